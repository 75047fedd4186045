"""Muse Glimmer (Meta 2026; text): Gemma's four norms, gated attention whose queries and keys are
normed without weights, windows in three of four layers, and no rope in the fourth."""

from __future__ import annotations

from collections.abc import Iterator

from headrace.back.layers.attention import AttentionSpec, QKNorm
from headrace.back.layers.norm import RMS, RMS_NO_WEIGHT, RMS_UNIT_OFFSET, SANDWICH, NormSpec
from headrace.back.layers.output_gate import OutputGate
from headrace.back.layers.rope import read_rope
from headrace.back.layers.scope import Scope
from headrace.back.models.blocks import (
    Decoder,
    DecoderNames,
    DecoderSizes,
    DecoderSpec,
    LayerSpec,
    plain_attention,
    read_sizes,
    read_windows,
)
from headrace.base.config.hf import ConfigReader

NAMES = DecoderNames(embedding_norm="embed_tokens.embed_norm")
GATE = OutputGate(name="gate_proj")


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """MuseGlimmerForConditionalGeneration, its text part."""
    sizes = read_sizes(config, eps=1e-5)
    after = NormSpec(offset=1.0, eps=config.float("post_norm_eps", 1e-8, ge=0.0))
    layers = tuple(
        LayerSpec(
            mixer=attention,
            placement=SANDWICH,
            norms={SANDWICH.after_attention: after, SANDWICH.after_mlp: after},
        )
        for attention in glimmer_attentions(scope, config, sizes, qk_scale=3.87, gate=GATE)
    )
    return Decoder(
        scope,
        DecoderSpec(
            sizes=sizes,
            layers=layers,
            norm=RMS_UNIT_OFFSET,
            first_norm=RMS_NO_WEIGHT,
            last_norm=RMS,
            logits_scale=config.float("output_multiplier", 0.19611613513818404, ge=0.0),
            logits_softcap=config.float("final_logit_softcapping", 20.0, ge=1e-6),
            names=NAMES,
        ),
    )


def glimmer_attentions(
    scope: Scope, config: ConfigReader, sizes: DecoderSizes, *, qk_scale: float, gate: OutputGate
) -> Iterator[AttentionSpec]:
    """That of each layer; `qk_scale`: of queries, unless the config says."""
    windows = read_windows(
        config,
        sizes.layers,
        window=config.int("sliding_window", 2048, ge=1),
        sliding=lambda layer: (sizes.layers - 1 - layer) % 4 != 0,
    )
    bias = config.bool("attention_bias", False)
    rope = read_rope(
        config, head_dim=sizes.head_dim, max_positions=scope.max_positions, default_theta=5e5
    )
    attention = plain_attention(sizes)
    attention["scale"] = sizes.head_dim**-0.5 * config.float("qk_scale_factor", qk_scale, ge=0.0)
    for window, turns in zip(windows, turning_layers(config, sizes.layers), strict=True):
        yield AttentionSpec(
            **attention,
            rope=rope if turns else None,
            window=window,
            qkv_bias=bias,
            out_bias=bias,
            qk_norm=QKNorm(norm=RMS_NO_WEIGHT, eps=sizes.eps),
            gate=gate,
        )


def turning_layers(config: ConfigReader, layers: int) -> list[bool]:
    """Which layers have a rope: not every fourth, counted from the last, unless the config lists
    a base for each, 0 where there is none. All others have one base."""
    listed = config.list("layer_rope_theta", None, of=float, length=layers)
    if listed is None:
        return [(layers - 1 - layer) % 4 != 0 for layer in range(layers)]
    if len(set(listed) - {0.0}) > 1:
        raise config.wrong("layer_rope_theta", "0 or one base for all layers")
    return [theta != 0 for theta in listed]
