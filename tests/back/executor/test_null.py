"""The fake back is deterministic, and as an oracle it notices what a plan must not do."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from headrace.back.executor.null import NullBehaviour, NullExecutor
from headrace.back.executor.null_pooling import DEFAULT_WIDTH
from headrace.base.errors import EngineDead
from headrace.base.wire.pooling import RowPooling
from headrace.base.wire.request import RowSampling
from headrace.base.wire.step import RowStart, StepPlan, StepResult
from tests.core.harness import WIDTH, Driver, make_request, make_spec, window_groups


def ints(*values: int) -> np.ndarray:
    return np.asarray(values, np.int32)


def plan(
    step: int,
    *runs: tuple[int, int, int, bool],
    starts: list[RowStart] | None = None,
    blocks: tuple[tuple[int, int, int, int], ...] = (),
    ends: tuple[int, ...] = (),
) -> StepPlan:
    """runs: (row, tokens, computed, sample); blocks: (group, row, index, id)."""
    group, row, index, block = (
        (ints(*column) for column in zip(*blocks, strict=True)) if blocks else [ints()] * 4
    )
    rows, tokens, computed, sample = zip(*runs, strict=True)
    return StepPlan(
        step=step,
        ends=ints(*ends),
        starts=starts or [],
        block_group=group,
        block_row=row,
        block_index=index,
        block_id=block,
        rows=ints(*rows),
        num_tokens=ints(*tokens),
        num_computed=ints(*computed),
        sample=np.asarray(sample, bool),
    )


def start(row: int, tokens: list[int], computed: int = 0, **sampling: object) -> RowStart:
    chosen = RowSampling(**{"temperature": 0.0, **sampling})
    return RowStart(
        row=row,
        request=row,
        tokens=ints(*tokens),
        num_prompt=len(tokens),
        num_computed=computed,
        sampling=chosen,
    )


def executor(**config: object) -> NullExecutor:
    return NullExecutor(make_spec(**config), check=True)


def run(null: NullExecutor, *plans: StepPlan) -> list[StepResult]:
    return [null.submit(p).result() for p in plans]


PROMPT = [5, 6, 7, 8, 9, 10]
TABLE = ((0, 0, 0, 3), (0, 0, 1, 4))


def test_chunks_give_the_same_token_as_one_piece() -> None:
    whole = run(executor(), plan(1, (0, 6, 0, True), starts=[start(0, PROMPT)], blocks=TABLE))
    parts = run(
        executor(),
        plan(1, (0, 4, 0, False), starts=[start(0, PROMPT)], blocks=TABLE[:1]),
        plan(2, (0, 2, 4, True), blocks=TABLE[1:]),
    )
    assert parts[0].tokens.tolist() == [[-1]]
    assert whole[0].tokens.tolist() == parts[1].tokens.tolist()


@pytest.mark.parametrize("how", ["cls", "last", "mean", "tokens"])
def test_chunks_give_the_same_vectors_as_one_piece(how: str) -> None:
    def vectors(*steps: StepPlan) -> np.ndarray:
        null = executor()
        told = [part for step in steps for _, part in null.submit(step).result().pooled]
        assert [part.start for part in told] == sorted(part.start for part in told)
        return np.concatenate([part.values for part in told])

    pooled = msgspec.structs.replace(start(1, [7, 8, 9, 10, 11]), pooling=RowPooling(how=how))
    blocks = ((0, 1, 0, 5), (0, 1, 1, 6))
    whole = vectors(plan(1, (1, 5, 0, False), starts=[pooled], blocks=blocks))
    cut = vectors(
        plan(1, (1, 3, 0, False), starts=[pooled], blocks=blocks), plan(2, (1, 2, 3, False))
    )
    np.testing.assert_allclose(whole, cut, rtol=1e-6)
    assert whole.shape == (5 if how == "tokens" else 1, DEFAULT_WIDTH) and np.abs(whole).max() <= 1


def test_the_state_behind_a_prefix_hit_is_read_from_the_blocks() -> None:
    null = executor()
    first = run(null, plan(1, (0, 6, 0, True), starts=[start(0, PROMPT)], blocks=TABLE))
    again = plan(2, (0, 2, 4, True), ends=(0,), starts=[start(0, PROMPT, computed=4)], blocks=TABLE)
    null._rows[0].seen.clear()
    assert run(null, again)[0].tokens.tolist() == first[0].tokens.tolist()


def test_a_stale_prefix_hit_is_noticed() -> None:
    null = executor()
    run(null, plan(1, (0, 6, 0, True), starts=[start(0, PROMPT)], blocks=TABLE))
    other = start(0, [1, 1, 1, 1, 1, 1], computed=4)
    with pytest.raises(AssertionError, match="foreign KV"):
        null.submit(plan(2, (0, 2, 4, True), ends=(0,), starts=[other], blocks=TABLE))


def test_two_rows_that_write_to_one_block_are_noticed() -> None:
    null = executor()
    blocks = (*TABLE, (0, 1, 0, 5), (0, 1, 1, 4))
    starts = [start(0, PROMPT), start(1, PROMPT)]
    with pytest.raises(AssertionError, match="to others' blocks"):
        null.submit(plan(1, (0, 6, 0, True), (1, 6, 0, True), starts=starts, blocks=blocks))


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (plan(1, (0, 6, 0, True), starts=[start(0, PROMPT)], blocks=TABLE[:1]), "null block"),
        (plan(1, (0, 6, 0, True)), "nobody has it"),
        (plan(1, (0, 6, 0, True), starts=[start(0, PROMPT)] * 2, blocks=TABLE), "taken twice"),
        (plan(1, (0, 5, 0, True), starts=[start(0, PROMPT)], blocks=TABLE), "inside a prompt"),
        (plan(1, (0, 6, 1, True), starts=[start(0, PROMPT)], blocks=TABLE), "num_computed"),
        (plan(1, (0, 6, 0, True), ends=(2,)), "nobody has it"),
    ],
)
def test_a_plan_that_breaks_its_promises_is_noticed(bad: StepPlan, words: str) -> None:
    with pytest.raises(AssertionError, match=words):
        executor().submit(bad)


def test_tokens_are_the_same_in_every_executor_and_depend_on_every_token() -> None:
    def first(tokens: list[int], **sampling: object) -> int:
        p = plan(1, (0, 6, 0, True), starts=[start(0, tokens, **sampling)], blocks=TABLE)
        return int(run(executor(), p)[0].tokens[0, 0])

    assert first(PROMPT) == first(PROMPT)
    others = {first([*PROMPT[:i], 99, *PROMPT[i + 1 :]]) for i in range(6)}
    assert len(others | {first(PROMPT)}) == 7
    assert first(PROMPT, temperature=1.0, seed=1) != first(PROMPT, temperature=1.0, seed=2)
    assert first(PROMPT, temperature=0.0, seed=1) == first(PROMPT, temperature=0.0, seed=2)


def test_allowed_and_suppressed_ids_are_obeyed() -> None:
    driver = Driver(make_spec(num_blocks=200))
    allowed = RowSampling(temperature=1.0, allowed_ids=(7, 8, 9))
    early = RowSampling(allowed_ids=(7, 8), suppressed_ids=(7,), min_tokens=10)
    driver.add(make_request(1, max_tokens=50, sampling=allowed))
    driver.add(make_request(2, max_tokens=50, sampling=early))
    driver.run()
    assert set(driver.tokens[1]) == {7, 8, 9}
    assert driver.tokens[2][:10] == [8] * 10 and 7 in driver.tokens[2]


def test_eos_comes_at_its_rate_and_never_by_accident() -> None:
    driver = Driver(
        make_spec(num_blocks=400, max_model_len=900), behaviour=NullBehaviour(eos_rate=0.05)
    )
    driver.add(make_request(1, max_tokens=800))
    driver.run()
    assert 15 <= driver.tokens[1].count(2) <= 75
    quiet = Driver(make_spec(num_blocks=400, max_model_len=900))
    quiet.add(make_request(1, max_tokens=800))
    quiet.run()
    assert 2 not in quiet.tokens[1] and max(quiet.tokens[1]) < WIDTH


def test_groups_follow_from_the_config() -> None:
    spec = make_spec()
    spec.model.config.update(
        num_hidden_layers=3,
        sliding_window=64,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    )
    groups = NullExecutor(spec).facts.groups
    assert [(g.kind, g.caches, g.span) for g in groups] == [
        ("full", (1,), None),
        ("window", (0, 2), 64),
    ]


def test_a_step_that_dies_fails_what_follows_at_once() -> None:
    """ENG-14: a failure that is known raises in submit."""
    null = NullExecutor(make_spec(), behaviour=NullBehaviour(dies_at=1))
    p = plan(1, (0, 6, 0, True), starts=[start(0, PROMPT)], blocks=TABLE)
    pending = null.submit(p)
    assert pending.done()
    with pytest.raises(EngineDead):
        pending.result()
    with pytest.raises(EngineDead):
        null.submit(p)
    with pytest.raises(EngineDead):
        null.check()


def test_a_window_group_may_hold_null_blocks_behind_the_window_only() -> None:
    null = NullExecutor(make_spec(), groups=window_groups(4), check=True)
    both = tuple((g, 0, i, 3 + g * 2 + i) for g in (0, 1) for i in (0, 1))
    run(null, plan(1, (0, 6, 0, True), starts=[start(0, PROMPT)], blocks=both))
    with pytest.raises(AssertionError, match="a block it reads is gone"):
        null.submit(plan(2, (0, 1, 6, True), blocks=((1, 0, 0, 0),)))
