"""When each word of a transcript is said: from the attention of a speech model's decoder over its
encoder's positions (Radford et al. 2022, the reference implementation's `timing.py`).

T tokens of the decoder, H heads, S encoder positions of 20 ms.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
MEDIAN = 7
"""Positions of the filter that smooths over time."""
POSITION_S = 0.02
SPACELESS = frozenset(("zh", "ja", "th", "lo", "my", "yue"))
"""Languages whose words are not told by spaces: each token of whole characters is one."""
OPENING = "\"'\u201c\u00bf([{-"
CLOSING = "\"'.\u3002,\uff0c!\uff01?\uff1f:\uff1a\u201d)]}\u3001"


class TimedWord(msgspec.Struct, frozen=True, kw_only=True):
    """A word and its times in seconds."""

    word: str
    start: float
    end: float


def alignment(weights_THS: npt.NDArray[np.float32], *, num_positions: int) -> Floats:
    """How well tokens and positions go together, [T, num_positions]: each head's weights over the
    positions that have sound, apart from what all tokens look at, smoothed; the mean of heads."""
    weights = weights_THS[:, :, :num_positions].astype(np.float64)
    weights /= np.maximum(weights.sum(axis=2, keepdims=True), 1e-30)
    spread = np.maximum(weights.std(axis=0, keepdims=True), 1e-30)
    weights = (weights - weights.mean(axis=0, keepdims=True)) / spread
    mean: Floats = _smoothed(weights).mean(axis=1)
    return mean


def _smoothed(weights: Floats) -> Floats:
    """The median of each position and its neighbours, mirrored at the ends."""
    reach = MEDIAN // 2
    if weights.shape[2] <= reach:
        return weights
    padded = np.pad(weights, ((0, 0), (0, 0), (reach, reach)), mode="reflect")
    windows = np.lib.stride_tricks.sliding_window_view(padded, MEDIAN, axis=2)
    median: Floats = np.median(windows, axis=3)
    return median


def path(scores_TS: Floats) -> list[int]:
    """The position at which each token begins, on the way through the matrix with the highest sum
    (dynamic time warping, Sakoe and Chiba 1978)."""
    tokens, positions = scores_TS.shape
    cost = np.full((tokens + 1, positions + 1), np.inf)
    cost[0, 0] = 0.0
    step = np.zeros((tokens + 1, positions + 1), np.int8)
    step[0], step[:, 0] = 2, 1
    for diagonal in range(2, tokens + positions + 1):  # all its cells at a time
        row = np.arange(max(1, diagonal - positions), min(tokens, diagonal - 1) + 1)
        column = diagonal - row
        both, down, right = cost[row - 1, column - 1], cost[row - 1, column], cost[row, column - 1]
        choice = np.where(
            (both < down) & (both < right), 0, np.where((down < both) & (down < right), 1, 2)
        )
        least = np.choose(choice, (both, down, right))
        cost[row, column] = least - scores_TS[row - 1, column - 1]
        step[row, column] = choice
    begins = [0] * tokens
    token, position = tokens, positions
    while token > 0 or position > 0:
        if token > 0:
            begins[token - 1] = max(0, position - 1)
        taken = step[token, position]
        token -= int(taken != 2)
        position -= int(taken != 1)
    return begins


def timed_words(
    ids: Sequence[int],
    begins: Sequence[int],
    decode: Callable[[list[int]], str],
    *,
    language: str,
    begin_s: float,
    end_s: float,
) -> list[TimedWord]:
    """The words of these tokens; `begins` has a position for each of them and one for the end."""
    words, starts = _split(ids, decode, spaces=language not in SPACELESS)
    at = [min(begin_s + begins[place] * POSITION_S, end_s) for place in (*starts, len(ids))]
    return [
        TimedWord(word=word, start=at[i], end=max(at[i], at[i + 1]))
        for i, word in enumerate(words)
        if word.strip()
    ]


def _split(
    ids: Sequence[int], decode: Callable[[list[int]], str], *, spaces: bool
) -> tuple[list[str], list[int]]:
    """Words, and the first token of each. Marks belong to the word beside them."""
    pieces, starts, shown, first = list[str](), list[int](), 0, 0
    for count in range(1, len(ids) + 1):
        text = decode(list(ids[:count]))
        if text.endswith("\ufffd") and count < len(ids):
            continue  # half a character
        pieces.append(text[shown:])
        starts.append(first)
        shown, first = len(text), count
    words, places = list[str](), list[int]()
    for piece, start in zip(pieces, starts, strict=True):
        bare, before = piece.strip(), words[-1].strip() if words else ""
        closes = bool(bare) and all(one in CLOSING for one in bare)
        is_open = bool(before) and all(one in OPENING for one in before)
        apart = not spaces or piece.startswith(" ")
        begins_word = not words or (apart and not closes and not is_open)
        if begins_word:
            words.append(piece)
            places.append(start)
        else:
            words[-1] += piece
    return words, places
