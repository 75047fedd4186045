"""Mixtures whose experts are quantized while they load: the logits of the same mixture with the weights that
the numbers stand for; recorded steps; sizes and memory (QNT-09, REG-058, PLT-09)."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from headrace.back.executor.inline import InlineExecutor
from headrace.back.models.families import architecture_of
from headrace.back.models.load import load_model
from headrace.back.parallel.mesh import Mesh
from headrace.back.platforms.detect import FAKES
from headrace.back.quant.online import pack
from headrace.back.quant.scheme import SCHEMES
from headrace.base.config.resolved import DeviceSpec, EngineSpec, KVSpec, ModelSpec, SchedulerSpec
from headrace.core.core import EngineCore
from headrace.launch.plan import kernels_on_absent_device
from tests.back.quant.test_online import dequantized
from tests.models.oracle import BLOCK_TOKENS, model_spec, oracle_logits, save_oracle
from tests.models.paged import teacher_forced
from tests.models.test_mixture import answers
from tests.models.test_parity import tiny_config

FAMILIES = (
    "mixtral",
    "qwen2-moe",
    "qwen3-moe",
    "olmoe",
    "granite-moe",
    "deepseek-v3",
    "gpt-oss",
    "llama4",
)
EXACT = 2e-5
"""Largest error of a logit for fp8, whose activations stay floats: other orders of sums."""
ALIKE = 0.95
"""Least cosine of a token's logits where activations become int8, which also sends tokens of these small
models to other experts."""


def load(folder: Path, **changes: Any) -> Any:
    return load_model(
        replace(model_spec(folder), **changes),
        mesh=Mesh(),
        device=torch.device("cpu"),
        block_tokens=BLOCK_TOKENS,
    )


def quantize_oracle(oracle: Any, scheme: str, packed: set[str]) -> None:
    """Gives the oracle the values that the packed matrices' numbers stand for."""
    with torch.no_grad():
        for name, parameter in oracle.named_parameters():
            if name not in packed and parameter.dim() != 3:
                continue
            turned = parameter.dim() == 3 and type(oracle).__name__ in (
                "GptOssForCausalLM",
                "Llama4ForCausalLM",
            )
            for matrix in parameter if parameter.dim() == 3 else parameter[None]:
                weight = matrix.t() if turned else matrix
                # The inputs of a shared MLP's last matrix belong to several experts.
                inner = oracle.config.to_dict().get("moe_intermediate_size", 0)
                of_one = inner if "shared" in name and "down" in name else 0
                parts = weight.split(of_one or weight.shape[1], 1)
                rounded = torch.cat(
                    [dequantized(pack(part.contiguous(), SCHEMES[scheme])) for part in parts], 1
                )
                matrix.copy_(rounded.t() if turned else rounded)


@pytest.mark.covering(1)
@pytest.mark.parametrize("scheme", ["fp8", "int8", "int4-asym", "mxfp4"])
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_the_weights_that_the_numbers_stand_for(
    name: str, scheme: str, tmp_path: Path
) -> None:
    oracle = save_oracle(tiny_config(name), tmp_path)
    model, report = load(tmp_path, quantization=scheme)
    assert any("experts_quant" in str(one) and "native" in str(one) for one in report.decisions)
    packed = {
        piece.name for param in model.weights.params if param.packed_bytes for piece in param.pieces
    }
    quantize_oracle(oracle, scheme, packed)
    rows = [list(range(3, 30)), [5, 1, 2]]
    ours = teacher_forced(model, rows, block_tokens=BLOCK_TOKENS, dtype=torch.float32)
    for mine, theirs in zip(ours, oracle_logits(oracle, rows), strict=True):
        if scheme == "fp8":
            assert (mine - theirs).abs().max() <= EXACT * theirs.abs().max()
        alike = torch.nn.functional.cosine_similarity(mine, theirs)
        assert alike.mean() >= ALIKE, alike


@pytest.mark.parametrize("name", ["qwen3-moe", "deepseek-v3"])
def test_recorded_steps_answer_as_steps_run_as_they_are(name: str, tmp_path: Path) -> None:
    save_oracle(tiny_config(name), tmp_path)
    found = []
    for max_running in (4, 1):
        spec = EngineSpec(
            model=replace(model_spec(tmp_path), quantization="int4"),
            kv=KVSpec(block_tokens=16, prefix_caching=False, num_blocks=64),
            scheduler=SchedulerSpec(max_step_tokens=64, max_running=max_running),
            device=DeviceSpec(device="cpu", executor="inline", threads=1),
        )
        executor = InlineExecutor(spec)
        core = EngineCore(spec, executor)
        found.append(
            [answers(core, {1 + i: [5, 9, 33], 11 + i: [40, 2]})[0].values() for i in (0, 20)]
        )
        steps = executor._resident.runner._steps
        assert steps._replay.num_graphs >= 1 and steps._replay.foreign == ()
    first, again = (list(one) for one in found[0])
    assert first == again == list(found[1][0])


def test_what_is_loaded_takes_what_its_bits_say(tmp_path: Path) -> None:
    config = tiny_config("qwen3-moe")
    config.hidden_size, config.moe_intermediate_size, config.mlp_only_layers = 192, 64, []
    save_oracle(config, tmp_path)
    plain = load(tmp_path)[0].weights.params
    for scheme, bits in (("int8", 8.5), ("int4", 4.5), ("mxfp4", 4.25)):
        params = load(tmp_path, quantization=scheme)[0].weights.params
        for before, after in zip(plain, params, strict=True):
            if ".experts." in before.name:
                assert after.tensor is None and before.tensor is None
                assert after.packed_bytes <= bits / 8 * math.prod(before.shape)


@pytest.mark.parametrize("odd", [False, True])
def test_a_mixture_says_what_its_experts_are_on_a_gpu(odd: bool) -> None:
    config = tiny_config("qwen3-moe").to_dict() | {"architectures": ["Qwen3MoeForCausalLM"]}
    config |= {"moe_intermediate_size": 60 if odd else 64, "hidden_size": 64, "head_dim": 16}
    named = architecture_of(config)
    spec = ModelSpec(
        path="", name="m", format="dummy", family=named.family, dtype="bfloat16", max_model_len=32,
        logits_width=config["vocab_size"], eos_ids=(), config=config, head=named.head,
        bare=named.bare, quantization="fp8",
    )  # fmt: skip
    decided = {
        one.field: one for one in kernels_on_absent_device(spec, FAKES["h200"], block_tokens=16)
    }
    if odd:
        assert decided["model.experts"].chosen == "not quantized"
    else:
        assert decided["kernel.experts_fp8"].chosen == "triton"
