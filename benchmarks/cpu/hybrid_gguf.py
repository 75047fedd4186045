"""Writes the shape of a Granite 4 (hybrid) config.json as a GGUF file with random weights, as make_gguf.py does others.

python -m benchmarks.cpu.hybrid_gguf benchmarks/models/granite-4-h-tiny /tmp/granite --types Q8_0,Q4_0 --layers 10
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np

from benchmarks.cpu.make_gguf import (
    DIFFERENT,
    FILE_TYPES,
    SCALE,
    add_tokenizer,
    blocks,
    main,
    type_of,
)


def write_hybrid(config: dict[str, Any], path: Path, named: str) -> None:
    """One file of Granite 4: Mamba 2 and attention, with experts and a shared MLP. What decays, its inputs' scales and
    the convolution are floats, as converters leave them."""
    out, rng = gguf.GGUFWriter(str(path), "granitehybrid"), np.random.default_rng(0)
    width, inner, experts = (
        config["hidden_size"],
        config["intermediate_size"],
        config["num_local_experts"],
    )
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    layers, kinds = config["num_hidden_layers"], config["layer_types"]
    mamba_heads, state, groups = (
        config[f"mamba_{key}"] for key in ("n_heads", "d_state", "n_groups")
    )
    mamba_inner = mamba_heads * config["mamba_d_head"]
    channels = mamba_inner + 2 * groups * state
    out.add_block_count(layers)
    out.add_context_length(config["max_position_embeddings"])
    out.add_embedding_length(width)
    out.add_feed_forward_length(inner)
    out.add_expert_shared_feed_forward_length(config["shared_intermediate_size"])
    out.add_head_count(heads)
    out.add_head_count_kv([kv_heads * (kinds[i] == "attention") for i in range(layers)])
    out.add_layer_norm_rms_eps(config["rms_norm_eps"])
    out.add_rope_freq_base(config["rope_theta"])
    out.add_rope_dimension_count(width // heads)
    out.add_rope_scaling_finetuned(config["position_embedding_type"] == "rope")
    out.add_vocab_size(config["vocab_size"])
    out.add_file_type(FILE_TYPES[named])
    out.add_expert_count(experts)
    out.add_expert_used_count(config["num_experts_per_tok"])
    out.add_ssm_conv_kernel(config["mamba_d_conv"])
    out.add_ssm_state_size(state)
    out.add_ssm_group_count(groups)
    out.add_ssm_inner_size(mamba_inner)
    out.add_ssm_time_step_rank(mamba_heads)
    out.add_attention_scale(config["attention_multiplier"])
    out.add_embedding_scale(config["embedding_multiplier"])
    out.add_residual_scale(config["residual_multiplier"])
    out.add_logit_scale(config["logits_scaling"])
    add_tokenizer(out, config["vocab_size"])

    def matrix(name: str, *shape: int) -> None:
        layer = int(name.split(".")[1]) if name.startswith("blk.") else 0
        kind = type_of(named, name, layer)
        count = DIFFERENT if len(shape) == 3 else 1
        data = blocks(rng, (count, *shape[1:]) if len(shape) == 3 else shape, kind)
        out.add_tensor(
            name,
            np.tile(data, (shape[0] // count, 1, 1)) if len(shape) == 3 else data,
            raw_dtype=kind,
        )

    def floats(name: str, values: np.ndarray) -> None:
        out.add_tensor(name, values.astype(np.float32))

    matrix("token_embd.weight", config["vocab_size"], width)
    floats("output_norm.weight", np.ones(width))
    for layer in range(layers):
        at = f"blk.{layer}"
        floats(f"{at}.attn_norm.weight", np.ones(width))
        floats(f"{at}.ffn_norm.weight", np.ones(width))
        if kinds[layer] == "attention":
            matrix(f"{at}.attn_q.weight", width, width)
            matrix(f"{at}.attn_k.weight", kv_heads * width // heads, width)
            matrix(f"{at}.attn_v.weight", kv_heads * width // heads, width)
            matrix(f"{at}.attn_output.weight", width, width)
        else:
            matrix(f"{at}.ssm_in.weight", mamba_inner + channels + mamba_heads, width)
            floats(
                f"{at}.ssm_conv1d.weight",
                rng.standard_normal((channels, config["mamba_d_conv"])) * 0.2,
            )
            floats(f"{at}.ssm_conv1d.bias", np.zeros(channels))
            floats(f"{at}.ssm_dt.bias", np.full(mamba_heads, -3.0))
            floats(f"{at}.ssm_a", -np.arange(1, mamba_heads + 1)[:, None])
            floats(f"{at}.ssm_d", np.ones((mamba_heads, 1)))
            floats(f"{at}.ssm_norm.weight", np.ones((groups, mamba_inner // groups)))
            matrix(f"{at}.ssm_out.weight", width, mamba_inner)
        floats(f"{at}.ffn_gate_inp.weight", rng.standard_normal((experts, width)) * SCALE)
        for end, rows, columns in (
            ("gate", inner, width),
            ("up", inner, width),
            ("down", width, inner),
        ):
            matrix(f"{at}.ffn_{end}_exps.weight", experts, rows, columns)
            shared = config["shared_intermediate_size"]
            sizes = (width, shared) if end == "down" else (shared, width)
            matrix(f"{at}.ffn_{end}_shexp.weight", *sizes)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


if __name__ == "__main__":
    main(write_hybrid, "Q8_0,Q4_0")
