"""Each family equals transformers on tiny random configurations: teacher-forced logits over a
chunked, paged run (MOD-17).

Several rows, prompts in two chunks mixed with decode steps, windows smaller than the sequences, NaN
in every cache position that must not be read.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import safetensors.torch
import torch
import transformers
from msgspec.structs import replace

from headrace.back.models.load import load_model
from headrace.back.parallel.mesh import Mesh
from headrace.base.errors import ConfigError
from tests.covering import first_of_each
from tests.models.oracle import BLOCK_TOKENS, load_ours, model_spec, oracle_logits, save_oracle
from tests.models.paged import PagedRun, random_rows, schedule, teacher_forced

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
LENGTHS = (37, 22, 51, 9)
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


LATENT: dict[str, Any] = {
    "num_key_value_heads": 6,
    "q_lora_rank": 20,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 12,
}


WIDE_LATENT: dict[str, Any] = {
    **{"num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 64, "kv_lora_rank": 64},
    **{"qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 16},
}


EXPERTS: dict[str, Any] = {
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
}
SHARED_EXPERT: dict[str, Any] = {"shared_expert_intermediate_size": 48}
ROUTED: dict[str, Any] = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 16,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
    "first_k_dense_replace": 1,
}


INDEXED: dict[str, Any] = {
    **{"index_n_heads": 16, "index_head_dim": 12, "index_topk": 7, "norm_topk_prob": True},
}  # so many heads that no two scores are 0: which of equal ones is chosen, nobody says


MAMBA2: dict[str, Any] = {
    **{"num_heads": 6, "head_dim": 16, "state_size": 12, "n_groups": 2, "conv_kernel": 4},
}


MAMBA1: dict[str, Any] = {"state_size": 16, "time_step_rank": 16}
FALCON_H1: dict[str, Any] = {
    **{"mamba_d_ssm": 96, "mlp_multipliers": [0.7, 1.4], "key_multiplier": 0.6},
    **{"ssm_multipliers": [0.5, 1.5, 0.8, 1.2, 0.9], "ssm_in_multiplier": 1.3},
    **{"attention_in_multiplier": 1.2, "attention_out_multiplier": 0.9},
    **{"ssm_out_multiplier": 0.4, "embedding_multiplier": 2.5, "lm_head_multiplier": 0.3},
}
MAMBA: dict[str, Any] = {
    **{"mamba_n_heads": 6, "mamba_d_head": 16, "mamba_d_state": 12, "mamba_n_groups": 2},
    **{"mamba_expand": 2, "mamba_d_conv": 4},
}


DELTA: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 3,
    "rms_norm_eps": 0.01,  # transformers' chunks and its own steps differ where a head gives next to nothing
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}


GEMMA4: dict[str, Any] = {
    **{"head_dim": 8, "global_head_dim": 16, "sliding_window": 9},
    **{"hidden_size_per_layer_input": 0, "layer_types": [*MIXED[:1] * 2, MIXED[1]]},
}


UNIFIED = {key: value for key, value in GEMMA4.items() if key != "hidden_size_per_layer_input"}


GEMMA3N: dict[str, Any] = {
    **{"head_dim": 8, "sliding_window": 9, "num_hidden_layers": 5, "num_kv_shared_layers": 2},
    **{"layer_types": [*MIXED, *MIXED[:2]], "intermediate_size": [80, 80, 64, 80, 96]},
    **{"vocab_size_per_layer_input": 97, "hidden_size_per_layer_input": 16, "laurel_rank": 8},
    "activation_sparsity_pattern": [0.8, 0.5, 0.0, 0.0, 0.0],
}


ZAMBA2: dict[str, Any] = {
    **{"n_mamba_heads": 6, "mamba_ngroups": 2, "mamba_d_state": 12, "mamba_d_conv": 4},
    **{"adapter_rank": 16, "time_step_min": 0.3},
}


MPT: dict[str, Any] = {
    **{"d_model": 48, "n_heads": 6, "n_layers": 3, "max_seq_len": 128},
}


DBRX: dict[str, Any] = {
    "rope_parameters": {"rope_theta": 500.0, "rope_type": "default"},
    **{"d_model": 48, "n_heads": 6, "n_layers": 3, "max_seq_len": 128},
    "attn_config": {"clip_qkv": 0.8, "kv_n_heads": 2, "rope_theta": 500.0},
    "ffn_config": {
        **{"hidden_size": 48, "ffn_hidden_size": 32, "moe_num_experts": 6, "moe_top_k": 2},
    },
}


def longrope(original: int) -> dict[str, Any]:
    return {
        "rope_type": "longrope",
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [1.0, 2.5, 4.0, 7.0],
        "original_max_position_embeddings": original,
    }


def rope(**values: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 500.0, **values}}


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-biased-tied": (
        "Llama",
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "llama-wide-heads": ("Llama", {"head_dim": 12, "num_key_value_heads": 6}),
    "llama-linear": ("Llama", rope(rope_type="linear", factor=3.0)),
    "llama-yarn": ("Llama", rope(**YARN)),
    "llama-yarn-mscale": (
        "Llama",
        rope(**YARN, mscale=0.8, mscale_all_dim=0.5, truncate=False, beta_fast=16, beta_slow=2),
    ),
    "llama-llama3": ("Llama", rope(**LLAMA3)),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral-window": ("Mistral", {"sliding_window": 11}),
    "qwen2": ("Qwen2", {}),
    "qwen2-window": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 13, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "gemma2": ("Gemma2", {"head_dim": 8, "sliding_window": 10, "query_pre_attn_scalar": 12}),
    "gemma2-uncapped": (
        "Gemma2",
        {"head_dim": 8, "attn_logit_softcapping": None, "final_logit_softcapping": None},
    ),
    "gemma3": (
        "Gemma3Text",
        {
            "head_dim": 8,
            "sliding_window": 9,
            "query_pre_attn_scalar": 7,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 900.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            },
        },
    ),
    "phi3": ("Phi3", {"sliding_window": None}),
    "phi3-window-partial": ("Phi3", {"sliding_window": 12, **rope(partial_rotary_factor=0.5)}),
    "phi3-longrope-short": (
        "Phi3",
        {
            "original_max_position_embeddings": 128,
            "rope_parameters": {"rope_theta": 300.0, **longrope(128)},
        },
    ),
    "olmo2": ("Olmo2", {}),
    "granite": (
        "Granite",
        {
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.4,
            "logits_scaling": 2.5,
        },
    ),
    "granite-swa": (
        "GraniteSWA",
        {
            **{"num_hidden_layers": 4, "sliding_window": 12, "attention_multiplier": 0.2},
            **{"embedding_multiplier": 3.0, "layer_rope_theta": [0, 500.0, 10000.0, 500.0]},
        },
    ),
    "granite-moe-swa": (
        "GraniteMoeSWA",
        {
            **{"num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 24},
            **{"shared_intermediate_size": 40, "sliding_window": 12},
        },
    ),
    "minicpm3": ("MiniCPM3", LATENT),
    "mixtral": ("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "qwen2-moe": (
        "Qwen2Moe",
        {**EXPERTS, "shared_expert_intermediate_size": 48, "decoder_sparse_step": 2},
    ),
    "qwen3-moe": ("Qwen3Moe", {**EXPERTS, "norm_topk_prob": True, "mlp_only_layers": [1]}),
    "olmoe": ("Olmoe", {"num_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 24}),
    "granite-moe": (
        "GraniteMoe",
        {"num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 24},
    ),
    "glm4-moe-lite": ("Glm4MoeLite", {**LATENT, **ROUTED, "norm_topk_prob": True}),
    "solar-open": ("SolarOpen", {**ROUTED, "head_dim": 8, **rope(partial_rotary_factor=1.0)}),
    "dots1": ("Dots1", {**ROUTED, "norm_topk_prob": True, "sliding_window": None}),
    "minimax-m2": (
        "MiniMaxM2",
        {"num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 8, "rotary_dim": 4},
    ),
    "gpt-oss": (
        "GptOss",
        {
            **{"num_local_experts": 5, "num_experts_per_tok": 2, "head_dim": 8},
            **{"sliding_window": 11, **rope(**YARN, truncate=False)},
        },
    ),
    "ernie4.5-moe": (
        "Ernie4_5_Moe",
        {
            **{"moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 24},
            **{"moe_num_shared_experts": 2, "moe_layer_start_index": 1},
        },
    ),
    "hunyuan-moe": (
        "HunYuanMoEV1",
        {"num_experts": 5, "moe_topk": 2, "head_dim": 8, "intermediate_size": 24},
    ),
    "exaone-moe": (
        "ExaoneMoe",
        {**EXPERTS, "head_dim": 8, "sliding_window": 12, "layer_types": MIXED, "n_group": 2},
    ),
    "mistral4": (
        "Mistral4",
        {
            **LATENT,
            **{**ROUTED, "norm_topk_prob": True, "head_dim": 16},
            **rope(**YARN, llama_4_scaling_beta=0.4, mscale=1.0, mscale_all_dim=1.0),
        },
    ),
    "phimoe": (
        "Phimoe",
        {
            **{"num_local_experts": 6, "router_jitter_noise": 0.4, "attention_bias": True},
            **{"lm_head_bias": True, "sliding_window": None},
        },
    ),
    "flex-olmo": (
        "FlexOlmo",
        {"num_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 24},
    ),
    "youtu": ("Youtu", {**LATENT, "tie_word_embeddings": True}),
    "afmoe": (
        "Afmoe",
        {
            **{**EXPERTS, "head_dim": 8, "sliding_window": 12, "layer_types": MIXED},
            **{"num_shared_experts": 2, "route_scale": 1.7, "mup_enabled": True},
        },
    ),
    "aria-text": (
        "AriaText",
        {"head_dim": 8, "moe_num_experts": 6, "moe_topk": 3, "moe_num_shared_experts": 2},
    ),
    "beam": (
        "Beam",
        {
            **{**EXPERTS, "num_experts": 8, "head_dim": 8, "sliding_window": 12},
            **{"layer_types": MIXED, "mlp_layer_types": ["dense", "sparse", "sparse"]},
            **{"n_group": 4, "topk_group": 2, "final_logit_softcapping": 4.0, "rms_norm_eps": 0.05},
        },
    ),
    "hy-v3": (
        "HYV3",
        {**EXPERTS, "head_dim": 8, "num_shared_experts": 2, "router_scaling_factor": 1.4},
    ),
    "mimo-v2-flash": (
        "MiMoV2Flash",
        {
            **{**ROUTED, "head_dim": 12, "v_head_dim": 8, "num_attention_heads": 8},
            "sliding_window": 12,
            **{"layer_types": MIXED, "mlp_layer_types": ["dense", "sparse", "sparse"]},
        },
    ),
    "llama4": (
        "Llama4Text",
        {
            **{"head_dim": 8, "num_local_experts": 4, "intermediate_size_mlp": 64},
            **{"no_rope_layers": [1, 0, 1], "attention_chunk_size": 12, "floor_scale": 7},
            **{"attn_scale": 0.5, "moe_layers": [0, 2]},
        },
    ),
    "llama4-two-experts": (
        "Llama4Text",
        {
            **{"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
            **{"attention_chunk_size": 16, "use_qk_norm": False, "attn_temperature_tuning": False},
            **rope(**LLAMA3),
        },
    ),
    "deepseek-v2": (
        "DeepseekV2",
        {**LATENT, **ROUTED, "topk_method": "group_limited_greedy", "q_lora_rank": None},
    ),
    "deepseek-v3": (
        "DeepseekV3",
        {
            **LATENT,
            **ROUTED,
            "norm_topk_prob": True,
            **rope(**YARN, mscale=1.0, mscale_all_dim=1.0),
        },
    ),
    "deepseek-v3.2": (
        "DeepseekV32",
        {
            **LATENT,
            **ROUTED,
            **INDEXED,
            **rope(**YARN, mscale=1.0, mscale_all_dim=1.0),
        },
    ),
    "glm-dsa": (
        "GlmMoeDsa",
        {**LATENT, **ROUTED, **INDEXED, "indexer_types": ["full", "shared", "shared"]},
    ),
    "axk1": ("AXK1", {**LATENT, **ROUTED, "norm_topk_prob": True}),
    "glm4-moe": (
        "Glm4Moe",
        {**ROUTED, "head_dim": 8, "use_qk_norm": True, **rope(partial_rotary_factor=0.5)},
    ),
    "lfm2": ("Lfm2", {"layer_types": ["conv", "full_attention", "conv"], "conv_bias": True}),
    "lfm2-as-stated": ("Lfm2", {"full_attn_idxs": [1], "block_auto_adjust_ff_dim": False}),
    "lfm2-moe": (
        "Lfm2Moe",
        {**EXPERTS, "layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1},
    ),
    "lfm3": (
        "Lfm3",
        {
            **{"head_dim": 16, "sliding_window": 12, "conv_bias": True},
            "layer_types": ["conv", "full_attention", "sliding_attention"],
        },
    ),
    "lfm3-plain": (
        "Lfm3",
        {
            **{"head_dim": 8, "use_sandwich_norm": False, "use_attention_gate": False},
            **{"num_hidden_layers": 5, "sliding_window": 10},
        },
    ),
    "kolibri1": (
        "Kolibri1",
        {**EXPERTS, "head_dim": 8, **SHARED_EXPERT, "sliding_window": 12, "layer_types": MIXED},
    ),
    "flint": (
        "Flint",
        {
            **{**EXPERTS, **SHARED_EXPERT, "head_dim": 8, "mlp_only_layers": [0]},
            **{"layer_types": MIXED, "sliding_window": 12},
        },
    ),
    "mellum": (
        "Mellum",
        {
            **{**EXPERTS, "head_dim": 8, "layer_types": MIXED, "sliding_window": 12},
            "mlp_layer_types": ["sparse", "dense", "sparse"],
        },
    ),
    "laguna": (
        "Laguna",
        {
            **{**EXPERTS, **SHARED_EXPERT, "head_dim": 8, "layer_types": MIXED},
            **{"num_attention_heads_per_layer": [6, 4, 6], "sliding_window": 12},
            **{"moe_routed_scaling_factor": 1.4, "moe_router_logit_softcapping": 2.0},
        },
    ),
    "laguna-gated-values": (
        "Laguna",
        {**EXPERTS, **SHARED_EXPERT, "head_dim": 8, "gating": "per-element"},
    ),
    "axk2": (
        "AXK2",
        {
            **{**WIDE_LATENT, **ROUTED, **INDEXED, "hidden_size": 64, "n_group": None},
            **{"topk_group": None, "gated_norm_rank": 64},
        },
    ),
    "axk2-groups": (
        "AXK2",
        {**WIDE_LATENT, **ROUTED, **INDEXED, "hidden_size": 64, "gated_norm_rank": 64},
    ),
    "minimax-m3": (
        "MiniMaxM3VLText",
        {
            **{"head_dim": 8, "rotary_dim": 4, "num_local_experts": 6, "num_experts_per_tok": 2},
            **{"intermediate_size": 24, "shared_intermediate_size": 48, "swiglu_limit": 0.9},
            **{"dense_intermediate_size": 80, "routed_scaling_factor": 1.5, "index_n_heads": 2},
            **{"index_head_dim": 8, "index_block_size": 4, "index_topk_blocks": 3},
            **{"mlp_layer_types": ["dense", "sparse", "sparse"], "index_local_blocks": 1},
            **{"layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"]},
            **rope(partial_rotary_factor=0.5),
        },
    ),
    "dots3-note": (
        "Dots3NoteText",
        {
            **{**WIDE_LATENT, **ROUTED, **INDEXED, "hidden_size": 64, "head_dim": 16},
            **{"shared_experts_intermediate_size": 32, "n_group": 1, "topk_group": 1},
            **{"sliding_window": 12, "use_dsa": None, "num_hidden_layers": 4},
            "layer_types": [
                "indexed_attention",
                "sliding_attention",
                "sliding_attention",
                "indexed_attention",
            ],
            "per_layer_config": {
                i: {
                    **{"num_attention_heads": 8, "num_key_value_heads": 8, "q_lora_rank": 64},
                    **{"kv_lora_rank": 64, "head_dim": 16, "qk_nope_head_dim": 12},
                    **{"v_head_dim": 8, "qk_rope_head_dim": 4},
                }
                for i in (1, 2)
            },
        },
    ),
    "deepseek-v4": (
        "DeepseekV4",
        {
            **{"hidden_size": 64, "num_attention_heads": 8, "head_dim": 16, "q_lora_rank": 64},
            **{"num_key_value_heads": 1, "partial_rotary_factor": 0.5, "moe_intermediate_size": 24},
            **{"n_routed_experts": 6, "num_experts_per_tok": 2, "sliding_window": 12, "hc_mult": 3},
            **{"o_groups": 2, "o_lora_rank": 64, "index_n_heads": 16, "index_head_dim": 12},
            **{
                "index_topk": 3,
                "swiglu_limit": 0.9,
                "num_hidden_layers": 4,
                "hc_sinkhorn_iters": 4,
            },
            "layer_types": [
                "sliding_attention",
                "compressed_sparse_attention",
                "heavily_compressed_attention",
                "compressed_sparse_attention",
            ],
            "compress_rates": {
                "compressed_sparse_attention": 4,
                "heavily_compressed_attention": 16,
            },
            "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"],
            "rope_parameters": {
                "main": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
                "compress": {
                    **YARN,
                    "rope_theta": 300.0,
                    "partial_rotary_factor": 0.5,
                    "attention_factor": 1.0,
                },
            },
        },
    ),
    "hy-v4": (
        "HYV4",
        {
            **{
                **WIDE_LATENT,
                **ROUTED,
                **INDEXED,
                "hidden_size": 64,
                "n_group": 1,
                "topk_group": 1,
            },
            **{"indexer_types": ["full", "shared", "full"], "swiglu_limit": 0.6, "hc_mult": 3},
        },
    ),
    "longcat-flash": (
        "LongcatFlash",
        {
            **{**WIDE_LATENT, "hidden_size": 64, "num_layers": 2, "ffn_hidden_size": 80},
            **{"n_routed_experts": 5, "zero_expert_num": 3, "moe_topk": 3, "head_dim": 8},
            **{"expert_ffn_hidden_size": 24, "routed_scaling_factor": 2.0},
        },
    ),
    "olmo-hybrid": ("OlmoHybrid", {**DELTA, "linear_num_key_heads": 4, "linear_key_head_dim": 12}),
    "olmo-hybrid-nope": (
        "OlmoHybrid",
        {
            **{**DELTA, "linear_num_key_heads": 4, "linear_key_head_dim": 12},
            **{"rope_parameters": None, "linear_allow_neg_eigval": False},
        },
    ),
    "kimi-linear": (
        "KimiLinear",
        {
            **{**LATENT, "q_lora_rank": None, "linear_head_dim": 8, "linear_num_heads": 4},
            **{"num_local_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16},
            **{"n_shared_experts": 2, "n_group": 4, "topk_group": 2, "rms_norm_eps": 0.01},
            "layer_types": DELTA["layer_types"],
        },
    ),
    "bailing-hybrid": (
        "BailingHybrid",
        {
            **{key: size for key, size in LATENT.items() if key != "q_lora_rank"},
            **{"num_local_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16},
            **{"n_shared_experts": 2, "n_group": 4, "topk_group": 2, "rms_norm_eps": 0.01},
            **{"head_dim": 8, "first_k_dense_replace": 1, "layer_types": DELTA["layer_types"]},
            "num_nextn_predict_layers": 0,
        },
    ),
    "minimax": (
        "MiniMax",
        {
            **{"num_local_experts": 4, "num_experts_per_tok": 2, "block_size": 8},
            **{"linear_attn_alpha_factor": 1.5, "mlp_alpha_factor": 0.7},
            "layer_types": DELTA["layer_types"],
        },
    ),
    "qwen3-next": (
        "Qwen3Next",
        {**EXPERTS, **DELTA, "head_dim": 16, "shared_expert_intermediate_size": 24},
    ),
    "qwen4": (
        "Qwen4ExpText",
        {
            **{**EXPERTS, **DELTA, "head_dim": 16, "shared_expert_intermediate_size": 24},
            **{"hidden_size": 64, "num_attention_heads": 4, "hc_count": 3, "hc_lowrank": 64},
            **{"ple_layer_ids": [1, 3], "ple_embed_dim": 64, "ngram_size": 3, "heads_per_ngram": 2},
            **{"ngram_vocab_size_base": 11, "make_ngram_vocab_size_divisible_by": 8},
            **{"split_ngram_parts": 4, "eos_token_id": 5, "indexer_n_heads": 16, "seed": 77},
            **{"indexer_kv_heads": 1, "indexer_head_dim": 12, "indexer_budget": 12},
            **{"indexer_compress_ratio": 4, "output_gate_type": "sigmoid"},
            **rope(partial_rotary_factor=0.5),
            "layer_types": ["linear_attention", "indexed_attention", "linear_attention"],
        },
    ),
    "qwen3.5": ("Qwen3_5Text", {**DELTA, "head_dim": 16, "tie_word_embeddings": True}),
    "qwen3.5-moe": (
        "Qwen3_5MoeText",
        {**EXPERTS, **DELTA, "head_dim": 16, "shared_expert_intermediate_size": 24},
    ),
    "minicpm3-direct-queries": (
        "MiniCPM3",
        {**LATENT, "q_lora_rank": None, "v_head_dim": 8, "scale_depth": None},
    ),
    "minicpm3-yarn-biased": (
        "MiniCPM3",
        {**LATENT, **rope(**YARN, mscale=0.8, mscale_all_dim=0.5), "attention_bias": True},
    ),
    "smollm3": ("SmolLM3", {"no_rope_layer_interval": 2}),
    "smollm3-window": (
        "SmolLM3",
        {"no_rope_layers": [1, 0, 1], "use_sliding_window": True, "sliding_window": 14},
    ),
    "phi": ("Phi", {}),
    "phi-qk-norm": ("Phi", {"qk_layernorm": True, "num_key_value_heads": 6}),
    "gemma": ("Gemma", {"head_dim": 8}),
    "stablelm": ("StableLm", {"use_qkv_bias": True, **rope(partial_rotary_factor=0.25)}),
    "stablelm-parallel": ("StableLm", {"use_parallel_residual": True, "qk_layernorm": True}),
    "starcoder2": ("Starcoder2", {"sliding_window": 12}),
    "nemotron": ("Nemotron", {}),
    "arcee": ("Arcee", {}),
    "cohere": ("Cohere", {"logit_scale": 0.3}),
    "cohere-qk-norm": ("Cohere", {"use_qk_norm": True}),
    "cohere2": ("Cohere2", {"sliding_window": 12, "layer_types": MIXED}),
    "cohere2-moe": (
        "Cohere2Moe",
        {
            **{"num_hidden_layers": 4, "head_dim": 8, "sliding_window": 12, "num_experts": 6},
            **{"intermediate_size": 24, "prefix_dense_intermediate_size": 40},
            **{"num_shared_experts": 2, "first_k_dense_replace": 1, "sliding_window_pattern": 2},
        },
    ),
    "cohere2-moe-sigmoid": (
        "Cohere2Moe",
        {
            **{"head_dim": 8, "sliding_window": 12, "num_experts": 6, "intermediate_size": 24},
            **{"expert_selection_fn": "sigmoid", "num_shared_experts": 1, "rms_norm_eps": 1e-5},
            "shared_expert_combination_strategy": "sum",
        },
    ),
    "olmo": ("Olmo", {}),
    "olmo-clipped": ("Olmo", {"clip_qkv": 0.4}),
    "olmo3": (
        "Olmo3",
        {
            "sliding_window": 12,
            "layer_types": MIXED,
            "rope_parameters": {
                "full_attention": {**YARN, "rope_theta": 500.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            },
        },
    ),
    "glm": ("Glm", {"head_dim": 8}),
    "glm4": ("Glm4", {"head_dim": 8}),
    "exaone4": ("Exaone4", {"sliding_window": 12, "layer_types": MIXED}),
    "exaone4-full": ("Exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 3}),
    "seed_oss": ("SeedOss", {"head_dim": 8, "attention_out_bias": True}),
    "apertus": ("Apertus", rope(**LLAMA3)),
    "ernie4_5": ("Ernie4_5", {"head_dim": 8, "use_bias": True}),
    "helium": ("Helium", {"head_dim": 8}),
    "hunyuan_v1": ("HunYuanDenseV1", {"head_dim": 8}),
    "hunyuan_v1-alpha": (
        "HunYuanDenseV1",
        {"head_dim": 8, **rope(rope_type="dynamic", alpha=50.0, factor=1.0)},
    ),
    "gpt2": ("GPT2", {"n_inner": 80, "scale_attn_by_inverse_layer_idx": True}),
    "openai-gpt": ("OpenAIGPT", {}),
    "ctrl": ("CTRL", {"dff": 80}),
    "mllama": (
        "MllamaText",
        {
            **{"pad_token_id": 0, "bos_token_id": 1, "cross_attention_layers": [1]},
            "rope_parameters": {**LLAMA3, "rope_theta": 500.0},
        },
    ),
    "gpt_neox": ("GPTNeoX", {}),
    "gpt_neox-serial": ("GPTNeoX", {"use_parallel_residual": False, "attention_bias": False}),
    "falcon": ("Falcon", {"ffn_hidden_size": 80}),
    "falcon-grouped": (
        "Falcon",
        {"ffn_hidden_size": 80, "new_decoder_architecture": True, "num_kv_heads": 2},
    ),
    "falcon-serial": (
        "Falcon",
        {"ffn_hidden_size": 80, "multi_query": False, "parallel_attn": False, "bias": True},
    ),
    "mamba2": ("Mamba2", MAMBA2),
    "mamba2-bounded": (
        "Mamba2",
        {**MAMBA2, "time_step_limit": (0.3, 0.9), "use_bias": True, "use_conv_bias": False},
    ),
    "mamba": ("Mamba", {**MAMBA1, "conv_kernel": 3}),
    "mamba-biased": ("Mamba", {**MAMBA1, "use_bias": True, "tie_word_embeddings": False}),
    "falcon-mamba": ("FalconMamba", MAMBA1),
    "jamba": (
        "Jamba",
        {
            **{"num_experts": 5, "num_experts_per_tok": 2, "mamba_d_state": 16},
            **{"attn_layer_period": 3, "attn_layer_offset": 1, "mamba_dt_rank": 16},
        },
    ),
    "bamba": ("Bamba", {**MAMBA, "attn_layer_indices": [1]}),
    "falcon-h1": ("FalconH1", {**MAMBA, **FALCON_H1}),
    "falcon-h1-normed": ("FalconH1", {**MAMBA, **FALCON_H1, "mamba_rms_norm": True}),
    "granite-hybrid": (
        "GraniteMoeHybrid",
        {
            **{**MAMBA, "num_local_experts": 0, "shared_intermediate_size": 40},
            **{"layer_types": ["linear_attention", "full_attention", "linear_attention"]},
            **{"embedding_multiplier": 3.0, "attention_multiplier": 0.2, "logits_scaling": 2.5},
            "residual_multiplier": 0.4,
        },
    ),
    "granite-hybrid-experts": (
        "GraniteMoeHybrid",
        {
            **{**MAMBA, "num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 24},
            **{"shared_intermediate_size": 40, "position_embedding_type": "rope"},
            "layer_types": ["full_attention", "linear_attention", "linear_attention"],
        },
    ),
    "granite-moe-shared": (
        "GraniteMoeShared",
        {
            **{"num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 24},
            "shared_intermediate_size": 40,
        },
    ),
    "nemotron-h": (
        "NemotronH",
        {
            **{"mamba_num_heads": 6, "mamba_head_dim": 16, "ssm_state_size": 12, "n_groups": 2},
            **{"num_hidden_layers": 4, "head_dim": 8, "use_bias": True},
            "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"],
        },
    ),
    "nemotron-h-experts": (
        "NemotronH",
        {
            **{"mamba_num_heads": 6, "mamba_head_dim": 16, "ssm_state_size": 12, "n_groups": 2},
            **{"num_hidden_layers": 4, "head_dim": 8, "n_routed_experts": 6, "n_group": 2},
            **{"num_experts_per_tok": 2, "moe_intermediate_size": 24, "topk_group": 1},
            **{"moe_shared_expert_intermediate_size": 40, "routed_scaling_factor": 2.5},
            "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
        },
    ),
    "nemotron-h-latent-experts": (
        "NemotronH",
        {
            **{"mamba_num_heads": 6, "mamba_head_dim": 16, "ssm_state_size": 12, "n_groups": 2},
            **{"num_hidden_layers": 4, "head_dim": 8, "n_routed_experts": 6, "n_group": 1},
            **{"num_experts_per_tok": 2, "moe_intermediate_size": 24, "topk_group": 1},
            **{"moe_shared_expert_intermediate_size": 64, "routed_scaling_factor": 2.5},
            **{"moe_latent_size": 64, "hidden_size": 64, "num_attention_heads": 8},
            "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
        },
    ),
    "gemma4": ("Gemma4Text", {**GEMMA4, "final_logit_softcapping": 6.0}),
    "gemma4-shared": (
        "Gemma4Text",
        {
            **{**GEMMA4, "num_hidden_layers": 6, "layer_types": [*MIXED[:2] * 3]},
            **{"num_kv_shared_layers": 3, "use_double_wide_mlp": True},
            **{"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 101},
        },
    ),
    "gemma4-experts": (
        "Gemma4Text",
        {
            **{**GEMMA4, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
            **{"enable_moe_block": True, "num_experts": 6, "top_k_experts": 2},
            "moe_intermediate_size": 24,
        },
    ),
    "gemma3n": ("Gemma3nText", GEMMA3N),
    "gemma3n-third-stream": (
        "Gemma3nText",
        {
            **{**GEMMA3N, "altup_active_idx": 2, "altup_num_inputs": 3, "num_kv_shared_layers": 0},
            **{"altup_correct_scale": False, "vocab_size_per_layer_input": 61},
        },
    ),
    "zamba": (
        "Zamba",
        {
            **{"num_hidden_layers": 4, "num_key_value_heads": 6, "mamba_d_state": 12},
            "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
        },
    ),
    "recurrent-gemma": (
        "RecurrentGemma",
        {"attention_window_size": 12, "lru_width": 36, "logits_soft_cap": 8.0},
    ),
    "rwkv": ("Rwkv", {}),
    "doge": ("Doge", {"keep_window_size": 128, "attention_bias": True}),
    "zaya": (
        "Zaya",
        {
            **{"head_dim": 8, "num_experts": 5, "moe_intermediate_size": 24, "sliding_window": 12},
            **{"router_hidden_size": 24, "cca_time0": 3},
            "layer_types": ["hybrid", "hybrid_sliding", "hybrid"],
        },
    ),
    "inkling": (
        "InklingText",
        {
            **{"moe_intermediate_size": 24, "head_dim": 8, "swa_num_attention_heads": 4},
            **{"swa_num_key_value_heads": 4, "swa_head_dim": 12, "sliding_window_size": 9},
            **{"d_rel": 4, "rel_extent": 14, "log_scaling_n_floor": 5, "n_routed_experts": 6},
            **{"num_experts_per_tok": 3, "n_shared_experts": 2, "logits_mup_width_multiplier": 2.0},
            "layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding"],
            "mlp_layer_types": ["dense", "sparse", "sparse"],
        },
    ),
    "inkling-2": (
        "Inkling2Text",
        {
            **{"moe_intermediate_size": 24, "head_dim": 8, "swa_num_attention_heads": 4},
            **{"swa_num_key_value_heads": 4, "swa_head_dim": 12, "sliding_window_size": 9},
            **{"d_rel": 4, "rel_extent": 14, "log_scaling_n_floor": 5, "n_routed_experts": 6},
            **{"num_experts_per_tok": 3, "n_layers_per_attn_res_block": 2, "num_hidden_layers": 5},
            **{"unpadded_vocab_size": 97, "final_logit_softcapping": 5.0},
            **{"qk_l2_clip_threshold": 3.0, "rel_l2_clip_threshold": 1.5},
            "layer_types": ["hybrid", *["hybrid_sliding"] * 2, "hybrid", "hybrid_sliding"],
        },
    ),
    "muse-glimmer": (
        "MuseGlimmerText",
        {
            **{"head_dim": 8, "sliding_window": 12, "num_hidden_layers": 5, "qk_scale_factor": 2.5},
            **{"final_logit_softcapping": 3.0, "output_multiplier": 0.6, "post_norm_eps": 0.01},
            **rope(),
        },
    ),
    "muse-spark": (
        "MuseSparkText",
        {
            **{"head_dim": 8, "sliding_window": 12, "num_hidden_layers": 5, "qk_scale_factor": 2.5},
            **{"final_logit_softcapping": 3.0, "output_multiplier": 0.6, "post_norm_eps": 0.01},
            **{"num_local_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24},
            **{"moe_hidden_size": 32, "routed_scaling_factor": 1.3, "rms_norm_eps": 0.01},
            **{"mlp_layer_types": ["dense", *["sparse"] * 4], **rope()},
        },
    ),
    "xlstm": ("xLSTM", {"hidden_size": 128, "num_heads": 4, "autocast_kernel_dtype": "float32"}),
    "hrm-text": ("HrmText", {"head_dim": 8, "num_hidden_layers": 2, "H_cycles": 2, "L_cycles": 2}),
    "zamba2": (
        "Zamba2",
        {
            **{**ZAMBA2, "num_hidden_layers": 5, "num_mem_blocks": 2, "num_key_value_heads": 6},
            **{"use_shared_attention_adapter": True, "use_mem_rope": True},
            "layers_block_type": [
                "linear_attention",
                "hybrid",
                "hybrid",
                "linear_attention",
                "hybrid",
            ],
        },
    ),
    "zamba2-plain": (
        "Zamba2",
        {
            **{**ZAMBA2, "add_bias_linear": True, "num_hidden_layers": 4},
            "layers_block_type": ["hybrid", "linear_attention", "hybrid", "linear_attention"],
        },
    ),
    "gpt-neox-japanese": (
        "GPTNeoXJapanese",
        {"intermediate_multiple_size": 2, **rope(partial_rotary_factor=0.5)},
    ),
    "modernbert-decoder": (
        "ModernBertDecoder",
        {
            **{"local_attention": 12, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
            **{"cls_token_id": 1, "sep_token_id": 2, "norm_bias": True, "attention_bias": True},
        },
    ),
    "bloom": ("Bloom", {"n_head": 6}),
    "bloom-behind-norm": (
        "Bloom",
        {"n_head": 8, "apply_residual_connection_post_layernorm": True},
    ),
    "mpt": ("Mpt", MPT),
    "mpt-clipped": (
        "Mpt",
        {**MPT, "attn_config": {"clip_qkv": 0.6, "softmax_scale": 0.2}},
    ),
    "falcon-alibi": (
        "Falcon",
        {
            **{"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True},
            **{"num_attention_heads": 8, "ffn_hidden_size": 80},
        },
    ),
    "falcon-alibi-parallel": (
        "Falcon",
        {"alibi": True, "num_attention_heads": 8, "ffn_hidden_size": 80},
    ),
    "opt": ("OPT", {"ffn_dim": 80, "word_embed_proj_dim": 48}),
    "opt-post": (
        "OPT",
        {"ffn_dim": 80, "word_embed_proj_dim": 32, "do_layer_norm_before": False},
    ),
    "opt-plain": (
        "OPT",
        {
            **{"ffn_dim": 80, "word_embed_proj_dim": 48, "enable_bias": False},
            **{"layer_norm_elementwise_affine": False, "activation_function": "gelu"},
        },
    ),
    "biogpt": ("BioGpt", {}),
    "xglm": ("XGLM", {"ffn_dim": 80}),
    "gptj": ("GPTJ", {"rotary_dim": 4, "n_inner": 80}),
    "codegen": ("CodeGen", {"num_attention_heads": 8, "rotary_dim": 4, "n_inner": 80}),
    "gpt-neo": (
        "GPTNeo",
        {
            **{"num_layers": 3, "window_size": 11},
            "attention_types": [[["global", "local"], 1], [["local"], 1]],
        },
    ),
    "gpt-bigcode": ("GPTBigCode", {"n_inner": 80}),
    "gpt-bigcode-heads": (
        "GPTBigCode",
        {"multi_query": False, "scale_attn_weights": False, "n_inner": 80},
    ),
    "persimmon": ("Persimmon", rope(partial_rotary_factor=0.5)),
    "persimmon-plain": ("Persimmon", {"qk_layernorm": False}),
    "nanochat": ("NanoChat", {}),
    "dbrx": ("Dbrx", DBRX),
    "dbrx-unweighed": (
        "Dbrx",
        {
            **DBRX,
            "attn_config": {"clip_qkv": 1.4, "kv_n_heads": 3, "rope_theta": 500.0},
            "ffn_config": {**DBRX["ffn_config"], "moe_normalize_expert_weights": None},
        },
    ),
    "cwm": (
        "Cwm",
        {
            **{"head_dim": 8, "sliding_window": 11, "layer_types": MIXED, "bos_token_id": 0},
            **rope(**{**LLAMA3, "factor": 16.0}),
        },
    ),
    "vaultgemma": ("VaultGemma", {"head_dim": 8, "sliding_window": 10}),
    "hyperclovax": (
        "HyperCLOVAX",
        {
            **{"embedding_multiplier": 3.0, "attention_multiplier": 0.2},
            **{"residual_multiplier": 0.4, "logits_scaling": 0.3},
        },
    ),
    "hyperclovax-plain": ("HyperCLOVAX", {"use_post_norm": False}),
    "jais2": ("Jais2", {"head_dim": 8}),
    "internlm3": ("InternLM3", {"head_dim": 12, "attention_bias": True, "mlp_bias": True}),
    "iquestcoder": ("IQuestCoder", {"head_dim": 8}),
    "emu3": ("Emu3Text", {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}),
    "diffllama": ("DiffLlama", {"lambda_std_dev": 0.3}),
    "jetmoe": (
        "JetMoe",
        {
            **{"num_local_experts": 5, "num_experts_per_tok": 2, "kv_channels": 12},
            **{"num_attention_heads": 4, "rms_norm_eps": 1e-5},
        },
    ),
    "bitnet": ("BitNet", {}),
    "gemma4-unified": ("Gemma4UnifiedText", {**UNIFIED, "attention_k_eq_v": True}),
    "gemma4-unified-shared": (
        "Gemma4UnifiedText",
        {
            **{**UNIFIED, "num_hidden_layers": 5, "num_kv_shared_layers": 2},
            **{"use_double_wide_mlp": True, "layer_types": [*MIXED, *MIXED[:2]]},
        },
    ),
    "ministral": ("Ministral", {"head_dim": 8, "sliding_window": 12, "layer_types": MIXED}),
    "ministral3": ("Ministral3", {"head_dim": 8, **rope(**YARN, llama_4_scaling_beta=0.4)}),
}
CLASSES = [name for name, _ in CASES.values()]


def tiny_config(case: str) -> Any:
    name, changes = CASES[case]
    return getattr(transformers, f"{name}Config")(**(SIZES | changes))


def compare(ours: list[torch.Tensor], theirs: list[torch.Tensor], tolerance: float) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.dtype == torch.float32
        scale = max(1.0, other.abs().max().item())
        assert (mine - other).abs().max().item() <= tolerance * scale


class BothModels(NamedTuple):
    """A case's rows, what transformers makes of them, and our model of the same weights."""

    rows: list[list[int]]
    theirs: list[torch.Tensor]
    ours: Any


def both_models(folder: Path, oracle: Any) -> BothModels:
    """Of the oracle that was saved there."""
    rows = random_rows(SIZES["vocab_size"], LENGTHS)
    return BothModels(rows, oracle_logits(oracle, rows), load_ours(model_spec(folder)))


@pytest.fixture(scope="module")
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> BothModels:
    """Of the case that is asked for, for both tests: making them is most of either."""
    folder = tmp_path_factory.mktemp("parity")
    return both_models(folder, save_oracle(tiny_config(request.param), folder))


@pytest.mark.parametrize("models", CASES, indirect=True)
def test_logits_equal_transformers_in_float32(models: BothModels) -> None:
    rows, theirs, ours = models
    got = teacher_forced(ours, rows, block_tokens=BLOCK_TOKENS, dtype=torch.float32)
    compare(got, theirs, 1e-4)


@pytest.mark.parametrize("models", first_of_each(list(CASES), CLASSES), indirect=True)
def test_last_tokens_alone_have_the_logits_of_transformers(models: BothModels) -> None:
    """The hidden states of other tokens end with the last layer's KV, which later steps read."""
    compare_last_tokens(models)


def compare_last_tokens(models: BothModels) -> None:
    """Of each chunk the last token's logits alone."""
    rows, theirs, ours = models
    run = PagedRun(ours, rows, block_tokens=BLOCK_TOKENS, dtype=torch.float32)
    for chunks in schedule([len(row) for row in rows]):
        parts = run.step(chunks, last=True)
        ends = [theirs[row][run.done[row] - 1][None] for row, _ in sorted(chunks)]
        compare(parts, ends, 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_greedy_tokens_equal_those_of_transformers(case: str, tmp_path: Path) -> None:
    """A prompt in one step, then a token at a time."""
    oracle = save_oracle(tiny_config(case), tmp_path)
    (prompt,), count = random_rows(SIZES["vocab_size"], (23,)), 12
    ours = load_ours(model_spec(tmp_path))
    room = [0] * count
    run = PagedRun(ours, [prompt + room], block_tokens=BLOCK_TOKENS, dtype=torch.float32)
    logits, tokens = run.step([(0, len(prompt))], last=True)[0], list(prompt)
    for place in range(len(prompt), len(prompt) + count):
        run.rows[0][place] = int(logits[-1].argmax())
        logits = run.step([(0, 1)], last=True)[0]
        tokens.append(int(oracle_logits(oracle, [tokens])[0][-1].argmax()))
    assert run.rows[0] == tokens


@pytest.mark.parametrize(
    "case",
    [
        "llama",
        "mistral-window",
        "qwen2",
        "qwen3",
        "gemma2",
        "gemma3",
        "gemma3n",
        "gemma4",
        "phi3",
        "olmo2",
        "granite",
        "minicpm3",
        "smollm3",
    ],
)
def test_bfloat16_is_as_near_to_float32_as_transformers_is(case: str, tmp_path: Path) -> None:
    oracle = save_oracle(tiny_config(case), tmp_path)
    rows = random_rows(SIZES["vocab_size"], LENGTHS)
    exact = oracle_logits(oracle.to(torch.bfloat16).float(), rows)
    theirs = oracle_logits(oracle.to(torch.bfloat16), rows)
    ours = teacher_forced(
        load_ours(model_spec(tmp_path, dtype="bfloat16")),
        rows,
        block_tokens=BLOCK_TOKENS,
        dtype=torch.bfloat16,
    )
    error = max((mine - true).pow(2).mean() for mine, true in zip(ours, exact, strict=True))
    bound = max((other - true).pow(2).mean() for other, true in zip(theirs, exact, strict=True))
    assert error.sqrt() <= 1.5 * bound.sqrt()


def test_dynamic_ntk_uses_the_base_of_the_longest_sequence_allowed(tmp_path: Path) -> None:
    config = tiny_config("llama")
    config.max_position_embeddings = 24
    config.rope_parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 500.0}
    oracle = save_oracle(config, tmp_path)
    rows = random_rows(SIZES["vocab_size"], (51,))
    ours = load_ours(model_spec(tmp_path, max_model_len=51))
    got = teacher_forced(ours, rows, block_tokens=BLOCK_TOKENS, dtype=torch.float32)
    compare(got, oracle_logits(oracle, rows), 1e-4)


def test_longrope_takes_the_long_factors_once_sequences_may_pass_the_original_length(
    tmp_path: Path,
) -> None:
    config = tiny_config("phi3")
    config.original_max_position_embeddings = 30
    config.rope_parameters = {
        "rope_theta": 300.0,
        "partial_rotary_factor": 1.0,
        **longrope(30),
    }
    oracle = save_oracle(config, tmp_path)
    rows = random_rows(SIZES["vocab_size"], (51, 37))
    ours = load_ours(model_spec(tmp_path, max_model_len=64))
    assert [one.chosen for one in ours.decisions if one.field == "model.rope"] == [
        "long factors: sequences may have 64 tokens"
    ]
    got = teacher_forced(ours, rows, block_tokens=BLOCK_TOKENS, dtype=torch.float32)
    compare(got, oracle_logits(oracle, rows), 1e-4)


def test_a_published_a_x_k1_has_no_bias_that_chooses_and_a_norm_too_many(tmp_path: Path) -> None:
    oracle = save_oracle(tiny_config("axk1"), tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    biases = [name for name in tensors if name.endswith("e_score_correction_bias")]
    for name in biases:
        oracle.state_dict()[name].zero_()
        del tensors[name]
    unused = "model.layers.0.post_mlp_layernorm.weight"
    assert len(biases) == 2 and unused not in tensors
    tensors[unused] = torch.full((SIZES["hidden_size"],), 3.0)
    safetensors.torch.save_file(tensors, file)
    rows = random_rows(SIZES["vocab_size"], LENGTHS)
    ours, _ = load_model(
        model_spec(tmp_path),
        mesh=Mesh(),
        device=torch.device("cpu"),
        block_tokens=BLOCK_TOKENS,
    )
    got = teacher_forced(ours, rows, block_tokens=BLOCK_TOKENS, dtype=torch.float32)
    compare(got, oracle_logits(oracle, rows), 1e-4)


def test_minimax_reads_the_keys_of_its_published_config(tmp_path: Path) -> None:
    """Half of each head rotated: transformers turns the pairs (i, i + 4) of 8, the published model
    (i, i + 2) of the first 4, so that rows lie in another order."""
    oracle = save_oracle(tiny_config("minimax"), tmp_path)
    frequencies = oracle.model.rotary_emb.inv_freq
    frequencies.copy_(torch.tensor([1.0, 500.0**-0.5, 0.0, 0.0]))
    file = tmp_path / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    order = torch.tensor([0, 1, 4, 5, 2, 3, 6, 7])
    for name in [name for name in tensors if name.endswith(("q_proj.weight", "k_proj.weight"))]:
        heads = tensors[name].unflatten(0, (-1, 8))
        tensors[name] = heads[:, order].flatten(0, 1).contiguous()
    safetensors.torch.save_file(tensors, file)
    stated = json.loads((tmp_path / "config.json").read_text())
    kinds = ["linear_attention", "full_attention"]
    published = {
        **{**SIZES, "architectures": ["MiniMaxText01ForCausalLM"], "rms_norm_eps": 1e-5},
        **{"attn_type_list": [kinds.index(kind) for kind in stated["layer_types"]]},
        **{"head_dim": 8, "rotary_dim": 4, "rope_theta": 500.0, "postnorm": True},
        **{key: stated[key] for key in ("num_local_experts", "num_experts_per_tok")},
        "layernorm_full_attention_alpha": stated["full_attn_alpha_factor"],
        "layernorm_linear_attention_alpha": stated["linear_attn_alpha_factor"],
        "layernorm_mlp_alpha": stated["mlp_alpha_factor"],
    }
    (tmp_path / "config.json").write_text(json.dumps(published))
    rows = random_rows(SIZES["vocab_size"], LENGTHS)
    got = teacher_forced(
        load_ours(model_spec(tmp_path)), rows, block_tokens=BLOCK_TOKENS, dtype=torch.float32
    )
    compare(got, oracle_logits(oracle, rows), 1e-4)


def test_tables_of_experts_by_token_are_read_as_they_are_stored(tmp_path: Path) -> None:
    """Whole numbers beside weights of the model's dtype; norms of latents under their published name."""
    oracle = save_oracle(tiny_config("deepseek-v4"), tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = safetensors.torch.load_file(file).items()
    published = {name.replace(".attn.norm.", ".attn.kv_norm."): one for name, one in tensors}
    safetensors.torch.save_file(published, file)
    rows = random_rows(SIZES["vocab_size"], LENGTHS)
    ours, _ = load_model(
        model_spec(tmp_path),
        mesh=Mesh(),
        device=torch.device("cpu"),
        block_tokens=BLOCK_TOKENS,
    )
    got = teacher_forced(ours, rows, block_tokens=BLOCK_TOKENS, dtype=torch.float32)
    compare(got, oracle_logits(oracle, rows), 1e-4)


def test_what_latents_cannot_be_is_said(tmp_path: Path) -> None:
    """No silent fallback: what a cache of latents cannot be is refused; experts are quantized."""
    save_oracle(tiny_config("deepseek-v3"), tmp_path)
    spec = model_spec(tmp_path)
    with pytest.raises(
        ConfigError, match=r"--kv-dtype int4: latents are kept in the model's dtype .* fp8"
    ):
        load_ours(replace(spec, kv_dtype="int4"))
    ours = load_ours(replace(spec, quantization="int8"))
    fields = {d.field for d in ours.decisions}
    assert "kernel.experts_quant" in fields and "model.experts" not in fields
