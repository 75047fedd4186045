"""PLaMo 3 (Preferred Networks 2025): Gemma 3's layers with rotations of their own below windows,
and norms that are stored without what they begin with: a fifth of 1 behind attention, less behind
the MLP (names and keys of the published checkpoints)."""

from __future__ import annotations

from headrace.back.layers.attention import AttentionNames, AttentionSpec, QKNorm
from headrace.back.layers.mlp import GatedMLPSpec
from headrace.back.layers.norm import RMS_UNIT_OFFSET, NormPlacement, NormSpec
from headrace.back.layers.rope import read_rope
from headrace.back.layers.scope import Scope
from headrace.back.models.blocks import (
    Decoder,
    DecoderNames,
    DecoderSpec,
    LayerSpec,
    plain_attention,
    read_sizes,
    read_windows,
)
from headrace.base.config.hf import ConfigReader

NAMES = DecoderNames(layers="layers.layers")
ATTENTION = AttentionNames(module="mixer", merged="qkv_proj")
MLP = GatedMLPSpec(merged="gate_up_proj")
PLACEMENT = NormPlacement(
    before_attention="pre_mixer_norm",
    after_attention="post_mixer_norm",
    before_mlp="pre_mlp_norm",
    after_mlp="post_mlp_norm",
)
NORMS = {
    "post_mixer_norm": NormSpec(offset=1 / 5),
    "post_mlp_norm": NormSpec(offset=5**-1.5),
}


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """Plamo3ForCausalLM."""
    sizes = read_sizes(config)
    rope = {"head_dim": sizes.head_dim, "max_positions": scope.max_positions}
    whole = read_rope(config, **rope, layer_type="full_attention", default_theta=1e6)
    local = read_rope(
        config,
        **rope,
        layer_type="sliding_attention",
        theta=config.float("rope_local_theta", 10_000.0, ge=1.0),
    )
    pattern = config.int("sliding_window_pattern", 8, ge=1)
    windows = read_windows(
        config,
        sizes.layers,
        window=config.int("sliding_window", 2048, ge=1, aliases=("window_size",)),
        sliding=lambda layer: (layer + 1) % pattern != 0,
    )
    layers = tuple(
        LayerSpec(
            mixer=AttentionSpec(
                **plain_attention(sizes),
                rope=local if window else whole,
                window=window,
                qk_norm=QKNorm(norm=RMS_UNIT_OFFSET, eps=sizes.eps),
                names=ATTENTION,
            ),
            placement=PLACEMENT,
            feed_forward=MLP,
            norms=NORMS,
        )
        for window in windows
    )
    return Decoder(
        scope, DecoderSpec(sizes=sizes, layers=layers, norm=RMS_UNIT_OFFSET, names=NAMES)
    )
