import itertools
import time

import msgspec
import numpy as np
import pytest

from headrace.base.errors import InvalidRequest
from headrace.base.wire.request import SamplingParams
from headrace.front.client.events import Generation, Started
from headrace.front.client.llm import run_one
from tests.front.client.scripted_core import WIDTH

VOCABULARY, EOS, STEPS = 4, 3, 3
WIDE = 20  # more than there are partial answers
PROMPT = [7, 8]


def table(seed):
    """Log-probabilities of the next of 5 tokens after every history (a fixed random language)."""
    known: dict[tuple[int, ...], np.ndarray] = {}
    generator = np.random.default_rng(seed)
    for length in range(STEPS + 1):
        for history in itertools.product(range(VOCABULARY), repeat=length):
            logits = generator.normal(size=VOCABULARY) * 2
            known[history] = (logits - np.log(np.exp(logits).sum())).astype(np.float32)
    return known


def script(known):
    def follow(request, tokens):
        history = (*request.prompt_ids().tolist()[len(PROMPT) :], *tokens)
        scores = np.full(WIDTH, -1e4, np.float32)
        if history in known:
            scores[:VOCABULARY] = known[history]
        return scores

    return follow


def all_answers(known, penalty):
    """Every answer there is, with its score: brute force."""
    found, open_ = [], [((), 0.0)]
    for step in range(STEPS):
        following = []
        for ids, logprob in open_:
            for token in range(VOCABULARY):
                longer = ((*ids, token), logprob + float(known[ids][token]))
                (found if token == EOS or step == STEPS - 1 else following).append(longer)
        open_ = following
    return sorted(((lp / len(ids) ** penalty, ids) for ids, lp in found), reverse=True)


def naive_beams(known, width, penalty):
    """The textbook algorithm in plain Python, without pruning."""
    live, complete = [((), 0.0)], []
    for _ in range(STEPS):
        longer = [
            ((*ids, t), lp + float(known[ids][t])) for ids, lp in live for t in range(VOCABULARY)
        ]
        longer.sort(key=lambda beam: -beam[1])
        ended = [beam for beam in longer if beam[0][-1] == EOS][:width]
        complete = sorted([*complete, *ended], key=lambda b: -(b[1] / len(b[0]) ** penalty))[:width]
        live = [beam for beam in longer if beam[0][-1] != EOS][:width]
    every = [*complete, *live]
    return sorted(((lp / len(ids) ** penalty, ids) for ids, lp in every), reverse=True)


def generation(width, penalty, **params):
    params = {"max_tokens": STEPS, "n": width, **params}
    return Generation(
        prompt_ids=PROMPT,
        params=SamplingParams(beam_width=width, length_penalty=penalty, **params),
    )


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.0, -1.0])
async def test_a_wide_enough_beam_equals_brute_force(connect, seed, penalty):
    known = table(seed)
    async with connect(script(known), eos=[EOS]) as (llm, _):
        output = await run_one(llm, generation(WIDE, penalty, n=5))
    expected = all_answers(known, penalty)[:5]
    assert [tuple(answer.token_ids) for answer in output.outputs] == [ids for _, ids in expected]
    for answer, (score, ids) in zip(output.outputs, expected, strict=True):
        assert answer.cumulative_logprob / len(ids) ** penalty == pytest.approx(score, rel=1e-5)
        assert answer.finish_reason == ("stop" if ids[-1] == EOS else "length")


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("width", [1, 2, 3])
@pytest.mark.parametrize("penalty", [0.0, 1.0, -1.0])
async def test_a_narrow_beam_equals_the_plain_algorithm(connect, seed, width, penalty):
    known = table(100 + seed)
    async with connect(script(known), eos=[EOS]) as (llm, _):
        output = await run_one(llm, generation(width, penalty))
    expected = naive_beams(known, width, penalty)[:width]
    assert [tuple(answer.token_ids) for answer in output.outputs] == [ids for _, ids in expected]


async def test_min_tokens_forbids_an_early_end(connect):
    known = table(9)
    async with connect(script(known), eos=[EOS]) as (llm, _):
        output = await run_one(llm, generation(3, 1.0, min_tokens=2))
    assert all(EOS not in answer.token_ids[:2] for answer in output.outputs)


async def test_the_end_id_has_no_text_and_scores_come_if_asked(connect, tokenizer):
    known = table(0)
    known[()] = np.log(np.array([0.05, 0.05, 0.1, 0.8], np.float32))
    async with connect(script(known), eos=[EOS]) as (llm, _):
        answer = (await run_one(llm, generation(2, 1.0, logprobs=2, n=1))).outputs[0]
    assert (answer.token_ids, answer.text, answer.stop) == ([EOS], "", EOS)
    assert [len(s.top) for s in answer.logprobs] == [2]


async def test_a_bad_beam_request_is_refused_before_any_event(connect):
    async with connect(script(table(0))) as (llm, core):
        with pytest.raises(InvalidRequest, match="beam_width"):
            await anext(llm.generate(generation(65, 1.0, n=1)))
        assert await anext(llm.generate(generation(2, 1.0))) == Started(2)
        assert llm.num_in_flight == 0 or core.requests


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("temperature", 0.7), ("top_k", 5), ("top_p", 0.9), ("min_p", 0.1), ("typical_p", 0.5)),
        *(("repetition_penalty", 1.1), ("presence_penalty", 0.5), ("frequency_penalty", -0.5)),
        *(("dry_multiplier", 0.8), ("xtc_probability", 0.5), ("stop", ("a",)), ("best_of", 3)),
        *(("prompt_logprobs", 0), ("logprob_token_ids", (1,)), ("logit_bias", {1: 2.0})),
    ],
)
async def test_what_beams_would_ignore_is_refused_by_name(connect, field, value):
    more = {"logprobs": 1} if field == "logprob_token_ids" else {}
    async with connect(script(table(0))) as (llm, core):
        with pytest.raises(InvalidRequest, match=f"{field}: .*beam search") as caught:
            await anext(llm.generate(generation(2, 1.0, n=1, **{field: value}, **more)))
        assert caught.value.field == field and not core.requests


@pytest.mark.parametrize("harmless", [{"temperature": 0.0}, {"top_k": -1}, {"seed": 3}])
async def test_what_changes_no_beam_is_taken(connect, harmless):
    known = table(1)
    async with connect(script(known), eos=[EOS]) as (llm, _):
        output = await run_one(llm, generation(2, 1.0, **harmless))
    assert [tuple(a.token_ids) for a in output.outputs] == [
        ids for _, ids in naive_beams(known, 2, 1.0)[:2]
    ]


async def test_the_deadline_is_the_searchs_and_not_that_of_each_of_its_steps(connect):
    known = table(2)
    left = []

    def slow(request, tokens):
        left.append(request.deadline_s)
        time.sleep(0.02)
        return script(known)(request, tokens)

    async with connect(slow) as (llm, _):
        await run_one(llm, msgspec.structs.replace(generation(4, 1.0, n=1), deadline_s=300.0))
    assert len(left) > STEPS and left == sorted(left, reverse=True)
    assert left[0] <= 300.0 and left[-1] <= left[0] - 0.02 * (STEPS - 1)
