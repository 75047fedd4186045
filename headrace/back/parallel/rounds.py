"""When engine cores that share out their experts exchange tokens. Each has a scheduler of its own:
they run different steps, or none, and drafts come in between. What a step is does not matter here.

A *round* is the exchange of one mixture, in which all ranks take part. Before it each says which
mixture it has come to, with how many rows, or that it has nothing to do. The round is that of the
first mixture that somebody waits at; who waits at a later one, or at none, takes part with rows
that choose no expert. So cores that are apart come together: those behind catch up, and then they
go through the layers side by side. Nobody waits for a core that has no work, as that one serves.

Once no core has anything to do all of them sleep, until one that gets work rings for the others.
The time between is a *period*: every rank counts the same ones, so that a ring that comes late is
known to be old.

Where a core has several ranks, these begin a step of theirs in the same round: one that has not
got it yet would serve, and wait for the one that waits for it within the layer.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import NamedTuple, Protocol, TypeVar

import torch

from headrace.back.parallel.collectives import all_parts
from headrace.back.parallel.mesh import Axis
from headrace.base.errors import EngineDead

T = TypeVar("T")
IDLE, READY = -1, -2
"""In place of a mixture's number: nothing to do; an order that waits for the core's other ranks."""


PERIODS = 1 << 40
"""More than there are while the ranks stay the same."""


@dataclass(frozen=True)
class Ring:
    """Some rank has work, in this period. It comes among a worker's orders."""

    period: int


class Bell(Protocol):
    """What wakes the other ranks."""

    def ring(self, period: int) -> None:
        """Sends every other rank a Ring."""
        ...


class Agreement(NamedTuple):
    """What all ranks know of a round: the mixture, IDLE where none can be exchanged yet; the rows
    of each rank; whether this one's are among them; whether all ranks of its core have an order to
    begin; whether nobody has anything to do."""

    number: int
    rows: int
    takes_part: bool
    begins: bool
    is_over: bool


class MixtureRounds:
    """Implements `mesh.Rounds`; called by the thread that runs the steps. `axis`: all ranks, over
    which numbers on the host are sent. `alike`: so many neighbours are the ranks of one core, which
    have the same rows and come to the same mixtures.

    Invariant: all ranks take part in the same rounds in the same order, asleep in none.
    """

    def __init__(self, axis: Axis, *, alike: int, bell: Bell) -> None:
        self._alike, self._generation = alike, -1
        self.renew(axis, bell)
        self._mixtures: dict[str, Callable[[int], None]] = {}
        self._serve: list[Callable[[int], None]] = []
        self.between: Callable[[int], None] = lambda count: None

    def renew(self, axis: Axis, bell: Bell) -> None:
        """From now on with the ranks of this axis, which do the same; nobody is awake. Periods that
        any of them has counted before are over."""
        self._axis, self._bell = axis, bell
        begun = all_parts(torch.tensor(self._generation + 1), axis)
        self._generation = max(int(one) for one in begun)
        self._awake, self._period, self._count = False, self._generation * PERIODS, 0

    def rest(self) -> None:
        """Serves the others until nobody has anything to do."""
        while self._awake:
            self._round(IDLE)

    def join(self, name: str, serve: Callable[[int], None]) -> int:
        """See Rounds. A model that is built again takes the numbers it had."""
        self._mixtures[name] = serve
        self._serve = list(self._mixtures.values())
        return list(self._mixtures).index(name)

    def enter(self, number: int, rows: int) -> int:
        """See Rounds."""
        self._wake()
        while True:
            agreed = self._agree(number, rows)
            if agreed.takes_part:
                return agreed.rows
            self._take_part(agreed)

    def _wake(self) -> None:
        if not self._awake:
            self._awake = True
            self._bell.ring(self._period)

    def next(self, orders: SimpleQueue[T | Ring], *, joint: type) -> T:
        """The worker's next order; until it comes this rank serves the others. All ranks of a core
        begin those of the type `joint` in the same round."""
        held: T | None = None
        while True:
            if held is None:
                held = self._taken(orders)
            if held is not None and (self._alike == 1 or not isinstance(held, joint)):
                return held
            if not self._awake:
                if held is None:
                    continue
                self._wake()
            if self._round(IDLE if held is None else READY):
                assert held is not None
                return held

    def _taken(self, orders: SimpleQueue[T | Ring]) -> T | None:
        """An order, if there is one. Asleep this rank waits for one, or for a ring."""
        if self._awake:
            try:
                order = orders.get_nowait()
            except Empty:
                return None
        else:
            order = orders.get()
        if not isinstance(order, Ring):
            return order
        self._awake = self._awake or order.period == self._period
        return None

    @torch.inference_mode()
    def _round(self, number: int) -> bool:
        """A round with no rows of this rank; whether its core begins an order."""
        agreed = self._agree(number, 0)
        if agreed.is_over:
            self._awake = False
            self._period += 1
        else:
            self._take_part(agreed)
        return agreed.begins

    def _take_part(self, agreed: Agreement) -> None:
        if agreed.number != IDLE:
            self._serve[agreed.number](agreed.rows)

    def _agree(self, number: int, rows: int) -> Agreement:
        try:
            stated = all_parts(torch.tensor((number, rows)), self._axis)
        except RuntimeError as error:
            why = str(error).strip().split("\n", 1)[0]
            raise EngineDead(
                f"one of the {self._axis.size} ranks that share out the experts is gone: {why}"
            ) from error
        agreed = agreement([(int(one[0]), int(one[1])) for one in stated], self._axis, self._alike)
        if agreed.number != IDLE:
            self._count += 1
            self.between(self._count)
        return agreed


def agreement(stated: list[tuple[int, int]], axis: Axis, alike: int) -> Agreement:
    """What follows from what the ranks have stated, mixture and rows. A core whose ranks are not
    all there yet is not ready: they wait for each other within the layer too."""
    cores = [stated[first : first + alike] for first in range(0, len(stated), alike)]
    agreed = [core[0] if len(set(core)) == 1 else (IDLE, 0) for core in cores]
    number = min((one for one, _ in agreed if one >= 0), default=IDLE)
    mine = agreed[axis.rank // alike][0]
    return Agreement(
        number=number,
        rows=max((rows for one, rows in agreed if one == number), default=0),
        takes_part=number != IDLE and mine == number,
        begins=mine == READY,
        is_over=all(one == IDLE for one, _ in stated),
    )


class SocketBell:
    """A datagram socket for each rank in a private folder. `heard` is called for every ring, by a
    thread of its own."""

    def __init__(self, folder: str, axis: Axis) -> None:
        self._folder, self._axis = folder, axis
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path(axis.rank))
        self._socket.bind(self._path(axis.rank))

    def listen(self, heard: Callable[[Ring], None]) -> None:
        """Begins to."""

        def hear() -> None:
            while data := self._socket.recv(8):
                heard(Ring(*struct.unpack("q", data)))

        threading.Thread(target=hear, name="headrace-bell", daemon=True).start()

    def close(self) -> None:
        """Nobody rings any more."""
        self._socket.shutdown(socket.SHUT_RDWR)

    def ring(self, period: int) -> None:
        """See Bell; EngineDead if a rank is gone."""
        for rank in range(self._axis.size):
            if rank == self._axis.rank:
                continue
            try:
                self._socket.sendto(struct.pack("q", period), self._path(rank))
            except OSError as error:
                raise EngineDead(
                    f"rank {rank} of the {self._axis.size} that share out the experts is gone "
                    f"({error.strerror})"
                ) from error

    def _path(self, rank: int) -> str:
        return f"{self._folder}/bell-{rank}"
