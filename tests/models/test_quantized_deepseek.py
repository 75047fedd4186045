"""DeepSeek V4.1 as it is published: dense layers e4m3 with a power of two for each block of 32 by 32, tables of n-grams
by rows, experts e2m1 in bytes with a sign, all scales in tensors called scale (QNT-02)."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from headrace.back.models.load import load_model
from headrace.back.models.published_keys import in_common_keys
from headrace.back.parallel.mesh import Mesh
from headrace.base.config.quantization_formats import stored_quantization
from tests.models.oracle import BLOCK_TOKENS, model_spec
from tests.models.paged import random_rows, teacher_forced
from tests.models.test_parity import compare
from tests.references import deepseek_v41
from tests.references.plain import Tensors

DENSE = re.compile(r".*\.(wq_a|wq_b|wkv|wo_a|wo_b|wk|w[123])\.weight")
PLAIN = re.compile(r".*\.compressor\..*")
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def powers(largest: torch.Tensor, most: float) -> torch.Tensor:
    """Scales that keep numbers within `most`, as powers of two."""
    return torch.exp2((largest.clamp(min=1e-4) / most).log2().ceil())


def in_blocks(weight: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Values, scales, and what they stand for; `rows` of 32 columns share a scale."""
    parts = weight.unflatten(0, (-1, rows)).unflatten(2, (-1, 32))
    scale = powers(parts.abs().amax((1, 3), keepdim=True), 448.0)
    values = (parts / scale).to(torch.float8_e4m3fn)
    stands = (values.float() * scale).reshape(weight.shape)
    return values.reshape(weight.shape), scale[:, 0, :, 0], stands


def in_fours(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Two numbers a byte, the first in its lower half; see in_blocks."""
    parts = weight.unflatten(1, (-1, 32))
    scale = powers(parts.abs().amax(2, keepdim=True), 6.0)
    level = ((parts / scale).abs()[..., None] - E2M1).abs().argmin(-1)
    stands = (E2M1[level] * parts.sign() * scale).reshape(weight.shape)
    codes = (level + 8 * (parts < 0)).flatten(1).to(torch.uint8)
    return (codes[:, ::2] | codes[:, 1::2] << 4).view(torch.int8), scale[..., 0], stands


def published(weights: Tensors, experts: str) -> tuple[Tensors, Tensors]:
    """What a checkpoint holds, and what it stands for."""
    stored, stands = dict(weights), dict(weights)
    for name, weight in weights.items():
        table = name.endswith("engram.embed.weight")
        if not table and (not DENSE.fullmatch(name) or PLAIN.fullmatch(name)):
            continue
        if ".experts." in name and experts == "fp4":
            values, scale, stands[name] = in_fours(weight)
        else:
            values, scale, stands[name] = in_blocks(weight, 1 if table else 32)
        stored[name] = values.contiguous()
        stored[name.replace(".weight", ".scale")] = scale.to(torch.float8_e8m0fnu)
    return stored, stands


def config_of(experts: str) -> dict[str, Any]:
    """Of sizes that are multiples of 32."""
    config = copy.deepcopy(deepseek_v41.CONFIG)
    text = config["text_config"]
    text |= {"hidden_size": 64, "head_dim": 32, "q_lora_rank": 32, "o_lora_rank": 32}
    text |= {"moe_intermediate_size": 32, "index_head_dim": 32, "engram_head_dim": 32}
    text |= {"num_hidden_layers": 5}
    config["quantization_config"] = {
        **{"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"},
        **{"scale_fmt": "ue8m0", "weight_block_size": [32, 32], "expert_dtype": experts},
    }
    return config


@pytest.mark.parametrize("experts", ["fp8", "fp4"])
def test_a_published_checkpoint_has_the_logits_of_what_it_stands_for(
    experts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for activations, which become int8 before numbers of 4 bits on a CPU."""
    monkeypatch.setattr(deepseek_v41, "DIM", 32)
    monkeypatch.setattr(deepseek_v41, "RANK", 32)
    config = config_of(experts)
    stored, stands = published(deepseek_v41.tensors(config), experts)
    save_file(stored, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    model, _ = load_model(
        model_spec(tmp_path), mesh=Mesh(), device=torch.device("cpu"), block_tokens=BLOCK_TOKENS
    )
    rows = random_rows(97, (23, 9))
    got = teacher_forced(model, rows, block_tokens=BLOCK_TOKENS, dtype=torch.float32)
    theirs = [deepseek_v41.logits(config, stands, row) for row in rows]
    if experts == "fp8":
        compare(got, theirs, 1e-4)
    alike = torch.nn.functional.cosine_similarity(torch.cat(got), torch.cat(theirs))
    assert alike.mean() > 0.995, alike


def test_v4_says_the_dtype_of_its_experts_beside_its_quantization() -> None:
    stated = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    config = {"architectures": ["DeepseekV4ForCausalLM"], "expert_dtype": "fp4"}
    common = in_common_keys({**config, "quantization_config": stated})
    stored = stored_quantization(common, "config.json")
    assert stored is not None
    expert, dense = (
        stored.of(f"layers.1.ffn.{name}.w1") for name in ("experts.7", "shared_experts")
    )
    assert (expert.arrangement, expert.group) == ("mxfp4-quark", (1, 32))
    assert (dense.arrangement, dense.group) == ("fp8-blocks", (128, 128))
