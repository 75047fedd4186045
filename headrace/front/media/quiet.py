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
    """Begin and end of windows of at most `most` samples, which follow each other without gaps.
    Each ends in the middle of the place with the least energy near its greatest end; where that
    falls within a word, the word is cut."""
    cuts, begin = [], 0
    while len(samples) - begin > most:
        end = begin + most
        searched = samples[end - min(SEARCHED, most // 2) : end].astype(np.float64)
        places = searched[: len(searched) // PLACE * PLACE].reshape(-1, PLACE)
        quietest = int(np.argmin((places**2).sum(axis=1))) if len(places) else 0
        cut = end - len(searched) + quietest * PLACE + PLACE // 2
        cuts.append((begin, cut))
        begin = cut
    return [*cuts, (begin, len(samples))]
