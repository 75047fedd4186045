"""The weights of a running core: their version, the orders that replace them, and those that copy
blocks of the KV cache, which were computed with them.

A version is a name. At start it is that of the checkpoint; an update gives another one when it is
complete, and forgets what was cached of prefixes and media under the one before. Between the first
push of an update and its end the weights are a mixture: nothing runs then, so that no answer comes
of it, and a resume is refused.

Orders need a complete pause, of any mode, and are answered when the workers have carried them out.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from headrace.base.errors import Conflict, HeadraceError, InvalidRequest, from_wire
from headrace.base.wire.weights import BESIDE_STEPS, WeightOrder, WeightReply
from headrace.core.ports import PendingKV, PendingWeights
from headrace.core.service_state import WeightVersions

POLL_S = 0.002
Order = Callable[[WeightOrder], PendingWeights]
Result = dict[str, object] | HeadraceError
Done = Callable[[Result], None]


def _untold(result: Result) -> None:
    """Nobody waits for what came of an order."""


@dataclass(frozen=True, eq=False)
class _Running:
    """An order on its way, what is made of its reply, and who is told. `stops`: why nothing may
    begin until then, or ""; `keeps`: why the executor must stay, or ""."""

    pending: PendingWeights | PendingKV
    settle: Callable[[Any], Result]
    on_done: Done
    stops: str = ""
    keeps: str = ""


class Weights:
    """See the top of the file. `poll_at`: when `advance` is to be called although nothing else
    happens."""

    def __init__(
        self,
        order: Order,
        *,
        version: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._order = order
        self._clock = clock
        self._first = version
        self.versions = WeightVersions(version, clock)
        self._running: list[_Running] = []
        self._count = 0
        self._is_open = False
        self.mixed = False
        self.poll_at: float | None = None

    @property
    def blocks_resume(self) -> str:
        """Why nothing may run, or ""."""
        for running in self._running:
            if running.stops:
                return running.stops
        if self.mixed:
            return (
                "the weights are a mixture of two versions: finish the update, or reload the model"
            )
        return ""

    def start(self, order: WeightOrder, version: str, on_done: Done) -> None:
        """Has an order carried out; `on_done` is called with what came of it. Conflict while
        another one is on its way."""
        self._check_free()
        if order.action == "finish" and not (self.mixed or self._is_open):
            raise Conflict("no update has been begun")
        if order.action in ("begin", "finish", "drop"):
            self._is_open = order.action == "begin"
        if order.action == "begin" or (order.action == "finish" and not self.mixed):
            on_done(self._state(WeightReply()))
            return
        if order.action == "push" and self._is_open:
            order = msgspec.structs.replace(order, last=False)
        pending = self._order(order)
        stops = "" if order.action in BESIDE_STEPS else "weights are being replaced"
        settle = partial(self._settled, order, version)
        self._add(_Running(pending, settle, on_done, stops=stops))

    def _add(self, running: _Running) -> None:
        self._running.append(running)
        self.poll_at = self._clock()

    def accompany(
        self, order: Callable[[], PendingKV], settle: Callable[[Any], Result], on_done: Done
    ) -> None:
        """Has another kind of order carried out, beside the steps: the weights stay as they are
        until it is. Conflict while another one is on its way."""
        self._check_free()
        self.attend(order(), settle, on_done)

    def attend(
        self, pending: PendingKV, settle: Callable[[Any], Result], on_done: Done = _untold
    ) -> None:
        """Looks after such an order, of which there may be several, until it has been carried
        out."""
        self._add(_Running(pending, settle, on_done, keeps="KV is being copied"))

    @property
    def keeps_executor(self) -> str:
        """Why the executor may not be given up now, or ""."""
        return next((running.keeps for running in self._running if running.keeps), "")

    def _check_free(self) -> None:
        for running in self._running:
            what = running.keeps or "another order about the weights is on its way"
            raise Conflict(f"{what}: try again later")

    @property
    def loads(self) -> str:
        """The version of the weights that new workers load."""
        return self._first

    def turn_to(self, version: str) -> dict[str, object]:
        """New workers load others, of this version, or ("") of the next number; nothing runs until
        then."""
        if not version:
            self._count += 1
        self._first = version or str(self._count)
        return {**self._state(WeightReply()), "version": self._first}

    def loaded(self) -> None:
        """Other workers have loaded the model's own weights."""
        self.mixed = self._is_open = False
        if self.versions.now != self._first:
            self.versions.begin(self._first)

    def advance(self) -> None:
        """Tells the calls whose orders have been carried out."""
        done = [running for running in self._running if running.pending.done()]
        self._running = [running for running in self._running if running not in done]
        self.poll_at = self._clock() + POLL_S if self._running else None
        for running in done:
            try:
                reply = running.pending.result()
            except HeadraceError as error:
                running.on_done(error)
                continue
            running.on_done(running.settle(reply))

    def _settled(self, order: WeightOrder, version: str, reply: WeightReply) -> Result:
        ends = order.action == "finish" or order.last
        if reply.changed:
            self.mixed = True
        if reply.error is not None:
            return from_wire(reply.error)
        if ends and order.action in ("push", "finish"):
            self.mixed = False
            self._count += 1
            self.versions.begin(version or str(self._count))
        return self._state(reply)

    def _state(self, reply: WeightReply) -> dict[str, object]:
        return {
            "version": self.versions.now,
            "mixed": self.mixed,
            "num_bytes": reply.num_bytes,
            "digest": reply.digest,
            "values": reply.values,
        }


def no_weights(order: WeightOrder) -> PendingWeights:
    """Of an engine whose executor has none."""
    raise InvalidRequest("this engine cannot change its weights")


def check_state(order: WeightOrder, *, can_run: bool, is_paused: bool) -> None:
    """Conflict unless an order may be carried out now: with an executor, and, but for groups, in a
    complete pause."""
    if not can_run:
        raise Conflict("the engine is asleep: wake its weights first")
    if order.action not in (*BESIDE_STEPS, "read", "digest") and not is_paused:
        raise Conflict("pause the engine first, in any mode, and let that complete")


def order_of(text: str) -> WeightOrder:
    """The order in a call's argument, which is JSON."""
    try:
        return msgspec.json.decode(text, type=WeightOrder)
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"order: {error}", field="order") from None
