"""Sound as LASR, and other families with settings of their own, read it: the natural logarithm of
the energy in mel bands, of as many frames as the sound has whole ones. transformers 5.23,
feature_extraction_lasr.py, feature_extraction_phi4_multimodal.py and those that follow Kaldi
(audio_utils.py).

N samples at RATE, F frames, M bands, B bins of the transform.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from headrace.base.config.media import PowerMel
from headrace.front.media.log_mel import HOP, RATE

Floats = npt.NDArray[np.float64]
LEAST_VARIANCE = 1e-7
LEAST_DEVIATION = 1e-10
WINDOWS: Mapping[str, Callable[[int], Floats]] = {
    "hann": np.hanning,
    "hamming": np.hamming,
    "povey": lambda size: np.hanning(size) ** 0.85,
}


def power_mel(
    samples: npt.NDArray[np.int16], bands: int, settings: PowerMel
) -> npt.NDArray[np.float32]:
    """int16 samples [N] -> float32 [F, M]."""
    if len(samples) < settings.frame:
        return np.zeros((0, bands), np.float32)
    wave = samples / 32768.0 * settings.scale
    frames = np.lib.stride_tricks.sliding_window_view(wave, settings.frame)[::HOP]
    if settings.centered:
        frames = frames - frames.mean(1, keepdims=True)
    if settings.emphasis:
        before = np.concatenate([frames[:, :1], frames[:, :-1]], axis=1)
        frames = frames - settings.emphasis * before
    window = WINDOWS[settings.shape](settings.frame)
    power = np.abs(np.fft.rfft(frames * window, settings.transform)) ** 2
    log = np.log(np.maximum(power @ mel_slopes(bands, settings), settings.least))
    if settings.normal == "sample":
        variance = log.var(0, ddof=1) if len(log) > 1 else np.zeros(bands)
        log = (log - log.mean(0)) / np.sqrt(variance + LEAST_VARIANCE)
    elif settings.normal == "whole":
        log = (log - log.mean(0)) / np.maximum(log.std(0), LEAST_DEVIATION)
    return np.ascontiguousarray(log, dtype=np.float32)


def mel_slopes(bands: int, settings: PowerMel) -> Floats:
    """Triangles over bins [B, M] that are straight in mel (O'Shaughnessy 1987); the first bin is in
    none."""
    bins = _mel(np.linspace(0.0, RATE / 2, settings.transform // 2 + 1)[1:])
    low, high = _mel(np.array([settings.low_hz, settings.high_hz])).tolist()
    edges = np.linspace(low, high, bands + 2)
    rising = (bins[:, None] - edges[:-2]) / np.diff(edges)[:-1]
    falling = (edges[2:] - bins[:, None]) / np.diff(edges)[1:]
    return np.pad(np.maximum(0.0, np.minimum(rising, falling)), ((1, 0), (0, 0)))


def _mel(hertz: Floats) -> Floats:
    return 1127.0 * np.log(1.0 + hertz / 700.0)
