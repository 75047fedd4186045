"""Rows from worker processes through memory that all share: nothing is pickled, nothing waits for a copy.

A ring has a number of places for rows of one structured NumPy type. Workers take a free place, fill it and say so;
the trainer takes full ones and gives them back. Made before CUDA is touched, because workers are forks.
"""

from __future__ import annotations

import mmap
import multiprocessing
import os
import queue
import threading
from collections.abc import Callable, Iterator, Mapping

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Fill = Callable[[int], Iterator[npt.NDArray[np.void]]]
"""The number of a worker -> its endless rows."""
Columns = dict[str, Tensor]
"""Rows [count, ...] of each column."""


def pinned(found: Mapping[str, npt.NDArray[np.generic]]) -> Columns:
    """As tensors, from which a GPU copies while other things go on."""
    tensors = {name: torch.from_numpy(column) for name, column in found.items()}
    if not torch.cuda.is_available():
        return tensors
    return {name: tensor.pin_memory() for name, tensor in tensors.items()}


def columns_of(rows: npt.NDArray[np.void]) -> Columns:
    """Rows of a structured type, column by column."""
    return pinned({name: np.ascontiguousarray(rows[name]) for name in rows.dtype.names or ()})


class Ring:
    """See the module. `places` rows of `kind`, filled by `workers` processes until this one ends."""

    def __init__(self, kind: np.dtype, fill: Fill, *, places: int, workers: int) -> None:
        context = multiprocessing.get_context("fork")
        memory = mmap.mmap(-1, kind.itemsize * places)
        self._rows = np.frombuffer(memory, kind, places)
        self._free, self._full = context.SimpleQueue(), context.SimpleQueue()
        for place in range(places):
            self._free.put(place)
        for number in range(workers):
            context.Process(target=self._work, args=(fill, number), daemon=True).start()

    def take(self, count: int) -> Columns:
        """So many rows, column by column; waits for them."""
        kind = self._rows.dtype
        names = kind.names or ()
        found = {name: np.empty((count, *kind[name].shape), kind[name].base) for name in names}
        for at in range(count):
            place = self._full.get()
            for name, column in found.items():
                column[at] = self._rows[place][name]
            self._free.put(place)
        return pinned(found)

    def ahead(self, count: int, depth: int = 3) -> Callable[[], Columns]:
        """A function that takes so many rows, which a thread has fetched before."""
        fetched: queue.Queue[Columns] = queue.Queue(depth)

        def fetch() -> None:
            while True:
                fetched.put(self.take(count))

        threading.Thread(target=fetch, daemon=True).start()
        return fetched.get

    def _work(self, fill: Fill, number: int) -> None:
        os.nice(5)
        for row in fill(number):
            place = self._free.get()
            self._rows[place] = row
            self._full.put(place)
