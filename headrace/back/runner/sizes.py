"""The sizes of steps that are recorded and replayed, and which of them a step takes."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import Protocol

from headrace.back.sampling.in_step import HeadOutput, SamplerInput

MIXED_ROWS = 16
"""The smallest number of rows of a bucket with prompts in it; the next are 4 and 16 times as
many."""
FEW_TOKENS = (2, 4, 8)
"""Numbers of tokens, below those of all steps, that only steps have which verify drafts."""


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """The size of a step. `decode`: every row has one query token, row i is token i, tokens ==
    rows. `sampler_input`: what it leaves for the sampler, or does itself. `every`: it leaves the
    hidden states of all tokens, not only of each row's last. `queries`: of a step that verifies
    drafts, the query tokens of a row at most; 0: of others.
    `whole`: its prompts begin in it, so that they see its own tokens alone. `adapted`: some of its
    rows have adapters. `media`: it reaches placeholders. `part`: "" is the
    step itself, "follow" what a drafter keeps of it, "draft" the passes of a drafter for these
    rows."""

    tokens: int
    rows: int
    decode: bool
    updates: int
    sampler_input: SamplerInput = HeadOutput.LOGITS
    every: bool = False
    queries: int = 0
    commits: bool = True
    whole: bool = False
    adapted: bool = False
    media: bool = False
    part: str = ""

    @property
    def verifies(self) -> bool:
        """Whether its rows have drafts, each of whose places is sampled."""
        return self.queries > 0

    @property
    def samples_apart(self) -> bool:
        """Whether sampling is launched behind the step: beside prompts each form with penalties or
        log-probabilities would be one more recording of every mixed size."""
        mixed = not self.decode and not self.verifies
        return mixed and self.sampler_input.words > 0

    @property
    def most_queries(self) -> int:
        """Query tokens of a row at most."""
        return self.queries or (1 if self.decode else self.tokens)

    def __str__(self) -> str:
        size = f"{self.rows} rows" if self.decode else f"{self.tokens} tokens, {self.rows} rows"
        size += f", verifying {self.queries} a row" if self.verifies else ""
        size += ", all hidden states" if self.every else ""
        size += ", whole prompts" if self.whole else ""
        size += ", with adapters" if self.adapted else ""
        size += ", with media" if self.media else ""
        size += f", {self.part}" if self.part else ""
        return f"{size}, {self.sampler_input}" if self.sampler_input.reads_rows else size


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

    def of(self, *, tokens: int, rows: int, whole: bool = False) -> Bucket:
        """A bucket that holds a step. `whole`: see Bucket."""
        ...

    def verifying(self, *, tokens: int, rows: int, queries: int) -> Bucket:
        """A bucket that holds a step whose rows, of at most so many query tokens, verify drafts."""
        ...


class SizesFactory(Protocol):
    """Makes the sizes of a runner's steps."""

    def __call__(self, *, max_rows: int, max_tokens: int, groups: int) -> Sizes: ...


class Buckets:
    """The sizes there are: decodes of 1, 2, 4 rows, by 8 up to 64, then four for each power of two;
    mixed steps whose padding is at most an eighth, from 1024 tokens on a sixteenth.

    Sizes of decodes are few, so that all are recorded at start: one that is met later costs two
    steps launched kernel by kernel (H200, 8B, 512 requests to their end: 43 sizes recorded on the
    way took 1.6 of 26 s). Padding rows read no KV, only the products grow.

    Steps that verify drafts have sizes of their own: rows and query tokens of a row in powers of
    two, which the kernels of decodes are launched by, and tokens as other steps, beginning with
    few."""

    def __init__(self, *, max_rows: int, max_tokens: int, groups: int) -> None:
        self._groups = groups
        self._decodes = _decode_sizes(max_rows)
        self._tokens = _token_sizes(max_tokens)
        rows = (MIXED_ROWS * 4**i for i in range(8))
        self._rows = [*(r for r in rows if r < max_rows), max_rows]
        self._few = [size for size in FEW_TOKENS if size < self._tokens[0]]

    def of(self, *, tokens: int, rows: int, whole: bool = False) -> Bucket:
        """The smallest bucket that holds a step."""
        if tokens == rows:
            return self.decode(self._decodes[bisect_left(self._decodes, rows)])
        size = self._tokens[bisect_left(self._tokens, tokens)]
        most = self._rows[bisect_left(self._rows, rows)]
        updates = self._groups * (size // 8 + 2 * most)
        return Bucket(tokens=size, rows=most, decode=False, updates=updates, whole=whole)

    def verifying(self, *, tokens: int, rows: int, queries: int) -> Bucket:
        """See Sizes."""
        sizes = [*self._few, *self._tokens]
        size = sizes[bisect_left(sizes, tokens)]
        most = min(_power_of_two(rows), self._rows[-1])
        updates = self._groups * (size // 8 + 2 * most)
        return Bucket(
            tokens=size, rows=most, decode=False, updates=updates, queries=_power_of_two(queries)
        )

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


def _power_of_two(value: int) -> int:
    return 1 << (value - 1).bit_length()


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
