"""Whole steps with quantized experts on CUDA, against the CPU in float32 with the same weights (`make test-gpu`): few
tokens and many. Every token takes all experts, so that rounding sends none elsewhere. QNT-09, KRN-17."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from headrace.back.executor.inline import InlineExecutor
from headrace.back.models.load import load_model
from headrace.back.parallel.mesh import Mesh
from headrace.base.config.resolved import (
    DeviceSpec,
    EngineSpec,
    KVSpec,
    ModelSpec,
    SchedulerSpec,
)
from tests.back.quant.test_gpu_experts import CHECKPOINTS, moe_folder
from tests.back.test_cuda import forced
from tests.models.oracle import model_spec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]
MOST = 0.3
"""Mean distance of log-probabilities: bfloat16, and tokens as e4m3 numbers (test_cuda_fp8.py)."""


def spec_of(folder: Path, device: str, dtype: str) -> EngineSpec:
    model = model_spec(folder, dtype=dtype)
    config = json.loads((folder / "config.json").read_text())
    return EngineSpec(
        model=replace(model, config=config),
        kv=KVSpec(block_tokens=16, prefix_caching=False, num_blocks=64),
        scheduler=SchedulerSpec(max_step_tokens=256, max_running=4),
        device=DeviceSpec(device=device, executor="inline", threads=1),
    )


@pytest.mark.parametrize("format", CHECKPOINTS)
def test_scores_stay_near_those_of_the_same_weights(format: str, tmp_path: Path) -> None:
    stored, plain = tmp_path / "stored", tmp_path / "plain"
    oracle = moe_folder(stored, format, chosen=4)
    oracle.save_pretrained(plain)
    exact = InlineExecutor(spec_of(plain, "cpu", "float32"))
    executor = InlineExecutor(spec_of(stored, "cuda", "bfloat16"))
    kernels = {one[0]: one[2] for one in executor.facts.decisions}
    assert kernels[f"kernel.{CHECKPOINTS[format][2]}"] == "triton", executor.facts.decisions
    vocabulary = json.loads((plain / "config.json").read_text())["vocab_size"]
    rng = random.Random(3)
    for sizes in ((2,), (5, 9), (30, 40, 50)):
        texts = [
            SimpleNamespace(tokens=[rng.randrange(3, vocabulary) for _ in range(size)])
            for size in sizes
        ]
        for ours, theirs in zip(forced(executor, texts), forced(exact, texts), strict=True):
            distance = float(np.abs(ours[0] - theirs[0]).mean())
            print(f"{format}, {sizes}: {distance:.4f}")
            assert distance < MOST
    executor.close()
    exact.close()


@pytest.mark.parametrize(
    "scheme", ["fp8", "int4-g128", "int8", "mxfp4", "mxfp8", "fp8-block", "nvfp4"]
)
def test_quantizing_while_loading_peaks_near_the_final_size(scheme: str) -> None:
    """Of a mixture with dummy weights: what is left, and a layer or two of floats. QNT-09."""
    config = {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 1024,
        "hidden_size": 1024, "intermediate_size": 2048, "moe_intermediate_size": 512,
        "num_hidden_layers": 16, "num_attention_heads": 16, "num_key_value_heads": 4,
        "head_dim": 64, "num_experts": 16, "num_experts_per_tok": 4, "mlp_only_layers": [],
        "decoder_sparse_step": 1, "norm_topk_prob": True, "rms_norm_eps": 1e-6,
        "max_position_embeddings": 512, "rope_theta": 10000.0, "tie_word_embeddings": False,
        "hidden_act": "silu", "attention_bias": False,
    }  # fmt: skip
    spec = ModelSpec(
        path="", name="m", format="dummy", family="qwen3_moe", dtype="bfloat16", max_model_len=128,
        logits_width=1024, eos_ids=(), config=config, quantization=scheme,
    )  # fmt: skip
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model, report = load_model(spec, mesh=Mesh(), device=torch.device("cuda"), block_tokens=16)
    layer = 2 * 3 * 16 * 1024 * 512
    peak = torch.cuda.max_memory_allocated() - before
    print(scheme, peak, report.weight_bytes)
    # quantizing makes float32 copies of some rows
    assert peak < report.weight_bytes + 3 * layer + (64 << 20), (peak, report.weight_bytes)
    del model
