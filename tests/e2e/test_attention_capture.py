"""Attention weights as requests are told them: transformers' own, whatever the schedule (API-21)."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from headrace.back.executor.inline import InlineExecutor
from headrace.base.config.resolved import DeviceSpec, EngineSpec, KVSpec, SchedulerSpec
from headrace.base.wire.request import Captured, EngineRequest, RowSampling, StopRules
from headrace.core.core import EngineCore
from tests.models.oracle import model_spec, save_oracle
from tests.models.test_parity import tiny_config

CASES = (
    "llama",
    "mistral-window",
    "qwen3",
    "gemma2",
    "gemma3",
    "granite",
    "olmo2",
    "smollm3-window",
)
LAYERS = (0, 2)


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_gpu])]


def engine_spec(folder: Path, *, device: str = "cpu", **scheduler: Any) -> EngineSpec:
    """Chunks of 16 tokens, prefix caching, room for three requests of the tests."""
    model = msgspec.structs.replace(model_spec(folder), attention_capture=True)
    settings: dict[str, Any] = {"max_step_tokens": 16, "max_running": 4, **scheduler}
    return EngineSpec(
        model=model,
        kv=KVSpec(block_tokens=16, prefix_caching=True, num_blocks=64),
        scheduler=SchedulerSpec(**settings),
        device=DeviceSpec(device=device, executor="inline", threads=1),
    )


def request(id: int, prompt: list[int], layers: tuple[int, ...], **stop: Any) -> EngineRequest:
    return EngineRequest(
        id=id,
        prompt=np.asarray(prompt, "<i4").tobytes(),
        stop=StopRules(**{"max_tokens": 9, **stop}),
        sampling=RowSampling(temperature=0.0, capture_layers=layers),
    )


class Told:
    """What a core said of each request."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = defaultdict(list)
        self.pieces: dict[int, list[Captured]] = defaultdict(list)
        self.ends: dict[int, Any] = {}

    def run(self, core: EngineCore) -> None:
        while core.has_work:
            batch = core.step(wait=True).tokens
            if batch is None:
                continue
            for id, token in zip(batch.ids.tolist(), batch.tokens.tolist(), strict=True):
                self.tokens[id].append(token)
            for id, piece in batch.captured:
                self.pieces[id].append(piece)
            self.ends |= {end.id: end for end in batch.finished}

    def whole(self, id: int, layer: int, size: int) -> torch.Tensor:
        """Every query's weights, [T, H, T]; NaN where nothing was told."""
        pieces = [piece for piece in self.pieces[id] if piece.layer == layer]
        found = np.full((size, pieces[0].values.shape[1], size), np.nan, np.float32)
        for piece in pieces:
            stop = piece.start + len(piece.values)
            found[piece.start : stop] = 0
            found[piece.start : stop, :, : piece.values.shape[2]] = piece.values
        return torch.from_numpy(found)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("device", DEVICES)
def test_weights_are_those_of_transformers_with_chunks_and_cached_prefixes(
    device: str, case: str, tmp_path: Path
) -> None:
    """On a GPU too, where the other rows' steps are replayed and the captured ones are not."""
    oracle = save_oracle(tiny_config(case), tmp_path)
    executor = InlineExecutor(engine_spec(tmp_path, device=device))
    core = EngineCore(engine_spec(tmp_path, device=device), executor)
    random = np.random.default_rng(5)
    prompts = [random.integers(0, 97, size).tolist() for size in (41, 7)]
    told = Told()
    core.add(request(1, prompts[0], ()))
    told.run(core)  # its blocks are in the prefix cache now
    core.add(request(2, prompts[0], LAYERS))
    core.add(request(3, prompts[1], (1,)))
    core.add(request(4, prompts[0], ()))
    told.run(core)
    assert told.tokens[1] == told.tokens[2] == told.tokens[4]
    assert told.ends[4].num_cached > 0 and told.ends[2].num_cached == 0
    assert not told.pieces[1] and not told.pieces[4]
    for id, prompt, layers in ((2, prompts[0], LAYERS), (3, prompts[1], (1,))):
        assert {piece.layer for piece in told.pieces[id]} == set(layers)
        row = [*prompt, *told.tokens[id][:-1]]
        with torch.inference_mode():
            theirs = oracle(torch.tensor([row]), output_attentions=True).attentions
        for layer in layers:
            ours = told.whole(id, layer, len(row))
            wanted = theirs[layer][0].transpose(0, 1)
            assert (ours - wanted).abs().max() <= 1e-4, (id, layer)
            assert (ours.sum(-1) - 1).abs().max() <= 1e-5
    core.close()


@pytest.mark.parametrize("device", DEVICES)
def test_a_preempted_request_tells_every_position(device: str, tmp_path: Path) -> None:
    oracle = save_oracle(tiny_config("llama"), tmp_path)
    spec = engine_spec(tmp_path, device=device)
    spec = msgspec.structs.replace(
        spec, kv=msgspec.structs.replace(spec.kv, num_blocks=7, block_tokens=8)
    )
    core = EngineCore(spec, InlineExecutor(spec))
    told = Told()
    prompts = {id: [3 * id + i for i in range(14)] for id in (1, 2)}
    for id, prompt in prompts.items():
        core.add(request(id, prompt, (1,), max_tokens=14))
    told.run(core)
    assert sum(end.num_preemptions for end in told.ends.values()) > 0
    for id, prompt in prompts.items():
        row = [*prompt, *told.tokens[id][:-1]]
        with torch.inference_mode():
            theirs = oracle(torch.tensor([row]), output_attentions=True).attentions[1]
        ours = told.whole(id, 1, len(row))
        assert (ours - theirs[0].transpose(0, 1)).abs().max() <= 1e-4
    core.close()


@pytest.mark.parametrize(
    ("layers", "max_tokens", "capture", "words"),
    [
        ((3,), 9, True, "attn_capture_layers is 3, allowed is 0 .. 2"),
        ((0,), 9, False, "--attention-capture"),
    ],
)
def test_what_cannot_be_told_is_refused_before_any_work(
    tmp_path: Path, layers: tuple[int, ...], max_tokens: int, capture: bool, words: str
) -> None:
    save_oracle(tiny_config("llama"), tmp_path)
    spec = engine_spec(tmp_path)
    model = msgspec.structs.replace(spec.model, attention_capture=capture)
    spec = msgspec.structs.replace(spec, model=model)
    core = EngineCore(spec, InlineExecutor(spec))
    told = Told()
    core.add(request(1, [1, 2, 3], layers, max_tokens=max_tokens))
    told.run(core)
    error = told.ends[1].error
    assert error.kind == "InvalidRequest" and words in error.message, error
    assert core.counters.steps == 0
    core.close()


def test_the_bound_of_what_is_told_names_the_numbers() -> None:
    from headrace.base.errors import InvalidRequest
    from headrace.base.wire.step import KVGroup, WorkerFacts
    from headrace.core.admission import check_request
    from headrace.core.kv.manager import KVManager

    facts = WorkerFacts(
        num_blocks=4096, block_tokens=16, groups=(KVGroup(kind="full", caches=(0,)),),
        logits_width=97, max_rows=4, max_model_len=32768, capture_layers=28, capture_heads=16,
    )  # fmt: skip
    kv = KVManager(facts, prefix_caching=True, chunk_tokens=64)
    check_request(request(1, [1] * 500, (0, 5), max_tokens=200), facts, kv)
    with pytest.raises(InvalidRequest, match="2 layers of 16 heads over up to 8500 tokens") as told:
        check_request(request(1, [1] * 500, (0, 5), max_tokens=8000), facts, kv)
    assert told.value.field == "attn_capture" and "at most 64 MiB" in told.value.message
