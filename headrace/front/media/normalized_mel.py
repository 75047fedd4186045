"""Sound as NeMo's models read it: the natural logarithm of the energy in mel bands of the sound's
differences, 100 frames a second, each band of mean 0 and deviation 1 over the whole sound (Kuchaiev
et al. 2019; transformers 5.23, feature_extraction_parakeet.py).

N samples at RATE, F frames, M bands.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from headrace.base.config.media import NormalizedMel
from headrace.front.media.log_mel import HOP, slaney_filters

EPS = 1e-5
LEAST = 2.0**-24
LEAST_FRAMES = 2
"""Of one there is no deviation."""


def normalized_mel(
    samples: npt.NDArray[np.int16], bands: int, settings: NormalizedMel
) -> npt.NDArray[np.float32]:
    """int16 samples [N] -> float32 [F, M], and `silent_frames` of zeros behind them; nothing of a
    sound that is too short."""
    count, size = len(samples) // HOP, settings.transform
    if count < LEAST_FRAMES:
        return np.zeros((0, bands), np.float32)
    wave = samples / 32768.0
    wave[1:] -= settings.emphasis * wave[:-1].copy()
    frames = np.lib.stride_tricks.sliding_window_view(np.pad(wave, size // 2), size)[::HOP]
    side = (size - settings.frame) // 2
    window = np.pad(np.hanning(settings.frame), (side, size - settings.frame - side))
    power = np.abs(np.fft.rfft(frames[:count] * window)) ** 2
    log = np.log(power @ slaney_filters(bands, size) + LEAST)
    normal = log if settings.plain else (log - log.mean(0)) / (log.std(0, ddof=1) + EPS)
    return np.pad(normal, ((0, settings.silent_frames), (0, 0))).astype(np.float32)
