"""Whatever happens in whatever order: the same tokens, one end per request, nothing leaked, always progress."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.back.executor.null import NullBehaviour
from headrace.base.wire.request import EngineRequest, RowSampling
from headrace.base.wire.step import KVGroup
from headrace.core.ports import AdmissionHook, AdmissionVerdict
from tests.core.harness import EOS, FULL, Clock, Driver, make_request, make_spec, window_groups

BEHAVIOUR = NullBehaviour(eos_rate=0.03)


def random_requests(seed: int, count: int) -> list[EngineRequest]:
    """A mix: shared prefixes, short and long prompts, samplers, priorities, tenants, prompt scores."""
    rng = random.Random(seed)
    shared = [[rng.randrange(3, 900) for _ in range(40)] for _ in range(3)]
    requests = []
    for id in range(1, count + 1):
        own = [rng.randrange(3, 900) for _ in range(rng.choice([1, 3, 4, 8, 17, 40]))]
        prompt = rng.choice(shared)[: rng.choice([0, 4, 8, 30, 40])] + own
        max_tokens = rng.choice([0, 1, 2, 5, 20, 60])
        requests.append(
            make_request(
                id,
                prompt,
                max_tokens=max_tokens,
                min_tokens=rng.randint(0, max_tokens),
                stop_ids=rng.choice([(), (EOS,), (EOS, 7, 8, 9, 10, 11)]),
                sampling=RowSampling(
                    temperature=rng.choice([0.0, 1.0]),
                    seed=rng.randrange(5),
                    prompt_logprobs=rng.choice([None, None, None, 1]),
                    logprobs=rng.choice([None, None, 2]),
                ),
                priority=rng.randrange(3),
                tenant=rng.choice("abc"),
                weight=rng.choice([1.0, 2.0]),
            )
        )
    return requests


def outcome(driver: Driver) -> dict[int, Any]:
    return {
        id: (driver.tokens[id], finished.reason, finished.stop_id, driver.prompt_scores[id])
        for id, finished in driver.finished.items()
    }


def alone(request: EngineRequest, groups: Any) -> Any:
    """What the request gives in an engine of its own, without overlap, caching, chunks or pressure."""
    spec = make_spec(num_blocks=256, prefix_caching=False, overlap=False, max_step_tokens=256)
    driver = Driver(spec, groups=groups, behaviour=BEHAVIOUR, check=False)
    driver.add_suited(request)
    driver.run()
    return outcome(driver)[request.id]


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 10**6),
    num_blocks=st.integers(80, 160),
    max_step_tokens=st.sampled_from([3, 9, 16, 64, 200]),
    max_running=st.integers(1, 8),
    policy=st.sampled_from(["fcfs", "priority", "fair"]),
    overlap=st.booleans(),
    prefix_caching=st.booleans(),
    inter_prefill_budget=st.sampled_from([None, 1, 8]),
    max_decode_slowdown=st.sampled_from([None, 1.1, 3.0]),
    window=st.sampled_from([None, 1, 5, 8, 16]),
)
def test_batching_chunking_caching_preemption_and_overlap_never_change_tokens(
    seed: int, window: int | None, **config: Any
) -> None:
    """ENG-06, REG-011, 1.9, P17: every request gives what it gives alone."""
    groups = FULL if window is None else window_groups(window)
    requests = random_requests(seed, 12)
    driver = Driver(make_spec(**config), groups=groups, behaviour=BEHAVIOUR)
    rng = random.Random(seed)
    for request in requests:
        driver.add_suited(request)
        for _ in range(rng.choice([0, 0, 1, 3])):
            driver.step()
    driver.run()
    assert outcome(driver) == {request.id: alone(request, groups) for request in requests}
    driver.assert_at_rest()


HYBRIDS = {
    "chunked": (FULL[0], KVGroup(kind="chunked", caches=(1,), span=10)),
    "latent": (KVGroup(kind="latent", caches=(0, 1)), KVGroup(kind="window", caches=(2,), span=7)),
    "state": (FULL[0], KVGroup(kind="state", caches=(1,), num_slots=6)),
    "state alone": (KVGroup(kind="state", caches=(0,), num_slots=12),),
    "state without slots": (FULL[0], KVGroup(kind="state", caches=(1,))),
    "cross": (FULL[0], KVGroup(kind="cross", caches=(1,), span=9)),
    "larger blocks": (FULL[0], KVGroup(kind="latent", caches=(1,), block_ratio=3)),
    "slabs": (
        KVGroup(kind="full", caches=(0,), blocks_per_slab=3),
        KVGroup(kind="window", caches=(1,), span=9, blocks_per_slab=16),
    ),
    "slabs of four kinds": (
        KVGroup(kind="full", caches=(0,), blocks_per_slab=2),
        KVGroup(kind="chunked", caches=(1,), span=12, blocks_per_slab=5),
        KVGroup(kind="latent", caches=(2,), block_ratio=2, blocks_per_slab=3),
        KVGroup(kind="state", caches=(3,), num_slots=4),
    ),
}


@pytest.mark.parametrize("name", HYBRIDS)
@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 10**6),
    spare=st.integers(0, 30),
    max_step_tokens=st.sampled_from([3, 9, 16, 64]),
    max_running=st.integers(1, 8),
    overlap=st.booleans(),
    prefix_caching=st.booleans(),
)
def test_kinds_of_caches_never_change_tokens(
    name: str, seed: int, spare: int, **config: Any
) -> None:
    """Hybrids under pressure: what is trimmed, shared, recomputed or begun from a snapshot."""
    groups = HYBRIDS[name]
    requests = random_requests(seed, 8)
    driver = Driver(
        make_spec(num_blocks=_least_blocks(groups) + spare, **config),
        groups=groups,
        behaviour=BEHAVIOUR,
    )
    rng = random.Random(seed)
    for request in requests:
        driver.add_suited(request)
        for _ in range(rng.choice([0, 0, 1, 3])):
            driver.step()
    driver.run()
    assert outcome(driver) == {request.id: alone(request, groups) for request in requests}
    driver.assert_at_rest()


def _least_blocks(groups: tuple[KVGroup, ...]) -> int:
    """Slabs that hold the longest of the random requests, 140 tokens, alone."""
    paged = [group for group in groups if group.kind != "state"]
    return 2 + sum(2 + 36 // (group.block_ratio * group.blocks_per_slab) for group in paged)


class MoodyHook(AdmissionHook):
    """A hook that now and then says not now, never, or fails; remembers that each request is finished once."""

    name = "moody"

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.open: set[int] = set()

    def _answer(self) -> AdmissionVerdict:
        mood = self.rng.random()
        if mood < 0.002:
            raise RuntimeError("the hook itself is broken")
        return (
            AdmissionVerdict("never", "x")
            if mood < 0.004
            else AdmissionVerdict("not_now" if mood < 0.1 else "yes", "busy")
        )

    def admit(self, request: EngineRequest) -> AdmissionVerdict:
        verdict = self._answer()
        if verdict.answer != "never":
            assert request.id not in self.open
            self.open.add(request.id)
            return AdmissionVerdict("yes")
        return verdict

    def ready(self, request_id: int, computed: object) -> AdmissionVerdict:
        assert request_id in self.open
        return self._answer()

    def payload(self, request_ids: list[int]) -> bytes | None:
        assert set(request_ids) <= self.open
        return b"x" if request_ids else None

    def finish(self, request_id: int) -> None:
        self.open.remove(request_id)


def assert_refcounts_are_exact(driver: Driver) -> None:
    """Every reference is held by a request's block list, every block is free or held, never both."""
    core = driver.core
    pool = core.kv.pool
    held: dict[int, int] = {}
    for request in core.requests:
        assert (request.row >= 0) == any(request.blocks), request.id
        for blocks in request.blocks:
            for block in blocks:
                if block:
                    held[block] = held.get(block, 0) + 1
    assert {b: pool.refs(0, b) for b in range(1, pool.num_usable + 1) if pool.refs(0, b)} == held
    assert pool.num_free == pool.num_usable - len(held)
    assert len(core.scheduler.queue) + core.scheduler.num_running == len(core.requests)


class RandomLife:
    """A core under random operations. Progress: with work to do and nothing held back, steps bring ends."""

    def __init__(self, seed: int, *, check: bool, **config: Any) -> None:
        self.rng = random.Random(seed)
        self.clock = Clock()
        self.hook = MoodyHook(self.rng)
        behaviour = NullBehaviour(
            eos_rate=0.02, fails=lambda request, at: hash((request, at)) % 400 == 0
        )
        self.driver = Driver(
            make_spec(**config),
            groups=window_groups(6),
            behaviour=behaviour,
            hooks=[self.hook],
            clock=self.clock,
            check=check,
        )
        self.sent = 0
        self.shared = [[self.rng.randrange(3, 900) for _ in range(60)] for _ in range(4)]

    def add(self) -> None:
        self.sent += 1
        prompt = [*self.rng.choice(self.shared)[: self.rng.randrange(1, 60)], self.sent % 900 + 3]
        deadline = self.rng.choice([None, None, None, 0.5, 5.0])
        self.driver.add_suited(
            make_request(
                self.sent,
                prompt if self.rng.random() > 0.01 else [5] * 400,
                max_tokens=self.rng.choice([0, 1, 5, 30, 150]),
                stop_ids=(EOS,),
                deadline_s=deadline,
                tenant=self.rng.choice("abcd"),
                priority=self.rng.randrange(3),
            )
        )

    def control(self) -> None:
        match self.rng.randrange(4):
            case 0:
                mode = self.rng.choice(["abort", "wait", "keep"])
                self.driver.call("pause", mode=mode, clear_cache=self.rng.random() < 0.5)
            case 1:
                self.driver.call("reset_prefix_cache")
            case _:
                self.driver.call("resume")

    def operate(self) -> None:
        draw = self.rng.random()
        if draw < 0.2 and len(self.driver.core.requests) < 40:
            self.add()
        elif draw < 0.25 and self.sent:
            self.driver.core.abort([self.rng.randint(max(1, self.sent - 60), self.sent)])
        elif draw < 0.27:
            self.clock.now += self.rng.random()
        elif draw < 0.272:
            self.control()
        else:
            self.driver.step()

    def finish(self) -> None:
        self.driver.call("resume")
        for _ in range(20_000):
            if not self.driver.core.requests:
                break
            if not self.driver.core.has_work:
                self.clock.now += self.driver.core.idle_s or 0.0
            self.driver.step()
        self.driver.run()
        assert set(self.driver.finished) == set(range(1, self.sent + 1))
        assert not self.hook.open
        self.driver.assert_at_rest()


@pytest.mark.covering(1)
@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair"])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("operations", [500, pytest.param(1_500, marks=pytest.mark.slow)])
def test_random_life_keeps_every_invariant(policy: str, overlap: bool, operations: int) -> None:
    """P17, P18: with the oracle on; every request ends exactly once, reference counts are exact at all times."""
    life = RandomLife(
        7,
        check=True,
        num_blocks=70,
        max_step_tokens=24,
        policy=policy,
        overlap=overlap,
        ageing_steps=10,
    )
    for i in range(operations):
        life.operate()
        if i % 10 == 0:
            assert_refcounts_are_exact(life.driver)
    life.finish()


@pytest.mark.parametrize(
    "operations",
    [
        6_000,
        pytest.param(
            1_000_000, marks=[pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(1200)]
        ),
    ],
)
def test_nothing_leaks_in_random_operations(operations: int) -> None:
    life = RandomLife(11, check=False, num_blocks=70, max_step_tokens=24, ageing_steps=10)
    for i in range(operations):
        life.operate()
        if i % 1_000 == 0:
            assert_refcounts_are_exact(life.driver)
    life.finish()
    reasons = {finished.reason for finished in life.driver.finished.values()}
    assert reasons == {"stop", "length", "abort", "error"}
    assert life.driver.core.scheduler.num_preemptions > min(100, operations // 250)
    assert life.driver.core.kv.num_hits > min(1000, operations // 25)
