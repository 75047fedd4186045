"""Whisper's spectrogram twice in a row, as a model reads it whose sound goes through an encoder and
through one that makes tokens of it (Kimi-Audio): for the first silence fills half a minute, for the
second a token; and whether a frame begins within the sound.

N samples at RATE, R rows, M bands.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from headrace.front.media.log_mel import HOP, LogMel

WINDOW = 3000
"""Frames of half a minute, apart from each other."""
TOKEN = 8
"""Frames of a token; so many stand behind those of each window, of which tokens see some."""


def paired_log_mel(samples: npt.NDArray[np.int16], bands: int) -> npt.NDArray[np.float32]:
    """int16 [N] -> float32 [R, 2 M + 1]: of each window whole tokens of frames, and TOKEN rows."""
    size = WINDOW * HOP
    parts = [_window(samples[at : at + size], bands) for at in range(0, len(samples), size)]
    if not parts:
        return np.zeros((0, 2 * bands + 1), np.float32)
    return np.ascontiguousarray(np.concatenate(parts))


def _window(samples: npt.NDArray[np.int16], bands: int) -> npt.NDArray[np.float32]:
    frames = -(-len(samples) // (TOKEN * HOP)) * TOKEN
    heard = LogMel(bands, WINDOW).features(samples).T[: frames + TOKEN]
    heard = np.pad(heard, ((0, frames + TOKEN - len(heard)), (0, 0)), mode="edge")
    coded = LogMel(bands, frames).features(samples).T
    rows = np.zeros((frames + TOKEN, 2 * bands + 1), np.float32)
    rows[:, :bands] = heard
    rows[:frames, bands:-1] = coded
    rows[: -(-len(samples) // HOP), -1] = 1.0
    return rows
