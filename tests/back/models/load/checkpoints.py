"""Tiny checkpoints on disk: transformers models saved as safetensors, and written as GGUF by the
`gguf` library.

Names in GGUF files come from that library's own table, an oracle for ours. Two conventions follow
its converters: rows of query and key projections are interleaved for some architectures, and
Gemma's norms are stored plus one.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers

from headrace.back.models.families import family_of
from headrace.base.config.hf import read_json
from headrace.base.config.resolved import ModelSpec

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
HEAD_DIM = {"head_dim": 16}
# GGUF architecture -> (configuration class, extra sizes, model class)
MODELS: dict[str, tuple[str, dict[str, Any], str]] = {
    "llama": ("LlamaConfig", {}, "LlamaForCausalLM"),
    "qwen2": ("Qwen2Config", {}, "Qwen2ForCausalLM"),
    "qwen3": ("Qwen3Config", {**HEAD_DIM, "tie_word_embeddings": True}, "Qwen3ForCausalLM"),
    "gemma2": (
        "Gemma2Config",
        {**HEAD_DIM, "query_pre_attn_scalar": 16, "sliding_window": 8},
        "Gemma2ForCausalLM",
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {**HEAD_DIM, "query_pre_attn_scalar": 16, "sliding_window": 8},
        "Gemma3ForCausalLM",
    ),
    "phi3": ("Phi3Config", {}, "Phi3ForCausalLM"),
    "olmo2": ("Olmo2Config", {}, "Olmo2ForCausalLM"),
    "granite": (
        "GraniteConfig",
        {
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.25,
            "attention_multiplier": 0.125,
            "logits_scaling": 4.0,
        },
        "GraniteForCausalLM",
    ),
    "smollm3": ("SmolLM3Config", {"num_hidden_layers": 4}, "SmolLM3ForCausalLM"),
}
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 96, **HEAD_DIM}
# The same with experts; "mixtral" is written as a llama.
MIXTURES: dict[str, tuple[str, dict[str, Any], str]] = {
    "mixtral": ("MixtralConfig", {"num_local_experts": 4}, "MixtralForCausalLM"),
    "qwen2moe": (
        "Qwen2MoeConfig",
        {**EXPERTS, "shared_expert_intermediate_size": 192},
        "Qwen2MoeForCausalLM",
    ),
    "qwen3moe": ("Qwen3MoeConfig", {**EXPERTS, "norm_topk_prob": True}, "Qwen3MoeForCausalLM"),
    "olmoe": ("OlmoeConfig", {"num_experts": 4, "num_experts_per_tok": 2}, "OlmoeForCausalLM"),
    "gpt-oss": (
        "GptOssConfig",
        {**HEAD_DIM, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
        "GptOssForCausalLM",
    ),
}
INTERLEAVED = ("llama", "granite", "smollm3", "mixtral")
GEMMA = ("gemma2", "gemma3")


def tiny_model(architecture: str, **changes: Any) -> Any:
    """A transformers model with random weights, norms included."""
    config_name, extra, model_name = (MODELS | MIXTURES)[architecture]
    config = getattr(transformers, config_name)(**{**SIZES, **extra, **changes})
    torch.manual_seed(0)
    model = getattr(transformers, model_name)(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.1)
    return model


def save(model: Any, folder: Path, **options: Any) -> Path:
    """Saves a transformers model as safetensors without a progress bar."""
    transformers.utils.logging.disable_progress_bar()
    model.save_pretrained(folder, **options)
    return folder


def spec_of(path: Path, config: dict[str, Any], **changes: Any) -> ModelSpec:
    """The ModelSpec the launcher would make of a checkpoint."""
    values: dict[str, Any] = {
        "path": str(path),
        "name": "tiny",
        "format": "gguf" if path.is_file() else "safetensors",
        "family": family_of(config),
        "dtype": "float32",
        "max_model_len": 64,
        "logits_width": config["vocab_size"],
        "eos_ids": (2,),
        "config": config,
    }
    return ModelSpec(**{**values, **changes})


def spec_of_folder(folder: Path, **changes: Any) -> ModelSpec:
    """The ModelSpec of a saved model."""
    return spec_of(folder, read_json(folder / "config.json"), **changes)


def write_gguf(
    path: Path,
    architecture: str,
    model: Any,
    *,
    quantize: Callable[[str, np.ndarray], tuple[np.ndarray, Any]] | None = None,
    extra: Callable[[gguf.GGUFWriter], None] | None = None,
) -> Path:
    """Writes a transformers model as GGUF. `quantize` gives each matrix its bytes and type; F32
    without it."""
    config = model.config
    writer = gguf.GGUFWriter(path, "llama" if architecture == "mixtral" else architecture)
    _write_metadata(writer, architecture, config)
    if extra is not None:
        extra(writer)
    named = "llama" if architecture == "mixtral" else architecture
    names = name_table(named, config.num_hidden_layers)
    tied = bool(getattr(config, "tie_word_embeddings", False))
    for name, tensor in _separated(architecture, model.state_dict()).items():
        if name == "lm_head.weight" and tied:
            continue
        values = _as_stored(architecture, name, tensor.numpy(), config)
        name += ".weight" if name.endswith("sinks") else ""
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored is not None, name
        raw, kind = values, None
        if (
            quantize is not None
            and values.ndim > 1
            and not stored.endswith("bias")
            and "_inp" not in stored
        ):
            flat, kind = quantize(stored, values.reshape(-1, values.shape[-1]))
            raw = flat.reshape(*values.shape[:-1], -1)
        writer.add_tensor(stored, np.ascontiguousarray(raw), raw_dtype=kind)
    _finish(writer)
    return path


def _separated(architecture: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Gates and ups of experts apart, outputs before inputs, under the names of the library's table."""
    separate: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        module, _, last = name.rpartition(".")
        kind = "bias" if last.endswith("_bias") else "weight"
        matrix = last.removesuffix("_bias")
        stacked = architecture in ("gemma4", "mistral4")
        if not module.endswith(".experts") or tensor.dim() < 2 or stacked:
            separate[name] = tensor
            continue
        oss = architecture == "gpt-oss"
        turned = (oss or architecture == "llama4") and kind == "weight"
        whole = tensor.transpose(1, 2) if turned else tensor
        if matrix == "down_proj":
            separate[f"{module}.down_proj.{kind}"] = whole
            continue
        halves = (whole[:, 0::2], whole[:, 1::2]) if oss else whole.chunk(2, 1)
        for part, half in zip(("gate_proj", "up_proj"), halves, strict=True):
            separate[f"{module}.{part}.{kind}"] = half
    return separate


def _finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _arch(architecture: str) -> Any:
    return next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)


def name_table(architecture: str, layers: int) -> Any:
    """The library's table of names; what some architectures have of their own stays in it for all that come later."""
    table = gguf.TensorNameMap
    kept = dict(table.block_mappings_cfg)
    try:
        return gguf.get_tensor_name_map(_arch(architecture), layers)
    finally:
        table.block_mappings_cfg = kept


def _as_stored(architecture: str, name: str, values: np.ndarray, config: Any) -> np.ndarray:
    if architecture in GEMMA and name.endswith("norm.weight"):
        return values + 1
    for part, heads in (("q", config.num_attention_heads), ("k", config.num_key_value_heads)):
        if architecture in INTERLEAVED and f"self_attn.{part}_proj" in name:
            split = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
            return split.swapaxes(1, 2).reshape(values.shape)
    return values


def _write_experts(writer: gguf.GGUFWriter, config: Any) -> None:
    sizes = config.to_dict()
    writer.add_expert_count(sizes.get("num_local_experts") or sizes["num_experts"])
    writer.add_expert_used_count(config.num_experts_per_tok)
    inner = sizes.get("moe_intermediate_size", config.intermediate_size)
    writer.add_expert_feed_forward_length(inner)
    if shared := sizes.get("shared_expert_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(shared)
    if config.rope_parameters.get("rope_type") == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(config.rope_parameters["factor"])
        original = config.rope_parameters["original_max_position_embeddings"]
        writer.add_rope_scaling_orig_ctx_len(original)


def _write_metadata(writer: gguf.GGUFWriter, architecture: str, config: Any) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    rope = config.rope_parameters
    writer.add_rope_freq_base(
        rope.get("rope_theta", rope.get("full_attention", {}).get("rope_theta"))
    )
    writer.add_eos_token_id(config.eos_token_id)
    writer.add_pad_token_id(config.pad_token_id)
    if config.bos_token_id is not None:
        writer.add_bos_token_id(config.bos_token_id)
    if architecture in MIXTURES:
        _write_experts(writer, config)
    if architecture in GEMMA or architecture == "gpt-oss":
        writer.add_sliding_window(config.sliding_window)
    if architecture == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if architecture == "granite":
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_logit_scale(config.logits_scaling)
