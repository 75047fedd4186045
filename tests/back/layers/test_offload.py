"""Weights in host memory: the logits are those of transformers, and the device holds no more than it was said to.

Here the device is the CPU, whose own memory is cut in two: what is read lies in slots that all offloaded layers
share, so that a layer which runs before its weights have come, or after others have, gives other logits.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from msgspec.structs import replace

from headrace.back.executor.inline import InlineExecutor
from headrace.back.kernels.native.library import load
from headrace.back.kernels.op import KernelChoice, Op
from headrace.back.layers.offload import Offload
from headrace.back.layers.reachable import tensors_of
from headrace.back.models.blocks import Decoder
from headrace.back.models.load import load_model
from headrace.back.models.load.offloaded import OffloadChoice, _choice, choose_offload
from headrace.back.models.registry import build_model
from headrace.back.models.streamed_layer import StreamedLayer
from headrace.back.parallel.mesh import Mesh
from headrace.base.config.resolved import (
    DeviceSpec,
    EngineSpec,
    KVSpec,
    ModelSpec,
    OffloadSpec,
    SchedulerSpec,
)
from headrace.base.errors import ConfigError
from tests.back.driver import Sequence
from tests.back.test_cuda import GREEDY, allocated, forced, generate
from tests.models.oracle import BLOCK_TOKENS, model_spec, oracle_logits, save_oracle
from tests.models.paged import random_rows, teacher_forced
from tests.models.test_parity import CASES as FAMILIES
from tests.models.test_parity import SIZES, compare

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def plain_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Native kernels note addresses when they are bound; those of a GPU are given tensors, as PyTorch is. What is
    chosen here is remembered by nobody, and what was chosen before is not asked."""

    def choose(
        self: Op[Any], problem: Any, *, invariant: bool = False, **_: bool
    ) -> KernelChoice[Any]:
        return self._decide(problem, invariant=invariant)

    monkeypatch.setattr(Op, "choose", choose)
    monkeypatch.setenv("HEADRACE_NATIVE", "0")
    load.cache_clear()
    yield
    load.cache_clear()


def loaded(spec: ModelSpec) -> Decoder:
    model, report = load_model(spec, mesh=Mesh(), device=CPU, block_tokens=BLOCK_TOKENS)
    assert isinstance(model, Decoder) and report.origin is None
    return model


def offload_of(model: Decoder) -> Offload:
    streamed = next(layer for layer in model._layers if isinstance(layer, StreamedLayer))
    return streamed._offload


def device_bytes(model: Decoder) -> int:
    """Of all memory that the model holds, but what counts as the host's."""
    hosts = [part.host for part in offload_of(model).parts.values()]
    outside = {host.untyped_storage().data_ptr() for host in hosts}
    sizes = {}
    for tensor in tensors_of(model):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in outside:
            sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


LENGTHS = (9, 5, 23)
SIX = {"num_hidden_layers": 6}
CASES: dict[str, tuple[str, dict[str, Any], str, int]] = {
    "layers": ("qwen3", SIX, "layers", 4),
    "shared-experts": ("deepseek-v3", SIX, "experts", 3),
    "shared-block": ("zamba2", {}, "layers", 3),
}
MORE: dict[str, tuple[str, dict[str, Any], str, int]] = {
    "every-layer": ("qwen3", SIX, "layers", 6),
    "latent": ("deepseek-v3", SIX, "layers", 3),
    "experts": ("qwen3-moe", SIX, "experts", 4),
    "state": ("qwen3-next", {}, "layers", 3),
    "tails": ("gemma3n", {}, "layers", 3),
}


@pytest.mark.parametrize("name", [*CASES, *(pytest.param(n, marks=pytest.mark.slow) for n in MORE)])
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """Over steps of many tokens and of one, of which routed experts are read in place."""
    case, changes, what, count = (CASES | MORE)[name]
    family, given = FAMILIES[case]
    config = getattr(transformers, f"{family}Config")(**(SIZES | given | changes))
    oracle = save_oracle(config, tmp_path)
    spec = replace(model_spec(tmp_path), offload=OffloadSpec(what=what, count=count))
    model = loaded(spec)
    offload = offload_of(model)
    assert len(offload.parts) == count and offload.stream is not None
    stream, in_place = offload.stream, list[bool]()
    begin = stream.begin

    def noted(tokens: int) -> None:
        begin(tokens)
        in_place.append(stream._in_place)

    stream.begin = noted
    rows = random_rows(SIZES["vocab_size"], LENGTHS)
    got = teacher_forced(model, rows, block_tokens=BLOCK_TOKENS, dtype=torch.float32)
    compare(got, oracle_logits(oracle, rows), 1e-4)
    assert any(in_place) == (what == "experts") and not all(in_place)
    choice = choice_of(spec, OffloadSpec(what=what, count=count))
    slots = stream.slot_bytes
    assert slots < sum(part.num_bytes for part in offload.parts.values())
    tables = 150_000  # rotary ones, and copies of small weights in float32
    assert device_bytes(model) < choice.device_bytes + slots + tables


def choice_of(spec: ModelSpec, offload: OffloadSpec) -> OffloadChoice:
    plain = build_model(spec, mesh=Mesh(), device=torch.device("meta"), block_tokens=BLOCK_TOKENS)
    return choose_offload(plain.weights, offload, family=spec.family)


def test_refusals_name_the_numbers(tmp_path: Path) -> None:
    family, given = FAMILIES["qwen3-moe"]
    config = getattr(transformers, f"{family}Config")(**(SIZES | given | SIX))
    config.architectures = ["Qwen3MoeForCausalLM"]
    config.save_pretrained(tmp_path)
    spec = replace(model_spec(tmp_path), format="dummy")
    for what, most in (("layers", 6), ("experts", 5)):
        for count in (1, 2, most + 1):
            with pytest.raises(ConfigError, match=f"--offload-{what} {count}: from 3 .* {most} "):
                choice_of(spec, OffloadSpec(what=what, count=count))
    whole = choice_of(spec, OffloadSpec(what="layers", room_bytes=1 << 40))
    assert whole.layers == () and whole.decision("auto", 6).chosen == "none"
    room = whole.held_bytes * 3 // 4
    fewer = choice_of(spec, OffloadSpec(what="layers", room_bytes=room))
    assert fewer.held_bytes <= room < whole.held_bytes and 3 <= len(fewer.layers) < 6
    with pytest.raises(ConfigError, match="even with all 6 in host memory"):
        choice_of(spec, OffloadSpec(what="layers", room_bytes=1000))


def test_layers_are_spread_over_the_model() -> None:
    sizes = dict.fromkeys(range(8), 100)
    assert _choice(sizes, 4, 1000, experts=False).layers == (1, 3, 5, 7)
    assert _choice(sizes, 8, 1000, experts=False).layers == tuple(range(8))
    three = _choice(sizes, 3, 1000, experts=False)
    assert (three.device_bytes, three.slot_bytes, three.host_bytes) == (700, 200, 300)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("what", ["layers", "experts"])
@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_a_gpu_says_the_same_and_holds_less(what: str, quantization: str | None) -> None:
    """Dummy weights of 1.1 GB, of which half lie in host memory; recorded steps, with tokens that are fed back. What
    is quantized in host memory has the bits that the device gives it."""
    config = {
        **{"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]},
        **{"hidden_size": 1024, "intermediate_size": 2048, "moe_intermediate_size": 512},
        **{"num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 2},
        **{"head_dim": 128, "num_experts": 32, "num_experts_per_tok": 4, "vocab_size": 4096},
        **{"norm_topk_prob": True, "max_position_embeddings": 512},
    }
    plain = ModelSpec(
        path="dummy", name="offload", format="dummy", family="qwen3_moe", dtype="bfloat16",
        max_model_len=512, logits_width=4096, eos_ids=(), config=config, quantization=quantization,
    )  # fmt: skip
    held: list[int] = []
    tokens: list[list[list[int]]] = []
    scores: list[list[np.ndarray]] = []
    texts: list[Sequence] = []
    for offload in (None, OffloadSpec(what=what, count=6)):
        torch.cuda.empty_cache()
        before = allocated()
        executor = InlineExecutor(engine(replace(plain, offload=offload)))
        held.append(allocated() - before)
        rows = generate(executor, GREEDY, chunk=300)
        texts = texts or rows
        scores.append([one[0] for one in forced(executor, texts)])
        tokens.append([row.outputs for row in rows])
        tokens[-1] += [row.outputs for row in generate(executor, GREEDY, chunk=300)]
        executor.close()
        del executor
        gc.collect()
    distance = float(np.mean([np.abs(a - b).mean() for a, b in zip(*scores, strict=True)]))
    assert distance < 1e-6, distance
    sizes = choice_of(plain, OffloadSpec(what=what, count=6))
    saved = sizes.host_bytes - sizes.slot_bytes
    assert tokens[0] == tokens[1]
    if quantization is None:
        assert held[0] - held[1] > 0.9 * saved, (held, sizes)


def engine(model: ModelSpec) -> EngineSpec:
    return EngineSpec(
        model=model,
        kv=KVSpec(block_tokens=16, prefix_caching=False, num_blocks=128),
        scheduler=SchedulerSpec(max_step_tokens=512, max_running=10),
        device=DeviceSpec(device="cuda", executor="inline", memory_bytes=40 << 30),
    )
