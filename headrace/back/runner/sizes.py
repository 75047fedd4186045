"""The sizes of steps that are recorded and replayed, and which of them a step takes."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import Protocol

from headrace.back.sampling.in_step import InStepSampling
from headrace.back.sampling.top_candidates import SamplerInput

MIXED_ROWS = 16
"""The smallest number of rows of a bucket with prompts in it; the next are 4 and 16 times as
many."""


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """The size of a step. `decode`: every row has one query token, row i is token i, tokens ==
    rows. `sampler_input`: what it leaves for the sampler, or does itself. `every`: it leaves the
    hidden states of all tokens, not only of each row's last."""

    tokens: int
    rows: int
    decode: bool
    updates: int
    sampler_input: SamplerInput = "logits"
    every: bool = False
    verifies: bool = False
    commits: bool = True

    def __str__(self) -> str:
        size = f"{self.rows} rows" if self.decode else f"{self.tokens} tokens, {self.rows} rows"
        size += ", verifying" if self.verifies else ""
        size += ", all hidden states" if self.every else ""
        return (
            f"{size}, {self.sampler_input}"
            if isinstance(self.sampler_input, InStepSampling)
            else size
        )


class Sizes(Protocol):
    """Which bucket a step takes."""

    @property
    def largest(self) -> Bucket:
        """The bucket for which memory must be there."""
        ...

    @property
    def common_rows(self) -> tuple[int, ...]:
        """See Steps."""
        ...

    @property
    def distinct_rows(self) -> tuple[int, ...]:
        """See Steps."""
        ...

    def of(self, *, tokens: int, rows: int) -> Bucket:
        """A bucket that holds a step."""
        ...


class SizesFactory(Protocol):
    """Makes the sizes of a runner's steps."""

    def __call__(self, *, max_rows: int, max_tokens: int, groups: int) -> Sizes: ...


class Buckets:
    """The sizes there are: decodes of 1, 2, 4 rows, by 8 up to 64, then four for each power of two;
    mixed steps whose padding is at most an eighth, from 1024 tokens on a sixteenth.

    Sizes of decodes are few, so that all are recorded at start: one that is met later costs two
    steps launched kernel by kernel (H200, 8B, 512 requests to their end: 43 sizes recorded on the
    way took 1.6 of 26 s). Padding rows read no KV, only the products grow."""

    def __init__(self, *, max_rows: int, max_tokens: int, groups: int) -> None:
        self._groups = groups
        self._decodes = _decode_sizes(max_rows)
        self._tokens = _token_sizes(max_tokens)
        rows = (MIXED_ROWS * 4**i for i in range(8))
        self._rows = [*(r for r in rows if r < max_rows), max_rows]

    def of(self, *, tokens: int, rows: int) -> Bucket:
        """The smallest bucket that holds a step."""
        if tokens == rows:
            return self.decode(self._decodes[bisect_left(self._decodes, rows)])
        size = self._tokens[bisect_left(self._tokens, tokens)]
        most = self._rows[bisect_left(self._rows, rows)]
        updates = self._groups * (size // 8 + 2 * most)
        return Bucket(tokens=size, rows=most, decode=False, updates=updates)

    def decode(self, rows: int) -> Bucket:
        """The bucket of that many decodes."""
        return Bucket(tokens=rows, rows=rows, decode=True, updates=2 * self._groups * rows)

    @property
    def largest(self) -> Bucket:
        """The bucket for which memory must be there."""
        tokens, rows = self._tokens[-1], self._rows[-1]
        updates = self._groups * (tokens // 8 + 2 * rows)
        return Bucket(tokens=tokens, rows=rows, decode=False, updates=updates)

    @property
    def common_rows(self) -> tuple[int, ...]:
        """See Steps: all sizes of decodes."""
        return tuple(reversed(self._decodes))

    @property
    def distinct_rows(self) -> tuple[int, ...]:
        """See Steps: powers of two, which kernels pad numbers of tokens to, half as many again, and
        the largest."""
        largest = self._decodes[-1]
        few = {*(1 << i for i in range(16)), *(3 << i for i in range(16))}
        return tuple(rows for rows in self.common_rows if rows == largest or rows in few)


def _decode_sizes(most: int) -> list[int]:
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 128, 16)]
    while sizes[-1] < most:
        sizes += [(1 << (sizes[-1].bit_length())) * quarter // 4 for quarter in range(4, 8)]
    return [*(size for size in sizes if size < most), most]


def _token_sizes(most: int) -> list[int]:
    sizes, size = [], 16
    while size < most:
        sizes.append(size)
        octave = 1 << (size.bit_length() - 1)
        size += max(16, octave // (16 if octave >= 1024 else 8))
    return [*sizes, most]
