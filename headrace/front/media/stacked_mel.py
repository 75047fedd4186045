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
    samples: npt.NDArray[np.int16], bands: int, stack: int
) -> npt.NDArray[np.float32]:
    """int16 samples [N] -> float32 [R, stack * M]; frames that fill no row are left out."""
    padded = np.pad(samples / 32768.0, TRANSFORM // 2, mode="reflect")
    frames = np.lib.stride_tricks.sliding_window_view(padded, TRANSFORM)[::HOP]
    side = (TRANSFORM - WINDOW) // 2
    window = np.pad(0.5 - 0.5 * np.cos(2 * np.pi * np.arange(WINDOW) / WINDOW), side)
    power = np.abs(np.fft.rfft(frames * window)) ** 2
    log = np.log10(np.maximum(power @ mel_triangles(bands, _FILTERS), LEAST_POWER))
    log = np.maximum(log, log.max() - RANGE) / 4.0 + 1.0
    rows = len(log) // stack
    return np.ascontiguousarray(log[: rows * stack].reshape(rows, stack * bands), dtype=np.float32)
