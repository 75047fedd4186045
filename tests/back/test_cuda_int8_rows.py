"""Checkpoints that ask for int8 activations, on CUDA: prompts are multiplied int8 by int8, and scores stay near those
of the CPU, which multiplies them so too. QNT-01, QNT-17."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from headrace.back.executor.inline import InlineExecutor
from headrace.launch.quantize import quantize_checkpoint
from tests.back.driver import Sequence
from tests.back.test_cuda import GREEDY, MODEL, bundled_spec, forced, generate
from tests.back.test_cuda_int4 import MOST, distance, few_rows
from tests.models.oracle import model_spec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]
INPUTS = {"num_bits": 8, "type": "int", "strategy": "token", "symmetric": True, "dynamic": True}


@pytest.mark.parametrize(
    "scheme, first", [("int8", 65), ("int8-g128", 65), ("int4-g128", 257)], ids=str
)
def test_scores_stay_near_those_of_the_cpu(scheme: str, first: int, tmp_path: Path) -> None:
    assert bundled_spec("cuda", "bfloat16").model.path == str(MODEL)
    folder = tmp_path / "out"
    quantize_checkpoint(model_spec(MODEL), folder, scheme)
    file = folder / "config.json"
    config = json.loads(file.read_text())
    config["quantization_config"]["config_groups"]["group_0"]["input_activations"] = INPUTS
    file.write_text(json.dumps(config))
    cpu = InlineExecutor(few_rows(folder, "cpu", "float32"))
    texts: list[Sequence] = generate(cpu, GREEDY, chunk=512)
    cuda = InlineExecutor(few_rows(folder, "cuda", "bfloat16"))
    asked = [one for one in cuda.facts.decisions if one[0] == "activations"]
    assert [one[2] for one in asked] == [
        f"int8, a scale for a token, from {first} tokens of a step on"
    ]
    for ours, theirs in zip(forced(cuda, texts), forced(cpu, texts), strict=True):
        print(f"{scheme}: {distance(ours[0], theirs[0]):.4f}")
        assert distance(ours[0], theirs[0]) < MOST
    cuda.close()
    cpu.close()
