"""What drafts cost, as measured: the times of plain steps and of steps that verify, in medians."""

from __future__ import annotations

from collections import deque
from statistics import median

PLAIN_FIRST = 3  # steps of a number of rows before one drafts: what drafts cost is compared to them
PLAIN_KNOWN = 8  # until so many are measured every second step is plain,
PLAIN_STEPS = 64  # and of so many one
LEAST = 0.01  # tokens that a draft costs at least: what is free cannot be compared
MEASURED = 15  # of the newest measurements of a size the median counts
FEW = 4  # measurements of other sizes count as so many of a size's own


class RecentMedian:
    """The median of the last measurements, which a few steps that something else delayed do not
    move. The first one does not count: what it measured may have been made in it."""

    def __init__(self) -> None:
        self._values: deque[float] = deque(maxlen=MEASURED)
        self._counts = False

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
        if self._counts:
            self._values.append(value)
        self._counts = True


class DraftPrices:
    """What drafts cost, as measured, in tokens: the time that a draft adds to a step, over the time
    in which a plain step of as many rows gains one. A number of drafts that was measured seldom or
    never has the price of others as well: with as many rows, or of all."""

    def __init__(self) -> None:
        self._plain: dict[int, RecentMedian] = {}
        self._extra: dict[tuple[int, int], RecentMedian] = {}
        self._of_rows: dict[int, RecentMedian] = {}
        self._of_all = RecentMedian()
        self._steps: dict[int, int] = {}

    def turn(self, rows: int) -> int:
        """Which step this is of those with about so many rows: counts up."""
        size = _size_class(rows)
        self._steps[size] = self._steps.get(size, -1) + 1
        return self._steps[size]

    def wants_plain(self, rows: int, turn: int) -> bool:
        """Whether the step is to be plain: at first, then every second one until enough of them are
        known, and now and then."""
        plain = self._plain.get(_size_class(rows))
        known = turn >= PLAIN_FIRST and plain is not None
        if plain is not None and plain.count < PLAIN_KNOWN and turn % 2 == 0:
            return True
        return not known or turn % PLAIN_STEPS == 0

    def price(self, rows: int, drafts: int) -> float:
        """Of each of `drafts` in a step; 0 while no price is known."""
        size, share = self._sizes(rows, drafts)
        of_rows = self._of_rows.get(size, self._of_all)
        others = of_rows.value or self._of_all.value
        own = self._extra.get((size, share), self._of_all)
        return (own.count * own.value + FEW * others) / (own.count + FEW)

    def observe(self, rows: int, drafts: int, seconds: float) -> None:
        """A step of decodes is done."""
        plain = self._plain.setdefault(_size_class(rows), RecentMedian())
        if not drafts:
            plain.add(seconds / rows)
        elif plain.value > 0.0:
            extra = (seconds / plain.value - rows) / drafts
            sizes = self._sizes(rows, drafts)
            own = self._extra.setdefault(sizes, RecentMedian())
            for prices in (own, self._of_rows.setdefault(sizes[0], RecentMedian()), self._of_all):
                prices.add(max(extra, LEAST))

    @staticmethod
    def _sizes(rows: int, drafts: int) -> tuple[int, int]:
        return _size_class(rows), (8 * drafts // rows).bit_length()


def _size_class(rows: int) -> int:
    """Rows up to the next quarter of a power of two."""
    unit = max(1, (1 << (rows - 1).bit_length()) // 8)
    return -(-rows // unit) * unit
