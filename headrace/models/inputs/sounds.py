"""Conversion of sounds to a model's input: WAV, FLAC, OGG and MP3.

A payload is one sound, or several in the parts of a MIME multipart body
(`headrace.models.inputs.multipart`). All files are checked before samples are made, see
`headrace.models.inputs.sound_files`. libsndfile decodes each in blocks, as floats from -1 to 1, of
which each is mixed to one channel, the mean of all; soxr resamples the whole. The result is padded
with silence, and is a row of the input as it is, or rows if it is cut into frames, or as a log-mel
spectrum, see `headrace.models.inputs.mel`.
"""

from __future__ import annotations

import importlib
import io
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.errors import Code, ConfigurationError, Rejected, describe_error
from headrace.models.inputs.media_files import other_content_type, other_format
from headrace.models.inputs.mel import MelSpectrum
from headrace.models.inputs.multipart import split_parts
from headrace.models.inputs.sound_files import (
    CONTENT_TYPES,
    SoundHeader,
    SoundLimits,
    read_sound_header,
)
from headrace.models.media_config import SoundTransform
from headrace.models.signature import Signature, TensorSpec
from headrace.protocol.messages import InputTensor
from headrace.protocol.tensors import DATATYPES, from_array
from headrace.tuning import TUNING, ModelTuning

INSTALL = "pip install 'headrace[audio]'"
_ANY_SOUND = frozenset({"", "application/octet-stream", "audio/*"})
_DATATYPES = ("FP32", "FP16", "BF16")
_VARIANCE_FLOOR = 1e-7  # as transformers' Wav2Vec2FeatureExtractor adds


class Sounds:
    """Converts payloads to the input of one version.

    Raises:
        ConfigurationError: the settings do not fit the input, or a package is missing.
    """

    def __init__(
        self, config: SoundTransform, signature: Signature, tuning: ModelTuning = TUNING.models
    ) -> None:
        self._config = config
        self._tuning = tuning
        self._soundfile, self._soxr = (_import(name) for name in ("soundfile", "soxr"))
        self._mel: MelSpectrum | None = None
        if config.log_mel is not None:
            self._mel = MelSpectrum(config.log_mel, config.sample_rate, tuning)
        self._input = _SoundInput(config, signature)
        self._length = self._find_length()
        if self._length:
            seconds = self._length / config.sample_rate
            setting = "seconds" if config.seconds else "seconds of the input"
            self._limits = SoundLimits(seconds, config.max_samples, config.truncate, setting)
        else:
            self._limits = SoundLimits(config.max_seconds, config.max_samples, config.truncate)

    def __call__(self, payload: bytes, content_type: str) -> list[InputTensor]:
        """Return the input that a payload becomes.

        Raises:
            Rejected: `TOO_LARGE` over a limit, `INVALID_REQUEST` for what is no whole sound.
        """
        sounds = self._read_headers(payload, content_type)
        made: list[NDArray[np.float32]] = []
        rows_left = self._config.max_rows
        for content, where, header in sounds:
            samples = self._decode(content, where, header)
            made.append(self._make_rows(self._resample(samples, where, header.rate), rows_left))
            rows_left -= len(made[-1])
            if made[-1].shape[1:] != made[0].shape[1:]:
                raise Rejected.mismatch(
                    Code.INVALID_TENSOR,
                    where,
                    expected=f"{made[0].shape[1]} samples or columns, as the first sound has",
                    got=str(made[-1].shape[1]),
                )
        array = self._input.arrange(made[0] if len(made) == 1 else np.concatenate(made))
        tensor = from_array(self._input.name, array)
        return [
            InputTensor(
                name=tensor.name,
                datatype=tensor.datatype,
                shape=list(tensor.shape),
                data=memoryview(tensor.data),
            )
        ]

    def is_slow(self, _payload: bytes, _content_type: str, _inline_bytes: int) -> bool:
        """See `headrace.models.inputs.transforms.Transform`: decoding takes milliseconds."""
        return True

    def _find_length(self) -> int:
        """Return the samples of every sound; 0 if they keep their own length."""
        config, steps = self._config, self._input.steps
        if config.seconds is not None:
            return max(1, round(config.seconds * config.sample_rate))
        if config.frames is not None or steps < 0:
            return 0
        return self._mel.count_samples(steps) if self._mel is not None else steps

    def _read_headers(
        self, payload: bytes, content_type: str
    ) -> list[tuple[bytes, str, SoundHeader]]:
        """Return content, place and header of each sound; all samples are within the limits."""
        found = [(payload, content_type, "payload")]
        if content_type.startswith("multipart/"):
            parts = split_parts(payload, self._config.max_sounds, "max_sounds")
            found = [
                (content, named_type, f"payload: part {number}")
                for number, (named_type, content) in enumerate(parts)
            ]
        sounds: list[tuple[bytes, str, SoundHeader]] = []
        samples = 0
        for content, named_type, where in found:
            header = self._read_header(content, named_type, where)
            own = min(header.samples, self._most(header))
            samples += own * header.channels
            if sounds:
                # Silence and resampling make more of a sound; `max_sounds` must not multiply that.
                becomes = self._length or own * self._config.sample_rate // header.rate
                samples += max(0, becomes - own * header.channels)
            if samples > self._config.max_samples:
                raise Rejected.mismatch(
                    Code.TOO_LARGE,
                    "payload",
                    expected=f"at most max_samples = {self._config.max_samples} in all sounds",
                    got="more",
                )
            sounds.append((content, where, header))
        return sounds

    def _read_header(self, content: bytes, content_type: str, where: str) -> SoundHeader:
        named = CONTENT_TYPES.get(content_type)
        if named is None and content_type not in _ANY_SOUND:
            raise other_content_type(content_type, where, CONTENT_TYPES)
        header = read_sound_header(content, where, self._limits, self._tuning)
        if named not in (None, header.format):
            raise other_format(named, content_type, where, header.format)
        return header

    def _most(self, header: SoundHeader) -> int:
        """Return a number of samples that no sound within the limits exceeds."""
        if not self._limits.truncate and header.is_exact:
            return header.samples
        return int(self._limits.seconds * header.rate) + 1

    # --- samples ---------------------------------------------------------------------------------

    def _decode(self, payload: bytes, where: str, header: SoundHeader) -> NDArray[np.float32]:
        """Return the samples of a sound, mixed to one channel."""
        limits, most = self._limits, self._most(header)
        parts: list[NDArray[np.float32]] = []
        count = 0
        try:
            with self._soundfile.SoundFile(io.BytesIO(payload)) as sound:
                if (sound.samplerate, sound.channels) != (header.rate, header.channels):
                    raise ValueError(f"{sound.channels} channels of {sound.samplerate} Hz in it")
                size = max(1, self._tuning.sound_block_samples // header.channels)
                block = np.empty((size, header.channels), np.float32)
                while count <= most:
                    read = sound.read(out=block)
                    if not len(read):
                        break
                    parts.append(read.mean(axis=1, dtype=np.float32))
                    count += len(read)
        except Exception as error:  # whatever bytes may make the library raise is the caller's
            got = (
                f"{describe_error(error)} after {count} samples of a file that ends at byte "
                f"{len(payload)}"
            )
            raise _damaged(where, header, "one without damage", got) from error
        if limits.truncate and count >= most:
            return np.concatenate(parts)[: max(1, most - 1)]
        self._check_count(payload, where, header, count)
        return np.concatenate(parts)

    def _check_count(self, payload: bytes, where: str, header: SoundHeader, count: int) -> None:
        if not count or (header.is_exact and count != header.samples):
            expected = f"{header.samples} samples" if header.is_exact else "at least one sample"
            got = f"{count} samples in a file that ends at byte {len(payload)}"
            raise _damaged(where, header, expected, got)
        # Encoders add up to half a second. Where nothing counts the frames, the library estimates
        # their number by the bit rate of the first one, and ends there.
        least = min(header.samples, self._most(header)) - header.rate // 2
        if header.format == "MP3" and count < least:
            raise _damaged(
                where,
                header,
                f"the samples of all frames, about {header.samples}",
                f"{count}; with a variable bit rate a header (Xing) must count the frames",
            )
        extra = 0 if header.format != "MP3" else header.rate // 10  # of the decoder's delay
        if count > self._most(header) + extra:
            raise Rejected.mismatch(
                Code.TOO_LARGE,
                f"{where}: {header.format}",
                expected=f"at most {self._limits.setting} = {self._limits.seconds:g}",
                got="more",
            )

    def _resample(self, samples: NDArray[np.float32], where: str, rate: int) -> NDArray[np.float32]:
        config = self._config
        if rate != config.sample_rate:
            samples = self._soxr.resample(samples, rate, config.sample_rate, config.quality)
        if self._length:
            samples = _padded(samples[: self._length], self._length)
        if not np.isfinite(samples).all():
            raise Rejected.mismatch(
                Code.INVALID_REQUEST, where, expected="finite samples", got="NaN or infinity"
            )
        if config.normalize:
            samples = (samples - samples.mean()) / np.sqrt(samples.var() + _VARIANCE_FLOOR)
        return samples

    # --- rows ------------------------------------------------------------------------------------

    def _make_rows(self, samples: NDArray[np.float32], most: int) -> NDArray[np.float32]:
        """Return the rows of a sound, at most so many: [rows, steps], or [rows, steps, bands]."""
        frames = self._config.frames
        if frames is None:
            return self._make_steps(samples, 1)[np.newaxis]
        mel = self._mel
        steps = mel.count_columns(len(samples)) if mel is not None else len(samples)
        left = max(0, steps - frames.length)
        rows = 1 + (math.ceil(left / frames.hop) if frames.tail == "pad" else left // frames.hop)
        if rows > most:
            raise Rejected.mismatch(
                Code.TOO_LARGE,
                "payload",
                expected=f"at most max_rows = {self._config.max_rows} frames",
                got=str(self._config.max_rows - most + rows),
            )
        made = self._make_steps(samples, (rows - 1) * frames.hop + frames.length)
        cut = np.lib.stride_tricks.sliding_window_view(made, frames.length, axis=0)
        cut = cut[:: frames.hop][:rows]
        return np.moveaxis(cut, -1, 1)

    def _make_steps(self, samples: NDArray[np.float32], least: int) -> NDArray[np.float32]:
        """Return samples or columns of a spectrum, at least so many: silence follows a sound."""
        mel, config = self._mel, self._config
        needed = least if mel is None else mel.count_samples(least)
        samples = _padded(samples, needed)
        made = samples if mel is None else mel.make(samples)
        if config.mean or config.deviation != 1:
            made = ((made - config.mean) / config.deviation).astype(np.float32)
        return made


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except (ImportError, OSError) as error:  # OSError: soundfile without libsndfile
        raise ConfigurationError(
            f"transform.sound: sounds need the package {name}: {INSTALL}"
        ) from error


def _padded(samples: NDArray[np.float32], length: int) -> NDArray[np.float32]:
    return np.pad(samples, (0, length - len(samples))) if len(samples) < length else samples


def _damaged(where: str, header: SoundHeader, expected: str, got: str) -> Rejected:
    return Rejected.mismatch(
        Code.INVALID_REQUEST, f"{where}: {header.format}", expected=expected, got=got
    )


class _SoundInput:
    """The input of a model that takes sounds.

    Attributes:
        name: of the input.
        steps: samples, or columns of a spectrum, of a row; -1 if they are open.
    """

    def __init__(self, config: SoundTransform, signature: Signature) -> None:
        spec = signature.inputs[0]
        axes = 1 if config.log_mel is None else 2
        if len(signature.inputs) > 1 or spec.datatype not in _DATATYPES:
            raise _unfit(f"a single input of {', '.join(_DATATYPES)}", _described(signature))
        self.name = spec.name
        self._spec = spec
        self._dtype = DATATYPES[spec.datatype].dtype
        self._has_rows = len(spec.shape) > axes
        between = spec.shape[1 : len(spec.shape) - axes]
        if len(spec.shape) < axes or between not in ((), (1,)):
            raise _unfit(
                "an input of [batch, samples]"
                if axes == 1
                else "an input of [batch, bands, columns]",
                _described(signature),
            )
        if config.frames is not None and not self._has_rows:
            raise _unfit("an input with rows for frames", _described(signature))
        self._between = between
        own = spec.shape[-axes:]
        self._is_mel_first = axes == 2 and _is_mel_first(config, own, spec)
        self.steps = own[-1] if self._is_mel_first or axes == 1 else own[0]
        if config.frames is not None and self.steps not in (-1, config.frames.length):
            raise _unfit(f"frames.length = {self.steps}", str(config.frames.length))

    def arrange(self, rows: NDArray[np.float32]) -> NDArray[Any]:
        """Return rows of samples or spectra in the shape and datatype of the input."""
        spec = self._spec
        if self._is_mel_first:
            rows = np.swapaxes(rows, 1, 2)
        if not self._has_rows:
            if len(rows) > 1:
                raise Rejected.mismatch(
                    Code.INVALID_TENSOR, "payload", expected="one sound", got=str(len(rows))
                )
            rows = rows[0]
        elif spec.shape[0] not in (-1, len(rows)):
            raise Rejected.mismatch(
                Code.INVALID_TENSOR, "payload", expected=f"{spec.shape[0]} rows", got=str(len(rows))
            )
        if self._between:
            rows = rows[:, np.newaxis]
        if any(size not in (-1, got) for size, got in zip(spec.shape, rows.shape, strict=True)):
            raise Rejected.mismatch(
                Code.INVALID_TENSOR,
                "payload",
                expected=f"{list(spec.shape)}, as the input has",
                got=str(list(rows.shape)),
            )
        return np.ascontiguousarray(rows, self._dtype)


def _is_mel_first(config: SoundTransform, own: tuple[int, ...], spec: TensorSpec) -> bool:
    assert config.log_mel is not None
    bands = config.log_mel.n_mels
    found = [
        layout
        for layout, axis in (("mel_time", 0), ("time_mel", 1))
        if own[axis] in (-1, bands) and config.layout in (None, layout)
    ]
    exact = [layout for layout in found if own[layout == "time_mel"] == bands]
    chosen = exact or found
    if len(chosen) != 1:
        raise _unfit(f"layout, and an input with {bands} bands", f"{spec.name} {list(spec.shape)}")
    return chosen[0] == "mel_time"


def _described(signature: Signature) -> str:
    return ", ".join(f"{s.name} {s.datatype} {list(s.shape)}" for s in signature.inputs)


def _unfit(expected: str, got: str) -> ConfigurationError:
    return ConfigurationError(f"transform.sound: expected {expected}, got {got}")
