"""When Python's cyclic garbage collector runs.

It pauses while a process starts: imports create hundreds of thousands of objects that stay, and
scanning them repeatedly is a sixth of the import time (torch: 1.25 s with it, 1.07 s without). In a
process that serves, the oldest generation is walked through while nobody waits."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_own = False
PROMOTIONS = 10
"""Collections of the middle generation after which the oldest one is looked at: Python's own
threshold."""
FEWEST = 250_000
"""So many old objects are walked through in about 0.1 s; fewer are left alone while somebody
waits."""
_NEVER = 2**31 - 1


def own_process() -> None:
    """Marks this process as headrace's own from start to end: what it imports may be frozen."""
    global _own
    _own = True


@contextmanager
def collection_paused() -> Iterator[None]:
    """No collection inside the block. In headrace's own processes the objects alive at its end are
    frozen, so that later collections are short too; in a host application nothing else changes."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            if _own:
                gc.freeze()
            gc.enable()


class OldGeneration:
    """Collects the oldest generation in this process's place.

    Python would do so whenever a quarter has come to it, and with the objects of 4,000 connections
    each time takes 0.05 to 0.1 s, in which nobody is answered. Here it is done when nobody waits;
    beside requests only once there are twice as many objects as the last time has left, so that
    what is kept stays in proportion. Younger generations, where nearly all garbage is found, are
    collected as ever."""

    def __init__(self, fewest: int = FEWEST) -> None:
        young, middle, _ = gc.get_threshold()
        gc.set_threshold(young, middle, _NEVER)
        self._fewest = self._most = fewest

    def look(self, *, idle: bool) -> bool:
        """Collects if it is time to; whether it was. `idle`: nobody waits for an answer."""
        if gc.get_count()[2] < PROMOTIONS:
            return False
        if not idle and _num_old() < self._most:
            return False
        gc.collect()
        self._most = max(self._fewest, 2 * _num_old())
        return True


def _num_old() -> int:
    """Counting takes a hundredth of what collecting does."""
    return len(gc.get_objects(generation=2))
