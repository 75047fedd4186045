"""Sound as an encoder of speech reads it: the logarithm of the energy in mel bands, 100 frames a
second (Radford et al. 2022, section 2.2; the scale of Slaney 1998).

N samples at RATE, F frames, M bands, B bins of the transform.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

RATE = 16_000
"""Samples a second."""
HOP = 160
WINDOW = 400
HIGHEST_HZ = 8000.0
LEAST_POWER = 1e-10
RANGE = 8.0
"""Decades below the loudest bin that are told apart."""
_LINEAR_HZ = 200.0 / 3
_LOG_FROM = 15.0
_LOG_STEP = np.log(6.4) / 27.0

Floats = npt.NDArray[np.float32]


class LogMel:
    """int16 samples [N] -> float32 [M, F], of which silence fills what N does not. Without `frames`
    there are as many as N has whole ones. `loudest`: the logarithm RANGE below which powers are not
    told apart; None: that of the loudest bin."""

    def __init__(
        self, bands: int, frames: int | None = None, *, loudest: float | None = None
    ) -> None:
        self._loudest = loudest
        self._num_samples = None if frames is None else frames * HOP
        self.filters_BM = slaney_filters(bands)
        self._window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(WINDOW) / WINDOW)

    def features(self, samples: npt.NDArray[np.int16]) -> Floats:
        """See the class; samples behind the last frame are cut off."""
        wave = np.zeros(len(samples) if self._num_samples is None else self._num_samples)
        heard = samples[: len(wave)]
        wave[: len(heard)] = heard / 32768.0
        padded = np.pad(wave, WINDOW // 2, mode="reflect")
        frames = np.lib.stride_tricks.sliding_window_view(padded, WINDOW)[::HOP][:-1]
        power_FB = np.abs(np.fft.rfft(frames * self._window)) ** 2
        log = np.log10(np.maximum(power_FB @ self.filters_BM, LEAST_POWER)).T
        loudest = log.max() if self._loudest is None else self._loudest
        log = np.maximum(log, loudest - RANGE)
        return np.ascontiguousarray((log + 4.0) / 4.0, dtype=np.float32)


def slaney_filters(bands: int, transform: int = WINDOW) -> npt.NDArray[np.float64]:
    """Triangles over bins [B, M] of equal width in mel and of equal area in Hz."""
    bins_hz = np.linspace(0, RATE // 2, transform // 2 + 1)
    edges_hz = _hertz(np.linspace(0.0, _mel(HIGHEST_HZ), bands + 2))
    widths = np.diff(edges_hz)
    distance = edges_hz[None, :] - bins_hz[:, None]
    rising, falling = -distance[:, :-2] / widths[:-1], distance[:, 2:] / widths[1:]
    triangles = np.maximum(0.0, np.minimum(rising, falling))
    filters: npt.NDArray[np.float64] = triangles * (2.0 / (edges_hz[2:] - edges_hz[:-2]))
    return filters


def _mel(hertz: float) -> float:
    """Linear below 1 kHz, logarithmic above."""
    mel = hertz / _LINEAR_HZ
    over = hertz / (_LOG_FROM * _LINEAR_HZ)
    return float(_LOG_FROM + np.log(over) / _LOG_STEP) if mel >= _LOG_FROM else mel


def _hertz(mel: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    above = _LOG_FROM * _LINEAR_HZ * np.exp(_LOG_STEP * (mel - _LOG_FROM))
    hertz: npt.NDArray[np.float64] = np.where(mel >= _LOG_FROM, above, mel * _LINEAR_HZ)
    return hertz
