"""What drafts cost, as measured: the times of plain steps and of steps that verify, in medians.

A step's time by itself says little: where steps are planned while others run, what one takes in
late another takes in early. So what is measured is the mean of a few alike steps in a row. And a
machine that others use too is slower at one time than at another: steps that verify are compared
with plain ones close to them.
"""

from __future__ import annotations

from collections import deque
from statistics import median

UNCOUNTED = 2  # steps of a size before one is measured: they may be run and recorded, not replayed
RUN = 4  # steps in a row that are measured together; plain ones come so many in a row,
PLAIN_KNOWN = 2  # until so many are measured every second run,
PLAIN_STEPS = 128  # and of so many steps one run
LEAST = 0.01  # tokens that a draft costs at least: what is free cannot be compared
FEW = 2  # measurements of other sizes count as so many of a size's own
SHARED = 0.5  # of what drafts add to a step, the part that is the same for any number of them
MEASURED = 9  # of the newest measurements of a size the median counts
NEAR = 2 * RUN  # steps of a size that may lie between those that are compared


class RecentMedian:
    """The median of the last measurements, which a few that something else delayed do not move."""

    def __init__(self) -> None:
        self._values: deque[float] = deque(maxlen=MEASURED)

    @property
    def count(self) -> int:
        """Measurements that count."""
        return len(self._values)

    @property
    def value(self) -> float:
        """0 while nothing is known."""
        return median(self._values) if self._values else 0.0

    def add(self, value: float) -> None:
        """A measurement."""
        self._values.append(value)


class _Run:
    """Steps in a row with as many rows, all of them plain or none."""

    def __init__(self, rows: int, drafts: int) -> None:
        self.kind = rows, drafts > 0
        self.steps = self.drafts = 0
        self.seconds = 0.0

    @property
    def each(self) -> float:
        """Seconds of a row's step."""
        return self.seconds / (self.steps * self.kind[0])


class DraftPrices:
    """What drafts cost, as measured, in tokens: the time that a draft adds to a step, over the time
    in which a plain step of as many rows gains one. What a number of drafts costs that was measured
    seldom or never is guessed from the nearest one that was: with as many rows, or with others."""

    def __init__(self) -> None:
        self._plain: dict[int, RecentMedian] = {}
        self._extra: dict[tuple[int, int], RecentMedian] = {}
        self._seen: dict[tuple[int, int], int] = {}
        self._steps: dict[int, int] = {}
        self._newest: dict[tuple[int, bool], tuple[_Run, int]] = {}
        self._run = _Run(0, 0)

    def turn(self, rows: int) -> int:
        """Which step this is of those with about so many rows: counts up."""
        size = _size_class(rows)
        self._steps[size] = self._steps.get(size, -1) + 1
        return self._steps[size]

    def wants_plain(self, rows: int, turn: int) -> bool:
        """Whether the step is to be plain: at first, then every second run until enough of them are
        known, and now and then."""
        plain = self._plain.get(_size_class(rows))
        if plain is None:
            return True
        return turn % (2 * RUN if plain.count < PLAIN_KNOWN else PLAIN_STEPS) < RUN

    def measured(self, rows: int) -> int:
        """Of steps of about so many rows with drafts."""
        size = _size_class(rows)
        return sum(own.count for key, own in self._extra.items() if key[0] == size)

    def price(self, rows: int, drafts: int) -> float:
        """Of each of `drafts` in a step; 0 while no price is known."""
        size, share = _size_class(rows), _share_class(rows, drafts)
        own, guess = self._extra.get((size, share)), self._guess(size, share)
        if own is None:
            return guess
        if not guess:
            return own.value
        return (own.count * own.value + FEW * guess) / (own.count + FEW)

    def _guess(self, size: int, share: int) -> float:
        """By the nearest other size."""
        others = [key for key in self._extra if key != (size, share)]
        if not others:
            return 0.0
        nearest = min(others, key=lambda key: (abs(key[0] - size), abs(key[1] - share)))
        fewer = 2.0 ** (nearest[1] - share)
        return self._extra[nearest].value * (SHARED * fewer + 1.0 - SHARED)

    def observe(self, rows: int, drafts: int, seconds: float) -> None:
        """A step of decodes is done."""
        exact, run = (rows, drafts), self._run
        seen = self._seen[exact] = self._seen.get(exact, 0) + 1
        if seen <= UNCOUNTED or run.kind != (rows, drafts > 0):
            self._take(run)
            run = self._run = _Run(rows, drafts)
        if seen <= UNCOUNTED:
            return
        run.steps, run.drafts, run.seconds = (
            run.steps + 1,
            run.drafts + drafts,
            run.seconds + seconds,
        )
        if run.steps == RUN:
            self._take(run)
            self._run = _Run(rows, drafts)

    def _take(self, run: _Run) -> None:
        if not run.steps or (run.steps == 1 and self.measured(run.kind[0])):
            return  # of one step alone the time says nothing
        (rows, drafting), now = run.kind, self._steps.get(_size_class(run.kind[0]), 0)
        size = _size_class(rows)
        if not drafting:
            self._plain.setdefault(size, RecentMedian()).add(run.each)
        other, at = self._newest.get((size, not drafting), (None, 0))
        self._newest[size, drafting] = run, now
        if other is not None and now - at <= NEAR + RUN:
            self._compare(*((other, run) if drafting else (run, other)))
        elif drafting and not self.measured(rows) and other is not None:
            self._compare(other, run)

    def _compare(self, plain: _Run, drafted: _Run) -> None:
        """Of two runs of one size class."""
        if plain.each <= 0.0:
            return
        rows, drafts = drafted.kind[0], drafted.drafts / drafted.steps
        extra = (drafted.each / plain.each - 1.0) * rows / drafts
        share = _size_class(rows), _share_class(rows, drafts)
        self._extra.setdefault(share, RecentMedian()).add(max(extra, LEAST))


def is_probe(turn: int, every: int) -> bool:
    """Whether this step tries drafts, as one run of `every` does. Runs are measured together; where
    32 or 64 are `every`, those that try lie right behind plain ones."""
    return turn // RUN % every == every // 2 + 1


def _share_class(rows: int, drafts: float) -> int:
    """Drafts of a row on average, in powers of two."""
    return int(8 * drafts / rows).bit_length()


def _size_class(rows: int) -> int:
    """Rows up to the next quarter of a power of two."""
    unit = max(1, (1 << (rows - 1).bit_length()) // 8)
    return -(-rows // unit) * unit
