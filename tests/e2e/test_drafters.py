"""Drafters with weights over the real runner: they change no token of the bundled model (SPC-02, SPC-05, SPC-06).

As a draft model it drafts for itself, so that most drafts stand; the heads are those that come with
it, which were trained on conversations and here see other texts.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from benchmarks.drafters import prompts_of
from headrace.back.executor.processes import ProcessExecutor
from headrace.back.kernels.native.library import NativeLibrary, load
from headrace.back.runner import devices, runner
from headrace.back.runner.sizes import Buckets
from headrace.back.sampling import sampler
from headrace.base.config.tree import SpeculationOptions as Speculation
from headrace.base.wire.request import EngineRequest, RowSampling, StopRules
from headrace.core.core import EngineCore
from headrace.core.grammar.compiler import CompileLimits
from headrace.core.grammar.hook import GrammarHook
from headrace.core.request import TOKEN_BYTES
from headrace.launch.vocabulary import encoder_of, vocabulary_of
from tests.back.runner.test_runner import Calls
from tests.back.speculative.checkpoints import save_head
from tests.back.speculative.test_blocks import pard_folder
from tests.e2e.test_grammar_drafts import CONSTRAINTS, LONG
from tests.e2e.test_grammar_drafts import requests_of as grammar_requests_of
from tests.e2e.test_speculation import (
    SAMPLINGS,
    Engine,
    assert_equal,
    options,
    requests_of,
    run,
)

pytestmark = pytest.mark.skipif(
    not isinstance(load(), NativeLibrary), reason="the native kernels are not built"
)
DEMO = Path(__file__).parents[2] / "demo"
FOLDERS = {
    "draft_model": DEMO / "model",
    "eagle3": DEMO / "drafters" / "eagle3",
    "mtp": DEMO / "drafters" / "mtp",
    "dflash": DEMO / "drafters" / "dflash",
}
AT_ONCE = ("pard", "medusa", "dflash", "dspark")
"""Those that draft all tokens in one pass. The model itself reads masks that it never saw: its first
draft stands. The heads of Medusa and DSpark have random weights, and hardly a draft stands."""
KINDS = ["draft_model", "eagle3", "mtp", *AT_ONCE]
SLOW = pytest.mark.slow
ONE_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]
slow_heads = [
    "draft_model",
    *(pytest.param(kind, marks=SLOW) for kind in ("eagle3", "mtp", *AT_ONCE)),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("drafters")
    save_head(root / "medusa", "medusa-shared")
    trained = {"pard-trained": DEMO / "drafters" / "pard"}
    save_head(root / "dspark", "dspark")
    own = {"pard": pard_folder(root / "pard"), "medusa": root / "medusa", "dspark": root / "dspark"}
    return FOLDERS | own | trained


def speculating_with(kind: str, folders: dict[str, Path]) -> Speculation:
    """`kind`: with "+sampled" its drafts are."""
    kind, _, sampled = kind.partition("+")
    return Speculation(
        method=kind.partition("-")[0],
        model=str(folders[kind]),
        num_speculative_tokens=3 if kind == "medusa" else 4,
        adaptive=False,
        draft_sample_method="probabilistic" if sampled else "greedy",
    )


@pytest.fixture
def pair(folders: dict[str, Path]) -> Iterator[Any]:
    """Makes two engines of the same options, without and with a drafter."""
    made: list[Engine] = []

    def make(kind: str, *, grammar: bool = False, **changes: Any) -> tuple[Engine, Engine]:
        for speculation in (None, speculating_with(kind, folders)):
            spec = options(speculation, **changes)
            assert spec.grammar is not None
            path = spec.grammar.tokenizer_path
            hook = GrammarHook(
                partial(vocabulary_of, path, spec.model),
                encoder=partial(encoder_of, path),
                limits=CompileLimits(threads=1),
            )
            made.append(Engine(spec, [hook] if grammar else []))
        return made[-2], made[-1]

    yield make
    for engine in made:
        engine.executor.close()


def accepted(engine: Engine) -> int:
    return engine.core.scheduler.speculation.stats.num_accepted_tokens


def least(kind: str, count: int) -> int:
    """Drafts that must stand: of those of the model itself so many."""
    part = {"draft_model": 1.0, "eagle3": 0.125, "mtp": 0.125, "pard": 0.125, "dflash": 0.1}
    return int(count * part.get(kind, 0.0))


@pytest.mark.parametrize(
    "kind",
    ["draft_model", *(pytest.param(kind, marks=SLOW) for kind in ("eagle3", "mtp", *AT_ONCE))],
)
def test_every_way_to_sample_gives_the_tokens_of_plain_decoding(pair: Any, kind: str) -> None:
    """Temperatures, penalties, log-probabilities, biases, bans; greedy and with fixed seeds."""
    plain, drafted = pair(kind)
    requests = requests_of(plain.spec, 2 * len(SAMPLINGS))
    assert_equal(run(plain.core, requests), run(drafted.core, requests))
    stats = drafted.core.scheduler.speculation.stats
    assert stats.num_draft_tokens > 300 and accepted(drafted) >= least(kind, 300)
    assert drafted.replay.foreign == ()
    parts = {bucket.part for bucket in drafted.replay._graphs}
    assert parts == {"", "draft", "follow"}


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "each"), [("pard-trained", 1.5), ("dflash", 2.5)])
def test_what_was_trained_on_conversations_is_mostly_right_in_them(
    pair: Any, kind: str, each: float
) -> None:
    """`each`: drafts of four that stand at least, up to the end of answers."""
    plain, drafted = pair(kind)
    stop = StopRules(max_tokens=60, stop_ids=plain.spec.model.eos_ids)
    requests = [
        EngineRequest(
            id=id,
            prompt=prompt.astype("<i4").tobytes(),
            stop=stop,
            sampling=RowSampling(temperature=0.0),
        )
        for id, prompt in enumerate(prompts_of("chat", 12), start=1)
    ]
    assert_equal(run(plain.core, requests), run(drafted.core, requests))
    stats = drafted.core.scheduler.speculation.stats
    assert stats.num_drafts > 20 and accepted(drafted) >= each * stats.num_drafts, vars(stats)


@SLOW
@pytest.mark.parametrize("kind", KINDS)
def test_preemption_and_chunks_change_nothing(pair: Any, kind: str) -> None:
    plain, drafted = pair(
        kind, kv_blocks=34, max_step_tokens=16, max_running=8, prefix_caching=False
    )
    requests = requests_of(plain.spec, 8, lengths=(140,))
    assert_equal(run(plain.core, requests, 40), run(drafted.core, requests, 40))
    assert drafted.core.scheduler.num_preemptions > 0
    assert accepted(drafted) >= least(kind, 100)


@pytest.mark.slow
@pytest.mark.parametrize("kind", slow_heads)
def test_a_prefix_hit_has_the_drafters_keys_too(pair: Any, kind: str) -> None:
    """A conversation that goes on: its drafts stand as often as if all had been computed (REG-085): hits take no
    hidden state away that a drafter needs."""
    plain, drafted = pair(kind)
    first = requests_of(plain.spec, 2)[0]
    stop, sampling = StopRules(max_tokens=60), RowSampling(temperature=0.0)
    first = EngineRequest(id=1, prompt=first.prompt, stop=stop, sampling=sampling)
    answers = [run(engine.core, [first])[1] for engine in (plain, drafted)]
    assert answers[0].tokens == answers[1].tokens
    prompt = first.prompt + np.asarray(answers[0].tokens[:-1], "<i4").tobytes()
    second = EngineRequest(id=2, prompt=prompt, stop=StopRules(max_tokens=40), sampling=sampling)
    before, hits = accepted(drafted), drafted.core.kv.num_hits
    expected = run(plain.core, [second])[2].tokens
    assert run(drafted.core, [second])[2].tokens == expected
    assert drafted.core.kv.num_hits - hits >= 32
    assert accepted(drafted) - before >= least(kind, 28)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_answers_of_a_grammar_are_those_without_drafts(pair: Any, kind: str) -> None:
    plain, drafted = pair(kind, grammar=True)
    requests = grammar_requests_of(plain, 2 * len(CONSTRAINTS))
    assert_equal(run(plain.core, requests), run(drafted.core, requests))
    assert accepted(drafted) >= least(kind, 100)


@pytest.mark.slow
def test_a_grammars_drafts_end_with_the_block(pair: Any) -> None:
    """They are proposed behind a step, when the row has no further block."""
    changes = {"kv_blocks": 34, "max_step_tokens": 48, "max_running": 8, "prefix_caching": False}
    plain, drafted = pair("draft_model", grammar=True, **changes)
    requests = grammar_requests_of(plain, 12, 120, LONG)
    assert_equal(run(plain.core, requests, 40), run(drafted.core, requests, 40))
    assert drafted.core.scheduler.num_preemptions > 0 and accepted(drafted) > 100


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_lengths_that_only_the_device_knows_give_the_same_tokens(
    pair: Any, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: plans go out with bounds, and all passes of the drafter run inside the step."""
    monkeypatch.setattr(devices, "CpuGraphs", lambda library: Calls())
    monkeypatch.setattr(devices, "ExactSizes", Buckets)
    monkeypatch.setattr(runner, "Sampler", partial(sampler.Sampler, on_device=True))
    plain, drafted = pair(kind, prefix_caching=False)
    requests = requests_of(plain.spec, 2 * len(SAMPLINGS))
    assert_equal(run(plain.core, requests, 4), run(drafted.core, requests, 4))
    assert accepted(drafted) >= least(kind, 100)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("kind", KINDS)
def test_graphs_that_draft_and_verify_give_the_same_tokens(pair: Any, kind: str) -> None:
    plain, drafted = pair(kind, device="cuda", prefix_caching=False)
    requests = requests_of(plain.spec, 2 * len(SAMPLINGS))
    for _ in range(3):  # launched, recorded, replayed
        assert_equal(run(plain.core, requests, 4), run(drafted.core, requests, 4))
    assert accepted(drafted) >= least(kind, 100)


@pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=SLOW), pytest.param("cuda", marks=ONE_GPU)]
)
@pytest.mark.parametrize("kind", ["draft_model", "eagle3", "mtp"])
def test_scores_of_prompts_are_the_models_and_not_the_drafters(
    pair: Any, kind: str, device: str
) -> None:
    """REG-025: which reads the same outputs, beside rows that draft; prompts in chunks."""
    plain, drafted = pair(
        kind, device=device, prefix_caching=False, max_step_tokens=24, max_running=8
    )
    requests = [
        replace(one, sampling=replace(one.sampling, prompt_logprobs=1)) if one.id % 2 else one
        for one in requests_of(plain.spec, len(SAMPLINGS))
    ]
    for _ in range(3):  # launched, recorded, replayed
        expected, found = run(plain.core, requests, 4), run(drafted.core, requests, 4)
        for one in requests:
            scored = len(one.prompt) // TOKEN_BYTES - 1 if one.id % 2 else 0
            assert len(expected[one.id].prompt) == scored
            np.testing.assert_allclose(found[one.id].prompt, expected[one.id].prompt, atol=1e-4)
    assert drafted.core.scheduler.speculation.stats.num_draft_tokens > 50


@pytest.mark.slow
def test_a_drafter_rests_while_too_many_rows_run(pair: Any) -> None:
    """Rows that it did not follow have no drafts; those that come later do."""
    plain, drafted = pair("draft_model", max_running=16)
    crowd = requests_of(plain.spec, 14, lengths=(20,))
    few = [
        EngineRequest(id=20 + one.id, prompt=one.prompt, stop=one.stop, sampling=one.sampling)
        for one in requests_of(plain.spec, 2, lengths=(40,))
    ]
    assert_equal(run(plain.core, crowd, 40), run(drafted.core, crowd, 40))
    before = accepted(drafted)
    assert_equal(run(plain.core, few), run(drafted.core, few))
    assert accepted(drafted) - before >= 20


TWO_GPUS = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices here"),
]


@pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=SLOW), pytest.param("cuda", marks=TWO_GPUS)]
)
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_that_share_a_model_draft_the_same(
    folders: dict[str, Path], kind: str, device: str
) -> None:
    """Each has the whole drafter, and the model's own table and head are shared between them."""
    answers, stats = [], []
    for how in (None, speculating_with(kind, folders)):
        spec = options(how, device=device, ranks=2)
        executor = ProcessExecutor(spec)
        try:
            core = EngineCore(spec, executor)
            answers.append(run(core, requests_of(spec, len(SAMPLINGS))))
            stats.append(core.scheduler.speculation.stats)
        finally:
            executor.close()
    assert_equal(*answers)
    assert stats[1].num_draft_tokens > 100
    assert stats[1].num_accepted_tokens >= least(kind, 100)
