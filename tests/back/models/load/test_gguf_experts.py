"""GGUF files of mixtures whose layers differ, or whose names the `gguf` library's table lacks: the logits of the
transformers model that they were written from. QNT-15."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from headrace.launch.locate import LocatedModel
from headrace.launch.model_facts import read_model_facts
from tests.back.models.load.test_gguf_blocks import gguf_spec
from tests.back.models.load.test_gguf_families import (
    HEAD,
    LATENT,
    ROUTED,
    Family,
    bias_of_choice,
    experts,
    latent,
    latent_parts,
    tiny,
    window,
    write,
)
from tests.back.models.load.test_gguf_mixtures import ROWS, load, logits
from tests.models.oracle import oracle_logits

EXPERTS: dict[str, Any] = {
    **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "num_hidden_layers": 3,
}
KINDS = ["full_attention", "sliding_attention", "sliding_attention"]
THETAS: dict[str, Any] = {
    "layer_types": KINDS,
    "sliding_window": 8,
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 500.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 90.0},
    },
}
INDEXED: dict[str, Any] = {"index_n_heads": 16, "index_head_dim": 12, "index_topk": 7}


def by_kind(writer: gguf.GGUFWriter, config: Any) -> None:
    experts(writer, config)
    window(writer, config)
    writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
    writer.add_rope_freq_base_swa(config.rope_parameters["sliding_attention"]["rope_theta"])


def laguna(writer: gguf.GGUFWriter, config: Any) -> None:
    """The pattern stays unsaid."""
    by_kind(writer, config)
    for key in ("attention.sliding_window_pattern", "attention.head_count"):
        writer.kv_data[0].pop(f"laguna.{key}")
    writer.add_head_count(config.num_attention_heads_per_layer)
    writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    writer.add_expert_weights_scale(config.moe_routed_scaling_factor)
    writer.add_rope_dimension_count_swa(config.head_dim)


def laguna_parts(
    name: str, tensor: torch.Tensor, config: Any
) -> Iterator[tuple[str, torch.Tensor]]:
    if name.endswith("g_proj.weight"):
        yield f"blk.{name.split('.')[2]}.attn_gate.weight", tensor
    else:
        yield from bias_of_choice(name, tensor, config)


def cohere(writer: gguf.GGUFWriter, config: Any) -> None:
    known = config.to_dict()
    for key in ("feed_forward_length", "attention.layer_norm_rms_epsilon"):
        writer.kv_data[0].pop(f"cohere2moe.{key}")
    writer.add_layer_norm_eps(config.layer_norm_eps)
    writer.add_feed_forward_length(config.prefix_dense_intermediate_size)
    writer.add_expert_feed_forward_length(config.intermediate_size)
    writer.add_expert_count(config.num_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_shared_count(config.num_shared_experts)
    writer.add_logit_scale(config.logit_scale)
    window(writer, config)
    writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
    writer.add_expert_weights_norm(known.get("norm_topk_prob", False))


def mimo(writer: gguf.GGUFWriter, config: Any) -> None:
    """Windows without the token itself; a layer behind the last one, which only drafts."""
    by_kind(writer, config)
    kept = writer.kv_data[0]
    for key in ("sliding_window", "sliding_window_pattern", "head_count_kv", "value_length"):
        kept.pop(f"mimo2.attention.{key}")
    kept.pop("mimo2.block_count")
    writer.add_block_count(config.num_hidden_layers + 1)
    writer.add_nextn_predict_layers(1)
    writer.add_sliding_window(config.sliding_window - 1)
    local = [kind == "sliding_attention" for kind in config.layer_types]
    writer.add_sliding_window_pattern([*local, True])
    whole, short = config.num_key_value_heads, config.swa_num_key_value_heads
    writer.add_head_count_kv([short if one else whole for one in (*local, True)])
    writer.add_value_length(config.v_head_dim)
    writer.add_float32("mimo2.attention.value_scale", config.attention_value_scale)


def mimo_parts(name: str, tensor: torch.Tensor, config: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if "sink" in name:
        yield f"blk.{name.split('.')[2]}.attn_sinks.weight", tensor
    else:
        yield from bias_of_choice(name, tensor, config)


def indexed(writer: gguf.GGUFWriter, config: Any) -> None:
    latent(writer, config)
    writer.add_indexer_head_count(config.index_n_heads)
    writer.add_indexer_key_length(config.index_head_dim)
    writer.add_indexer_top_k(config.index_topk)


def kimi(writer: gguf.GGUFWriter, config: Any) -> None:
    latent(writer, config)
    writer.kv_data[0].pop("kimi-linear.attention.head_count_kv")
    writer.add_expert_used_count(config.num_experts_per_token)
    writer.add_expert_shared_count(config.num_shared_experts)
    writer.add_head_count_kv([int(kind == "full_attention") for kind in config.layer_types])
    writer.add_kda_head_dim(config.linear_head_dim)
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)


def kimi_parts(name: str, tensor: torch.Tensor, config: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """As the converter leaves them: shapes of four dimensions."""
    layer = name.split(".")[2:3]
    if name.endswith("A_log"):
        yield f"blk.{layer[0]}.ssm_a", -tensor.exp().reshape(1, 1, -1, 1)
    elif name.endswith("dt_bias"):
        yield f"blk.{layer[0]}.ssm_dt.bias", tensor
    elif "conv1d" in name:
        for part, one in zip("qkv", tensor.chunk(3), strict=True):
            yield f"blk.{layer[0]}.ssm_conv1d_{part}.weight", one[None]
    elif "o_norm" in name:
        yield f"blk.{layer[0]}.ssm_norm.weight", tensor
    else:
        for ending, stored in KIMI.items():
            if name.endswith(f".{ending}.weight"):
                yield f"blk.{layer[0]}.{stored}.weight", tensor
                return
        yield from latent_parts(name, tensor, config)


KIMI = {
    **{"f_a_proj": "ssm_f_a", "f_b_proj": "ssm_f_b", "g_a_proj": "ssm_g_a", "g_b_proj": "ssm_g_b"},
    "b_proj": "ssm_beta",
}


def dbrx(writer: gguf.GGUFWriter, config: Any) -> None:
    kept, attention, ffn = writer.kv_data[0], config.attn_config, config.ffn_config
    for key in ("attention.head_count_kv", "feed_forward_length"):
        kept.pop(f"dbrx.{key}")
    writer.add_head_count_kv(attention.kv_n_heads)
    writer.add_feed_forward_length(ffn.ffn_hidden_size)
    writer.add_clamp_kqv(attention.clip_qkv)
    writer.add_expert_count(ffn.moe_num_experts)
    writer.add_expert_used_count(ffn.moe_top_k)


def dbrx_parts(name: str, tensor: torch.Tensor, config: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Experts one by one, downs turned back."""
    for ending, stored in (("w1", "gate"), ("v1", "up"), ("w2", "down")):
        if name.endswith(f"experts.mlp.{ending}"):
            each = tensor.unflatten(0, (config.ffn_config.moe_num_experts, -1))
            turned = each.transpose(1, 2) if stored == "down" else each
            yield f"blk.{name.split('.')[2]}.ffn_{stored}_exps.weight", turned
            return
    yield name, tensor


CASES: dict[str, tuple[str, Family]] = {
    "mellum": (
        "mellum",
        Family(
            kind="Mellum",
            sizes={**HEAD, **EXPERTS, **THETAS, "mlp_layer_types": ["sparse", "dense", "sparse"]},
            metadata=by_kind,
            names="dots1",
        ),
    ),
    "laguna": (
        "laguna",
        Family(
            kind="Laguna",
            sizes={
                **{**HEAD, **EXPERTS, **THETAS, "num_attention_heads_per_layer": [2, 4, 4]},
                **{"shared_expert_intermediate_size": 64, "moe_routed_scaling_factor": 1.4},
            },
            metadata=laguna,
            converts=laguna_parts,
            names="dots1",
        ),
    ),
    "cohere2-moe": (
        "cohere2moe",
        Family(
            kind="Cohere2Moe",
            sizes={
                **{**HEAD, "num_hidden_layers": 4, "sliding_window": 8, "num_experts": 4},
                **{"intermediate_size": 32, "prefix_dense_intermediate_size": 96},
                **{"num_shared_experts": 2, "first_k_dense_replace": 1, "logit_scale": 0.3},
                **{"num_experts_per_tok": 2, "sliding_window_pattern": 2},
            },
            metadata=cohere,
            names="dots1",
        ),
    ),
    "mimo-v2": (
        "mimo2",
        Family(
            kind="MiMoV2Flash",
            sizes={
                **{**HEAD, **ROUTED, **THETAS, "num_hidden_layers": 3, "v_head_dim": 12},
                **{"swa_num_key_value_heads": 4, "mlp_layer_types": ["dense", "sparse", "sparse"]},
                "rope_parameters": {
                    kind: {**rope, "partial_rotary_factor": 0.5}
                    for kind, rope in THETAS["rope_parameters"].items()
                },
            },
            metadata=mimo,
            converts=mimo_parts,
        ),
    ),
    "glm-dsa": (
        "glm-dsa",
        Family(
            kind="GlmMoeDsa",
            sizes={
                **{**LATENT, **ROUTED, **INDEXED, "q_lora_rank": 20, "num_hidden_layers": 3},
                "indexer_types": ["full", "shared", "full"],
            },
            metadata=indexed,
            converts=latent_parts,
        ),
    ),
    "deepseek-v3.2": (
        "deepseek32",
        Family(
            kind="DeepseekV32",
            sizes={**LATENT, **ROUTED, **INDEXED, "q_lora_rank": 20},
            metadata=indexed,
            converts=latent_parts,
            names="glm-dsa",
        ),
    ),
    "kimi-linear": (
        "kimi-linear",
        Family(
            kind="KimiLinear",
            sizes={
                **{**LATENT, "q_lora_rank": None, "linear_head_dim": 8, "linear_num_heads": 4},
                **{"num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
                **{"n_shared_experts": 1, "n_group": 1, "topk_group": 1, "rms_norm_eps": 0.01},
                **{"num_hidden_layers": 3, "linear_conv_kernel_dim": 3},
                "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            },
            metadata=kimi,
            converts=kimi_parts,
        ),
    ),
    "dbrx": (
        "dbrx",
        Family(
            kind="Dbrx",
            old=True,
            sizes={
                **{"d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 128},
                "rope_parameters": {"rope_theta": 500.0, "rope_type": "default"},
                "attn_config": {"clip_qkv": 0.8, "kv_n_heads": 2, "rope_theta": 500.0},
                "ffn_config": {
                    **{"hidden_size": 64, "ffn_hidden_size": 32},
                    **{"moe_num_experts": 4, "moe_top_k": 2},
                },
            },
            metadata=dbrx,
            converts=dbrx_parts,
        ),
    ),
}


@pytest.mark.parametrize(
    "case", [n if n == "mellum" else pytest.param(n, marks=pytest.mark.slow) for n in CASES]
)
def test_files_answer_as_the_model_they_are_of(case: str, tmp_path: Path) -> None:
    architecture, family = CASES[case]
    oracle = tiny(family)
    path = write(tmp_path / "m.gguf", architecture, family, oracle)
    facts = read_model_facts(LocatedModel(path=path, name="m", format="gguf"))
    assert facts.num_layers == oracle.config.num_hidden_layers and facts.logits_width == 96
    model, _ = load(gguf_spec(path))
    for mine, theirs in zip(logits(model), oracle_logits(oracle, ROWS), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=2e-4)
