"""Which models are loaded: whatever comes in whatever order, the budget holds, nobody's model is taken away, and every
request is answered (BEY-08, BEY-43, BEY-51)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.base.errors import HeadraceError, Unavailable
from headrace.base.wire.models import (
    ChangeModel,
    ExplainWait,
    ListModels,
    ModelStatus,
    ReleaseModel,
    WantModel,
)
from headrace.launch.many.pool import ModelPool
from headrace.launch.many.pooled import (
    AT_REST,
    MAX_WAITING,
    RETRY_S,
    SWAP_AFTER_S,
    PooledModel,
    load_error,
)

WAIT_S = 60.0


class Bench:
    """A pool over processes that do what they are asked to when the test lets them."""

    def __init__(self, sizes: list[int], *, budget: int = 100, **more: Any) -> None:
        self.now = 1000.0
        self.pending: list[tuple[str, int]] = []
        self.replies: dict[tuple[int, int], Any] = {}
        self.closed: list[int] = []
        self.number = 0
        models = [PooledModel(i, f"m{i}", size) for i, size in enumerate(sizes)]
        self.pool = ModelPool(
            models, self, budget_bytes=budget, wait_s=WAIT_S, clock=lambda: self.now, **more
        )
        self.models = self.pool.models

    def load(self, model: PooledModel) -> None:
        self.pending.append(("load", model.index))

    def end(self, model: PooledModel) -> None:
        self._may_go(model)
        self.pending = [(what, index) for what, index in self.pending if index != model.index]
        self.pending.append(("end", model.index))

    def sleep(self, model: PooledModel) -> None:
        self._may_go(model)
        self.pending.append(("sleep", model.index))

    def wake(self, model: PooledModel) -> None:
        self.pending.append(("wake", model.index))

    def _may_go(self, model: PooledModel) -> None:
        assert not model.leases, f"{model.name} is in use"

    def reply(
        self, client: int, number: int, *, result: object = None, error: HeadraceError | None = None
    ) -> None:
        assert (client, number) not in self.replies, "answered twice"
        self.replies[client, number] = error or result

    def announce_closed(self, model: PooledModel) -> None:
        self.closed.append(model.index)

    def announce_gone(self, model: PooledModel) -> None:
        pass

    def want(self, model: int, *, client: int = 1) -> int:
        self.number += 1
        self.pool.want(client, WantModel(number=self.number, model=model, ids=(f"r{self.number}",)))
        self.pool.turn()
        return self.number

    def release(self, model: int, *, client: int = 1, keep_alive_s: float | None = None) -> None:
        count = self.models[model].leases[client]
        self.pool.release(client, ReleaseModel(model=model, count=count, keep_alive_s=keep_alive_s))
        self.pool.turn()

    def change(self, model: int, *, load: bool) -> int:
        self.number += 1
        self.pool.change(1, ChangeModel(number=self.number, model=model, load=load))
        self.pool.turn()
        return self.number

    def step(self, position: int = 0) -> None:
        """One of the pending things is done."""
        what, index = self.pending.pop(position)
        if what in ("load", "wake"):
            self.pool.loaded(index, num_bytes=self.models[index].num_bytes, load_s=1.0)
        elif what == "sleep":
            self.pool.asleep(index)
        else:
            self.pool.ended(index)
        self.pool.turn()

    def settle(self) -> None:
        while self.pending:
            self.step()

    def after(self, seconds: float) -> None:
        self.now += seconds
        self.pool.turn()

    def use(self, model: int) -> None:
        """A request that comes and goes."""
        number = self.want(model)
        self.settle()
        assert self.replies[1, number] is None
        self.release(model)

    def in_state(self, *states: ModelStatus) -> list[int]:
        return [model.index for model in self.models if model.status in states]

    @property
    def active_bytes(self) -> int:
        return sum(model.num_bytes for model in self.models if model.status not in AT_REST)


def test_the_model_whose_last_use_is_longest_ago_makes_room() -> None:
    bench = Bench([40, 40, 40])
    for model in (0, 1, 0):
        bench.now += 1
        bench.use(model)
    bench.use(2)
    assert bench.in_state(ModelStatus.LOADED) == [0, 2]


def test_low_priority_goes_before_long_unused_and_pinned_models_stay() -> None:
    bench = Bench([30, 30, 30, 30])
    bench.models[0].pinned = True
    bench.models[1].priority = 5
    for model in (0, 1, 2):
        bench.now += 1
        bench.use(model)
    bench.use(3)
    assert bench.in_state(ModelStatus.LOADED) == [0, 1, 3]


def test_no_more_is_evicted_than_must_be() -> None:
    bench = Bench([10, 50, 30, 50])
    for model in (0, 1, 2):
        bench.now += 1
        bench.use(model)
    bench.use(3)
    assert bench.in_state(ModelStatus.LOADED) == [0, 2, 3], "the small one would not have helped"


def test_a_model_in_use_is_not_evicted_and_the_wait_is_explained() -> None:
    bench = Bench([60, 60])
    bench.want(0)
    bench.settle()
    waits = bench.want(1)
    assert not bench.pending and (1, waits) not in bench.replies
    bench.pool.explain(1, ExplainWait(number=900, id=f"r{waits}", tenant=None))
    (reason,) = bench.replies[1, 900]
    assert "needs 60 B of 100 B" in reason["reason"] and "m0 (60 B, in use)" in reason["reason"]
    assert reason["position"] == 0 and reason["at_most_s"] == WAIT_S
    bench.pool.explain(1, ExplainWait(number=901, id=f"r{waits}", tenant="other"))
    assert bench.replies[1, 901] == []
    bench.release(0)
    bench.settle()
    assert bench.replies[1, waits] is None and bench.in_state(ModelStatus.LOADED) == [1]


def test_a_busy_model_is_closed_for_one_that_waits_too_long_and_comes_back() -> None:
    bench = Bench([60, 60])
    bench.want(0)
    bench.settle()
    bench.now += SWAP_AFTER_S
    starved = bench.want(1)
    bench.after(SWAP_AFTER_S / 2)
    assert bench.closed == []
    assert bench.pool.due() <= bench.now + SWAP_AFTER_S / 2
    bench.after(SWAP_AFTER_S / 2)
    assert bench.closed == [0]
    late = bench.want(0, client=2)
    assert (2, late) not in bench.replies, "new requests wait"
    bench.release(0)
    bench.settle()
    assert bench.replies[1, starved] is None
    bench.release(1)
    bench.settle()
    assert bench.replies[2, late] is None


def test_a_model_of_higher_priority_is_not_closed_for_a_lower_one() -> None:
    bench = Bench([60, 60])
    bench.models[0].priority = 1
    bench.want(0)
    bench.settle()
    waits = bench.want(1)
    bench.after(WAIT_S - 1)
    assert bench.closed == [] and (1, waits) not in bench.replies
    bench.after(1)
    error = bench.replies[1, waits]
    assert isinstance(error, Unavailable) and "not there within 60 s" in error.message
    assert "m0 (60 B, in use)" in error.message


def test_keep_alive_of_the_model_and_of_the_request() -> None:
    bench = Bench([10, 10, 10])
    for model in bench.models:
        model.default_keep_alive_s = 300.0
    for model, keep_alive_s in ((0, None), (1, -1.0), (2, 0.0)):
        bench.want(model)
        bench.settle()
        bench.release(model, keep_alive_s=keep_alive_s)
    assert bench.in_state(ModelStatus.UNLOADING) == [2]
    bench.settle()
    assert bench.pool.due() == bench.now + 300.0
    bench.after(300.0)
    bench.settle()
    assert bench.in_state(ModelStatus.LOADED) == [1]
    assert bench.pool.due() == math.inf


def test_evicted_models_sleep_while_there_is_host_memory_and_wake() -> None:
    bench = Bench([60, 60, 60], sleep_bytes=50)
    for model in bench.models:
        model.sleep_bytes = 50
    bench.use(0)
    bench.use(1)
    assert bench.in_state(ModelStatus.ASLEEP) == [0]
    bench.use(2)
    assert bench.in_state(ModelStatus.ASLEEP) == [0], "no memory for another one"
    assert bench.in_state(ModelStatus.UNLOADED) == [1]
    bench.want(0)
    assert bench.in_state(ModelStatus.UNLOADING) == [2]
    bench.step()
    assert bench.in_state(ModelStatus.WAKING) == [0] and bench.pending == [("wake", 0)]


def test_a_core_that_cannot_wake_is_loaded_anew() -> None:
    bench = Bench([60, 60], sleep_bytes=50)
    for model in bench.models:
        model.sleep_bytes = 50
    bench.use(0)
    bench.use(1)
    bench.want(0)
    bench.step()
    bench.pending.clear()
    bench.pool.ended(0)
    bench.pool.turn()
    assert bench.pending == [("load", 0)]


def test_a_failed_load_is_told_and_tried_again_later() -> None:
    bench = Bench([60])
    numbers = [bench.want(0), bench.want(0)]
    bench.pending.clear()
    error = load_error("m0", "no such tensor", broken=True)
    bench.pool.failed(0, error)
    assert [bench.replies[1, number] for number in numbers] == [error, error]
    assert bench.replies[1, bench.want(0)] is error
    bench.now += RETRY_S
    again = bench.want(0)
    assert bench.pending == [("load", 0)] and (1, again) not in bench.replies


def test_unloading_waits_for_what_runs_and_new_requests_wait_for_it() -> None:
    bench = Bench([60])
    bench.want(0)
    bench.settle()
    number = bench.change(0, load=False)
    assert bench.closed == [0] and not bench.pending
    late = bench.want(0)
    bench.release(0)
    assert bench.pending == [("end", 0)]
    bench.step()
    assert bench.replies[1, number] is None
    bench.settle()
    assert bench.replies[1, late] is None
    bench.release(0)
    done = bench.change(0, load=True)
    assert bench.replies[1, done] is None and not bench.models[0].leases


def test_requests_of_a_process_that_dies_hold_nothing() -> None:
    bench = Bench([60, 60])
    bench.want(0, client=7)
    bench.settle()
    bench.want(1, client=7)
    waits = bench.want(1, client=8)
    bench.pool.forget(7)
    bench.pool.turn()
    bench.settle()
    assert bench.replies[8, waits] is None and list(bench.models[1].leases) == [8]


def test_no_more_than_so_many_wait_for_one_model() -> None:
    bench = Bench([60, 60])
    bench.want(0)
    bench.settle()
    numbers = [bench.want(1) for _ in range(MAX_WAITING)]
    error = bench.replies[1, bench.want(1)]
    assert isinstance(error, Unavailable) and "512 requests wait for 'm1' already" in error.message
    assert not any((1, number) in bench.replies for number in numbers)
    bench.pool.leave(1, numbers[0])
    assert (1, bench.want(1)) not in bench.replies


def test_a_core_that_died_is_waited_for() -> None:
    bench = Bench([60])
    bench.want(0)
    bench.settle()
    bench.pool.restarting(0)
    waits = bench.want(0)
    assert (1, waits) not in bench.replies
    bench.pool.loaded(0, num_bytes=60, load_s=1.0)
    bench.pool.turn()
    assert bench.replies[1, waits] is None and bench.models[0].leases[1] == 2


@pytest.mark.parametrize("max_loaded", [1, 2])
def test_the_number_of_loaded_models_is_bounded_too(max_loaded: int) -> None:
    bench = Bench([1, 1, 1], max_loaded=max_loaded)
    for model in (0, 1, 2):
        bench.now += 1
        bench.use(model)
    assert bench.in_state(ModelStatus.LOADED) == [0, 1, 2][-max_loaded:]


Step = tuple[str, int, int]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            ["want", "want", "release", "leave", "step", "step", "wait", "unload", "die", "lost"]
        ),
        st.integers(0, 3),
        st.integers(1, 2),
    ),
    max_size=60,
)


@settings(max_examples=400, deadline=None)
@given(
    STEPS,
    st.lists(st.integers(20, 100), min_size=4, max_size=4),
    st.sampled_from([0, 60]),
    st.sampled_from([None, 2]),
)
def test_any_order_of_events_keeps_the_budget_and_answers_everybody(
    steps: list[Step], sizes: list[int], sleep_bytes: int, max_loaded: int | None
) -> None:
    bench = Bench(sizes, sleep_bytes=sleep_bytes, max_loaded=max_loaded)
    for model in bench.models:
        model.sleep_bytes = model.num_bytes // 2 if sleep_bytes else None
        model.default_keep_alive_s = 30.0
        model.priority = model.index % 2
    asked: list[tuple[int, int]] = []

    def died(index: int) -> None:
        status = bench.models[index].status
        if status is ModelStatus.LOADED:
            bench.pool.restarting(index)
            bench.pending.append(("load", index))
        elif status is ModelStatus.LOADING:
            bench.pending = [one for one in bench.pending if one[1] != index]
            bench.pool.failed(index, load_error("m", "it died", broken=False))
        elif status is not ModelStatus.UNLOADED and status is not ModelStatus.FAILED:
            bench.pending = [one for one in bench.pending if one[1] != index]
            bench.pool.ended(index)
        bench.pool.turn()

    actions: dict[str, Callable[[int, int], Any]] = {
        "want": lambda model, client: asked.append((client, bench.want(model, client=client))),
        "release": lambda model, client: bench.release(model, client=client),
        "leave": lambda model, client: asked and bench.pool.leave(*asked[-1]),
        "step": lambda model, client: bench.pending and bench.step(model % len(bench.pending)),
        "wait": lambda model, client: bench.after(model * 1.5),
        "unload": lambda model, client: asked.append((1, bench.change(model, load=False))),
        "die": lambda model, client: died(model),
        "lost": lambda model, client: bench.pool.forget(client),
    }
    lost: set[int] = set()
    for what, model, client in steps:
        if what == "lost":
            lost.add(client)
        actions[what](model, client)
        assert bench.active_bytes <= 100
        assert len(bench.in_state(*(set(ModelStatus) - AT_REST))) <= (max_loaded or 4)
    for _ in range(40):
        for model in range(4):
            for client in (1, 2):
                bench.release(model, client=client)
        bench.settle()
        bench.after(2.0)
    unanswered = [one for one in asked if one not in bench.replies and one[0] not in lost]
    assert unanswered == []
    bench.after(31.0)
    bench.settle()
    bench.pool.list_models(1, ListModels(10**6))
    assert bench.in_state(ModelStatus.LOADED) == [], "they expire"
