"""Forced tokens are written down without being sampled, and what comes out does not change (API-12)."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.back.executor.null import NullBehaviour
from headrace.base.wire.grammar import Json, Literal, Node, ReasoningRule, Regex
from headrace.base.wire.request import EngineRequest, RowSampling
from headrace.core.grammar.compiler import CompileLimits
from headrace.core.grammar.hook import GrammarHook
from tests.core.grammar.constrained import (
    EOS,
    GrammarDriver,
    constrained,
    encoder,
    spec_for,
    tokenizer,
    vocabulary,
)
from tests.core.harness import make_request, window_groups

LONG = {
    "type": "object",
    "properties": {
        "the_name_of_the_customer": {"type": "string", "maxLength": 6},
        "the_number_of_items_ordered": {"type": "integer"},
        "the_delivery_was_confirmed": {"enum": ["confirmed_by_phone", "confirmed_by_letter"]},
    },
    "required": [
        "the_name_of_the_customer",
        "the_number_of_items_ordered",
        "the_delivery_was_confirmed",
    ],
    "additionalProperties": False,
}
NODE = Json(json.dumps(LONG), compact=True)
NODES: list[Node] = [
    NODE,
    Json(json.dumps(LONG)),
    Literal("one text that is known from its first to its last letter"),
    Regex("(yes|no), I (certainly agree|certainly disagree) with you"),
    Regex("[ab]{40}"),
]
THINK = ReasoningRule(open="<think>", close="</think>", inside=True, may_open=False, budget=4)


def hook_of(*, jump_forward: bool) -> GrammarHook:
    limits = CompileLimits(threads=1)
    return GrammarHook(vocabulary, encoder=encoder, jump_forward=jump_forward, limits=limits)


HOOKS = {jump_forward: hook_of(jump_forward=jump_forward) for jump_forward in (False, True)}


def requests(seed: int) -> list[EngineRequest]:
    """Constrained ones of all kinds between free ones."""
    rng = random.Random(seed)
    made = []
    for id in range(1, 9):
        sampling = RowSampling(
            temperature=rng.choice([0.0, 1.0]),
            seed=id,
            logprobs=rng.choice([None, None, None, 2]),
            repetition_penalty=rng.choice([1.0, 1.0, 1.3]),
        )
        fields: dict[str, Any] = {
            "prompt": rng.choice([1, 7, 8, 30]),
            "max_tokens": rng.choice([1, 2, 5, 17, 200]),
            "stop_ids": rng.choice([EOS, (), (*EOS, tokenizer().encode_plain(" of")[0])]),
            "sampling": sampling,
            "priority": rng.randrange(2),
        }
        if rng.random() < 0.2:
            made.append(make_request(id, **fields))
        else:
            rule = rng.choice([None, None, THINK])
            made.append(constrained(id, rng.choice(NODES), reasoning=rule, **fields))
    return made


def outcome(driver: GrammarDriver) -> dict[int, Any]:
    return {
        id: (driver.tokens[id], end.reason, end.stop_id, driver.num_scores(id))
        for id, end in driver.finished.items()
    }


def run(
    seed: int, *, jump_forward: bool, window: int | None = None, **config: Any
) -> GrammarDriver:
    behaviour = NullBehaviour(eos_rate=0.01)
    extra = {} if window is None else {"groups": window_groups(window)}
    driver = GrammarDriver(
        spec_for(**config), hook=HOOKS[jump_forward], behaviour=behaviour, **extra
    )
    for request in requests(seed):
        driver.add_suited(request)
    driver.finish(*range(1, 9))
    while driver.core.num_in_flight:
        driver.step()
    driver.assert_at_rest()
    return driver


SCHEDULES = {
    "num_blocks": st.sampled_from([40, 60, 512]),
    "max_step_tokens": st.sampled_from([3, 9, 64]),
    "max_running": st.integers(1, 8),
    "policy": st.sampled_from(["fcfs", "priority", "fair"]),
    "overlap": st.booleans(),
    "prefix_caching": st.booleans(),
    "window": st.sampled_from([None, 8]),
}


def same_tokens(seed: int, **config: Any) -> None:
    plain = run(seed, jump_forward=False)
    assert outcome(run(seed, jump_forward=True, **config)) == outcome(plain)


@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 10**6), **SCHEDULES)
def test_jumping_changes_no_token_whatever_the_schedule(seed: int, **config: Any) -> None:
    """Sampled or not, alone or crowded, preempted or not: the same tokens, ends and numbers of scores."""
    same_tokens(seed, **config)


@pytest.mark.slow
@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 10**6), **SCHEDULES)
def test_jumping_changes_no_token_in_hundreds_of_schedules(seed: int, **config: Any) -> None:
    same_tokens(seed, **config)


def test_long_keys_cost_a_step_each() -> None:
    steps = {}
    for jump_forward in (False, True):
        driver = GrammarDriver(hook=HOOKS[jump_forward])
        text, end = driver.run_one(constrained(1, NODE))
        assert end.reason == "stop" and json.loads(text)
        steps[jump_forward] = driver.core.counters.steps, driver.core.counters.jump_forward_tokens
    assert steps[False][1] == 0 and steps[True][1] >= 30
    assert steps[True][0] * 2 < steps[False][0], steps


def test_an_answer_without_any_choice_takes_one_step() -> None:
    driver = GrammarDriver(hook=HOOKS[True])
    text, end = driver.run_one(constrained(1, NODES[2]))
    assert text == NODES[2].text and end.reason == "stop"
    assert driver.core.counters.steps <= 2 and driver.core.kv.pool.num_free == 511


def test_forced_texts_have_the_tokens_that_the_tokenizer_gives_them() -> None:
    """A model has seen these, not others of the same text."""
    driver = GrammarDriver(hook=HOOKS[True])
    text, _ = driver.run_one(constrained(1, NODES[2]))
    assert driver.tokens[1] == tokenizer().encode_plain(text)


@pytest.mark.parametrize(
    "sampling",
    [RowSampling(temperature=1.0, logprobs=1), RowSampling(temperature=1.0, presence_penalty=0.5)],
)
def test_what_is_told_or_counted_per_token_is_sampled_token_by_token(sampling: RowSampling) -> None:
    driver = GrammarDriver(hook=HOOKS[True])
    driver.run_one(constrained(1, NODE, sampling=sampling))
    assert driver.core.counters.jump_forward_tokens == 0
    if sampling.logprobs is not None:
        assert len(driver.logprobs[1]) == len(driver.tokens[1])
        assert all(driver.logprobs[1])
