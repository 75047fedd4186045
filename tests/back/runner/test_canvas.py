"""BEY-40: diffusion language models whose tokens all see each other give the tokens of the published samplers, through
the scheduler, beside each other, and after they were put back."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import save_file

from headrace.back.executor.choose import make_executor
from headrace.back.runner.canvas import counted, parts_of, whole_shape
from headrace.base.config.denoising import DenoisingSpec
from headrace.base.config.resolved import DeviceSpec, EngineSpec, KVSpec, SchedulerSpec
from headrace.base.wire.request import EngineRequest, RowSampling, StopRules
from headrace.core.core import EngineCore
from tests.models.oracle import load_ours, model_spec
from tests.models.test_encoders import batch_of
from tests.references import canvas_diffusion as reference

LLADA = DenoisingSpec(length=4, steps=3, threshold=1.0, mask=reference.MASK, part=4, canvas=8)
DREAM = DenoisingSpec(
    length=24,
    steps=9,
    threshold=1.0,
    mask=reference.MASK,
    part=24,
    shifted=True,
    canvas=24,
    order="entropy",
    timed=True,
)


def core_of(folder: Path, config: dict[str, Any], form: DenoisingSpec, **device: Any) -> EngineCore:
    weights = reference.published(config, reference.tensors(config))
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    spec = EngineSpec(
        model=model_spec(folder),
        kv=KVSpec(block_tokens=16, prefix_caching=False, num_blocks=1),
        scheduler=SchedulerSpec(max_step_tokens=64, max_running=4, chunked=False),
        device=DeviceSpec(**{"device": "cpu", "executor": "inline", **device}),
        denoising=form,
    )
    return EngineCore(spec, make_executor(spec))


@pytest.fixture
def llada(tmp_path: Path) -> Iterator[EngineCore]:
    core = core_of(tmp_path, reference.LLADA, LLADA)
    yield core
    core.close()


def prompt_of(number: int, length: int) -> list[int]:
    return [(i * 7 + number * 5) % 95 for i in range(length)]


def request(id: int, prompt: list[int], count: int, **sampling: Any) -> EngineRequest:
    return EngineRequest(
        id=id,
        prompt=np.asarray(prompt, "<i4").tobytes(),
        stop=StopRules(max_tokens=count),
        sampling=RowSampling(**{"temperature": 0.0, **sampling}),
    )


def answers(core: EngineCore, *requests: EngineRequest) -> dict[int, list[int]]:
    """All of them; the requests come one a step."""
    waiting, found = list(requests), defaultdict(list)
    while waiting or core.has_work:
        if waiting:
            core.add(waiting.pop(0))
        batch = core.step(wait=True).tokens
        if batch is not None:
            for id in dict.fromkeys(batch.ids.tolist()):
                found[id] += batch.tokens[batch.ids == id].tolist()
            assert all(finished.error is None for finished in batch.finished), batch.finished
    return dict(found)


def written(
    config: dict[str, Any], form: DenoisingSpec, prompt: list[int], count: int
) -> list[int]:
    """A canvas behind the other."""
    weights, text = reference.tensors(config), list(prompt)

    def logits_of(row: list[int]) -> torch.Tensor:
        return reference.logits(config, weights, row)

    while len(text) < len(prompt) + count:
        masks = min(form.canvas, len(prompt) + count - len(text))
        if form.timed:
            text += reference.generate_timed(
                logits_of, text, masks, steps=form.steps, order=form.order
            )
        else:
            text += reference.generate(
                logits_of,
                text,
                masks,
                length=form.length,
                steps=form.steps,
                threshold=form.threshold,
            )
    return text[len(prompt) :]


@pytest.mark.parametrize(
    ("config", "form"),
    [
        pytest.param(reference.LLADA, LLADA, id="llada"),
        pytest.param(reference.DREAM, DREAM, id="dream"),
        pytest.param(
            reference.DREAM,
            replace(DREAM, order="margin", steps=24),
            id="margin",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            reference.LLADA_MOE,
            replace(LLADA, threshold=0.3, canvas=32),
            id="experts",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_answers_are_those_of_the_published_samplers(
    config: dict[str, Any], form: DenoisingSpec, tmp_path: Path
) -> None:
    """Beside each other; a full canvas, part of one, several."""
    core = core_of(tmp_path, config, form)
    asked = [(prompt_of(i, n), count) for i, (n, count) in enumerate(((1, 24), (7, 13), (26, 6)))]
    found = answers(core, *(request(i, *one) for i, one in enumerate(asked)))
    core.close()
    assert found == {i: written(config, form, *one) for i, one in enumerate(asked)}


@pytest.mark.parametrize(
    "config", [reference.LLADA, reference.DREAM, reference.LLADA_MOE], ids=lambda c: c["model_type"]
)
def test_logits_are_those_of_the_reference(config: dict[str, Any], tmp_path: Path) -> None:
    weights = reference.tensors(config)
    save_file(reference.published(config, weights), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = load_ours(model_spec(tmp_path))
    rows = [prompt_of(1, 9), prompt_of(2, 4)]
    ours = model.logits(model.forward(batch_of(rows)))
    theirs = torch.cat([reference.logits(config, weights, row) for row in rows])
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


def test_a_request_that_is_put_back_goes_on_with_what_was_told(llada: EngineCore) -> None:
    prompt = prompt_of(3, 5)
    llada.add(request(1, prompt, 13))
    found: list[int] = []
    puts_back = [1, 5]
    while llada.has_work:
        batch = llada.step(wait=True).tokens
        found += [] if batch is None else batch.tokens.tolist()
        if puts_back and len(found) >= puts_back[0]:
            puts_back.pop(0)
            llada.put_back_all("for the test")
    assert not puts_back and found == written(reference.LLADA, LLADA, prompt, 13)


def test_sampled_tokens_follow_their_seed_alone(llada: EngineCore) -> None:
    prompt = prompt_of(6, 9)
    random = {"temperature": 1.5, "seed": 3, "top_p": 0.95}
    alone = answers(llada, request(1, prompt, 9, **random))[1]
    others = (request(i, prompt_of(i, 5 * i), 9, **random) for i in (2, 3))
    assert answers(llada, *others, request(4, prompt, 9, **random))[4] == alone
    assert answers(llada, request(5, prompt, 9, **{**random, "seed": 4}))[5] != alone
    assert answers(llada, request(7, prompt, 9, logit_bias={50: 100.0}))[7] == [50] * 9


@pytest.mark.slow
def test_ranks_that_share_a_model_write_what_one_writes(tmp_path: Path) -> None:
    core = core_of(tmp_path, reference.DREAM, DREAM, executor="processes", tensor_parallel=2)
    prompt = prompt_of(4, 18)
    found = answers(core, request(1, prompt, 20))
    core.close()
    assert found == {1: written(reference.DREAM, DREAM, prompt, 20)}


def test_dreams_times_decide_a_share_of_what_is_open() -> None:
    form = replace(DREAM, length=512, part=512, canvas=512, steps=512)
    left, shares = 512, []
    for turn in range(512):
        shares.append(int(form.shares(turn, np.array([left]))[0]))
        left -= shares[-1]
    assert left == 0 and shares[:2] == [0, 1] and max(shares) <= 2


def test_rows_are_parted_by_their_tokens() -> None:
    assert list(parts_of(np.array([5, 5, 9, 20, 1]), 12)) == [
        slice(0, 2),
        slice(2, 3),
        slice(3, 4),
        slice(4, 5),
    ]
    assert counted(np.array([3, 8]), np.array([2, 3])).tolist() == [3, 4, 8, 9, 10]
    shape = whole_shape(np.array([2, 0]), np.array([3, 2]))
    assert shape.position_T.tolist() == [0, 1, 2, 0, 1] and shape.query_start.tolist() == [0, 3, 5]
