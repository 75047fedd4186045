"""PAR-10: engine cores that run different steps exchange the tokens of the same mixture, and none waits for one
that has nothing to do."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import pytest
import torch

from headrace.back.parallel.collectives import all_parts
from headrace.back.parallel.mesh import Axis
from headrace.back.parallel.rounds import IDLE, READY, MixtureRounds, Ring, SocketBell, agreement
from headrace.base.errors import EngineDead
from tests.back.parallel.thread_ranks import run_threads

STOP = "stop"
Steps = list[tuple[int, int]]
"""Of one order: the mixtures that it comes to, with how many rows."""


def axis(rank: int, size: int) -> Axis:
    group: Any = object()
    return Axis(name="ep", size=size, rank=rank, group=group)


@pytest.mark.parametrize(
    ("stated", "rank", "alike", "number", "rows", "takes_part"),
    [
        ([(3, 5), (7, 2)], 0, 1, 3, 5, True),
        ([(3, 5), (7, 2)], 1, 1, 3, 5, False),
        ([(3, 5), (3, 9)], 1, 1, 3, 9, True),
        ([(IDLE, 0), (0, 4)], 0, 1, 0, 4, False),
        ([(2, 4), (IDLE, 0), (6, 1), (6, 1)], 0, 2, 6, 1, False),
        ([(2, 4), (2, 4), (6, 1), (6, 1)], 1, 2, 2, 4, True),
        ([(2, 4), (IDLE, 0), (IDLE, 0), (IDLE, 0)], 0, 2, IDLE, 0, False),
    ],
)
def test_the_first_mixture_whose_core_is_ready_is_exchanged(
    stated: Steps, rank: int, alike: int, number: int, rows: int, takes_part: bool
) -> None:
    agreed = agreement(stated, axis(rank, len(stated)), alike)
    assert agreed == (number, rows, takes_part, False, False)


@pytest.mark.parametrize(("rank", "begins"), [(0, False), (1, False), (2, True), (3, True)])
def test_ranks_of_a_core_begin_an_order_when_all_have_it(rank: int, begins: bool) -> None:
    stated = [(READY, 0), (IDLE, 0), (READY, 0), (READY, 0)]
    agreed = agreement(stated, axis(rank, 4), 2)
    assert agreed == (IDLE, 0, False, begins, False)


def test_a_period_is_over_when_nobody_has_anything_to_do() -> None:
    assert agreement([(IDLE, 0)] * 3, axis(1, 3), 1).is_over


class Orders(SimpleQueue[Any]):
    """Of one rank. It is told to stop when it sleeps: awake, the others may wait for it."""

    def get_nowait(self) -> Any:
        order = super().get_nowait()
        if order != STOP:
            return order
        self.put(STOP)
        raise Empty


class Bells:
    """Rings into the orders of the other ranks."""

    def __init__(self, orders: list[Orders], rank: int) -> None:
        self._others = [one for i, one in enumerate(orders) if i != rank]

    def ring(self, period: int) -> None:
        for orders in self._others:
            orders.put(Ring(period))


@pytest.mark.parametrize(("cores", "alike"), [(2, 1), (3, 1), (2, 2)])
def test_cores_with_different_steps_meet_at_every_mixture(
    cores: int, alike: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Orders come while others run, sleep or serve; every exchange has all ranks at one mixture."""
    size, mixtures, rng = cores * alike, 4, random.Random(cores + alike)
    orders = [Orders() for _ in range(size)]
    plans = [
        [
            sorted((rng.randrange(mixtures), rng.randrange(1, 9)) for _ in range(rng.randrange(5)))
            for _ in range(0 if core == 1 else 12)
        ]
        for core in range(cores)
    ]
    left, lock = [sum(map(len, plans)) * alike], threading.Lock()

    def rank_main(rank: int, axis_of: Callable[..., Axis]) -> int:
        numbers, tokens, core = axis_of("rounds"), axis_of("tokens"), axis_of("core", alike)
        rounds, seen = MixtureRounds(numbers, alike=alike, bell=Bells(orders, rank)), [0]

        def exchange(number: int, rows: int) -> None:
            """All ranks are at this mixture, with as many rows."""
            for theirs in all_parts(torch.tensor((number, rows)), tokens):
                assert theirs.tolist() == [number, rows]
            seen[0] += 1

        for number in range(mixtures):
            name = f"mixture {number}"
            assert rounds.join(name, lambda rows, number=number: exchange(number, rows)) == number
        waiting = [*plans[rank // alike]]
        if waiting:
            orders[rank].put(waiting.pop(0))
        while (order := rounds.next(orders[rank], joint=list)) != STOP:
            for number, rows in order:
                if alike > 1:  # what the ranks of a core exchange within a layer
                    assert all(int(one) == number for one in all_parts(torch.tensor(number), core))
                agreed = rounds.enter(number, rows)
                assert agreed >= rows
                exchange(number, agreed)
            if waiting:
                orders[rank].put(waiting.pop(0))
            with lock:
                left[0] -= 1
                if not left[0]:
                    for one in orders:
                        one.put(STOP)
        return seen[0]

    seen = run_threads(monkeypatch, size, rank_main)
    most = max(len(order) for plan in plans for order in plan)
    assert len(set(seen)) == 1 and seen[0] >= most, seen


def test_ranks_that_meet_count_periods_that_none_of_them_has_had(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One has met others before, and then others again; the second one comes anew."""
    orders = [Orders() for _ in range(2)]

    def rank_main(rank: int, axis_of: Callable[..., Axis]) -> list[int]:
        rounds = MixtureRounds(Axis(name="ep"), alike=1, bell=Bells(orders, rank))
        earlier = [rounds._period]
        if rank == 0:
            for _ in range(2):
                rounds.renew(Axis(name="ep"), Bells(orders, rank))
                earlier.append(rounds._period)
        rounds.renew(axis_of("met"), Bells(orders, rank))
        assert rounds._period not in earlier
        return [rounds._period]

    first, second = run_threads(monkeypatch, 2, rank_main)
    assert first == second


def test_bells_ring_at_all_other_ranks_and_say_who_is_gone(tmp_path: Path) -> None:
    heard: list[SimpleQueue[Ring]] = [SimpleQueue() for _ in range(3)]
    bells = [SocketBell(str(tmp_path), axis(rank, 3)) for rank in range(3)]
    for bell, rings in zip(bells, heard, strict=True):
        bell.listen(rings.put)
    bells[1].ring(5)
    assert [heard[rank].get(timeout=20) for rank in (0, 2)] == [Ring(5)] * 2
    assert heard[1].empty()
    (tmp_path / "bell-2").unlink()
    with pytest.raises(EngineDead, match="rank 2 of the 3 that share out the experts is gone"):
        bells[0].ring(6)
