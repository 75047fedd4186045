"""BEY-40: rows that are written in blocks, in the core: whatever happens beside them, each gives what it gives alone,
and the KV of a block is there before its first token is."""

from __future__ import annotations

import random
from typing import Any

import msgspec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.back.executor.null import NullBehaviour
from headrace.base.config.resolved import SpeculationSpec
from headrace.base.wire.request import EngineRequest, RowSampling
from headrace.base.wire.step import StepPlan
from headrace.core.core import EngineCore
from tests.core.harness import FULL, Driver, make_request, make_spec
from tests.core.test_properties import alone, outcome, random_requests

BLOCK_TOKENS = 8


class BlockDriver(Driver):
    """A core over workers that say they write blocks, on a null executor that takes all drafts."""

    def __init__(self, length: int, **config: Any) -> None:
        room = SpeculationSpec(
            method="ngram", num_tokens=length, max_rows=8
        )  # what a step may hold
        spec = make_spec(speculation=room, block_tokens=BLOCK_TOKENS, **config)
        behaviour = NullBehaviour(eos_rate=0.03, accepts=lambda request, position: length)
        super().__init__(spec, behaviour=behaviour)
        self.length = length
        executor, submit = self.executor, self.executor.submit
        executor._facts = msgspec.structs.replace(executor.facts, block_length=length)
        self.core = EngineCore(spec, executor, clock=self.clock)

        def checked(plan: StepPlan) -> Any:
            self.check(plan)
            return submit(plan)

        executor.submit = checked

    def check(self, plan: StepPlan) -> None:
        """Each row that is sampled has KV for the whole block that its next token is in, and a step of decodes brings
        all that is left of it."""
        rows = self.core.rows
        drafts = plan.drafts if len(plan.drafts) else 0 * plan.num_tokens
        first = plan.num_computed + plan.num_tokens - drafts
        end = first // self.length * self.length + self.length
        alone = not any(start.row in plan.rows for start in plan.starts)
        for i, row in enumerate(plan.rows.tolist()):
            owner = rows.owner(row)
            if plan.sample[i]:
                assert self.core.kv.held_tokens(owner) >= end[i]
            if len(plan.drafts) and alone:
                assert first[i] + 1 + drafts[i] == min(end[i], rows.limit[row])


def plain(request: EngineRequest) -> EngineRequest:
    """Without what such models do not tell."""
    asked = request.sampling
    sampling = RowSampling(temperature=asked.temperature, seed=asked.seed)
    return msgspec.structs.replace(request, sampling=sampling)


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 10**6),
    length=st.sampled_from([2, 4, 8]),
    num_blocks=st.integers(20, 80),
    max_step_tokens=st.sampled_from([8, 16, 64, 200]),
    max_running=st.integers(1, 8),
    overlap=st.booleans(),
    prefix_caching=st.booleans(),
)
def test_blocks_leave_every_request_as_it_is_alone(seed: int, length: int, **config: Any) -> None:
    requests = [plain(request) for request in random_requests(seed, 8)]
    driver = BlockDriver(length, **config)
    rng = random.Random(seed)
    for request in requests:
        driver.add_suited(request)
        for _ in range(rng.choice([0, 0, 1, 3])):
            driver.step()
    driver.run()
    found = outcome(driver)
    assert found == {request.id: alone(request, FULL) for request in requests}
    driver.assert_at_rest()


def test_an_answer_ends_where_it_may_be_no_longer() -> None:
    """In the middle of a block, behind one token, and where the KV cache is full."""
    driver = BlockDriver(8, num_blocks=5, max_model_len=256, overlap=False)
    driver.add(make_request(1, 6, max_tokens=1), make_request(2, 7, max_tokens=5))
    driver.run()
    assert [len(driver.tokens[id]) for id in (1, 2)] == [1, 5]
    driver.add(make_request(3, 3, max_tokens=200, min_tokens=200))
    driver.run()
    assert driver.finished[3].reason == "length"
    assert 3 + len(driver.tokens[3]) == driver.core.kv.capacity_tokens == 24
    driver.assert_at_rest()
