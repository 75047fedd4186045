"""GGUF files with recurrent layers, Qwen3-Next and Qwen 3.5, and the text side of Qwen3-VL: the logits of the model
they were written from, with the order and the conventions of llama.cpp's converter. QNT-15, QNT-16."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers

from headrace.base.config.gguf import read_gguf
from headrace.base.config.gguf_config import gguf_config
from headrace.base.errors import CheckpointError
from tests.back.models.load.checkpoints import SIZES, _separated, _write_metadata
from tests.back.models.load.test_gguf_blocks import dequantized, gguf_spec, library, run
from tests.back.models.load.test_gguf_mixtures import ROWS, load, logits
from tests.models.oracle import oracle_logits

KEYS, VALUES, KEY_DIM, VALUE_DIM = 2, 4, 16, 32
DELTA: dict[str, Any] = {
    **{"linear_num_key_heads": KEYS, "linear_num_value_heads": VALUES, "head_dim": 16},
    **{"linear_key_head_dim": KEY_DIM, "linear_value_head_dim": VALUE_DIM, "rms_norm_eps": 0.01},
    **{"linear_conv_kernel_dim": 3, "num_hidden_layers": 3},
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
EXPERTS: dict[str, Any] = {
    **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
    "shared_expert_intermediate_size": 64,
}
MODELS = {
    "qwen3next": ("Qwen3NextConfig", DELTA | EXPERTS, "Qwen3NextForCausalLM"),
    "qwen35": ("Qwen3_5TextConfig", DELTA, "Qwen3_5ForCausalLM"),
    "qwen35moe": ("Qwen3_5MoeTextConfig", DELTA | EXPERTS, "Qwen3_5MoeForCausalLM"),
}


def tiny(architecture: str) -> Any:
    config_name, sizes, model_name = MODELS[architecture]
    config = getattr(transformers, config_name)(**(SIZES | sizes))
    torch.manual_seed(0)
    model = getattr(transformers, model_name)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.1)
    return model


def tiled(values: torch.Tensor, size: int, dim: int = 0) -> torch.Tensor:
    """Value heads of `size` along a dimension: the first of each key head, then the second of each."""
    moved = values.movedim(dim, 0)
    heads = moved.unflatten(0, (KEYS, VALUES // KEYS, size)).transpose(0, 1)
    return heads.flatten(0, 2).movedim(0, dim)


def reordered(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Of Qwen 3.5's recurrent layers."""
    before = 2 * KEYS * KEY_DIM
    if ".in_proj_qkv." in name or ".conv1d." in name:
        return torch.cat((tensor[:before], tiled(tensor[before:], VALUE_DIM)))
    if ".in_proj_z." in name:
        return tiled(tensor, VALUE_DIM)
    if ".out_proj." in name:
        return tiled(tensor, VALUE_DIM, dim=1)
    one = (".in_proj_a.", ".in_proj_b.", ".A_log", ".dt_bias")
    return tiled(tensor, 1) if any(part in name for part in one) else tensor


def converted(architecture: str, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, Any]]:
    """A tensor's names and values as the converter leaves them."""
    if architecture != "qwen3next" and "linear_attn" in name:
        tensor = reordered(name, tensor)
    if name.endswith(".A_log"):
        tensor = -tensor.exp()
    elif name.endswith(".dt_bias"):
        name = name.removesuffix(".dt_bias") + ".dt_proj.bias"
    elif ".conv1d." in name:
        tensor = tensor.squeeze(1)
    elif name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        tensor = tensor + 1
    if "shared_expert_gate" in name:
        tensor = tensor.squeeze(0)
    if ".in_proj_qkvz." not in name:
        yield name, tensor
        return
    own = VALUES // KEYS * VALUE_DIM
    parts = tensor.unflatten(0, (KEYS, -1)).split((KEY_DIM, KEY_DIM, own, own), 1)
    *qkv, gate = (part.flatten(0, 1) for part in parts)
    yield name.replace("qkvz", "qkv"), torch.cat(qkv)
    yield name.replace("qkvz", "z"), gate


def write(path: Path, architecture: str, model: Any, quantize: Any = None) -> Path:
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    if architecture == "qwen35":
        _write_metadata(writer, architecture, config)
    else:
        config.intermediate_size = 64
        _write_metadata(writer, architecture, config)
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_ssm_state_size(KEY_DIM)
    writer.add_ssm_group_count(KEYS)
    writer.add_ssm_time_step_rank(VALUES)
    writer.add_ssm_inner_size(VALUES * VALUE_DIM)
    rotary = config.rope_parameters.get("partial_rotary_factor", 0.25) * config.head_dim
    writer.kv_data[0].pop(f"{architecture}.rope.dimension_count")
    writer.add_rope_dimension_count(int(rotary))
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    for name, tensor in _separated(architecture, model.state_dict()).items():
        for own, values in converted(architecture, name, tensor):
            stored = names.get_name(own, try_suffixes=(".weight", ".bias"))
            assert stored is not None, own
            raw, kind = values.contiguous().numpy(), None
            if (
                quantize is not None
                and raw.ndim > 1
                and "_inp" not in stored
                and "conv" not in stored
            ):
                flat, kind = quantize(stored, raw.reshape(-1, raw.shape[-1]))
                raw = flat.reshape(*raw.shape[:-1], -1)
            writer.add_tensor(stored, np.ascontiguousarray(raw), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("architecture", MODELS)
def test_recurrent_layers_answer_as_transformers(architecture: str, tmp_path: Path) -> None:
    oracle = tiny(architecture)
    expected = oracle_logits(oracle, ROWS)
    model, _ = load(gguf_spec(write(tmp_path / "m.gguf", architecture, oracle)))
    for mine, theirs in zip(logits(model), expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("architecture", MODELS)
def test_their_projections_stay_as_the_file_holds_them(architecture: str, tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", architecture, tiny(architecture), library("Q8_0"))
    spec = gguf_spec(path)
    ours, report = load(spec)
    kept = next(one for one in report.decisions if one.field == "weights")
    assert "Q8_0" in kept.chosen
    exact, got = run(dequantized(spec)), run(ours)
    assert torch.nn.functional.cosine_similarity(got, exact).mean() > 0.98


@pytest.mark.parametrize(
    ("key", "value"), [("ssm.group_count", 0), ("ssm.inner_size", VALUES * VALUE_DIM + 1)]
)
def test_sizes_that_do_not_fit_are_named(key: str, value: int, tmp_path: Path) -> None:
    file = read_gguf(write(tmp_path / "m.gguf", "qwen35", tiny("qwen35")))
    file.metadata[f"qwen35.{key}"] = value
    with pytest.raises(CheckpointError, match=key):
        gguf_config(file)


def test_the_text_side_of_qwen3_vl_is_qwen3(tmp_path: Path) -> None:
    from tests.back.models.load.checkpoints import tiny_model, write_gguf

    oracle = tiny_model("qwen3")

    def deepstack(writer: gguf.GGUFWriter) -> None:
        writer.add_uint32("qwen3vl.n_deepstack_layers", 3)
        writer.add_rope_dimension_sections([3, 3, 2, 0])

    path = write_gguf(tmp_path / "m.gguf", "qwen3vl", oracle, extra=deepstack)
    model, _ = load(gguf_spec(path))
    for mine, theirs in zip(logits(model), oracle_logits(oracle, ROWS), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
