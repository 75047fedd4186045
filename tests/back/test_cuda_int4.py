"""Whole steps with weights of 4-bit integers on CUDA, against the CPU in float32 with the same weights (`make
test-gpu`): stored ones and those made while loading, chunks and replayed decodes. QNT-01."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file

from headrace.back.executor.inline import InlineExecutor
from headrace.back.kernels.linear_int4.layout import dequantize
from headrace.back.quant.gpu_int4 import INT4_SCHEMES, quantize_int4
from headrace.base.config.resolved import EngineSpec
from tests.back.driver import Sequence
from tests.back.quant.test_gpu_int4 import FORMATS
from tests.back.test_cuda import (
    GREEDY,
    MODEL,
    NUM_OUTPUT,
    forced,
    generate,
    prompts,
    spec_of,
    stored_beside_plain,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]
SIZES = {"gptq": 128, "gptq-asym": 32, "gptq-order": 128, "awq": 32, "compressed": 128}
"""Groups of the stored formats: those of the schemes, whose kernels are compiled once for all."""
MOST = 0.15
"""Mean distance of log-probabilities: bfloat16 alone is allowed 0.1 (test_cuda.py), and weights are rounded to it."""


def folders(folder: Path, format: str) -> tuple[Path, Path]:
    """The bundled model as it is stored in a format (a scheme: as it is), and its weights as floats."""
    stored: dict[str, torch.Tensor] = {}
    plain: dict[str, torch.Tensor] = {}
    config = json.loads((MODEL / "config.json").read_text())
    quantization: dict[str, object] = {}
    for name, weight in load_file(MODEL / "model.safetensors").items():
        stored[name] = plain[name] = weight
        if ".layers." not in name or weight.dim() != 2:
            continue
        if format in INT4_SCHEMES:
            plain[name] = dequantize(quantize_int4(weight, INT4_SCHEMES[format]), torch.float32)
            continue
        quantize, symmetric, _, told, _ = FORMATS[format]
        sized = re.sub(r'("group_size": )\d+', rf"\g<1>{SIZES[format]}", json.dumps(told))
        quantization = json.loads(sized)
        weight = stored.pop(name).float()
        members, plain[name] = quantize(weight, SIZES[format], symmetric=symmetric)
        stored |= {name.removesuffix("weight") + leaf: one for leaf, one in members.items()}
    if quantization:
        config["quantization_config"] = quantization
    return stored_beside_plain(folder, config, stored, plain)


def few_rows(folder: Path, device: str, dtype: str, quantization: str | None = None) -> EngineSpec:
    """One step takes all forced tokens; few sizes of steps, each with kernels to compile."""
    spec = spec_of(folder, device, dtype, quantization)
    return replace(spec, scheduler=replace(spec.scheduler, max_running=len(prompts())))


def distance(scores: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(scores - expected).mean())


@pytest.mark.parametrize("format", [*FORMATS, "int4-g128", "int4-asym"])
def test_scores_stay_near_those_of_the_same_weights(format: str, tmp_path: Path) -> None:
    stored, plain = folders(tmp_path, format)
    exact = InlineExecutor(few_rows(plain, "cpu", "float32"))
    texts: list[Sequence] = generate(exact, GREEDY, chunk=256)
    online = format if format in INT4_SCHEMES else None
    executor = InlineExecutor(few_rows(stored, "cuda", "bfloat16", online))
    kernels = {one[0]: one[2] for one in executor.facts.decisions}
    assert kernels["kernel.linear_int4"] == "triton", executor.facts.decisions
    for ours, theirs in zip(forced(executor, texts), forced(exact, texts), strict=True):
        print(f"{format}, prompts: {distance(ours[0], theirs[0]):.4f}")
        assert distance(ours[0], theirs[0]) < MOST
    first, *later = (generate(executor, GREEDY, chunk=6) for _ in range(3))
    for row, (given, _) in zip(first, forced(exact, first), strict=True):
        scores = np.array([one.values[0] for one in row.logprobs])
        print(f"{format}, decodes: {distance(scores, given[-NUM_OUTPUT:]):.4f}")
        assert distance(scores, given[-NUM_OUTPUT:]) < MOST
    for again in later:  # launched, recorded, replayed
        assert [row.outputs for row in again] == [row.outputs for row in first]
    executor.close()
    exact.close()
