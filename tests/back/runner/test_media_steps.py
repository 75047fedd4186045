"""Steps that reach placeholders of media, in the sizes in which they are recorded: they give what transformers gives,
once a made-up one has agreed with an exact one."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.back.models.load import load_model
from headrace.back.parallel.mesh import Mesh
from headrace.back.runner import media_steps
from headrace.back.runner.buckets import BucketSteps
from headrace.back.runner.exact_steps import ExactSteps
from headrace.back.runner.runner import Runner
from headrace.back.runner.start import start_runner
from headrace.base.wire.request import RowSampling
from tests.back.driver import Driver
from tests.back.runner.test_runner import by_buckets
from tests.models.media import Prompt, _in_order, engine_spec
from tests.models.oracle import BLOCK_TOKENS, load_ours
from tests.models.test_qwen_vl import CASES, Seen, save_case, two_images

SCORED = RowSampling(temperature=0.0, logprobs=-1)


@pytest.fixture(scope="module", params=["qwen3-vl", *(
    pytest.param(name, marks=pytest.mark.slow) for name in CASES if name != "qwen3-vl"
)])  # fmt: skip
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    case, folder = CASES[request.param], tmp_path_factory.mktemp("model")
    return Seen(case=case, folder=folder, oracle=save_case(case, folder), engine=None)


def runner_of(folder: Path) -> Runner:
    spec = engine_spec(folder)
    model = load_ours(spec.model)
    return start_runner(spec, model, device=torch.device("cpu"), steps=by_buckets).runner


def answers(runner: Runner, prompts: list[Prompt], chunk: int, tokens: int) -> list[Any]:
    """Greedy, all at once, in chunks; rows that have begun to decode do so beside the others' chunks."""
    driver = Driver(runner.facts)
    rows = [
        driver.add(one.ids, SCORED, media=one.media, request=i) for i, one in enumerate(prompts)
    ]
    while any(len(row.outputs) < tokens for row in rows):
        open_ = [row for row in rows if len(row.outputs) < tokens]
        counts = [(row, min(chunk, row.length - row.num_computed)) for row in open_]
        counts.sort(key=lambda one: one[1] != 1)
        driver.read(runner.launch(driver.plan(counts)).result())
    for row in rows:
        driver.release(row)
    return rows


@pytest.fixture
def no_exact_steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Counts the exact steps of real plans."""
    counted: list[int] = []
    run = ExactSteps.run

    def noted(self: ExactSteps, plan: Any, *given: Any, **more: Any) -> Any:
        counted.extend([plan.step] * (plan.step >= 0))
        return run(self, plan, *given, **more)

    monkeypatch.setattr(ExactSteps, "run", noted)
    yield counted


@pytest.mark.parametrize("chunk", [pytest.param(100, marks=pytest.mark.slow), 7])
def test_they_give_what_the_reference_gives(
    seen: Seen, chunk: int, no_exact_steps: list[int]
) -> None:
    """Beside a text, whole and in chunks that cut images (KRN-25, ENG-21)."""
    runner = runner_of(seen.folder)
    assert isinstance(runner._steps, BucketSteps) and runner._steps._media.trusted
    prompts = [two_images(seen), Prompt().text(*range(3, 30)), two_images(seen).text(13, 14)]
    for prompt, row in zip(prompts, answers(runner, prompts, chunk, 5), strict=True):
        expected = seen.expected(prompt)
        got = np.stack([_in_order(part.ids, part.values) for part in row.logprobs])
        assert np.abs(got - np.stack(expected.logprobs)).max() < 1e-4
        assert row.outputs == expected.tokens
    assert not no_exact_steps


def test_those_that_do_not_agree_are_exact(
    seen: Seen,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    no_exact_steps: list[int],
) -> None:
    monkeypatch.setattr(media_steps, "AGREEMENT", -1.0)
    with caplog.at_level(logging.WARNING):
        runner = runner_of(seen.folder)
    assert "steps with media are not recorded: off by" in caplog.text
    prompt = two_images(seen)
    (row,) = answers(runner, [prompt], 100, 2)
    assert row.outputs == seen.expected(prompt, 2).tokens and len(no_exact_steps) == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_they_are_recorded_on_a_gpu(seen: Seen, no_exact_steps: list[int]) -> None:
    """Each size three times: launched, recorded, replayed with other pixels."""
    device, spec = torch.device("cuda", torch.cuda.current_device()), engine_spec(seen.folder)
    model, _ = load_model(spec.model, mesh=Mesh(), device=device, block_tokens=BLOCK_TOKENS)
    runner = start_runner(spec, model, device=device).runner
    assert isinstance(runner._steps, BucketSteps) and runner._steps._media.trusted
    for seed in range(4):
        prompts = [two_images(seen), Prompt().text(*range(3, 30)), two_images(seen).text(13, 14)]
        for prompt in prompts[::2]:
            prompt.inputs[0] = seen.pixels(10 + seed, (1, 6, 4))
        for prompt, row in zip(prompts, answers(runner, prompts, 100, 5), strict=True):
            expected = seen.expected(prompt)
            got = np.stack([_in_order(part.ids, part.values) for part in row.logprobs])
            assert np.abs(got - np.stack(expected.logprobs)).max() < 2e-3
    assert not no_exact_steps
    assert any(bucket.media for bucket in runner._steps._replay._graphs)
