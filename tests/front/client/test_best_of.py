import msgspec
import numpy as np
import pytest

from headrace.base.wire.request import SamplingParams
from headrace.base.wire.retention import EngineHints, KVRetention
from headrace.base.wire.transfer import KVTransferParams
from headrace.front.client.engine import choice_of, choice_params, choice_seed
from headrace.front.client.events import Generation
from headrace.front.client.llm import run_one
from tests.front.client.scripted_core import WIDTH


def generation(**params):
    return Generation(prompt_ids=[1, 2], params=SamplingParams(max_tokens=4, **params))


def by_seed(request, tokens):
    """Every seed has its own token, and a log-probability that falls with it."""
    scores = np.full(WIDTH, -50.0, np.float32)
    token = request.sampling.seed % 97
    scores[token] = -0.01 * token - 0.001
    return scores


def test_derived_seeds_are_distinct_reproducible_and_fit():
    seeds = [choice_seed(s, i) for s in (-(2**63), -1, 0, 1, 2**63 - 1) for i in range(1, 200)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert seeds[0] == choice_seed(-(2**63), 1)
    assert choice_seed(5, 0) == 5 and choice_seed(None, 3) is None


def test_only_the_first_answer_scores_the_prompt():
    params = SamplingParams(prompt_logprobs=3, seed=1)
    assert choice_params(params, 0) is params
    assert choice_params(params, 1).prompt_logprobs is None


def test_each_answer_keeps_its_routing_key_and_only_the_first_passes_kv_on():
    transfer = KVTransferParams(do_remote_decode=True, transfer_id="t")
    retention = (KVRetention(priority=80),)
    hints = EngineHints(transfer=transfer, retention=retention, routing_key="k")
    whole = msgspec.structs.replace(generation(n=3), hints=hints)
    assert choice_of(whole, 0) is whole
    assert choice_of(whole, 2).hints == EngineHints(retention=retention, routing_key="k")
    assert choice_of(msgspec.structs.replace(whole, hints=transfer), 1).hints is None


async def test_a_seed_reproduces_all_n_answers(connect):
    async with connect(by_seed) as (llm, core):
        one = await run_one(llm, generation(n=5, seed=11))
        two = await run_one(llm, generation(n=5, seed=11))
        assert one.outputs == two.outputs
        seeds = [request.sampling.seed for request in core.requests]
        assert seeds[:5] == seeds[5:] and len(set(seeds)) == 5


async def test_best_of_gives_the_answers_with_the_highest_mean_logprob(connect):
    async with connect(by_seed) as (llm, core):
        output = await run_one(llm, generation(n=2, best_of=6, seed=3))
        tokens = sorted(request.sampling.seed % 97 for request in core.requests)
        assert len(tokens) == 6
        assert [answer.token_ids for answer in output.outputs] == [[t] * 4 for t in tokens[:2]]
        assert [answer.index for answer in output.outputs] == [0, 1]
        assert all(answer.logprobs is None for answer in output.outputs)
        assert all(answer.cumulative_logprob is None for answer in output.outputs)


async def test_best_of_keeps_scores_that_were_asked_for(connect):
    async with connect(by_seed) as (llm, core):
        answer = (await run_one(llm, generation(best_of=4, logprobs=1, seed=3))).outputs[0]
        best = min(request.sampling.seed % 97 for request in core.requests)
        assert answer.cumulative_logprob == pytest.approx(4 * (-0.01 * best - 0.001), rel=1e-4)
        assert len(answer.logprobs) == 4
