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
    parts = [_paired(one, bands) for one in _windows(samples)]
    return np.concatenate(parts) if parts else np.zeros((0, 2 * bands + 1), np.float32)


def windowed_log_mel(samples: npt.NDArray[np.int16], bands: int) -> npt.NDArray[np.float32]:
    """int16 [N] -> float32 [R, M]: the first of the two."""
    parts = [_heard(one, bands) for one in _windows(samples)]
    return np.concatenate(parts) if parts else np.zeros((0, bands), np.float32)


def _windows(samples: npt.NDArray[np.int16]) -> list[npt.NDArray[np.int16]]:
    size = WINDOW * HOP
    return [samples[at : at + size] for at in range(0, len(samples), size)]


def _heard(samples: npt.NDArray[np.int16], bands: int) -> npt.NDArray[np.float32]:
    frames = -(-len(samples) // (TOKEN * HOP)) * TOKEN
    heard = LogMel(bands, WINDOW).features(samples).T[: frames + TOKEN]
    return np.pad(heard, ((0, frames + TOKEN - len(heard)), (0, 0)), mode="edge")


def _paired(samples: npt.NDArray[np.int16], bands: int) -> npt.NDArray[np.float32]:
    heard = _heard(samples, bands)
    frames = len(heard) - TOKEN
    coded = LogMel(bands, frames).features(samples).T
    rows = np.zeros((frames + TOKEN, 2 * bands + 1), np.float32)
    rows[:, :bands] = heard
    rows[:frames, bands:-1] = coded
    rows[: -(-len(samples) // HOP), -1] = 1.0
    return rows
