"""Spectra in mel bands, as models of speech and sounds were trained on them.

For a sound x, a Hann window w of W samples (periodic: w[n] = 0.5 - 0.5 cos(2 pi n / W)), a hop H:

- column t of the spectrum: S[t, k] = |sum over n of w[n] x[t H + n] exp(-2 pi i k n / n_fft)|
  to the power, for k from 0 to n_fft / 2. With padding, x begins W // 2 samples before the sound
  and ends W // 2 behind it, so that a column is about the sample t H.
- bands: M[t, m] = sum over k of B[m, k] S[t, k]. Band m is a triangle over the points m, m + 1 and
  m + 2 of n_mels + 2 points that are evenly spaced in mel from fmin to fmax: 0 at the outer ones
  and 1 at the middle one, straight in Hz or in mel. With the norm `slaney` it is multiplied by
  2 / (its width in Hz).
- logarithm: L = log(max(M + offset, floor)), natural, of base 10, or 10 log10 (`db`); with a
  dynamic range, L = max(L, largest L of the sound - range).

Mel scales: HTK, m(f) = 2595 log10(1 + f / 700) (S. Young et al., The HTK Book, section 5.4), and
that of Slaney's Auditory Toolbox (Interval Research report 1998-010): f / (200 / 3) up to 1000 Hz,
above that 15 + 27 ln(f / 1000) / ln(6.4). The parameters are those of librosa's `melspectrogram`
(https://librosa.org/doc/latest/generated/librosa.feature.melspectrogram.html); Whisper's
(https://github.com/openai/whisper, `whisper/audio.py`) are the defaults with `drop_last`,
`dynamic_range = 8`, and (L + 4) / 4. YAMNet's (https://github.com/tensorflow/models,
`research/audioset/yamnet/features.py`) are n_fft 512, window 400, 64 bands of HTK from 125 to
7500 Hz with triangles in mel and no norm, power 1, and ln(M + 0.001).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.models.media_config import LogMel
from headrace.tuning import TUNING, ModelTuning

_Floats = NDArray[np.float64]
_SLANEY_HZ, _SLANEY_MEL = 1000.0, 15.0
_SLANEY_HZ_PER_MEL = 200 / 3
_SLANEY_STEP = np.log(6.4) / 27


class MelSpectrum:
    """Makes the log-mel spectra of sounds, see the module.

    Args:
        config: of the spectrum.
        sample_rate: of the sounds.
        tuning: bounds the memory beside the result.
    """

    def __init__(
        self, config: LogMel, sample_rate: int, tuning: ModelTuning = TUNING.models
    ) -> None:
        self._config = config
        self._columns_at_once = tuning.mel_columns
        size = config.window_size
        self._pad = 0 if config.padding == "none" else size // 2
        self._window: _Floats = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(size) / size)
        self._bands = make_bands(config, sample_rate)

    def count_columns(self, samples: int) -> int:
        """Return the number of columns of a sound."""
        config = self._config
        room = samples + 2 * self._pad - config.window_size
        return max(0, (1 + room // config.hop if room >= 0 else 0) - config.drop_last)

    def count_samples(self, columns: int) -> int:
        """Return the fewest samples that have so many columns."""
        config = self._config
        last = columns - 1 + config.drop_last
        return max(1, last * config.hop + config.window_size - 2 * self._pad)

    def make(self, samples: NDArray[Any]) -> NDArray[np.float32]:
        """Return the spectrum of a sound with at least one column, [columns, bands]."""
        config = self._config
        if self._pad:
            mode: Any = "reflect" if config.padding == "reflect" else "constant"
            samples = np.pad(samples, self._pad, mode=mode)
        windows = np.lib.stride_tricks.sliding_window_view(samples, config.window_size)
        windows = windows[:: config.hop]
        columns = len(windows) - config.drop_last
        made: _Floats = np.empty((columns, config.n_mels))
        for start in range(0, columns, self._columns_at_once):
            chosen = slice(start, min(start + self._columns_at_once, columns))
            spectrum = np.abs(np.fft.rfft(windows[chosen] * self._window, config.n_fft))
            made[chosen] = (spectrum**2 if config.power == 2 else spectrum) @ self._bands.T
        np.maximum(made + config.offset, config.floor, out=made)
        made = np.log(made) if config.log == "ln" else np.log10(made)
        if config.log == "db":
            made *= 10
        if config.dynamic_range is not None:
            np.maximum(made, made.max() - config.dynamic_range, out=made)
        return made.astype(np.float32)


def make_bands(config: LogMel, sample_rate: int) -> _Floats:
    """Return the weight of each frequency in each band, [n_mels, n_fft / 2 + 1]."""
    fmax = config.fmax or sample_rate / 2
    low, high = (_to_mel(np.array(f, np.float64), config.mel_scale) for f in (config.fmin, fmax))
    points = np.linspace(low, high, config.n_mels + 2)
    points_hz = _to_hz(points, config.mel_scale)
    frequencies = np.arange(config.n_fft // 2 + 1) * sample_rate / config.n_fft
    if config.triangles == "hz":
        edges, places = points_hz, frequencies
    else:
        edges, places = points, _to_mel(frequencies, config.mel_scale)
    left, middle, right = (edges[k : k + config.n_mels, np.newaxis] for k in range(3))
    rising = (places - left) / (middle - left)
    falling = (right - places) / (right - middle)
    bands: _Floats = np.maximum(0, np.minimum(rising, falling))
    if config.mel_norm == "slaney":
        bands *= (2 / (points_hz[2:] - points_hz[:-2]))[:, np.newaxis]
    return bands


def _to_mel(hz: _Floats, scale: str) -> _Floats:
    if scale == "htk":
        return np.asarray(2595 * np.log10(1 + hz / 700))
    upper = _SLANEY_MEL + np.log(np.maximum(hz, _SLANEY_HZ) / _SLANEY_HZ) / _SLANEY_STEP
    return np.where(hz < _SLANEY_HZ, hz / _SLANEY_HZ_PER_MEL, upper)


def _to_hz(mel: _Floats, scale: str) -> _Floats:
    if scale == "htk":
        return np.asarray(700 * (10 ** (mel / 2595) - 1))
    upper = _SLANEY_HZ * np.exp(_SLANEY_STEP * (np.maximum(mel, _SLANEY_MEL) - _SLANEY_MEL))
    return np.where(mel < _SLANEY_MEL, mel * _SLANEY_HZ_PER_MEL, upper)
