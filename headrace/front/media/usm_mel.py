"""Sound as Gemma 3n and Gemma 4 read it: the logarithm of the magnitude in mel bands, 100 frames a
second, as much of it as whole frames have (the scale of O'Shaughnessy 1987).

N samples at RATE, F frames, M bands, B bins of the transform.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from headrace.base.config.media import MagnitudeSettings
from headrace.front.media.log_mel import HOP, RATE

Floats = npt.NDArray[np.float32]


def log_magnitudes(
    samples: npt.NDArray[np.int16], bands: int, settings: MagnitudeSettings
) -> Floats:
    """int16 samples [N] -> float32 [F, M]; a frame sees one sample more than it has."""
    filled = -len(samples) % settings.multiple
    wave = np.concatenate([np.zeros(settings.lead), samples / 32768.0, np.zeros(filled)])
    if len(wave) <= settings.frame:
        return np.zeros((0, bands), np.float32)
    frames = np.lib.stride_tricks.sliding_window_view(wave, settings.frame + 1)[::HOP]
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(settings.frame) / settings.frame)
    spectrum = np.fft.rfft(_emphasized(frames, settings.emphasis) * window, settings.transform)
    mel_FM = np.abs(spectrum) @ mel_triangles(bands, settings)
    least = settings.least
    log = np.log(mel_FM + least if settings.adds_least else np.maximum(mel_FM, least))
    return np.ascontiguousarray(log, dtype=np.float32)


def _emphasized(frames: npt.NDArray[np.float64], share: float) -> npt.NDArray[np.float64]:
    """Each sample without a share of the one before it; the first without that share of itself."""
    own = frames[:, :-1]
    if not share:
        return own
    before = np.concatenate([own[:, :1], own[:, :-1]], axis=1)
    return own - share * before


def mel_triangles(bands: int, settings: MagnitudeSettings) -> npt.NDArray[np.float64]:
    """Triangles over bins [B, M] of equal width in mel and height 1."""
    bins_hz = np.arange(settings.transform // 2 + 1) * (RATE / settings.transform)
    low, high = (2595.0 * np.log10(1.0 + hz / 700.0) for hz in (settings.low_hz, settings.high_hz))
    edges_hz = 700.0 * (10.0 ** (np.linspace(low, high, bands + 2) / 2595.0) - 1.0)
    widths = np.diff(edges_hz)
    distance = edges_hz[None, :] - bins_hz[:, None]
    rising, falling = -distance[:, :-2] / widths[:-1], distance[:, 2:] / widths[1:]
    triangles: npt.NDArray[np.float64] = np.maximum(0.0, np.minimum(rising, falling))
    return triangles
