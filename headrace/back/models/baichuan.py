"""Baichuan 1 and 2 (Yang et al. 2023): Llama's decoder with query, key and value in one tensor; 7B
rotates, 13B has ALiBi; since version 2 the rows of the head are normed (names and keys of the
published checkpoints)."""

from __future__ import annotations

from headrace.back.layers.alibi import alibi_slopes
from headrace.back.layers.attention import AttentionSpec
from headrace.back.layers.attention_names import SEPARATE, AttentionNames
from headrace.back.layers.rope import read_rope
from headrace.back.layers.scope import Scope
from headrace.back.models.blocks import Decoder, DecoderSpec, LayerSpec, plain_attention, read_sizes
from headrace.base.config.hf import ConfigReader

ATTENTION = AttentionNames(merged="W_pack")
OF_VERSION_2 = "z_loss_weight"
"""A key that the config of version 2 has and that of version 1 has not."""


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """BaichuanForCausalLM, BaiChuanForCausalLM. Where `max_position_embeddings` is stated
    positions are rotations, as in the published 7B. GGUF files have projections apart."""
    sizes = read_sizes(config)
    rope = None
    if "max_position_embeddings" in config:
        rope = read_rope(config, head_dim=sizes.head_dim, max_positions=scope.max_positions)
    layer = LayerSpec(
        mixer=AttentionSpec(
            **plain_attention(sizes),
            rope=rope,
            slopes=() if rope else alibi_slopes(sizes.heads),
            names=ATTENTION if config.bool("joined_projections", True) else SEPARATE,
        )
    )
    return Decoder(
        scope,
        DecoderSpec(
            sizes=sizes,
            layers=(layer,) * sizes.layers,
            logits_normed=OF_VERSION_2 in config,
        ),
    )
