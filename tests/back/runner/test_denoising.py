"""BEY-40: models that write blocks by diffusion give the tokens of a reference that keeps no KV, through scheduler,
chunks, prefix hits and preemptions."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from safetensors.torch import save_file

from headrace.back.executor.choose import make_executor
from headrace.back.runner import denoising
from headrace.back.runner.denoising import block_shape, decided
from headrace.base.config.denoising import DenoisingSpec
from headrace.base.config.resolved import DeviceSpec, EngineSpec, KVSpec, SchedulerSpec
from headrace.base.wire.request import EngineRequest, Finished, RowSampling, StopRules
from headrace.core.core import EngineCore
from tests.models.oracle import model_spec
from tests.references import block_diffusion as reference
from tests.references.plain import Tensors

LENGTHS = (1, 7, 16, 26)
COUNT = 13


@dataclass(frozen=True)
class Tiny:
    """A tiny random checkpoint and what it is made of."""

    spec: EngineSpec
    config: dict[str, Any]
    weights: Tensors

    def answer(
        self, prompt: list[int], count: int = COUNT, *, steps: int | None = None
    ) -> list[int]:
        form = self.spec.denoising
        assert form is not None
        if form.shifted:
            return reference.generate_shifted(
                lambda row: reference.logits(self.config, self.weights, row, length=form.length),
                prompt,
                count,
                length=form.length,
                part=form.part,
                threshold=form.threshold,
            )
        return reference.generate(
            lambda row: reference.logits(self.config, self.weights, row, length=form.length),
            prompt,
            count,
            length=form.length,
            steps=steps or form.steps,
            threshold=form.threshold,
        )


def tiny(folder: Path, config: dict[str, Any], form: DenoisingSpec, **changes: Any) -> Tiny:
    weights = reference.tensors(config)
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    spec = EngineSpec(
        model=model_spec(folder),
        kv=KVSpec(block_tokens=max(16, form.length), prefix_caching=True, num_blocks=64),
        scheduler=SchedulerSpec(max_step_tokens=24, max_running=4),
        device=DeviceSpec(device="cpu", executor="inline"),
        denoising=form,
    )
    return Tiny(replace(spec, **changes), config, weights)


SDAR = DenoisingSpec(length=4, steps=3, threshold=0.3, mask=reference.MASK, part=4)
FAST_DLLM = DenoisingSpec(
    length=8, steps=8, threshold=0.4, mask=reference.MASK, part=4, shifted=True
)


@pytest.fixture(scope="module")
def sdar(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return tiny(tmp_path_factory.mktemp("sdar"), reference.SDAR, SDAR)


@pytest.fixture
def core(sdar: Tiny) -> Iterator[EngineCore]:
    core = EngineCore(sdar.spec, make_executor(sdar.spec))
    yield core
    core.close()


def prompt_of(number: int, length: int) -> list[int]:
    return [(i * 7 + number * 5) % 95 for i in range(length)]


def request(id: int, prompt: list[int], count: int = COUNT, **sampling: Any) -> EngineRequest:
    return EngineRequest(
        id=id,
        prompt=np.asarray(prompt, "<i4").tobytes(),
        stop=StopRules(max_tokens=count),
        sampling=RowSampling(**{"temperature": 0.0, **sampling}),
    )


def answers(core: EngineCore, *requests: EngineRequest) -> dict[int, list[int]]:
    """All of them; the requests come one a step."""
    found = answers_by_step(core, *requests)
    return {id: [token for step in steps for token in step] for id, steps in found.items()}


def answers_by_step(core: EngineCore, *requests: EngineRequest) -> dict[int, list[list[int]]]:
    waiting, found = list(requests), defaultdict(list)
    while waiting or core.has_work:
        if waiting:
            core.add(waiting.pop(0))
        batch = core.step(wait=True).tokens
        if batch is None:
            continue
        for id in dict.fromkeys(batch.ids.tolist()):
            found[id].append(batch.tokens[batch.ids == id].tolist())
        for finished in batch.finished:
            assert finished.error is None, finished
    return dict(found)


@pytest.mark.parametrize(
    ("config", "form"),
    [
        pytest.param(reference.SDAR, SDAR, id="sdar"),
        pytest.param(reference.FAST_DLLM, FAST_DLLM, id="fast-dllm"),
        pytest.param(
            reference.SDAR_MOE,
            DenoisingSpec(length=8, steps=8, threshold=0.4, mask=reference.MASK, part=8),
            id="experts",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            reference.LLADA_2,
            DenoisingSpec(length=32, steps=9, threshold=1.0, mask=reference.MASK, part=32),
            id="llada2",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_blocks_are_those_of_the_reference(
    config: dict[str, Any], form: DenoisingSpec, tmp_path: Path
) -> None:
    """Prompts that end at a block, in it, and before its end, in chunks, beside each other."""
    made = tiny(tmp_path, config, form)
    core = EngineCore(made.spec, make_executor(made.spec))
    prompts = [prompt_of(i, length) for i, length in enumerate(LENGTHS)]
    found = answers(core, *(request(i, prompt) for i, prompt in enumerate(prompts)))
    core.close()
    assert found == {i: made.answer(prompt) for i, prompt in enumerate(prompts)}


def test_a_block_is_told_as_a_whole(core: EngineCore) -> None:
    """The first token comes with the prompt; the others of its block one step later."""
    found = answers_by_step(core, request(1, prompt_of(1, 6), 11))
    assert [len(step) for step in found[1]] == [1, 1, 4, 4, 1]
    found = answers_by_step(core, request(2, prompt_of(2, 8), 8))
    assert [len(step) for step in found[2]] == [1, 3, 4]


def test_a_cached_prefix_leaves_the_answer_as_it_is(core: EngineCore, sdar: Tiny) -> None:
    prompt = prompt_of(3, 37)
    first = answers(core, request(1, prompt))
    assert core.kv.num_hits == 0
    assert answers(core, request(2, [*prompt, *first[1]], 5))[2] == sdar.answer(
        [*prompt, *first[1]], 5
    )
    assert core.kv.num_hits == 48, "the prompt's two blocks, and one that the answer filled"


def test_preempted_requests_give_the_same_tokens(sdar: Tiny) -> None:
    spec = replace(sdar.spec, kv=replace(sdar.spec.kv, num_blocks=7, prefix_caching=False))
    core = EngineCore(spec, make_executor(spec))
    prompts = [prompt_of(i, 30 + i) for i in range(3)]
    sampling = {"temperature": 0.8, "seed": 7}
    found = answers(core, *(request(i, p, 21, **sampling) for i, p in enumerate(prompts)))
    assert core.scheduler.num_preemptions > 0
    core.close()
    roomy = EngineCore(sdar.spec, make_executor(sdar.spec))
    for i, prompt in enumerate(prompts):
        assert answers(roomy, request(i, prompt, 21, **sampling)) == {i: found[i]}
    roomy.close()


@pytest.mark.slow
def test_a_first_token_of_a_block_follows_from_the_block_before(tmp_path: Path) -> None:
    """Behind prefix hits and preemptions too."""
    made = tiny(tmp_path, reference.FAST_DLLM, FAST_DLLM)
    core = EngineCore(made.spec, make_executor(made.spec))
    prompt = prompt_of(1, 40)
    assert answers(core, request(1, prompt))[1] == made.answer(prompt)
    for length in (32, 33, 40):
        assert answers(core, request(2, prompt[:length]))[2] == made.answer(prompt[:length])
    assert core.kv.num_hits == 16 + 32 + 32
    core.close()
    tight = replace(made.spec.kv, num_blocks=7, prefix_caching=False)
    spec = replace(made.spec, kv=tight)
    core = EngineCore(spec, make_executor(spec))
    prompts = [prompt_of(i, 30 + i) for i in range(3)]
    found = answers(core, *(request(i, p, 21) for i, p in enumerate(prompts)))
    assert core.scheduler.num_preemptions > 0
    core.close()
    assert found == {i: made.answer(p, 21) for i, p in enumerate(prompts)}


def test_a_stop_within_a_block_ends_the_answer_there(core: EngineCore, sdar: Tiny) -> None:
    prompt = prompt_of(5, 8)
    want = sdar.answer(prompt)
    stop = want[6]
    wanted = want[: want.index(stop) + 1]
    core.add(replace(request(1, prompt), stop=StopRules(max_tokens=COUNT, stop_ids=(stop,))))
    got: list[int] = []
    ends: list[Finished] = []
    while core.has_work:
        batch = core.step(wait=True).tokens
        if batch is not None:
            got += batch.tokens.tolist()
            ends += batch.finished
    assert got == wanted
    assert [(end.reason, end.stop_id) for end in ends] == [("stop", stop)]


def test_sampled_tokens_follow_their_seed_alone(core: EngineCore, sdar: Tiny) -> None:
    """Whoever runs beside. Among one token each is sure, so that one pass decides a block; a bias gets what it
    wants."""
    prompt = prompt_of(6, 9)
    random = {"temperature": 1.5, "seed": 3, "top_p": 0.95}
    alone = answers(core, request(1, prompt, **random))[1]
    others = (request(i, prompt_of(i, 5 * i), **random) for i in (2, 3))
    assert answers(core, *others, request(4, prompt, **random))[4] == alone
    assert answers(core, request(5, prompt, **{**random, "seed": 4}))[5] != alone
    assert alone != sdar.answer(prompt)
    at_once = sdar.answer(prompt, steps=1)
    assert answers(core, request(6, prompt, temperature=1.0, top_k=1, seed=9))[6] == at_once
    assert answers(core, request(7, prompt, logit_bias={50: 100.0}))[7] == [50] * COUNT


def test_logits_of_few_masks_at_a_time_give_the_same_tokens(
    core: EngineCore, sdar: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(denoising, "MASKS", 3)
    prompt = prompt_of(9, 6)
    assert answers(core, request(1, prompt, 6))[1] == sdar.answer(prompt, 6)


@pytest.mark.slow
def test_ranks_that_share_a_model_write_what_one_writes(sdar: Tiny) -> None:
    device = replace(sdar.spec.device, executor="processes", tensor_parallel=2)
    spec = replace(sdar.spec, device=device)
    core = EngineCore(spec, make_executor(spec))
    prompt = prompt_of(4, 18)
    assert answers(core, request(1, prompt)) == {1: sdar.answer(prompt)}
    core.close()


def test_a_pass_decides_its_share_or_all_that_is_sure() -> None:
    confidence = np.array([[0.9, -np.inf, 0.2, 0.8], [0.1, 0.3, 0.2, 0.4], [-np.inf] * 3 + [0.1]])
    is_open = confidence > -np.inf

    def places(share: int, threshold: float) -> list[list[int]]:
        found = decided(confidence, is_open, share_K=np.full(3, share), threshold=threshold)
        return [np.flatnonzero(row).tolist() for row in found]

    assert places(1, 0.7) == [[0, 3], [3], [3]], "more than its share"
    assert places(1, 1.0) == [[0], [3], [3]], "the share alone"
    assert places(2, 0.85) == [[0, 3], [1, 3], [3]], "no more than is open"
    form = DenoisingSpec(length=8, steps=3, threshold=1.0, mask=0, part=8)
    shares = [form.shares(turn, np.array([8]))[0] for turn in range(3)]
    assert shares == [3, 3, 2]


def test_blocks_are_rows_that_end_with_themselves() -> None:
    shape = block_shape(np.array([2, 2, 0]), np.array([0, 4, 8]), 4)
    assert shape.row_T.tolist() == [2] * 8 + [0] * 4
    assert shape.position_T.tolist() == [*range(8), 8, 9, 10, 11]
    assert shape.kv_len.tolist() == [4, 8, 12] and shape.query_start.tolist() == [0, 4, 8, 12]


def test_what_was_told_stays_though_rounding_says_otherwise(core: EngineCore, sdar: Tiny) -> None:
    """A request that is put back behind the first token of a block: had that been another one, it stays."""
    prompt = prompt_of(8, 6)
    wanted = sdar.answer(prompt)
    core.add(request(1, prompt))
    first = core.step(wait=True).tokens or core.step(wait=True).tokens
    assert first is not None and first.tokens.tolist() == wanted[:1]
    core.put_back_all("for the test")
    put_back = next(iter(core.requests))
    other = (wanted[0] + 1) % 95
    put_back.output[:] = np.array([other], "<i4").tobytes()
    rest: list[int] = []
    while core.has_work:
        batch = core.step(wait=True).tokens
        rest += [] if batch is None else batch.tokens.tolist()
    assert len(rest) == COUNT - 1 and core.kv.num_hits == 0
    behind = [*prompt, other, rest[0]]
    assert rest[1:5] == sdar.answer(behind, 4), "the next block was written behind the token told"
