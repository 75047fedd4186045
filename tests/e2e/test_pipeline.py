"""PAR-05, PAR-12: stages in processes of their own, over gloo, write what one worker writes, whatever
else is asked of them; one that is killed ends all."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from headrace.back.executor.choose import make_executor
from headrace.back.executor.processes import ProcessExecutor
from headrace.back.parallel.mesh import SEQUENCE_ROWS
from headrace.base.config.resolved import EngineSpec
from headrace.base.config.tree import (
    DeviceOptions,
    KVOptions,
    ModelOptions,
    Options,
    SchedulerOptions,
    SpeculationOptions,
)
from headrace.base.errors import EngineDead
from headrace.base.wire.request import EngineRequest, RowSampling, StopRules
from headrace.core.core import EngineCore
from headrace.core.grammar.compiler import CompileLimits
from headrace.core.grammar.hook import GrammarHook
from headrace.launch.facts import resolve_options
from headrace.launch.vocabulary import encoder_of, vocabulary_of
from tests.e2e import test_grammar_drafts, test_speculation
from tests.e2e.test_speculation import Answer, assert_equal, run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
FLOAT32 = {"dtype": "float32"}
DRAFTS = Path(__file__).parents[2] / "demo" / "model"
NGRAM = SpeculationOptions(method="ngram", num_speculative_tokens=4, adaptive=False)


class Case(NamedTuple):
    """`ranks` x `stages` beside `ranks` alone; `changes` are of both."""

    stages: int = 2
    ranks: int = 1
    layers: tuple[int, ...] | None = None
    speculation: SpeculationOptions | None = None
    model: dict[str, Any] = {}
    kv: dict[str, Any] = {}
    step: int = 64
    experts: bool = False
    exchange: str = "allreduce"

    def spec(self, stages: int, *, in_parts: bool = False) -> EngineSpec:
        tree = Options(
            device=DeviceOptions(
                device="cpu",
                threads=1,
                tensor_parallel=self.ranks,
                pipeline_parallel=stages,
                pipeline_layers=self.layers if stages > 1 else None,
                sequence_parallel=in_parts,
                enable_expert_parallel=self.experts,
                all2all_backend=self.exchange,
            ),
            model=ModelOptions(max_model_len=512, **({"deterministic": True} | self.model)),
            kv=KVOptions(kv_blocks=200, **self.kv),
            scheduler=SchedulerOptions(
                speculative_config=self.speculation, max_step_tokens=self.step, max_running=12
            ),
        )
        return resolve_options(tree).engine


CASES = {
    "plain": Case(),
    "layers": Case(layers=(6, 2)),
    "three": Case(stages=3),
    "ranks": Case(ranks=2),
    "drafts": Case(speculation=NGRAM),
    "three-drafts": Case(stages=3, speculation=NGRAM),
    "quantized": Case(model={"quantization": "int8", "deterministic": False}),
    "quantized-cache": Case(kv={"kv_dtype": "int8"}, model={"deterministic": False}),
    "experts": Case(ranks=2, experts=True, model={"demo": "mixture", **FLOAT32}),
    "no-prefix-cache": Case(kv={"prefix_caching": False}),
}


def answers(spec: EngineSpec) -> tuple[dict[int, Answer], EngineCore]:
    """Of requests that sample in every way, with a grammar hook beside."""
    core = EngineCore(spec, make_executor(spec))
    try:
        requests = test_speculation.requests_of(spec, 2 * len(test_speculation.SAMPLINGS))
        return run(core, requests, at_once=9), core
    finally:
        core.close()


@pytest.mark.parametrize("name", CASES)
def test_stages_answer_as_one_worker(name: str) -> None:
    case = CASES[name]
    ours, core = answers(case.spec(case.stages))
    alone, _ = answers(case.spec(1))
    assert_equal(alone, ours)
    stats = core.scheduler.speculation.stats
    assert (stats.num_accepted_tokens > 20) is (case.speculation is not None)


class Asked(NamedTuple):
    """What `requests_of` of the grammars' tests asks of an engine."""

    spec: EngineSpec


@pytest.mark.parametrize(
    "case",
    [(2, Case()), (2, Case(speculation=NGRAM)), (1, Case(ranks=2, model=FLOAT32))],
    ids=["stages", "stages-drafts", "ranks"],
)
def test_grammars_are_followed_over_several_processes(case: tuple[int, Case]) -> None:
    """Masks go to the last stage alone, which samples; rows that have some draft nothing there."""
    written = []
    for spec in (Case(model=case[1].model).spec(1), case[1].spec(case[0])):
        assert spec.grammar is not None
        path = spec.grammar.tokenizer_path
        hook = GrammarHook(
            partial(vocabulary_of, path, spec.model),
            encoder=partial(encoder_of, path),
            limits=CompileLimits(threads=1),
        )
        core = EngineCore(spec, make_executor(spec), hooks=[hook])
        try:
            made = test_grammar_drafts.requests_of(Asked(spec), 14)
            written.append(run(core, made))
        finally:
            core.close()
    assert_equal(*written)


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_ranks_draft_without_a_difference(method: str) -> None:
    drafts = SpeculationOptions(method=method, num_speculative_tokens=4, adaptive=False)
    drafted, core = answers(Case(ranks=2, speculation=drafts).spec(1))
    assert_equal(answers(Case(ranks=2).spec(1))[0], drafted)
    assert core.scheduler.speculation.stats.num_accepted_tokens > 20


@pytest.mark.parametrize("exchange", ["allreduce", "ragged", "padded"])
def test_a_rank_without_a_token_drafts_and_takes_part_all_the_same(exchange: str) -> None:
    """PAR-10, REG-070: one request on two ranks with whole experts, and a drafter with weights."""
    drafts = SpeculationOptions(
        method="draft_model", model=str(DRAFTS), num_speculative_tokens=2, adaptive=False
    )
    experts = Case(ranks=2, experts=True, model={"demo": "mixture", **FLOAT32})
    written = []
    for case in (experts._replace(exchange=exchange, speculation=drafts), experts):
        spec = case.spec(1)
        core = EngineCore(spec, make_executor(spec))
        try:
            (request,) = test_speculation.requests_of(spec, 1, lengths=(40,))
            written.append(run(core, [request]))
            stats = core.scheduler.speculation.stats
            assert (stats.num_draft_tokens > 4) == (case.speculation is not None)
        finally:
            core.close()
    assert_equal(*written)


@pytest.mark.parametrize("stages", [1, 2])
def test_parts_of_long_prompts_give_the_same_tokens(stages: int) -> None:
    """PAR-09: prompts of more tokens than SEQUENCE_ROWS, and of fewer; chunks of one behind the other."""
    case, written = Case(ranks=2, model=FLOAT32, step=SEQUENCE_ROWS + 40), []
    rng = np.random.default_rng(2)
    requests = [
        EngineRequest(
            id=id,
            prompt=rng.integers(300, 4000, length).astype("<i4").tobytes(),
            stop=StopRules(max_tokens=8, min_tokens=8),
            sampling=RowSampling(
                temperature=0.0, logprobs=1, prompt_logprobs=0 if id == 3 else None
            ),
        )
        for id, length in enumerate(
            (SEQUENCE_ROWS + 31, 40, 2 * SEQUENCE_ROWS - 61, SEQUENCE_ROWS + 1)
        )
    ]
    for in_parts in (False, True):
        spec = case.spec(stages, in_parts=in_parts)
        core = EngineCore(spec, make_executor(spec))
        try:
            written.append(run(core, requests))
        finally:
            core.close()
    assert_equal(*written)


@pytest.fixture
def pair() -> Iterator[ProcessExecutor]:
    executor = make_executor(Case().spec(2))
    assert isinstance(executor, ProcessExecutor)
    yield executor
    executor.close()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_stage_ends_all(pair: ProcessExecutor, rank: int) -> None:
    os.kill(pair._workers[rank].process.pid, signal.SIGKILL)
    pair._ended.wait()
    with pytest.raises(EngineDead, match=f"worker {rank} was killed by signal 9"):
        pair.check()
    assert [worker.process.poll() is None for worker in pair._workers] == [False, False]
