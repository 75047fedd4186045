"""Long sound in windows that an encoder can read, cut where it is quiet."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from headrace.front.media.log_mel import RATE

SEARCHED = 5 * RATE
"""At the end of a window so many samples are searched for the quietest place."""
PLACE = RATE // 50
"""Samples of a place: 20 ms."""


def windows(samples: npt.NDArray[np.int16], most: int) -> list[tuple[int, int]]:
    """Begin and end of windows of at most `most` samples, which follow each other without gaps."""
    cuts, begin = [], 0
    while (cut := first_cut(samples[begin:], most)) is not None:
        cuts.append((begin, begin + cut))
        begin += cut
    return [*cuts, (begin, len(samples))]


def first_cut(samples: npt.NDArray[np.int16], most: int) -> int | None:
    """The end of the first window; None where there is no more than one. It ends in the middle of
    the place with the least energy near its greatest end; where that falls within a word, the word
    is cut. No sample behind `most` changes it."""
    if len(samples) <= most:
        return None
    searched = samples[most - min(SEARCHED, most // 2) : most].astype(np.float64)
    places = searched[: len(searched) // PLACE * PLACE].reshape(-1, PLACE)
    quietest = int(np.argmin((places**2).sum(axis=1))) if len(places) else 0
    return most - len(searched) + quietest * PLACE + PLACE // 2
