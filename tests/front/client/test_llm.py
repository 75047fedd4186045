import pytest

from headrace.base.errors import ConfigError, InvalidRequest
from headrace.base.wire.params import SamplingParams
from headrace.front.client.events import Generation
from headrace.front.client.llm import options_from, params_list, progress_bar, prompt_list, run_all


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
            await run_all(llm, [good, bad], show=False)
        assert not core.requests
        outputs = await run_all(llm, [good] * 50, show=False)
        assert [len(output.outputs[0].token_ids) for output in outputs] == [3] * 50


def test_the_progress_bar_counts_to_its_end(capsys):
    bar = progress_bar(2, show=True)
    with bar as advance:
        advance(10)
        advance(10)
        assert bar._bar.finished
        assert "tok/s" in bar._bar.tasks[0].fields["rate"]
    with progress_bar(2, show=False) as advance:
        advance(1)
    assert capsys.readouterr().out == ""
