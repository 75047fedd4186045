"""Drafts under a grammar: what the bundled model writes does not depend on them (API-05, API-09, BEY-22)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from headrace.back.kernels.native.library import NativeLibrary, load
from headrace.base.wire.grammar import Constraint, Json, Node, ReasoningRule, Regex, pack
from headrace.base.wire.request import EngineRequest, RowSampling, StopRules
from headrace.core.grammar.compiler import CompileLimits
from headrace.core.grammar.hook import GrammarHook
from headrace.front.text.tokenizer_files import load_tokenizer
from headrace.launch.vocabulary import encoder_of, vocabulary_of
from tests.e2e.test_speculation import (
    NGRAM,
    Answer,
    Engine,
    as_on_a_gpu,
    assert_equal,
    options,
    run,
)

pytestmark = pytest.mark.skipif(
    not isinstance(load(), NativeLibrary), reason="the native kernels are not built"
)
PEOPLE = {
    "type": "array",
    "minItems": 2,
    "maxItems": 5,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "age": {"type": "integer", "minimum": 0, "maximum": 99},
            "state": {"enum": ["present", "absent"]},
        },
        "required": ["name", "age", "state"],
        "additionalProperties": False,
    },
}
PERSON = PEOPLE["items"]
EXAMPLE = (
    '[{"name": "Ann", "age": 31, "state": "present"}, {"name": "Bob", "age": 7, "state": "absent"}]'
)
PROMPTS = [
    f"{EXAMPLE}\nThe same again:\n",
    'A person: {"name": "Ann", "age": 31, "state": "present"}\nA person: ',
    "Ann is 31 and present. Bob is 7 and absent. As JSON:",
    '{"name": 5, "size": 31}, {"name": 6, "size": 32}, {"name": 7, "size": 33}, ',
]
THINK = ReasoningRule(open="<think>", close="</think>", inside=True, may_open=False, budget=9)
CONSTRAINTS: list[tuple[Node | None, ReasoningRule | None]] = [
    (Json(json.dumps(PEOPLE), compact=True), None),
    (Json(json.dumps(PERSON), compact=True), None),
    (Json(json.dumps(PEOPLE)), None),
    (Regex(r"([a-d]{2,4}, ){3,9}end"), None),
    (Json(json.dumps(PERSON), compact=True), THINK),
    (None, THINK),
    (None, None),
]
SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 1.0, "top_p": 0.9, "logprobs": 1},
    {"temperature": 0.0, "logit_bias": {300: 2.0}},
    {"temperature": 0.0, "repetition_penalty": 1.2},
]


LONG: list[tuple[Node | None, ReasoningRule | None]] = [
    (Json(json.dumps({**PEOPLE, "minItems": 9, "maxItems": 9}), compact=True), None),
    (Regex(r"([a-d]{2,4}, ){90}end"), None),
]


def requests_of(
    engine: Engine,
    count: int,
    max_tokens: int = 70,
    constraints: list[tuple[Node | None, ReasoningRule | None]] = CONSTRAINTS,
) -> list[EngineRequest]:
    """All constraints with all ways to sample, over prompts that hold such answers."""
    assert engine.spec.grammar is not None
    encode = load_tokenizer(engine.spec.grammar.tokenizer_path).encode_plain
    made = []
    for id in range(count):
        node, reasoning = constraints[id % len(constraints)]
        payloads = {}
        if node is not None or reasoning is not None:
            payloads["grammar"] = pack(Constraint(grammar=node, reasoning=reasoning))
        made.append(
            EngineRequest(
                id=id,
                prompt=np.asarray(encode(PROMPTS[id % len(PROMPTS)]), "<i4").tobytes(),
                stop=StopRules(max_tokens=max_tokens, stop_ids=engine.spec.model.eos_ids),
                sampling=RowSampling(seed=id, **SAMPLINGS[id % len(SAMPLINGS)]),
                hook_payloads=payloads,
            )
        )
    return made


@pytest.fixture
def pair() -> Iterator[Any]:
    """Makes two engines of the same options, without and with speculation."""
    made: list[Engine] = []

    def make(*, jump_forward: bool = True, **changes: Any) -> tuple[Engine, Engine]:
        for speculation in (None, NGRAM):
            spec = options(speculation, **changes)
            assert spec.grammar is not None
            path = spec.grammar.tokenizer_path
            hook = GrammarHook(
                partial(vocabulary_of, path, spec.model),
                encoder=partial(encoder_of, path),
                limits=CompileLimits(threads=1),
                jump_forward=jump_forward,
            )
            made.append(Engine(spec, [hook]))
        return made[-2], made[-1]

    yield make
    for engine in made:
        engine.executor.close()


def accepted(engine: Engine) -> int:
    return engine.core.scheduler.speculation.stats.num_accepted_tokens


def steps_of_compiled(engine: Engine) -> int:
    """Steps so far, once every grammar is compiled: while one is waited for, others have steps of their own."""
    run(engine.core, requests_of(engine, len(CONSTRAINTS), 1))
    return engine.core.counters.steps


def text_of(engine: Engine, answer: Answer) -> str:
    assert engine.spec.grammar is not None
    return load_tokenizer(engine.spec.grammar.tokenizer_path).decode(answer.tokens)


@pytest.mark.parametrize("jump_forward", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_answers_of_a_grammar_are_those_without_drafts(pair: Any, jump_forward: bool) -> None:
    plain, drafted = pair(jump_forward=jump_forward)
    requests = requests_of(plain, 2 * len(CONSTRAINTS))
    before = steps_of_compiled(plain), steps_of_compiled(drafted)
    answers = run(drafted.core, requests)
    assert_equal(run(plain.core, requests), answers)
    assert accepted(drafted) > 20
    assert drafted.core.counters.steps - before[1] < plain.core.counters.steps - before[0]
    jsonschema = pytest.importorskip("jsonschema")  # machines with a GPU read this file without it
    for id in (0, 7):
        if answers[id].reason == "stop":
            jsonschema.validate(json.loads(text_of(drafted, answers[id])), PEOPLE)


@pytest.mark.slow
def test_forced_texts_and_drafts_bring_each_other_no_other_token(pair: Any) -> None:
    """One request at a time: each step is its own, with drafts, forced tokens or neither."""
    plain, drafted = pair()
    requests = [one for one in requests_of(plain, 28, 90) if one.hook_payloads][:8]
    for request in requests:
        assert_equal(run(plain.core, [request], 3), run(drafted.core, [request], 3))
    assert drafted.core.counters.jump_forward_tokens > 0
    assert accepted(drafted) > 10


@pytest.mark.slow
def test_on_a_device_drafts_wait_for_their_masks(
    pair: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: what is proposed behind a step is told to the host, which makes the masks while
    the next step verifies it. Rows without a grammar are in the same steps."""
    as_on_a_gpu(monkeypatch)
    plain, drafted = pair(prefix_caching=False)
    requests = requests_of(plain, 2 * len(CONSTRAINTS))
    before = steps_of_compiled(plain), steps_of_compiled(drafted)
    assert_equal(run(plain.core, requests), run(drafted.core, requests))
    assert accepted(drafted) > 20
    assert drafted.core.counters.steps - before[1] < plain.core.counters.steps - before[0]
    assert drafted.core.counters.jump_forward_tokens > 0


@pytest.mark.slow
def test_on_a_device_preemption_changes_no_token_of_a_grammar(
    pair: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_on_a_gpu(monkeypatch)
    plain, drafted = pair(kv_blocks=34, max_step_tokens=48, max_running=12, prefix_caching=False)
    requests = requests_of(plain, 12, 120, LONG)
    assert_equal(run(plain.core, requests, 40), run(drafted.core, requests, 40))
    assert drafted.core.scheduler.num_preemptions > 0 and accepted(drafted) > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_on_a_gpu_answers_of_a_grammar_are_those_without_drafts(pair: Any) -> None:
    plain, drafted = pair(device="cuda", prefix_caching=False)
    requests = requests_of(plain, 2 * len(CONSTRAINTS))
    for _ in range(3):  # launched, recorded, replayed
        assert_equal(run(plain.core, requests), run(drafted.core, requests))
    assert accepted(drafted) > 60
    assert drafted.core.counters.steps < plain.core.counters.steps


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [True, False])
def test_preemption_and_chunks_change_no_token_of_a_grammar(pair: Any, overlap: bool) -> None:
    plain, drafted = pair(
        kv_blocks=34, max_step_tokens=48, max_running=12, prefix_caching=False, overlap=overlap
    )
    requests = requests_of(plain, 12, 120, LONG)
    assert_equal(run(plain.core, requests, 40), run(drafted.core, requests, 40))
    assert drafted.core.scheduler.num_preemptions > 0 and accepted(drafted) > 0
