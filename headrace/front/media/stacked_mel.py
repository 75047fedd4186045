"""Sound as Granite Speech reads it: Whisper's scale over bands of equal height (O'Shaughnessy
1987), frames that stand side by side in rows.

N samples at RATE, R rows, M bands, B bins of the transform.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from headrace.base.config.media import MagnitudeSettings
from headrace.front.media.log_mel import HOP, LEAST_POWER, RANGE, WINDOW
from headrace.front.media.usm_mel import mel_triangles

TRANSFORM = 512
_FILTERS = MagnitudeSettings(frame=WINDOW, transform=TRANSFORM, low_hz=0.0, high_hz=8000.0)


def stacked_log_mel(
    samples: npt.NDArray[np.int16], bands: int, stack: int, *, changes: bool = False
) -> npt.NDArray[np.float32]:
    """int16 samples [N] -> float32 [R, stack * M]; frames that fill no row are left out. With
    `changes` [R, stack * 2 M]: behind each frame stands half of what lies between the one before
    it and the one behind; silence fills the last row, and nothing is left out."""
    count = -(-(len(samples) // HOP) // stack) * stack
    if changes and count:
        samples = np.pad(samples, (0, max(0, (count - 1) * HOP + 1 - len(samples))))
    padded = np.pad(samples / 32768.0, TRANSFORM // 2, mode="reflect")
    frames = np.lib.stride_tricks.sliding_window_view(padded, TRANSFORM)[::HOP]
    side = (TRANSFORM - WINDOW) // 2
    window = np.pad(0.5 - 0.5 * np.cos(2 * np.pi * np.arange(WINDOW) / WINDOW), side)
    power = np.abs(np.fft.rfft(frames * window)) ** 2
    log = np.log10(np.maximum(power @ mel_triangles(bands, _FILTERS), LEAST_POWER))
    if changes:
        log = log[:count]
    if not len(log):
        return np.zeros((0, stack * bands * (1 + changes)), np.float32)
    log = np.maximum(log, log.max() - RANGE) / 4.0 + 1.0
    if changes:
        edges = np.pad(log, ((1, 1), (0, 0)), mode="edge")
        log = np.concatenate([log, (edges[2:] - edges[:-2]) / 2], axis=1)
    rows = len(log) // stack
    values = log[: rows * stack].reshape(rows, stack * log.shape[1])
    return np.ascontiguousarray(values, dtype=np.float32)
