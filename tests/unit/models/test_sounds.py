"""Sounds on their way to a model's input, against the same done by soundfile, soxr and NumPy."""

from __future__ import annotations

import io
import itertools
import struct
import sys
import tracemalloc
from typing import Any

import numpy as np
import pytest
import soundfile
import soxr
from numpy.typing import NDArray

from headrace.config import make_settings
from headrace.errors import Code, ConfigurationError, Rejected
from headrace.models.config import TransformTable, make_model_config
from headrace.models.inputs.sounds import Sounds
from headrace.models.signature import make_signature
from headrace.protocol.messages import Tensor
from headrace.protocol.tensors import to_array
from tests.support.multipart import multipart
from tests.unit.models.requests import spec

KINDS = [
    ("WAV", "PCM_U8"),
    ("WAV", "PCM_16"),
    ("WAV", "PCM_24"),
    ("WAV", "FLOAT"),
    ("WAV", "ULAW"),
    ("FLAC", "PCM_16"),
    ("FLAC", "PCM_24"),
    ("OGG", "VORBIS"),
    ("OGG", "OPUS"),
    ("MP3", "MPEG_LAYER_III"),
]
RATES = (8000, 16_000, 24_000, 48_000)
WHISPER = {"drop_last": True, "dynamic_range": 8}
YAMNET = {
    "n_fft": 512,
    "window": 400,
    "n_mels": 64,
    "fmin": 125,
    "fmax": 7500,
    "mel_scale": "htk",
    "mel_norm": "none",
    "triangles": "mel",
    "power": 1,
    "log": "ln",
    "offset": 0.001,
    "padding": "none",
}


def sounds_of(shape: list[int], datatype: str = "FP32", **settings: Any) -> Sounds:
    """The transform of a model with an input of this shape."""
    config = make_model_config({"transform": {"sound": settings}}, make_settings({}))
    assert isinstance(config.transform, TransformTable)
    assert config.transform.sound is not None
    signature = make_signature([spec("x", datatype, shape)], [spec("y", "FP32", [-1])])
    return Sounds(config.transform.sound, signature)


def convert(sounds: Sounds, payload: bytes, content_type: str = "") -> NDArray[Any]:
    """The input that a payload becomes."""
    [given] = sounds(payload, content_type)
    return to_array(Tensor(given.name, given.datatype, tuple(given.shape), given.data))


def refusal(payload: bytes, content_type: str = "", **settings: Any) -> Rejected:
    """The error with which a payload is refused."""
    sounds = sounds_of([-1, -1], **settings)
    with pytest.raises(Rejected) as caught:
        sounds(payload, content_type)
    return caught.value


def noise(samples: int, channels: int = 1, seed: int = 19) -> NDArray[np.float32]:
    """A tone with noise."""
    rng = np.random.default_rng(seed)
    tone = 0.4 * np.sin(np.arange(samples) * 0.05)[:, np.newaxis]
    return np.asarray(tone + rng.uniform(-0.3, 0.3, (samples, channels)), np.float32)


def written(
    samples: NDArray[np.float32], rate: int = 16_000, kind: str = "WAV", subtype: str = "PCM_16"
) -> bytes:
    """A file of a sound."""
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=kind, subtype=subtype)
    return file.getvalue()


def directly(payload: bytes, rate: int, quality: str = "HQ") -> NDArray[np.float32]:
    """The sound by soundfile and soxr alone."""
    with soundfile.SoundFile(io.BytesIO(payload)) as file:
        own, samples = file.samplerate, file.read(dtype="float32", always_2d=True)
    mono: NDArray[np.float32] = samples.mean(axis=1)
    if own != rate:
        mono = soxr.resample(mono, own, rate, quality)
    return mono


def test_thousand_sounds_are_those_that_the_libraries_give() -> None:
    """In all formats, with one or two channels, of several rates and lengths."""
    made = {rate: sounds_of([-1, -1], sample_rate=rate) for rate in (16_000, 22_050)}
    rng = np.random.default_rng(5)
    cases = itertools.cycle(itertools.product(KINDS, RATES, (1, 2)))
    for number, ((kind, subtype), rate, channels) in enumerate(itertools.islice(cases, 1000)):
        sound = noise(int(rng.integers(1500, 4000)), channels, number)
        payload = written(sound, rate, kind, subtype)
        target = 16_000 if number % 3 else 22_050

        given = convert(made[target], payload)

        np.testing.assert_array_equal(given, directly(payload, target)[np.newaxis])


def test_frames_are_rows() -> None:
    """Silence follows the last one, or what fills none is left out."""
    payload = written(noise(2500))
    whole = directly(payload, 16_000)

    padded = convert(sounds_of([-1, 1000], frames={"length": 1000, "hop": 500}), payload)
    cut = sounds_of([-1, 1, 1000], frames={"length": 1000, "hop": 600, "tail": "drop"})

    expected = np.stack([whole[start : start + 1000] for start in (0, 500, 1000, 1500)])
    np.testing.assert_array_equal(padded, expected)
    expected = np.stack([whole[start : start + 1000] for start in (0, 600, 1200)])
    np.testing.assert_array_equal(convert(cut, payload), expected[:, np.newaxis])


def test_hundred_payloads_of_several_sounds_are_those_that_the_libraries_give() -> None:
    """Rows of all formats, rates and numbers of channels, in the order of the parts."""
    sounds, rng = sounds_of([-1, 1, 16_000]), np.random.default_rng(8)
    for number in range(100):
        payloads = []
        for part in range(1 + number % 5):
            kind, subtype = KINDS[int(rng.integers(len(KINDS)))]
            sound = noise(int(rng.integers(1500, 4000)), 1 + part % 2, 10 * number + part)
            payloads.append(written(sound, int(rng.choice(RATES)), kind, subtype))

        given = convert(sounds, multipart(*payloads, head=b""), "multipart/mixed")

        expected = [directly(each, 16_000) for each in payloads]
        rows = [np.pad(each, (0, 16_000 - len(each))) for each in expected]
        np.testing.assert_array_equal(given, np.stack(rows)[:, np.newaxis])


def test_frames_of_several_sounds_follow_each_other() -> None:
    """All of the first sound, then all of the second."""
    first, second = written(noise(900)), written(noise(2100, seed=3))
    sounds = sounds_of([-1, 500], frames={"length": 500, "hop": 500, "tail": "drop"})

    given = convert(sounds, multipart(first, second, head=b""), "multipart/mixed")

    one, two = directly(first, 16_000), directly(second, 16_000)
    expected = [one[:500], two[:500], two[500:1000], two[1000:1500], two[1500:2000]]
    np.testing.assert_array_equal(given, np.stack(expected))


def test_spectra_of_several_sounds_are_those_of_each_alone() -> None:
    """With a spectrum, and each sound normalized by itself."""
    payloads = [written(noise(1600, seed=seed)) for seed in range(3)]
    sounds = sounds_of([-1, 80, 10], log_mel=WHISPER, normalize=True)

    given = convert(
        sounds, multipart(*payloads, head=b"Content-Type: audio/wav\r\n"), "multipart/x"
    )

    expected = np.concatenate([convert(sounds, each) for each in payloads])
    np.testing.assert_array_equal(given, expected)


@pytest.mark.parametrize(
    ("parts", "code", "message"),
    [
        ([800, 801], Code.INVALID_TENSOR, "part 1: expected 800 samples or columns, as the first"),
        ([800] * 33, Code.TOO_LARGE, "expected at most max_sounds = 32, got more"),
        ([16_000, 80_000], Code.TOO_LARGE, "at most max_samples = 90000 in all sounds, got more"),
    ],
)
def test_sounds_that_are_too_many_or_differ_are_refused(
    parts: list[int], code: Code, message: str
) -> None:
    """The part is named, or the setting."""
    payload = multipart(*[written(noise(samples)) for samples in parts], head=b"")
    error = refusal(payload, "multipart/mixed", max_samples=90_000)
    assert error.code == code
    assert message in error.message


def test_silence_behind_several_short_sounds_counts_as_samples() -> None:
    """Ten sounds of one sample would become ten of a minute each."""
    payload = multipart(*[written(noise(1))] * 10, head=b"")
    with pytest.raises(Rejected, match="at most max_samples = 2000000 in all sounds") as caught:
        sounds_of([-1, -1], seconds=60, max_samples=2_000_000)(payload, "multipart/mixed")
    assert caught.value.code == Code.TOO_LARGE


@pytest.mark.parametrize(
    ("kind", "subtype", "message"),
    [
        ("OGG", "VORBIS", "OGG: expected a single stream, got a further one at byte "),
        ("MP3", "MPEG_LAYER_III", "MP3: expected 30 frames, as its header says, got more"),
    ],
)
def test_files_that_were_joined_are_refused(kind: str, subtype: str, message: str) -> None:
    """Decoders end with the first one, and the others would be left out without a word."""
    payload = written(noise(16_000), kind=kind, subtype=subtype)

    assert message in refusal(payload + payload).message


def test_mp3_of_variable_bit_rate_without_count_of_frames_is_refused() -> None:
    """As encoders write it to a pipe. The library decodes half of it, by an estimate."""
    payload = written(noise(48_000), kind="MP3", subtype="MPEG_LAYER_III")
    second = payload.index(payload[:2], 4)
    assert b"Xing" in payload[:second]

    message = refusal(payload[second:]).message

    assert message.startswith("payload: MP3: expected the samples of all frames, about 49536, got ")
    assert message.endswith("; with a variable bit rate a header (Xing) must count the frames")


@pytest.mark.parametrize("length", [0xFFFFFFFF, 0x7FFFF000, 0x7FFFFFFF - 36])
def test_wav_that_was_written_to_a_pipe_goes_to_its_end(length: int) -> None:
    """As ffmpeg, espeak and sox write it."""
    payload = bytearray(written(noise(1600)))
    at = payload.index(b"data") + 4
    payload[at : at + 4] = length.to_bytes(4, "little")

    assert convert(sounds_of([-1, -1]), bytes(payload)).shape == (1, 1600)


def test_error_of_library_names_no_address() -> None:
    """Each would be another error to those who group them by their texts."""
    payload = written(noise(1600))

    message = refusal(payload + payload[payload.index(b"data") :]).message

    assert "LibsndfileError: Error opening <_io.BytesIO object>: " in message


def test_several_sounds_for_an_input_without_rows_are_refused() -> None:
    """None is left out in silence."""
    payload = multipart(written(noise(800)), written(noise(800)), head=b"")
    with pytest.raises(Rejected, match="payload: expected one sound, got 2") as caught:
        sounds_of([-1])(payload, "multipart/mixed")
    assert caught.value.code == Code.INVALID_TENSOR


def test_damaged_part_is_named_with_the_byte_where_it_ends() -> None:
    """The first one is whole."""
    payload = multipart(written(noise(800)), written(noise(800), kind="FLAC")[:50], head=b"")
    error = refusal(payload, "multipart/mixed")
    assert error.code == Code.INVALID_REQUEST
    assert error.message.startswith("payload: part 1: FLAC: expected")
    assert "a file that ends at byte 50" in error.message


def test_length_of_the_input_is_kept() -> None:
    """Silence follows shorter sounds; longer ones are refused, or shortened."""
    short, long = written(noise(600)), written(noise(1200))
    sounds, truncating = sounds_of([-1, 1000]), sounds_of([-1, 1000], truncate=True)

    expected = np.concatenate([directly(short, 16_000), np.zeros(400, np.float32)])
    np.testing.assert_array_equal(convert(sounds, short)[0], expected)
    np.testing.assert_array_equal(convert(truncating, long)[0], directly(long, 16_000)[:1000])
    with pytest.raises(Rejected, match=r"at most seconds of the input = 0\.0625") as caught:
        convert(sounds, long)
    assert caught.value.code == Code.TOO_LARGE


def test_samples_are_normalized() -> None:
    """Each sound for itself."""
    payload = written(noise(4000))

    given = convert(sounds_of([-1, -1], normalize=True), payload)

    assert abs(float(given.mean())) < 1e-5
    assert abs(float(given.std()) - 1) < 1e-4


# --- log-mel ------------------------------------------------------------------------------------


def hz_of_slaney(mel: float) -> float:
    """Convert mels to Hz by the formula of Slaney's Auditory Toolbox."""
    return float(mel * 200 / 3 if mel < 15 else 1000 * 6.4 ** ((mel - 15) / 27))


def whisper_by_hand(samples: NDArray[np.float32]) -> NDArray[np.float64]:
    """Whisper's spectrum, column by column: [bands, columns]."""
    sound = samples.astype(np.float64)
    sound = np.concatenate([sound[200:0:-1], sound, sound[-2:-202:-1]])
    turns = np.outer(np.arange(201), np.arange(400)) / 400
    fourier = np.exp(-2j * np.pi * turns)
    window = np.sin(np.pi * np.arange(400) / 400) ** 2
    top = 15 + 27 * np.log(8) / np.log(6.4)
    points = [hz_of_slaney(top * k / 81) for k in range(82)]

    def weight(f: float, low: float, middle: float, high: float) -> float:
        side = (f - low) / (middle - low) if f < middle else (high - f) / (high - middle)
        return max(0.0, side) * 2 / (high - low)

    weights = [
        [weight(k * 40.0, *band) for k in range(201)]
        for band in zip(points, points[1:], points[2:], strict=False)
    ]
    columns = []
    for start in range(0, len(sound) - 400 + 1, 160):
        power = np.abs(fourier @ (window * sound[start : start + 400])) ** 2
        columns.append(np.log10(np.maximum(np.array(weights) @ power, 1e-10)))
    made: NDArray[np.float64] = np.array(columns[:-1], np.float64).T
    return np.asarray((np.maximum(made, made.max() - 8) + 4) / 4)


def yamnet_by_hand(samples: NDArray[np.float32]) -> NDArray[np.float64]:
    """YAMNet's spectrum: [columns, bands]."""

    def mel(hz: float) -> float:
        return float(1127 * np.log(1 + hz / 700))

    edges = np.linspace(mel(125), mel(7500), 66)
    weights = [
        [
            max(0.0, min((m - low) / (middle - low), (high - m) / (high - middle)))
            for m in (mel(k * 16_000 / 512) for k in range(257))
        ]
        for low, middle, high in zip(edges, edges[1:], edges[2:], strict=False)
    ]
    window = np.sin(np.pi * np.arange(400) / 400) ** 2
    columns = []
    for start in range(0, len(samples) - 400 + 1, 160):
        padded = np.zeros(512)
        padded[:400] = window * samples[start : start + 400]
        sizes = np.abs(np.fft.fft(padded))[:257]
        columns.append(np.log(np.array(weights) @ sizes + 0.001))
    return np.array(columns)


def test_whisper_spectrum_is_that_of_the_formula() -> None:
    """That of the documentation, one number after the other."""
    payload = written(noise(16_000))
    sounds = sounds_of([-1, 80, -1], log_mel=WHISPER, mean=-4, deviation=4)

    given = convert(sounds, payload)

    assert given.shape == (1, 80, 100)
    np.testing.assert_allclose(given[0], whisper_by_hand(directly(payload, 16_000)), atol=2e-6)


def test_fixed_columns_are_those_of_thirty_seconds() -> None:
    """Whisper's input of 3000 columns."""
    sounds = sounds_of([-1, 80, 3000], log_mel=WHISPER, mean=-4, deviation=4)

    assert convert(sounds, written(noise(16_000))).shape == (1, 80, 3000)


def test_yamnet_patches_are_those_of_the_formula() -> None:
    """Silence follows the sound up to the end of the last patch."""
    payload = written(noise(20_000))
    sounds = sounds_of([-1, 96, 64], log_mel=YAMNET, frames={"length": 96, "hop": 48})

    given = convert(sounds, payload)

    silence = np.zeros(400 + (96 + 48 - 1) * 160 - 20_000, np.float32)
    columns = yamnet_by_hand(np.concatenate([directly(payload, 16_000), silence]))
    expected = np.stack([columns[0:96], columns[48:144]])
    np.testing.assert_allclose(given, expected, atol=2e-5)


# --- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "subtype"), KINDS)
def test_truncated_sound_is_refused_with_its_end(kind: str, subtype: str) -> None:
    """Wherever it ends; MP3 by the number of frames in its header."""
    payload = written(noise(9000, 2), 16_000, kind, subtype)
    for end in {len(payload) * k // 7 for k in range(1, 7)} | {len(payload) - 1}:
        error = refusal(payload[:end])

        assert error.code == Code.INVALID_REQUEST
        assert f"byte {end}" in error.message, (end, error.message)


def bombs() -> dict[str, bytes]:
    """Files that say, or have, far more samples than a limit allows."""
    flac = bytearray(written(noise(4000), kind="FLAC"))
    flac[18:26] = struct.pack(">Q", struct.unpack(">Q", flac[18:26])[0] >> 36 << 36 | 10**10)
    ogg = bytearray(written(noise(4000), kind="OGG", subtype="VORBIS"))
    last = ogg.rindex(b"OggS")
    ogg[last + 6 : last + 14] = struct.pack("<q", 10**10)
    frame = bytes.fromhex("ffe318c4") + bytes(68)  # MPEG 2.5, 8 kbit/s, 8000 Hz: 72 ms
    wav = b"RIFF\xff\xff\xff\xffWAVEfmt " + struct.pack("<IHHIIHH", 16, 1, 1, 1000, 1000, 1, 8)
    return {
        "FLAC": bytes(flac),
        "OGG": bytes(ogg),
        "MP3": frame * 20_000,
        "WAV": wav + b"data\xff\xff\xff\xff" + bytes(1_000_000),
    }


@pytest.mark.parametrize("kind", ["FLAC", "OGG", "MP3", "WAV"])
def test_bomb_is_refused_before_a_sample_is_made(kind: str) -> None:
    """Memory stays flat."""
    bomb = bombs()[kind]
    sounds = sounds_of([-1, -1])
    tracemalloc.start()
    try:
        with pytest.raises(Rejected, match="at most max_seconds = 60") as caught:
            sounds(bomb, "")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert caught.value.code == Code.TOO_LARGE
    assert peak < 1_000_000


def test_flac_without_a_length_is_refused() -> None:
    """Encoders that write to a pipe omit the length, so the decoded size is unknown."""
    flac = bytearray(written(noise(4000), kind="FLAC"))
    flac[18:26] = struct.pack(">Q", struct.unpack(">Q", flac[18:26])[0] >> 36 << 36)

    assert "the number of samples in block STREAMINFO" in refusal(bytes(flac)).message


def test_other_payloads_are_refused() -> None:
    """Payloads of another content type, of another format or without a sample are refused."""
    assert "expected one of audio/wav" in refusal(b"", "text/plain").message
    assert "expected a sound in WAV, FLAC, OGG or MP3" in refusal(b"hello").message
    assert "got WAV" in refusal(written(noise(99)), "audio/flac").message
    assert "expected at least one sample" in refusal(written(noise(0))).message


@pytest.mark.parametrize("package", ["soundfile", "soxr"])
def test_missing_package_is_named(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the line that installs it."""
    monkeypatch.setitem(sys.modules, package, None)

    with pytest.raises(ConfigurationError, match=rf"{package}: pip install 'headrace\[audio\]'"):
        sounds_of([-1, -1])


@pytest.mark.parametrize(
    ("shape", "settings"),
    [
        ([-1, 2, 100], {}),
        ([-1, 100], {"frames": {"length": 50, "hop": 50}}),
        ([-1, 40, 100], {"log_mel": {}}),
        ([-1, -1, -1], {"log_mel": {}}),
    ],
)
def test_settings_that_do_not_fit_the_input_are_refused(
    shape: list[int], settings: dict[str, Any]
) -> None:
    """Channels, other lengths, other bands, or bands on an axis that nothing says."""
    with pytest.raises(ConfigurationError, match=r"transform\.sound: expected"):
        sounds_of(shape, **settings)
