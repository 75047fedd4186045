"""GGUF files of further families: the logits of the transformers model that they were written from, under the names of
the `gguf` library's table, with the order and the conventions of llama.cpp's converters. QNT-15."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers

from headrace.back.models.load.gguf_dialects import DIALECTS
from headrace.base.config.gguf_config import ARCHITECTURES
from headrace.base.errors import CheckpointError
from headrace.launch.locate import LocatedModel
from headrace.launch.model_facts import read_model_facts
from tests.back.models.load.checkpoints import SIZES, _finish, _separated, name_table
from tests.back.models.load.test_gguf_blocks import gguf_spec
from tests.back.models.load.test_gguf_mixtures import ROWS, load, logits
from tests.models.oracle import oracle_logits, randomize

HEAD = {"head_dim": 16}
ROUTED: dict[str, Any] = {
    **{"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    **{"n_shared_experts": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5},
    **{"n_group": 1, "topk_group": 1, "norm_topk_prob": True},
}
LATENT: dict[str, Any] = {
    **{"kv_lora_rank": 24, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10},
    **{"num_key_value_heads": 4, "head_dim": 8},
}
HALF = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}
}


def permuted(values: np.ndarray, heads: int) -> np.ndarray:
    """Rows of rotated pairs side by side, as llama.cpp has them for some."""
    split = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
    return split.swapaxes(1, 2).reshape(values.shape)


@dataclass(frozen=True, kw_only=True)
class Family:
    """`kind`: the prefix of its classes in transformers. `sizes`: of the config besides SIZES; `permutes`: rows of
    queries and keys; `plus_one`: norms; `metadata`: what it writes besides; `converts`: one tensor of the model as
    those of the file, by their names there or in the model; `names`: whose
    of the library's table, which lacks its own."""

    kind: str
    sizes: dict[str, Any] = field(default_factory=dict)
    permutes: bool = False
    plus_one: bool = False
    metadata: Callable[[gguf.GGUFWriter, Any], None] | None = None
    converts: Callable[[str, torch.Tensor, Any], Iterator[tuple[str, torch.Tensor]]] | None = None
    text: bool = False
    old: bool = False
    names: str = ""


def window(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_sliding_window(config.sliding_window)


def logit_scale(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_logit_scale(config.logit_scale)
    if getattr(config, "sliding_window", None):
        window(writer, config)


def experts(writer: gguf.GGUFWriter, config: Any) -> None:
    known = config.to_dict()
    for write, names in (
        (
            writer.add_expert_count,
            ("n_routed_experts", "moe_num_experts", "num_local_experts", "num_experts"),
        ),
        (writer.add_expert_used_count, ("num_experts_per_tok", "moe_k", "moe_topk")),
        (writer.add_expert_feed_forward_length, ("moe_intermediate_size", "intermediate_size")),
        (writer.add_expert_shared_count, ("n_shared_experts", "moe_num_shared_experts")),
        (
            writer.add_leading_dense_block_count,
            ("first_k_dense_replace", "moe_layer_start_index", "num_dense_layers"),
        ),
        (writer.add_expert_weights_scale, ("routed_scaling_factor",)),
        (writer.add_expert_weights_norm, ("norm_topk_prob",)),
    ):
        value = next((known[name] for name in names if known.get(name) is not None), None)
        if value is not None:
            write(value)


def drafting(writer: gguf.GGUFWriter, config: Any) -> None:
    experts(writer, config)
    writer.add_nextn_predict_layers(1)
    writer.kv_data[0].pop("glm4moe.block_count")
    writer.add_block_count(config.num_hidden_layers + 1)
    writer.add_tensor("blk.3.nextn.enorm.weight", np.ones(64, np.float32))


def latent(writer: gguf.GGUFWriter, config: Any) -> None:
    experts(writer, config)
    for key in ("key_length", "value_length", "head_count_kv"):
        writer.kv_data[0].pop(f"{writer.arch}.attention.{key}")
    writer.kv_data[0].pop(f"{writer.arch}.rope.dimension_count")
    writer.add_head_count_kv(1)
    writer.add_key_length(config.kv_lora_rank + config.qk_rope_head_dim)
    writer.add_value_length(config.kv_lora_rank)
    writer.add_key_length_mla(config.qk_nope_head_dim + config.qk_rope_head_dim)
    writer.add_value_length_mla(config.v_head_dim)
    writer.add_rope_dimension_count(config.qk_rope_head_dim)
    writer.add_kv_lora_rank(config.kv_lora_rank)
    if getattr(config, "q_lora_rank", None):
        writer.add_q_lora_rank(config.q_lora_rank)
    sigmoid = config.model_type != "deepseek_v2"
    kinds = gguf.ExpertGatingFuncType
    writer.add_expert_gating_func(kinds.SIGMOID if sigmoid else kinds.SOFTMAX)
    if (getattr(config, "rope_parameters", None) or {}).get("rope_type") == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(config.rope_parameters["factor"])
        writer.add_rope_scaling_orig_ctx_len(
            config.rope_parameters["original_max_position_embeddings"]
        )
        writer.add_rope_scaling_yarn_log_mul(0.1 * config.rope_parameters["mscale_all_dim"])


def latent_parts(
    name: str, tensor: torch.Tensor, config: Any
) -> Iterator[tuple[str, torch.Tensor]]:
    """Keys and values of latents apart, those of keys turned."""
    if not name.endswith("kv_b_proj.weight"):
        yield from bias_of_choice(name, tensor, config)
        return
    heads = tensor.unflatten(0, (config.num_attention_heads, -1))
    keys, values = heads.split((config.qk_nope_head_dim, config.v_head_dim), 1)
    yield name.replace("kv_b_proj", "k_b_proj"), keys.transpose(1, 2)
    yield name.replace("kv_b_proj", "v_b_proj"), values


def bias_of_choice(
    name: str, tensor: torch.Tensor, config: Any
) -> Iterator[tuple[str, torch.Tensor]]:
    if name.endswith(("e_score_correction_bias", "expert_bias")):
        yield f"blk.{name.split('.')[2]}.exp_probs_b.bias", tensor.flatten()
    else:
        yield name, tensor


def short_conv(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_shortconv_l_cache(config.conv_L_cache)
    kinds = config.layer_types
    writer.kv_data[0].pop(f"{writer.arch}.attention.head_count_kv")
    writer.add_head_count_kv([config.num_key_value_heads * (kind != "conv") for kind in kinds])
    if getattr(config, "num_experts", None):
        experts(writer, config)


def squeezed(name: str, tensor: torch.Tensor, config: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if ".conv.conv." in name:
        yield name, tensor.squeeze(1)
    else:
        yield from bias_of_choice(name, tensor, config)


def granite(writer: gguf.GGUFWriter, config: Any) -> None:
    experts(writer, config)
    writer.add_embedding_scale(config.embedding_multiplier)
    writer.add_residual_scale(config.residual_multiplier)
    writer.add_attention_scale(config.attention_multiplier)
    writer.add_logit_scale(config.logits_scaling)
    if shared := getattr(config, "shared_intermediate_size", 0):
        writer.add_expert_shared_feed_forward_length(shared)


def granite_parts(
    name: str, tensor: torch.Tensor, config: Any
) -> Iterator[tuple[str, torch.Tensor]]:
    parts = name.split(".")
    if ".experts." in name:
        matrix = parts[-2].removesuffix("_proj")
        yield f"blk.{parts[2]}.ffn_{matrix}_exps.weight", tensor
    elif "shared_mlp.input_linear" in name:
        for part, half in zip(("gate", "up"), tensor.chunk(2), strict=True):
            yield f"blk.{parts[2]}.ffn_{part}_shexp.weight", half
    else:
        yield name.replace(".router.weight", ".router.layer.weight"), tensor


def granite_hybrid(writer: gguf.GGUFWriter, config: Any) -> None:
    granite(writer, config)
    kinds = config.layer_types
    writer.kv_data[0].pop(f"{writer.arch}.attention.head_count_kv")
    writer.add_head_count_kv(
        [config.num_key_value_heads * (kind == "full_attention") for kind in kinds]
    )
    writer.add_ssm_conv_kernel(config.mamba_d_conv)
    writer.add_ssm_state_size(config.mamba_d_state)
    writer.add_ssm_group_count(config.mamba_n_groups)
    writer.add_ssm_inner_size(config.mamba_n_heads * config.mamba_d_head)
    writer.add_ssm_time_step_rank(config.mamba_n_heads)
    writer.add_rope_scaling_finetuned(config.position_embedding_type == "rope")
    if not config.num_local_experts:
        for key in ("expert_count", "expert_used_count", "expert_shared_feed_forward_length"):
            writer.kv_data[0].pop(f"{writer.arch}.{key}", None)
        writer.kv_data[0].pop(f"{writer.arch}.feed_forward_length")
        writer.add_feed_forward_length(config.shared_intermediate_size)


def granite_hybrid_parts(
    name: str, tensor: torch.Tensor, config: Any
) -> Iterator[tuple[str, torch.Tensor]]:
    """Of Mamba 2 as the converter leaves it; one MLP has the names of any."""
    layer, last = name.split(".")[2:3], name.rsplit(".", 1)[-1]
    if name.endswith("A_log"):
        yield f"blk.{layer[0]}.ssm_a", -tensor.exp()[:, None]
    elif name.endswith(".D"):
        yield f"blk.{layer[0]}.ssm_d", tensor[:, None]
    elif name.endswith("dt_bias"):
        yield f"blk.{layer[0]}.ssm_dt.bias", tensor
    elif "mamba.norm" in name:
        yield name, tensor.reshape(config.mamba_n_groups, -1)
    elif "mamba.conv1d" in name:
        yield name, tensor.squeeze(1) if last == "weight" else tensor
    elif config.num_local_experts or "shared_mlp" not in name:
        yield from granite_parts(name, tensor, config)
    elif "output_linear" in name:
        yield f"blk.{layer[0]}.ffn_down.weight", tensor
    else:
        for part, half in zip(("gate", "up"), tensor.chunk(2), strict=True):
            yield f"blk.{layer[0]}.ffn_{part}.weight", half


def mistral3(writer: gguf.GGUFWriter, config: Any) -> None:
    rope = config.rope_parameters
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(rope["factor"])
    writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
    writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])


def llama4(writer: gguf.GGUFWriter, config: Any) -> None:
    experts(writer, config)
    writer.kv_data[0].pop("llama4.feed_forward_length")
    writer.add_feed_forward_length(config.intermediate_size_mlp)
    writer.kv_data[0].pop("llama4.expert_feed_forward_length")
    writer.add_expert_feed_forward_length(config.intermediate_size)
    writer.add_interleave_moe_layer_step(config.interleave_moe_layer_step)


def gemma3n(writer: gguf.GGUFWriter, config: Any) -> None:
    local = [kind == "sliding_attention" for kind in config.layer_types]
    writer.add_sliding_window_pattern(local)
    window(writer, config)
    writer.add_shared_kv_layers(config.num_kv_shared_layers)
    writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input or 0)
    if config.final_logit_softcapping:
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    ropes = config.rope_parameters
    writer.add_rope_freq_base_swa(ropes["sliding_attention"]["rope_theta"])
    if config.model_type == "gemma4_text":
        gemma4(writer, config)
        return
    writer.add_altup_active_idx(config.altup_active_idx)
    writer.add_altup_num_inputs(config.altup_num_inputs)
    normal = torch.distributions.Normal(0.0, 1.0)
    cuts = [normal.icdf(torch.tensor(one)).item() for one in config.activation_sparsity_pattern]
    writer.add_activation_sparsity_scale(cuts)
    writer.kv_data[0].pop("gemma3n.feed_forward_length")
    writer.add_feed_forward_length(config.intermediate_size)


def gemma3n_parts(
    name: str, tensor: torch.Tensor, config: Any
) -> Iterator[tuple[str, torch.Tensor]]:
    """Maps between streams lie in one tensor."""
    if name.endswith("correct_output_scale"):
        yield f"blk.{name.split('.')[2]}.altup_correct_scale.weight", tensor
    elif match := re.search(r"(altup_\w+)\.(\d)\.weight$", name):
        before = config.__dict__.setdefault(match[1], [])
        before.append(tensor)
        if len(before) == config.altup_num_inputs - 1:
            yield f"model.{match[1]}.weight", torch.stack(before)
    else:
        yield name, tensor


def gemma4(writer: gguf.GGUFWriter, config: Any) -> None:
    each = [config.per_layer_config[layer] for layer in range(config.num_hidden_layers)]
    local, whole = each[0].head_dim, each[1].head_dim
    keys = ("attention.key_length", "attention.value_length", "rope.dimension_count")
    for key in (*keys, "attention.head_count_kv", "feed_forward_length"):
        writer.kv_data[0].pop(f"gemma4.{key}")
    writer.add_key_length(whole)
    writer.add_value_length(whole)
    writer.add_key_length_swa(local)
    writer.add_value_length_swa(local)
    writer.add_rope_dimension_count(whole)
    writer.add_rope_dimension_count_swa(local)
    writer.add_head_count_kv([one.num_key_value_heads for one in each])
    first_shared = config.num_hidden_layers - config.num_kv_shared_layers
    wide = 1 + config.use_double_wide_mlp
    inner = [config.intermediate_size] * first_shared
    inner += [config.intermediate_size * wide] * config.num_kv_shared_layers
    writer.add_feed_forward_length(inner)
    if config.enable_moe_block:
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.top_k_experts)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    rope = config.rope_parameters["full_attention"]
    turned = int(whole * rope["partial_rotary_factor"] / 2)
    divisors = [1.0] * turned + [1e30] * (whole // 2 - turned)
    writer.add_tensor("rope_freqs.weight", np.array(divisors, np.float32))


def gemma4_parts(
    name: str, tensor: torch.Tensor, config: Any
) -> Iterator[tuple[str, torch.Tensor]]:
    layer = name.split(".")[2]
    for ending, stored in (
        ("layer_scalar", "layer_output_scale.weight"),
        ("router.scale", "ffn_gate_inp.scale"),
        ("per_expert_scale", "ffn_down_exps.scale"),
        ("experts.gate_up_proj", "ffn_gate_up_exps.weight"),
        ("experts.down_proj", "ffn_down_exps.weight"),
    ):
        if name.endswith(ending):
            yield f"blk.{layer}.{stored}", tensor
            return
    yield name, tensor


def minicpm(writer: gguf.GGUFWriter, config: Any) -> None:
    """Of a Llama: MiniCPM's own multipliers as 1."""
    writer.add_embedding_scale(1.0)
    writer.add_residual_scale(1.0)
    writer.add_logit_scale(1.0)


def grouped(name: str, tensor: torch.Tensor, config: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """All queries, then keys, then values."""
    if "query_key_value" not in name:
        yield name, tensor
        return
    heads = config.num_attention_heads
    groups = (
        (config.num_kv_heads if config.new_decoder_architecture else 1)
        if config.model_type == "falcon"
        else heads
    )
    parts = tensor.unflatten(0, (groups, heads // groups + 2, -1))
    yield (
        name,
        torch.cat([part.flatten(0, 2) for part in (parts[:, :-2], parts[:, -2:-1], parts[:, -1:])]),
    )


def bloom(name: str, tensor: torch.Tensor, config: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The library's table has names without the prefix."""
    yield from grouped(name.removeprefix("transformer."), tensor, config)


def linear(name: str, tensor: torch.Tensor, config: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """GPT-2's weights as others have them."""
    turned = name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))
    yield name, tensor.t() if turned else tensor


def falcon(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.kv_data[0].pop("falcon.attention.head_count_kv")
    writer.add_head_count_kv(config.num_kv_heads if config.new_decoder_architecture else 1)


def one_kv_head(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.kv_data[0].pop("starcoder.attention.head_count_kv")
    writer.add_head_count_kv(1)


def mpt(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_max_alibi_bias(config.attn_config.alibi_bias_max)


def sliding(writer: gguf.GGUFWriter, config: Any) -> None:
    """Experts beside local layers."""
    experts(writer, config)
    window(writer, config)
    known = config.to_dict()
    if writer.arch == "afmoe":
        writer.add_expert_weights_scale(config.route_scale)
    if "num_shared_experts" in known:
        writer.kv_data[0].pop(f"{writer.arch}.expert_shared_count", None)
        writer.add_expert_shared_count(config.num_shared_experts)
    if writer.arch == "exaone-moe":
        local = [kind == "sliding_attention" for kind in config.layer_types]
        writer.add_sliding_window_pattern(local)
        writer.add_leading_dense_block_count(config.mlp_layer_types.index("sparse"))


def mistral4(writer: gguf.GGUFWriter, config: Any) -> None:
    """DeepSeek's, with queries that grow."""
    latent(writer, config)
    writer.add_attn_temperature_scale(config.rope_parameters["llama_4_scaling_beta"])


def mistral4_parts(
    name: str, tensor: torch.Tensor, config: Any
) -> Iterator[tuple[str, torch.Tensor]]:
    """Experts lie stacked, gates and ups in one tensor."""
    layer = name.split(".")[2:3]
    if name.endswith("experts.gate_up_proj"):
        yield f"blk.{layer[0]}.ffn_gate_up_exps.weight", tensor
    elif name.endswith("experts.down_proj"):
        yield f"blk.{layer[0]}.ffn_down_exps.weight", tensor
    else:
        yield from latent_parts(name, tensor, config)


def minicpm3(writer: gguf.GGUFWriter, config: Any) -> None:
    for key in ("attention.key_length", "attention.value_length", "rope.dimension_count"):
        writer.kv_data[0].pop(f"minicpm3.{key}")
    writer.add_key_length(config.qk_nope_head_dim + config.qk_rope_head_dim)
    writer.add_rope_dimension_count(config.qk_rope_head_dim)
    writer.add_kv_lora_rank(config.kv_lora_rank)
    writer.add_q_lora_rank(config.q_lora_rank)
    for kind in ("long", "short"):
        divisors = np.array([1.0, 2.0, 3.0, 4.0], np.float32)
        writer.add_tensor(f"rope_factors_{kind}.weight", divisors)


def xielu(writer: gguf.GGUFWriter, config: Any) -> None:
    """The parameters of activations, which `xielu_parts` collects, stand in metadata."""
    config.xielu = {one: [] for one in ("alpha_p", "alpha_n", "beta", "eps")}
    config.writer = writer


def xielu_parts(name: str, tensor: torch.Tensor, config: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if ".act_fn." not in name:
        yield name, tensor
        return
    listed = config.xielu[name.rpartition(".")[2]]
    listed.append(tensor.float().item())
    if len(listed) == config.num_hidden_layers:
        config.writer.add_array(f"xielu.{name.rpartition('.')[2]}", listed)


def gptj(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.kv_data[0].pop("gptj.rope.dimension_count")
    writer.add_rope_dimension_count(config.rotary_dim)


def first_bitnet(
    name: str, tensor: torch.Tensor, config: Any
) -> Iterator[tuple[str, torch.Tensor]]:
    """The library's table has the names of the first checkpoints."""
    older = name.replace("attn_sub_norm", "inner_attn_ln")
    yield older.replace("ffn_sub_norm", "ffn_layernorm"), tensor


MULTIPLIERS = {
    **{"embedding_multiplier": 12.0, "residual_multiplier": 0.25},
    **{"attention_multiplier": 0.125, "logits_scaling": 4.0},
}
HYBRID: dict[str, Any] = {
    **{"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1},
    **{"shared_intermediate_size": 32, "layer_types": ["mamba", "attention"]},
}
FAMILIES: dict[str, tuple[str, Family]] = {
    "apertus": (
        "apertus",
        Family(
            kind="Apertus",
            sizes={"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
            metadata=xielu,
            converts=xielu_parts,
        ),
    ),
    "gptj": ("gptj", Family(kind="GPTJ", sizes={"rotary_dim": 8}, old=True, metadata=gptj)),
    "bitnet": (
        "bitnet",
        Family(
            kind="BitNet",
            sizes={"hidden_act": "silu", "tie_word_embeddings": True},
            converts=first_bitnet,
        ),
    ),
    "mistral4": (
        "mistral4",
        Family(
            kind="Mistral4",
            sizes={
                **{**ROUTED, **LATENT, "q_lora_rank": 20, "head_dim": 20},
                "rope_parameters": {
                    **{"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0},
                    **{"original_max_position_embeddings": 8, "llama_4_scaling_beta": 0.4},
                    **{"mscale": 1.0, "mscale_all_dim": 1.0},
                },
            },
            metadata=mistral4,
            converts=mistral4_parts,
        ),
    ),
    "minicpm3": (
        "minicpm3",
        Family(
            kind="MiniCPM3",
            sizes={
                **{**LATENT, "q_lora_rank": 20, "v_head_dim": 16, "scale_emb": 12.0},
                **{"scale_depth": 1.4, "dim_model_base": 256, "tie_word_embeddings": True},
                "rope_parameters": {
                    **{"rope_type": "longrope", "rope_theta": 500.0, "factor": 1.0},
                    **{"long_factor": [1.0, 2.0, 3.0, 4.0], "short_factor": [1.0, 2.0, 3.0, 4.0]},
                    **{"original_max_position_embeddings": 256, "attention_factor": 1.0},
                },
            },
            metadata=minicpm3,
        ),
    ),
    "gemma": ("gemma", Family(kind="Gemma", sizes=HEAD, plus_one=True)),
    "glm4": ("glm4", Family(kind="Glm4", sizes={**HEAD, **HALF, "attention_bias": True})),
    "seed-oss": ("seed_oss", Family(kind="SeedOss", sizes=HEAD)),
    "exaone4": (
        "exaone4",
        Family(
            kind="Exaone4", sizes={"sliding_window": 8, "num_hidden_layers": 4}, metadata=window
        ),
    ),
    "exaone4-whole": (
        "exaone4",
        Family(
            kind="Exaone4", sizes={"sliding_window": None, "layer_types": ["full_attention"] * 2}
        ),
    ),
    "starcoder2": ("starcoder2", Family(kind="Starcoder2", sizes={"sliding_window": None})),
    "stablelm": ("stablelm", Family(kind="StableLm", sizes={**HALF, "use_qkv_bias": True})),
    "command-r": (
        "command-r",
        Family(kind="Cohere", sizes={"logit_scale": 0.3}, metadata=logit_scale),
    ),
    "command-r-plus": (
        "command-r",
        Family(
            kind="Cohere", sizes={"logit_scale": 0.3, "use_qk_norm": True}, metadata=logit_scale
        ),
    ),
    "cohere2": (
        "cohere2",
        Family(
            kind="Cohere2",
            sizes={"sliding_window": 8, "num_hidden_layers": 4, "logit_scale": 0.3},
            metadata=logit_scale,
        ),
    ),
    "nemotron": ("nemotron", Family(kind="Nemotron", sizes=HALF, plus_one=True)),
    "pangu": ("pangu-embedded", Family(kind="Llama", sizes={"attention_bias": True})),
    "arcee": ("arcee", Family(kind="Arcee", permutes=True)),
    "olmo": (
        "olmo",
        Family(
            kind="Olmo",
            sizes={"clip_qkv": 0.2},
            permutes=True,
            metadata=lambda writer, config: writer.add_clamp_kqv(config.clip_qkv),
        ),
    ),
    "phi2": ("phi2", Family(kind="Phi", sizes=HALF)),
    "ernie4.5": ("ernie4_5", Family(kind="Ernie4_5", sizes=HEAD)),
    "ernie4.5-moe": (
        "ernie4_5-moe",
        Family(
            kind="Ernie4_5_Moe",
            sizes={
                **{"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32},
                **{"moe_num_shared_experts": 2, "moe_layer_start_index": 1, **HEAD},
            },
            metadata=experts,
            converts=bias_of_choice,
        ),
    ),
    "hunyuan": ("hunyuan-dense", Family(kind="HunYuanDenseV1", sizes=HEAD)),
    "hunyuan-vl": ("hunyuan_vl", Family(kind="HunYuanDenseV1", sizes=HEAD)),
    "paddle-ocr": ("paddleocr", Family(kind="Llama", sizes=HEAD)),
    "hunyuan-moe": (
        "hunyuan-moe",
        Family(
            kind="HunYuanMoEV1", sizes={**HEAD, "num_experts": 4, "moe_topk": 2}, metadata=experts
        ),
    ),
    "lfm2": (
        "lfm2",
        Family(
            kind="Lfm2",
            sizes={
                **{"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3},
                "block_auto_adjust_ff_dim": False,
            },
            metadata=short_conv,
            converts=squeezed,
        ),
    ),
    "lfm2-moe": (
        "lfm2moe",
        Family(
            kind="Lfm2Moe",
            sizes={
                **{"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
                **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
            },
            metadata=short_conv,
            converts=squeezed,
        ),
    ),
    "glm4-moe": (
        "glm4moe",
        Family(
            kind="Glm4Moe",
            sizes={**ROUTED, **HALF, **HEAD, "use_qk_norm": True, "num_hidden_layers": 3},
            metadata=drafting,
            converts=bias_of_choice,
        ),
    ),
    "dots1": (
        "dots1",
        Family(kind="Dots1", sizes={**ROUTED, **HEAD}, metadata=experts, converts=bias_of_choice),
    ),
    "minimax-m2": (
        "minimax-m2",
        Family(
            kind="MiniMaxM2",
            sizes={**HEAD, "num_local_experts": 4, "num_experts_per_tok": 2, **HALF},
            metadata=experts,
            converts=bias_of_choice,
        ),
    ),
    "deepseek-v2": (
        "deepseek2",
        Family(
            kind="DeepseekV2",
            sizes={
                **ROUTED,
                **LATENT,
                "q_lora_rank": None,
                "norm_topk_prob": False,
                "topk_method": "greedy",
            },
            metadata=latent,
            converts=latent_parts,
        ),
    ),
    "deepseek-v3": (
        "deepseek2",
        Family(
            kind="DeepseekV3",
            sizes={
                **{**ROUTED, **LATENT, "q_lora_rank": 20},
                "rope_parameters": {
                    **{"rope_type": "yarn", "factor": 4.0, "rope_theta": 500.0, "mscale": 0.7},
                    **{"mscale_all_dim": 0.7, "original_max_position_embeddings": 64},
                },
            },
            metadata=latent,
            converts=latent_parts,
        ),
    ),
    "granite-moe": (
        "granitemoe",
        Family(
            kind="GraniteMoe",
            sizes={**MULTIPLIERS, "num_local_experts": 4, "num_experts_per_tok": 2},
            permutes=True,
            metadata=granite,
            converts=granite_parts,
        ),
    ),
    "granite-moe-shared": (
        "granitemoe",
        Family(
            kind="GraniteMoeShared",
            sizes={
                **{**MULTIPLIERS, "num_local_experts": 4, "num_experts_per_tok": 2},
                "shared_intermediate_size": 32,
            },
            permutes=True,
            metadata=granite,
            converts=granite_parts,
        ),
    ),
    "granite-hybrid": (
        "granitehybrid",
        Family(
            kind="GraniteMoeHybrid",
            sizes={
                **{**MULTIPLIERS, **HYBRID, "num_local_experts": 4, "num_experts_per_tok": 2},
                "position_embedding_type": "rope",
            },
            permutes=True,
            metadata=granite_hybrid,
            converts=granite_hybrid_parts,
        ),
    ),
    "granite-hybrid-dense": (
        "granitehybrid",
        Family(
            kind="GraniteMoeHybrid",
            sizes={**MULTIPLIERS, **HYBRID, "num_local_experts": 0, "num_experts_per_tok": 0},
            permutes=True,
            metadata=granite_hybrid,
            converts=granite_hybrid_parts,
        ),
    ),
    "mistral3": (
        "mistral3",
        Family(
            kind="Ministral3",
            sizes={
                **HEAD,
                "rope_parameters": {
                    **{"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "mscale": 1.0},
                    **{"beta_fast": 32.0, "beta_slow": 1.0, "mscale_all_dim": 1.0},
                    **{"original_max_position_embeddings": 8, "llama_4_scaling_beta": 0.1},
                },
            },
            permutes=True,
            metadata=mistral3,
        ),
    ),
    "llama4": (
        "llama4",
        Family(
            kind="Llama4",
            sizes={
                **{
                    **HEAD,
                    "intermediate_size_mlp": 80,
                    "num_local_experts": 4,
                    "rms_norm_eps": 1e-5,
                },
                **{"interleave_moe_layer_step": 2, "num_hidden_layers": 4},
            },
            metadata=llama4,
            text=True,
        ),
    ),
    "gemma3n": (
        "gemma3n",
        Family(
            kind="Gemma3n",
            sizes={
                **{**HEAD, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 96},
                **{"num_kv_shared_layers": 2, "num_hidden_layers": 5, "laurel_rank": 8},
                "layer_types": ["sliding_attention", "full_attention"] * 2 + ["full_attention"],
                "activation_sparsity_pattern": [0.9, 0.0, 0.0, 0.0, 0.0],
                **{"sliding_window": 8, "intermediate_size": [96] * 5},
            },
            metadata=gemma3n,
            converts=gemma3n_parts,
            text=True,
        ),
    ),
    "gemma4": (
        "gemma4",
        Family(
            kind="Gemma4",
            sizes={
                **{**HEAD, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 96},
                **{"num_kv_shared_layers": 2, "num_hidden_layers": 6, "global_head_dim": 32},
                **{"sliding_window": 8, "use_double_wide_mlp": True},
                "layer_types": ["sliding_attention", "full_attention"] * 3,
            },
            metadata=gemma3n,
            converts=gemma4_parts,
            text=True,
        ),
    ),
    "gemma4-moe": (
        "gemma4",
        Family(
            kind="Gemma4",
            sizes={
                **{**HEAD, "hidden_size_per_layer_input": 0, "attention_k_eq_v": True},
                **{"num_kv_shared_layers": 0, "global_head_dim": 32, "sliding_window": 8},
                **{"num_global_key_value_heads": 1, "enable_moe_block": True, "num_experts": 4},
                **{"top_k_experts": 2, "moe_intermediate_size": 32},
                "layer_types": ["sliding_attention", "full_attention"],
            },
            metadata=gemma3n,
            converts=gemma4_parts,
            text=True,
        ),
    ),
    "olmo3": (
        "olmo2",
        Family(kind="Olmo3", sizes={"sliding_window": 8, "num_hidden_layers": 4}, metadata=window),
    ),
    "minicpm": ("minicpm", Family(kind="Llama", permutes=True, metadata=minicpm)),
    "jais2": ("jais2", Family(kind="Jais2", sizes=HEAD)),
    "falcon-7b": (
        "falcon",
        Family(
            kind="Falcon",
            old=True,
            sizes={"num_kv_heads": 1, "bias": False, "alibi": False},
            metadata=falcon,
            converts=grouped,
        ),
    ),
    "falcon-40b": (
        "falcon",
        Family(
            kind="Falcon",
            old=True,
            sizes={"num_kv_heads": 2, "new_decoder_architecture": True, "alibi": False},
            metadata=falcon,
            converts=grouped,
        ),
    ),
    "gptneox": (
        "gptneox",
        Family(
            kind="GPTNeoX",
            sizes={**HALF, "num_key_value_heads": 4},
            metadata=lambda writer, config: writer.add_parallel_residual(True),
            converts=grouped,
        ),
    ),
    "bloom": (
        "bloom",
        Family(kind="Bloom", old=True, sizes={"n_head": 4, "n_layer": 2}, converts=bloom),
    ),
    "gpt2": ("gpt2", Family(kind="GPT2", old=True, converts=linear)),
    "starcoder": ("starcoder", Family(kind="GPTBigCode", old=True, metadata=one_kv_head)),
    "mpt": (
        "mpt",
        Family(
            kind="Mpt", old=True, sizes={"d_model": 64, "n_heads": 4, "n_layers": 2}, metadata=mpt
        ),
    ),
    "afmoe": (
        "afmoe",
        Family(
            kind="Afmoe",
            sizes={
                **{**HEAD, "num_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
                **{"moe_intermediate_size": 32, "num_dense_layers": 1, "num_shared_experts": 1},
                **{"route_scale": 1.5, "mup_enabled": True, "num_hidden_layers": 4},
                "rms_norm_eps": 1e-5,
            },
            metadata=sliding,
            converts=bias_of_choice,
        ),
    ),
    "exaone-moe": (
        "exaone-moe",
        Family(
            kind="ExaoneMoe",
            sizes={
                **{**HEAD, "num_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
                **{"moe_intermediate_size": 32, "num_shared_experts": 1, "num_hidden_layers": 4},
                **{"routed_scaling_factor": 1.5, "n_group": 1, "topk_group": 1},
            },
            metadata=sliding,
            converts=bias_of_choice,
        ),
    ),
    "phimoe": (
        "phimoe",
        Family(
            kind="Phimoe",
            sizes={
                **{"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
                **{"attention_bias": True, "lm_head_bias": True},
            },
            metadata=experts,
        ),
    ),
    "internlm2": ("internlm2", Family(kind="Llama", permutes=True)),
    "xverse": ("xverse", Family(kind="Llama", permutes=True)),
    "glm-separate": ("chatglm", Family(kind="Glm", sizes={"head_dim": 16})),
    "exaone": ("exaone", Family(kind="Llama")),
}


def tiny(family: Family) -> Any:
    named = f"{family.kind}{'Text' if family.text else ''}Config"
    config = getattr(transformers, named)(**(SIZES | family.sizes))
    config.allow_global_per_layer_attribute_access = True
    torch.manual_seed(0)
    name = "GPT2LMHeadModel" if family.kind == "GPT2" else f"{family.kind}ForCausalLM"
    model = getattr(transformers, name)(config).eval()
    randomize(model)
    return model


def write(path: Path, architecture: str, family: Family, model: Any) -> Path:
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    known = config.to_dict()
    head_dim = known.get("head_dim") or config.hidden_size // config.num_attention_heads
    rope = getattr(config, "rope_parameters", None) or {"rope_theta": 10000.0}
    rope = rope.get("full_attention", rope)
    writer.add_context_length(known.get("max_position_embeddings") or known.get("n_positions", 256))
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(
        4 * config.hidden_size if family.old else config.intermediate_size
    )
    writer.add_head_count(config.num_attention_heads)
    heads = config.num_attention_heads
    writer.add_head_count_kv(heads if family.old else config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    writer.add_rope_freq_base(rope["rope_theta"])
    keys = ("norm_epsilon", "layer_norm_eps", "norm_eps", "layer_norm_epsilon")
    plain = [known[key] for key in keys if key in known]
    plain += [1e-5]
    if "rms_norm_eps" in known or family.kind.startswith("Lfm2"):
        writer.add_layer_norm_rms_eps(known.get("rms_norm_eps") or plain[0])
    else:
        writer.add_layer_norm_eps(plain[0])
    writer.add_eos_token_id(2)
    if family.metadata is not None:
        family.metadata(writer, config)
    names = name_table(family.names or architecture, config.num_hidden_layers)
    for name, tensor in _separated(architecture, model.state_dict()).items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        for own, values in converted(family, name, tensor, config):
            stored = (
                own
                if own.startswith("blk.")
                else names.get_name(own, try_suffixes=(".weight", ".bias"))
            )
            assert stored is not None, own
            writer.add_tensor(stored, np.ascontiguousarray(values))
    _finish(writer)
    return path


def converted(
    family: Family, name: str, tensor: torch.Tensor, config: Any
) -> Iterator[tuple[str, np.ndarray]]:
    """What the converter makes of a tensor."""
    pieces = family.converts(name, tensor, config) if family.converts else iter([(name, tensor)])
    for own, piece in pieces:
        values = piece.contiguous().numpy()
        kv_heads = getattr(config, "num_key_value_heads", 0)
        for part, heads in (("q", config.num_attention_heads), ("k", kv_heads)):
            if family.permutes and f"self_attn.{part}_proj" in own:
                values = permuted(values, heads)
        if family.plus_one and own.endswith(("norm.weight", "layernorm.weight")):
            values = values + 1
        yield own, values


ALIKE = (
    "command-r",
    "pangu",
    "exaone",
    "exaone4-whole",
    "internlm2",
    "xverse",
    "glm-separate",
    "deepseek-v2",
    "granite-moe",
    "ernie4.5",
    "arcee",
    "hunyuan",
    "hunyuan-vl",
    "paddle-ocr",
    "minicpm",
    "jais2",
    "falcon-40b",
    "bloom",
    "gpt2",
    "starcoder",
    "mpt",
    "phimoe",
    "exaone-moe",
    "bitnet",
    "minicpm3",
    "gptj",
)
"""Every part of these stands in another case, or few use them."""


@pytest.mark.parametrize(
    "case", [pytest.param(n, marks=pytest.mark.slow) if n in ALIKE else n for n in FAMILIES]
)
def test_files_answer_as_the_model_they_are_of(case: str, tmp_path: Path) -> None:
    architecture, family = FAMILIES[case]
    oracle = tiny(family)
    path = write(tmp_path / "m.gguf", architecture, family, oracle)
    facts = read_model_facts(LocatedModel(path=path, name="m", format="gguf"))
    assert facts.num_layers == oracle.config.num_hidden_layers and facts.logits_width == 96
    model, _ = load(gguf_spec(path))
    for mine, theirs in zip(logits(model), oracle_logits(oracle, ROWS), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=2e-4)


def test_parts_that_do_not_go_together_are_named(tmp_path: Path) -> None:
    """Keys and values of latents, which are one tensor elsewhere."""
    architecture, family = FAMILIES["deepseek-v3"]

    def cut(name: str, tensor: torch.Tensor, config: Any) -> Iterator[tuple[str, torch.Tensor]]:
        for own, piece in latent_parts(name, tensor, config):
            yield own, piece[..., :-1] if "v_b_proj" in own else piece

    model = tiny(family)
    path = write(tmp_path / "m.gguf", architecture, replace(family, converts=cut), model)
    with pytest.raises(
        CheckpointError, match=r"attn_k_b.* and .*attn_v_b.*not go together as self"
    ):
        load(gguf_spec(path))


def test_every_architecture_has_a_dialect() -> None:
    assert DIALECTS.keys() == ARCHITECTURES.keys()
