"""MiniCPM 1, 2 and 4, dense: Llama's decoder with multipliers on embeddings, branches and logits
(Hu et al. 2024)."""

from __future__ import annotations

from headrace.back.layers.attention import AttentionSpec
from headrace.back.layers.rope import read_rope
from headrace.back.layers.scope import Scope
from headrace.back.models.blocks import Decoder, DecoderSpec, LayerSpec, plain_attention, read_sizes
from headrace.base.config.hf import ConfigReader


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """MiniCPMForCausalLM."""
    sizes = read_sizes(config, tied=True)
    if config.int("num_experts", 0, ge=0):
        raise config.wrong("num_experts", "0")
    bias = config.bool("attention_bias", False)
    layer = LayerSpec(
        mixer=AttentionSpec(
            **plain_attention(sizes),
            rope=read_rope(config, head_dim=sizes.head_dim, max_positions=scope.max_positions),
            qkv_bias=bias,
            out_bias=bias,
        ),
        branch_scale=config.float("scale_depth", 1.0) / sizes.layers**0.5,
    )
    base = config.float("dim_model_base", 1.0, ge=1e-6)
    return Decoder(
        scope,
        DecoderSpec(
            sizes=sizes,
            layers=(layer,) * sizes.layers,
            embedding_scale=config.float("scale_emb", 1.0),
            logits_scale=base / sizes.width,
        ),
    )
