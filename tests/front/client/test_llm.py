import asyncio
import io
import math

import msgspec
import pytest
from rich.console import Console

from headrace.base.errors import ConfigError, ContextTooLong, InvalidRequest, Unavailable, WireError
from headrace.base.wire.request import SamplingParams
from headrace.front.client.events import Generation
from headrace.front.client.llm import (
    LLM,
    options_from,
    params_list,
    prompt_list,
    run_all,
    run_one,
)
from headrace.front.client.progress import progress_bar


def test_options_find_their_section_by_name():
    options = options_from(model="m", max_running=4, kv_memory="2GiB", device="cpu")
    assert (options.model.model, options.scheduler.max_running) == ("m", 4)
    assert (options.kv.kv_memory, options.device.device) == ("2GiB", "cpu")


def test_wrong_options_are_refused_by_name():
    with pytest.raises(ConfigError, match=r"max_runing: no such option .*max_running"):
        options_from(max_runing=4)
    with pytest.raises(ConfigError, match="max_running"):
        options_from(max_running=0)


def test_prompts_may_be_one_or_many_and_text_or_ids():
    assert prompt_list("a") == ["a"]
    assert prompt_list([1, 2]) == [[1, 2]]
    assert prompt_list(["a", [1]]) == ["a", [1]]
    assert prompt_list([]) == []


def test_params_may_be_one_or_one_for_each():
    a, b = SamplingParams(seed=1), SamplingParams(seed=2)
    assert params_list(a, 2, {}) == [a, a]
    assert params_list([a, b], 2, {}) == [a, b]
    assert params_list(None, 1, {"temperature": 0.5, "top_k": 3})[0].temperature == 0.5
    with pytest.raises(ConfigError, match="1 for 2 prompts"):
        params_list([a], 2, {})


async def test_all_are_checked_before_the_first_one_starts(connect):
    async with connect() as (llm, core):
        good = Generation(prompt_ids=[1], params=SamplingParams(max_tokens=3))
        bad = Generation(prompt_ids=[1], params=SamplingParams(temperature=-1))
        with pytest.raises(InvalidRequest, match="temperature"):
            await run_all(llm, [good, bad], run_one, show=False)
        assert not core.requests
        outputs = await run_all(llm, [good] * 50, run_one, show=False)
        assert [len(output.outputs[0].token_ids) for output in outputs] == [3] * 50


async def test_the_first_failure_is_raised_plainly(connect):
    async with connect() as (llm, core):
        core.refuse = WireError("Unavailable", "full")
        wanted = Generation(prompt_ids=[1], params=SamplingParams(max_tokens=3))
        with pytest.raises(Unavailable, match="full"):
            await run_all(llm, [wanted] * 3, run_one, show=False)
        assert llm.num_in_flight == 0


def test_the_progress_bar_shows_count_and_rate_on_a_terminal():
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=100)
    with progress_bar(2, show=True, console=console) as advance:
        advance(10)
        advance(10)
    assert "2/2" in screen.getvalue() and "tok/s" in screen.getvalue()


def test_no_progress_bar_without_a_terminal():
    screen = io.StringIO()
    with progress_bar(1, show=True, console=Console(file=screen)) as advance:
        advance(10)
    assert screen.getvalue().strip() == ""


@pytest.fixture(scope="module")
def llm():
    """The real core over a real socket, with the fake back."""
    with LLM(executor="null") as made:
        yield made


def test_generate_keeps_order_and_does_not_depend_on_company(llm):
    params = SamplingParams(max_tokens=12, temperature=0)
    prompts = [f"prompt number {i}" for i in range(20)]
    together = llm.generate(prompts, params, progress=False)
    alone = [llm.generate(prompt, params, progress=False)[0] for prompt in prompts]
    assert [o.prompt for o in together] == prompts
    assert [o.outputs for o in together] == [o.outputs for o in alone]


def test_chat_renders_and_stops(llm):
    messages = [{"role": "user", "content": "Say <|im_end|> please."}]
    output = llm.chat(messages, SamplingParams(max_tokens=5), progress=False)[0]
    assert len(output.outputs[0].token_ids) <= 5
    assert output.prompt_ids == llm.chat_template.render(messages)
    both = llm.chat([messages, messages], SamplingParams(max_tokens=2, seed=1), progress=False)
    assert both[0].outputs == both[1].outputs


def test_a_seed_reproduces_n_answers(llm):
    params = SamplingParams(max_tokens=8, n=3, seed=5)
    first = llm.generate("once upon", params, progress=False)[0].outputs
    assert first == llm.generate("once upon", params, progress=False)[0].outputs
    assert len({tuple(answer.token_ids) for answer in first}) == 3


def test_prompt_scores_cover_the_prompt_without_its_first_token(llm):
    """REG-024: with max_tokens 0, as scoring clients ask."""
    params = SamplingParams(max_tokens=0, prompt_logprobs=1)
    output = llm.generate("the quick brown fox", params, progress=False)[0]
    assert output.prompt_logprobs[0] is None
    assert [s.token.id for s in output.prompt_logprobs[1:]] == output.prompt_ids[1:]
    assert all(len(s.top) == 1 for s in output.prompt_logprobs[1:])
    again = llm.generate("the quick brown fox", params, progress=False)[0]
    assert again.prompt_logprobs == output.prompt_logprobs  # whatever the prefix cache holds


def test_a_prompt_that_cannot_fit_is_refused_and_others_go_on(llm):
    with pytest.raises(ContextTooLong, match="prompt is too long"):
        llm.generate([[1] * 100_000], progress=False)
    assert llm.generate("a", SamplingParams(max_tokens=1), progress=False)[0].outputs


def test_beams_end_and_free_everything(llm):
    output = llm.generate("a", SamplingParams(max_tokens=4, beam_width=3, n=3), progress=False)[0]
    scores = [answer.cumulative_logprob / len(answer.token_ids) for answer in output.outputs]
    assert scores == sorted(scores, reverse=True)
    status = llm._wait(llm.engine.call("status"))[0]
    assert status["running"] == 0 and status["free_blocks"] == status["total_blocks"]


_ODD = [None, True, -1, 0, 1, 3, 2**31, 2**63, -(2**63), 0.5, math.nan, math.inf, "", "a", "\ud800",
        (), (0,), (-1,), (4095,), (4096,), ("a", "\n"), ("",), {}, {1: 1.0}, {4096: 1.0}, {1: math.nan}]  # fmt: skip


def test_odd_parameters_hurt_nobody_else(llm):
    """P7, T7: every field with every odd value, in one batch with bystanders, on the real core."""
    fields = [field.name for field in msgspec.structs.fields(SamplingParams)]
    odd = [
        Generation(prompt_ids=[5, 6], params=SamplingParams(**{"max_tokens": 3, field: value}))
        for field in fields
        for value in _ODD
        if (field, value) != ("max_tokens", None)  # goes on to the end of the context
    ]
    calm = Generation(prompt_ids=[7, 8, 9], params=SamplingParams(max_tokens=300, temperature=0))

    room = asyncio.Semaphore(60)

    async def attempt(generation):
        try:
            async with room:
                await run_one(llm.engine, generation)
        except InvalidRequest:
            return True
        return False

    async def both():
        bystanders = [asyncio.create_task(run_one(llm.engine, calm)) for _ in range(4)]
        refused = await asyncio.gather(*map(attempt, odd))
        return refused, [await task for task in bystanders]

    expected = llm._wait(run_one(llm.engine, calm)).outputs
    refused, bystanders = llm._wait(both())
    assert 0 < sum(refused) < len(refused)
    assert all(output.outputs == expected for output in bystanders)
    status = llm._wait(llm.engine.call("status"))[0]
    assert status["free_blocks"] == status["total_blocks"] and status["running"] == 0


def test_close_can_be_called_twice():
    llm = LLM(executor="null")
    llm.close()
    llm.close()
    assert not llm._thread.is_alive()
