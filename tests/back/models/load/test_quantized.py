"""Checkpoints with quantized weights load as they are, and answer as transformers does with the
same weights dequantized. QNT-01 QNT-06 QNT-12."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file

from headrace.back.models.load import load_model
from headrace.back.models.protocol import LoadableModel
from headrace.back.parallel.mesh import Mesh
from headrace.base.config.resolved import Decision
from headrace.base.errors import CheckpointError
from headrace.launch.locate import LocatedModel
from headrace.launch.model_facts import read_model_facts
from tests.back.quant.formats.test_formats import awq_words, bit_stream
from tests.models.oracle import BLOCK_TOKENS, model_spec, oracle_logits, save_oracle
from tests.models.paged import teacher_forced
from tests.models.test_parity import tiny_config

Stored = dict[str, torch.Tensor]
GROUP = 32
SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32}


def grouped(weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Values 0 .. 15, zero points and scales [O, G], and the weight they stand for."""
    groups = weight.unflatten(1, (-1, GROUP))
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    scales = ((high - low) / 15).half().float()
    zeros = (-low / scales).round().clamp(0, 15)
    values = (groups / scales + zeros).round().clamp(0, 15)
    return values.flatten(1), zeros[..., 0], scales[..., 0], ((values - zeros) * scales).flatten(1)


def gptq(name: str, weight: torch.Tensor) -> tuple[Stored, torch.Tensor]:
    values, zeros, scales, plain = grouped(weight)
    return {
        f"{name}.qweight": bit_stream(values, 4).t(),
        f"{name}.qzeros": bit_stream((zeros - 1).t() % 16, 4),
        f"{name}.scales": scales.t().half(),
        f"{name}.g_idx": (torch.arange(weight.shape[1]) // GROUP).int(),
    }, plain


def awq(name: str, weight: torch.Tensor) -> tuple[Stored, torch.Tensor]:
    values, zeros, scales, plain = grouped(weight)
    return {
        f"{name}.qweight": awq_words(values.t()),
        f"{name}.qzeros": awq_words(zeros.t()),
        f"{name}.scales": scales.t().half(),
    }, plain


def fp8(name: str, weight: torch.Tensor) -> tuple[Stored, torch.Tensor]:
    rows, columns = weight.shape
    scales = torch.rand(-(-rows // 32), -(-columns // 32)) + 0.1
    spread = scales.repeat_interleave(32, 0)[:rows].repeat_interleave(32, 1)[:, :columns]
    values = (weight / spread).to(torch.float8_e4m3fn)
    stored = {f"{name}.weight": values, f"{name}.weight_scale_inv": scales}
    return stored, values.float() * spread


def int8(name: str, weight: torch.Tensor) -> tuple[Stored, torch.Tensor]:
    scales = weight.abs().amax(1, keepdim=True) / 127
    values = (weight / scales).round()
    stored = {f"{name}.weight": values.to(torch.int8), f"{name}.weight_scale": scales}
    return stored, values * scales


FORMATS: dict[str, tuple[Callable[..., tuple[Stored, torch.Tensor]], dict[str, Any]]] = {
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False}),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}),
    "fp8": (fp8, {"quant_method": "fp8", "weight_block_size": [32, 32]}),
    "int8": (
        int8,
        {
            "quant_method": "compressed-tensors",
            "format": "int-quantized",
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": {"num_bits": 8, "type": "int", "strategy": "channel"},
                }
            },
            "ignore": ["lm_head"],
        },
    ),
}


def quantize_folder(folder: Path, format: str) -> Any:
    """Quantizes the layers' linear weights of the checkpoint in `folder`; the transformers model
    with the weights that are stored."""
    config = tiny_config("qwen3")
    config.update(SIZES)
    oracle = save_oracle(config, folder)
    quantize, quantization = FORMATS[format]
    plain = load_file(folder / "model.safetensors")
    stored, back = dict(plain), oracle.state_dict()
    for name, weight in plain.items():
        if ".layers." in name and weight.dim() == 2:
            del stored[name]
            parts, back[name] = quantize(name.removesuffix(".weight"), weight)
            stored |= parts
    save_file(
        {name: value.contiguous() for name, value in stored.items()}, folder / "model.safetensors"
    )
    oracle.load_state_dict(back)
    file = folder / "config.json"
    file.write_text(
        json.dumps({**json.loads(file.read_text()), "quantization_config": quantization})
    )
    return oracle


def load(folder: Path, **changes: Any) -> tuple[LoadableModel, tuple[Decision, ...]]:
    spec = model_spec(folder, **changes)
    cpu = torch.device("cpu")
    model, report = load_model(spec, mesh=Mesh(), device=cpu, block_tokens=BLOCK_TOKENS)
    return model, report.decisions


@pytest.mark.parametrize("format", FORMATS)
def test_a_quantized_checkpoint_answers_as_its_weights_dequantized(
    format: str, tmp_path: Path
) -> None:
    oracle = quantize_folder(tmp_path, format)
    rows = [list(range(3, 30)), [5, 1, 2]]
    model, decisions = load(tmp_path)
    ours = teacher_forced(model, rows, block_tokens=BLOCK_TOKENS, dtype=torch.float32)
    for row, expected in zip(ours, oracle_logits(oracle, rows), strict=True):
        torch.testing.assert_close(row, expected, rtol=1e-4, atol=1e-4)
    (weights,) = (one for one in decisions if one.field == "weights")
    assert (weights.chosen, "dequantized" in weights.why) == ("float32", True)


def test_experts_in_mxfp4_answer_as_dequantized(tmp_path: Path) -> None:
    """gpt-oss as it is published: blocks and scales of the experts, all else plain."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    config = tiny_config("gpt-oss")
    config.hidden_size, config.intermediate_size = 64, 96
    oracle = save_oracle(config, tmp_path)
    generator = torch.Generator().manual_seed(5)
    stored, back = load_file(tmp_path / "model.safetensors"), oracle.state_dict()
    for name in [name for name in stored if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = stored.pop(name).shape
        shape = (experts, outputs, inputs // 32, 16)
        blocks = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        scales = torch.randint(121, 125, shape[:3], dtype=torch.uint8, generator=generator)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        back[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    save_file(stored, tmp_path / "model.safetensors")
    oracle.load_state_dict(back)
    rows = [list(range(3, 30)), [5, 1, 2]]
    model, _ = load(tmp_path, quantization_config={"quant_method": "mxfp4"})
    ours = teacher_forced(model, rows, block_tokens=BLOCK_TOKENS, dtype=torch.float32)
    for row, expected in zip(ours, oracle_logits(oracle, rows), strict=True):
        torch.testing.assert_close(row, expected, rtol=1e-4, atol=1e-4)


def test_the_fallback_reads_them_too(tmp_path: Path) -> None:
    oracle = quantize_folder(tmp_path, "gptq")
    spec = replace(model_spec(tmp_path), family="transformers")
    cpu = torch.device("cpu")
    model, _ = load_model(spec, mesh=Mesh(), device=cpu, block_tokens=BLOCK_TOKENS)
    rows = [list(range(3, 30))]
    ours = teacher_forced(model, rows, block_tokens=BLOCK_TOKENS, dtype=torch.float32)
    torch.testing.assert_close(ours[0], oracle_logits(oracle, rows)[0], rtol=1e-4, atol=1e-4)


def test_a_missing_part_is_refused_before_anything_is_built(tmp_path: Path) -> None:
    quantize_folder(tmp_path, "awq")
    stored = load_file(tmp_path / "model.safetensors")
    del stored["model.layers.1.mlp.up_proj.qzeros"]
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.up_proj\.qzeros is missing"):
        load(tmp_path)


def test_facts_count_the_weights_and_not_the_words_they_are_packed_into(tmp_path: Path) -> None:
    oracle = quantize_folder(tmp_path, "gptq")
    facts = read_model_facts(LocatedModel(path=tmp_path, name="m", format="safetensors"))
    assert facts.num_params == sum(weight.numel() for weight in oracle.parameters())
    assert facts.weight_bytes == 4 * facts.num_params  # the plain tensors are float32


def test_what_modelopt_says_in_a_file_of_its_own_counts(tmp_path: Path) -> None:
    save_oracle(tiny_config("qwen3"), tmp_path)
    said = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "W4A8"}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(said))
    with pytest.raises(CheckpointError, match=r"quant_algo is 'W4A8'.*FP8"):
        read_model_facts(LocatedModel(path=tmp_path, name="m", format="safetensors"))
