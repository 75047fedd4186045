"""PAR-05: stages of a pipeline give the tokens of one worker, whatever samples them, and go on while
the last one lags."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from headrace.back.executor.choose import make_executor
from headrace.back.kernels.native.library import NativeLibrary, load
from headrace.back.kernels.step_inputs.op import GroupBlocks
from headrace.back.runner.batch import Rows
from headrace.back.runner.replay import step_tables
from headrace.back.runner.stages import append_tokens
from headrace.base.config.resolved import (
    DeviceSpec,
    EngineSpec,
    KVSpec,
    ModelSpec,
    SchedulerSpec,
    SpeculationSpec,
)
from headrace.base.wire.request import EngineRequest, RowSampling, StopRules
from headrace.core.core import EngineCore
from headrace.core.request import RowsInTurns
from tests.back.runner.staged import CPU, StagedExecutor

MODEL = Path(__file__).parents[3] / "demo" / "model"
SAMPLINGS = (
    RowSampling(temperature=0.0),
    RowSampling(temperature=0.9, seed=11, top_p=0.9),
    RowSampling(temperature=0.0, repetition_penalty=1.2, logprobs=1),
    RowSampling(temperature=0.0, prompt_logprobs=0),
)
NGRAM = SpeculationSpec(method="ngram", num_tokens=3, max_rows=8, masked=False)


def spec_of(stages: int = 1, **changes: object) -> EngineSpec:
    """The bundled model, in steps of few tokens."""
    config = json.loads((MODEL / "config.json").read_text())
    return EngineSpec(
        model=ModelSpec(
            path=str(MODEL),
            name="bundled",
            format="safetensors",
            family="qwen3",
            dtype="float32",
            max_model_len=int(changes.pop("max_model_len", 256)),
            logits_width=config["vocab_size"],
            eos_ids=(config["eos_token_id"],),
            config=config,
        ),
        kv=KVSpec(
            block_tokens=16, prefix_caching=True, num_blocks=int(changes.pop("num_blocks", 64))
        ),
        scheduler=SchedulerSpec(max_step_tokens=24, max_running=8, stages=stages),
        device=DeviceSpec(device="cpu", executor="inline", pipeline_parallel=stages),
        **changes,
    )


def requests_of(count: int, tokens: int) -> list[EngineRequest]:
    """Prompts that begin alike and repeat themselves."""
    rng = np.random.default_rng(4)
    shared = np.tile(rng.integers(300, 4000, 10), 5)
    return [
        EngineRequest(
            id=id,
            prompt=np.append(shared[: 12 * id], rng.integers(300, 4000, 2)).astype("<i4").tobytes(),
            stop=StopRules(max_tokens=tokens, min_tokens=tokens),
            sampling=SAMPLINGS[id % len(SAMPLINGS)],
        )
        for id in range(1, count + 1)
    ]


def tokens_of(core: EngineCore, requests: list[EngineRequest]) -> dict[int, list[int]]:
    """What each request gets; they come one a step."""
    waiting, tokens = list(requests), defaultdict(list)
    while waiting or core.has_work:
        if waiting:
            core.add(waiting.pop(0))
        batch = core.step(wait=True).tokens
        if batch is None:
            continue
        for id, token in zip(batch.ids.tolist(), batch.tokens.tolist(), strict=True):
            tokens[id].append(token)
        for finished in batch.finished:
            assert finished.error is None, finished
    return dict(tokens)


def alone(requests: list[EngineRequest], **changes: object) -> dict[int, list[int]]:
    spec = spec_of(**changes)
    core = EngineCore(spec, make_executor(spec))
    try:
        return tokens_of(core, requests)
    finally:
        core.close()


def test_two_stages_give_the_tokens_of_one_worker_and_work_at_the_same_time() -> None:
    """Chunks, prefix hits, four ways to sample: the first stage begins a step before the last one
    has run the step before."""
    requests = requests_of(4, tokens=8)
    spec = spec_of(stages=2)
    executor = StagedExecutor(spec)
    core = EngineCore(spec, executor)
    assert tokens_of(core, requests) == alone(requests)
    assert executor.most_ahead == 2, "steps that no stage had finished when the next began"
    first, last = executor.pipes
    assert not last.before and len(first.back) < 4, "taken with the plans that come"
    core.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"speculation": NGRAM},
        {"num_blocks": 12},
        {"speculation": NGRAM, "num_blocks": 12},
    ],
    ids=["drafts", "preempted", "both"],
)
def test_drafts_and_preemptions_leave_the_tokens_as_they_are(changes: dict) -> None:
    requests = requests_of(6, tokens=40)
    spec = spec_of(stages=2, **changes)
    core = EngineCore(spec, StagedExecutor(spec))
    assert tokens_of(core, requests) == alone(requests)
    stats, most = core.scheduler.speculation.stats, core.executor.facts.max_drafts
    # Steps of PyTorch's own operations, where the native kernels are not built, verify no drafts.
    drafts = "speculation" in changes and isinstance(load(), NativeLibrary)
    assert most == (NGRAM.num_tokens if drafts else 0)
    assert (stats.num_accepted_tokens > 0) is drafts
    assert ("num_blocks" not in changes) or core.scheduler.num_preemptions > 0
    core.close()


def test_tokens_that_stand_are_appended_and_the_last_says_how_long_a_row_is() -> None:
    tables = step_tables(
        max_rows=4,
        max_model_len=16,
        groups=(GroupBlocks(tokens=8),),
        block_tokens=8,
        device=CPU,
        speculates=True,
    )
    rows = Rows.over(tables, (), block_tokens=8)
    shape = SimpleNamespace(
        verifies=True,
        sampled_row=np.array([2, 2, 2, 0]),
        sampled_position=np.array([5, 6, 7, 3]),
    )
    append_tokens(rows, shape, np.array([41, 42, -2, 43]))
    assert rows.tokens.data[2, 4:8].tolist() == [0, 41, 42, 0]
    assert rows.tokens.data[0, 3] == 43
    assert tables.length_M is not None and tables.length_M.tolist() == [4, 0, 7, 0, 0]


def test_rows_decode_in_as_many_parts_as_there_are() -> None:
    rows = RowsInTurns(8, 16, parts=2)
    rows.decoding[:5] = True
    rows.limit[:], rows.length[:] = 9, 1
    turns = [rows.to_decode().tolist() for _ in range(4)]
    assert turns == [[0, 1], [2, 3, 4]] * 2
    rows.decoding[1:] = False
    assert [rows.to_decode().tolist() for _ in range(3)] == [[0]] * 3
    rows.decoding[:] = False
    assert rows.to_decode().tolist() == []
