"""Tokens that see each other are computed in one step, whatever else runs, and every request ends."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.base.errors import ContextTooLong, from_wire
from headrace.base.wire.media import MediaForm, MediaInput
from headrace.base.wire.step import StepPlan
from headrace.core.encoder_cache import encoder_cache_hooks
from tests.core.harness import Driver, make_request, make_spec

FORM = MediaForm(kind="image", row_bytes=12, patch=2, merge=1, max_rows=256, mutual="input")


def image(name: int, offset: int, tokens: int) -> MediaInput:
    return MediaInput(
        kind="image",
        key=bytes([name]) * 32,
        offset=offset,
        num_tokens=tokens,
        grid=(1, 1, tokens),
        rows=bytes(12 * tokens),
    )


def driver_of(mutual: str, **spec: Any) -> tuple[Driver, list[StepPlan]]:
    """A driver, and the plans it has submitted: none ends within a span."""
    driver = Driver(make_spec(**spec), hooks=encoder_cache_hooks(256, 64))
    executor, plans = driver.executor, list[StepPlan]()
    form = msgspec.structs.replace(FORM, mutual=mutual)
    executor._facts = msgspec.structs.replace(executor.facts, media=(form,), media_tokens=256)
    submit = executor.submit

    def watched(plan: StepPlan) -> Any:
        plans.append(plan)
        for row, count, computed in zip(plan.rows, plan.num_tokens, plan.num_computed, strict=True):
            request = driver.core.scheduler.rows.owner(int(row))
            end = int(computed) + int(count)
            assert not any(low < end < high for low, high in request.uncut), (row, end)
        return submit(plan)

    vars(executor)["submit"] = watched
    return driver, plans


@settings(max_examples=60, deadline=None)
@given(
    shapes=st.lists(
        st.tuples(st.integers(1, 20), st.integers(1, 16), st.integers(0, 12), st.integers(1, 16)),
        min_size=1,
        max_size=8,
    ),
    num_blocks=st.sampled_from([30, 40, 200]),
    max_running=st.integers(1, 8),
    step_tokens=st.sampled_from([16, 17, 24, 64]),
    slow=st.booleans(),
)
def test_no_step_ends_within_an_image(
    shapes: list[tuple[int, int, int, int]],
    num_blocks: int,
    max_running: int,
    step_tokens: int,
    slow: bool,
) -> None:
    driver, _ = driver_of(
        "input",
        num_blocks=num_blocks,
        max_running=max_running,
        max_step_tokens=step_tokens,
        max_decode_slowdown=1.1 if slow else None,
    )
    for id, (before, first, between, second) in enumerate(shapes):
        other = before + first + between
        media = (image(id + 1, before, first), image(100 + id, other, second))
        driver.add(make_request(id, other + second + 1, max_tokens=6, media=media))
    driver.run()
    assert all(one.error is None for one in driver.finished.values())
    assert len(driver.finished) == len(shapes)
    driver.assert_at_rest()


def test_a_prompt_whose_tokens_see_each_other_is_one_chunk_and_no_prefix_of_another() -> None:
    driver, plans = driver_of("prompt", max_step_tokens=32, max_running=4)
    prompt = list(range(3, 31))
    driver.add(*(make_request(id, prompt, max_tokens=4) for id in range(6)))
    driver.run()
    starts = [start for plan in plans for start in plan.starts]
    assert len(starts) == 6 and not any(start.num_computed for start in starts)
    driver.assert_at_rest()


@pytest.mark.parametrize(("mutual", "tokens"), [("input", 17), ("prompt", 21)])
def test_more_than_a_step_takes_is_refused(mutual: str, tokens: int) -> None:
    driver, _ = driver_of(mutual, max_step_tokens=16)
    driver.add(make_request(1, 21, media=(image(1, 2, 17),)))
    driver.run()
    error = driver.finished[1].error
    assert error is not None
    raised = from_wire(error)
    assert isinstance(raised, ContextTooLong)
    assert f"{tokens} tokens that see each other" in raised.message
    assert f"--max-step-tokens {tokens}" in raised.message
