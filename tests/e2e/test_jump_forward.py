"""Jump-forward over the real runner: what the bundled model writes at temperature 0 does not depend on it."""

from __future__ import annotations

import json
import time
from functools import partial

import numpy as np
import pytest

from headrace.back.executor.choose import make_executor
from headrace.base.config.tree import Options
from headrace.base.wire.grammar import Constraint, Json, pack
from headrace.base.wire.request import EngineRequest, RowSampling, StopRules
from headrace.core.core import EngineCore
from headrace.core.grammar.hook import GrammarHook
from headrace.front.text.tokenizer_files import load_tokenizer
from headrace.launch.facts import resolve_options
from headrace.launch.vocabulary import encoder_of, vocabulary_of

PROMPTS = ["Tell me about a cat.", "A list of fruits, with their colors:", "x"]
SCHEMA = {
    "type": "object",
    "properties": {
        "a_long_description_of_the_thing": {"type": "string", "maxLength": 30},
        "how_many_of_them_are_there": {"type": "integer", "minimum": 0, "maximum": 99},
        "is_it_any_good": {"enum": ["certainly_it_is", "certainly_not", "nobody_knows"]},
    },
    "required": [
        "a_long_description_of_the_thing",
        "how_many_of_them_are_there",
        "is_it_any_good",
    ],
    "additionalProperties": False,
}


@pytest.mark.slow
def test_the_bundled_model_writes_the_same_text_in_fewer_steps() -> None:
    spec = resolve_options(Options()).engine
    assert spec.grammar is not None
    path = spec.grammar.tokenizer_path
    tokenizer = load_tokenizer(path)
    load, encoder = partial(vocabulary_of, path, spec.model), partial(encoder_of, path)
    executor = make_executor(spec)
    found, steps = {}, {}
    for jump_forward in (False, True):
        core = EngineCore(
            spec, executor, hooks=[GrammarHook(load, encoder=encoder, jump_forward=jump_forward)]
        )
        for id, prompt in enumerate(PROMPTS):
            ids = np.asarray(tokenizer.encode_plain(prompt), "<i4")
            core.add(
                EngineRequest(
                    id=id,
                    prompt=ids.tobytes(),
                    stop=StopRules(max_tokens=150),
                    sampling=RowSampling(temperature=0.0),
                    hook_payloads={"grammar": pack(Constraint(grammar=Json(json.dumps(SCHEMA))))},
                )
            )
        tokens: dict[int, list[int]] = {id: [] for id in range(len(PROMPTS))}
        num_ended = 0
        while num_ended < len(PROMPTS):
            if not core.has_work:
                time.sleep(core.idle_s or 0.001)
                continue
            batch = core.step(wait=True).tokens
            if batch is None:
                continue
            for id, token in zip(batch.ids.tolist(), batch.tokens.tolist(), strict=True):
                tokens[id].append(token)
            assert not any(end.error for end in batch.finished), batch.finished
            num_ended += len(batch.finished)
        while core.num_in_flight:
            core.step(wait=True)
        found[jump_forward], steps[jump_forward] = tokens, core.counters.steps
    executor.close()
    assert found[True] == found[False]
    for answer in found[True].values():
        assert set(json.loads(tokenizer.decode(answer))) == set(SCHEMA["required"])
    assert steps[True] < steps[False], steps
