"""Phi-3 and Phi-4 (dense): Llama's decoder; the checkpoint merges query, key, value and gate, up;
longrope."""

from __future__ import annotations

from headrace.back.layers.attention import AttentionNames, AttentionSpec
from headrace.back.layers.mlp import GatedMLPSpec
from headrace.back.layers.rope import OLD_NAMES, read_rope
from headrace.back.layers.scope import Scope
from headrace.back.models.blocks import Decoder, DecoderSpec, LayerSpec, plain_attention, read_sizes
from headrace.base.config.hf import ConfigReader


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """Phi3ForCausalLM. "yarn" in its first configs meant what is called longrope now."""
    sizes = read_sizes(config, eps=1e-5)
    rope = read_rope(
        config,
        head_dim=sizes.head_dim,
        max_positions=scope.max_positions,
        renamed={**OLD_NAMES, "yarn": "longrope"},
    )
    layer = LayerSpec(
        mixer=AttentionSpec(
            **plain_attention(sizes),
            rope=rope,
            window=config.int("sliding_window", None, ge=1),
            names=AttentionNames(merged="qkv_proj"),
        ),
        feed_forward=GatedMLPSpec(merged="gate_up_proj"),
    )
    return Decoder(scope, DecoderSpec(sizes=sizes, layers=(layer,) * sizes.layers))
