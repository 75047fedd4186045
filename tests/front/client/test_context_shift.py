"""Answers that go on where the context ends (BEY-42): what the engine is asked for, and what comes out of it as one."""

from __future__ import annotations

import asyncio
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.base.errors import ContextTooLong
from headrace.base.wire.grammar import StructuredOutputs
from headrace.base.wire.request import SamplingParams
from headrace.front.client.context_shift import ShiftingLLM, shifted
from headrace.front.client.events import Generation
from headrace.front.client.llm import run_one
from tests.front.client.scripted_core import WIDTH

CONTEXT = 32
KEEP = 4
shifting = partial(ShiftingLLM, keep=KEEP)


def count_on(request, tokens):
    """One more than the token before, whichever prompt it lies in."""
    last = tokens[-1] if tokens else int(request.prompt_ids()[-1])
    scores = np.full(WIDTH, -20.0, np.float32)
    scores[(last + 1) % WIDTH] = -0.5
    return scores


def generation(size=30, first=100, **params):
    ids = [*range(KEEP), *range(first, first + size - KEEP)]
    return Generation(prompt_ids=ids, params=SamplingParams(**{"seed": 5, **params}))


def prompts(core):
    return [request.prompt_ids().tolist() for request in core.requests]


@given(st.integers(0, 200), st.integers(0, 40), st.integers(2, 60))
def test_the_beginning_and_the_newest_stay(size: int, keep: int, more: int) -> None:
    """As llama.cpp cuts: what goes is whole halves of what is not kept, as few as will do."""
    ids, room = list(range(size)), keep + more
    rest = shifted(ids, keep=keep, room=room)
    assert len(rest) <= room
    if size <= room:
        assert rest == ids
        return
    gone, half = size - len(rest), more // 2
    assert rest == ids[:keep] + ids[keep + gone :] and gone % half == 0
    assert size - (gone - half) > room


async def test_an_answer_goes_on_behind_the_end_of_the_context(connect):
    """Two tokens fit; from then on each part begins with what is kept and the newer half of the rest."""
    async with connect(count_on, make=shifting, max_model_len=CONTEXT) as (llm, core):
        output = await run_one(llm, generation(max_tokens=CONTEXT))
        (answer,) = output.outputs
        assert answer.token_ids == list(range(126, 126 + CONTEXT))
        assert answer.finish_reason == "length"
        asked, whole = prompts(core), [*range(KEEP), *range(100, 128)]
        for prompt, request in zip(asked[1:], core.requests[1:], strict=True):
            assert prompt == shifted(whole, keep=KEEP, room=CONTEXT - 1)
            whole = [*prompt, *range(prompt[-1] + 1, prompt[-1] + 1 + request.stop.max_tokens)]
            assert len(whole) <= CONTEXT
        assert len(asked) == 4 and whole[-1] == answer.token_ids[-1]
        assert len({request.sampling.seed for request in core.requests}) == len(asked)
        assert llm.num_in_flight == 0


async def test_text_and_stop_strings_do_not_see_the_seam(connect, tokenizer):
    """Half of a character lies in front of it, half of a stop string too."""
    ids = tokenizer.encode_plain("abcdefghijklmnopqr\u00e9stuvw")
    follow = count_on_along(ids)
    for cut in range(1, len(ids)):
        room = CONTEXT - cut
        prompt = [ids[0]] * room
        async with connect(follow, make=shifting, max_model_len=CONTEXT) as (llm, core):
            params = SamplingParams(max_tokens=len(ids) - 1, stop=("uvw",), seed=1)
            output = await run_one(llm, Generation(prompt_ids=prompt, params=params))
            assert output.outputs[0].text == "bcdefghijklmnopqr\u00e9st", cut
            assert output.outputs[0].finish_reason == "stop" and len(core.requests) >= 1 + (
                cut < 20
            )


def count_on_along(ids):
    def follow(request, tokens):
        last = tokens[-1] if tokens else int(request.prompt_ids()[-1])
        scores = np.full(WIDTH, -20.0, np.float32)
        scores[ids[(ids.index(last) + 1) % len(ids)]] = -0.5
        return scores

    return follow


async def test_longer_prompts_are_shortened(connect):
    async with connect(count_on, make=shifting, max_model_len=CONTEXT) as (llm, core):
        whole = generation(size=90, max_tokens=3)
        llm.check(whole)
        output = await run_one(llm, whole)
        assert prompts(core) == [shifted(whole.prompt_ids, keep=KEEP, room=CONTEXT - 1)]
        assert output.outputs[0].token_ids == [186, 187, 188]
    async with connect(count_on, max_model_len=CONTEXT) as (llm, _):
        with pytest.raises(ContextTooLong):
            llm.check(whole)


async def test_a_part_that_finds_no_room_is_sent_again(connect):
    """The same request: what comes does not depend on the queue."""
    seeds = []
    for full in ((), (2, 3)):
        async with connect(count_on, make=shifting, max_model_len=CONTEXT) as (llm, core):
            core.full_for = full
            output = await run_one(llm, generation(max_tokens=12))
            assert output.outputs[0].token_ids == list(range(126, 138))
            sent = [one for n, one in enumerate(core.requests, 1) if n not in full]
            seeds.append([(one.prompt, one.sampling.seed, one.stop) for one in sent])
    assert seeds[0] == seeds[1] and len(seeds[0]) == 2


async def test_each_of_several_answers_goes_on(connect):
    async with connect(count_on, make=shifting, max_model_len=CONTEXT) as (llm, core):
        output = await run_one(llm, generation(max_tokens=12, n=3, logprobs=0))
        for answer in output.outputs:
            assert answer.token_ids == list(range(126, 138)) and len(answer.logprobs) == 12
        assert len(core.requests) == 6


@pytest.mark.parametrize(
    "params",
    [
        {"structured_outputs": StructuredOutputs(regex="a+")},
        {"prompt_logprobs": 0},
        {"capture_layers": (0,)},
    ],
)
async def test_what_belongs_to_a_whole_ends_with_the_context(connect, params):
    async with connect(count_on, make=shifting, max_model_len=CONTEXT) as (llm, core):
        output = await run_one(llm, generation(max_tokens=CONTEXT, **params))
        assert output.outputs[0].finish_reason == "length"
        assert len(output.outputs[0].token_ids) == 2 and len(core.requests) == 1
        with pytest.raises(ContextTooLong):
            llm.check(generation(size=CONTEXT, **params))


async def test_a_reader_that_goes_takes_the_part_with_it(connect):
    async with connect(count_on, make=shifting, max_model_len=CONTEXT) as (llm, core):
        events = llm.generate(generation(max_tokens=CONTEXT))
        async for _ in events:
            if len(core.requests) == 2:
                break
        core.flow.clear()
        await events.aclose()
        async with asyncio.timeout(60):
            await core.until(lambda: not core.num_running)
        assert llm.num_in_flight == 0
