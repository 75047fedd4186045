"""Falcon-H1: Mamba 2 and attention side by side in every layer, with multipliers on everything.

All multipliers but those of embeddings and logits become part of the weights. What attention's
input is multiplied with, q, k and v get; of q and k the scale of the scores has it.
"""

from __future__ import annotations

from dataclasses import replace

from headrace.back.layers.attention import AttentionSpec
from headrace.back.layers.mixer_pair import MixerPairSpec
from headrace.back.layers.mlp import GatedMLPSpec
from headrace.back.layers.norm import NormPlacement
from headrace.back.layers.rope import read_rope
from headrace.back.layers.scope import Scope
from headrace.back.layers.ssm.gated_norm import ONLY_GATE
from headrace.back.layers.ssm.mamba2 import Mamba2Spec
from headrace.back.models.blocks import (
    Decoder,
    DecoderNames,
    DecoderSizes,
    DecoderSpec,
    LayerSpec,
    plain_attention,
    read_sizes,
)
from headrace.back.models.ssm import read_mamba2
from headrace.base.config.hf import ConfigReader

PLACEMENT = NormPlacement(before_attention="input_layernorm", before_mlp="pre_ff_layernorm")
NAMES = DecoderNames(norm="final_layernorm")
BIASES = ("attention_bias", "projectors_bias", "mamba_proj_bias", "mlp_bias")


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """FalconH1ForCausalLM."""
    sizes = read_sizes(config, eps=1e-5)
    for key in BIASES:
        if config.bool(key, False):
            raise config.wrong(key, "false: multipliers would have to leave biases out")
    gate, down = _multipliers(config, "mlp_multipliers", 2)
    layer = LayerSpec(
        mixer=MixerPairSpec(first=_mamba(config, sizes), second=_attention(scope, config, sizes)),
        placement=PLACEMENT,
        feed_forward=GatedMLPSpec(name="feed_forward", gate_scale=gate, down_scale=down),
    )
    spec = DecoderSpec(
        sizes=sizes,
        layers=(layer,) * sizes.layers,
        names=NAMES,
        embedding_scale=config.float("embedding_multiplier", 1.0),
        logits_scale=config.float("lm_head_multiplier", 1.0),
    )
    return Decoder(scope, spec)


def _attention(scope: Scope, config: ConfigReader, sizes: DecoderSizes) -> AttentionSpec:
    before = config.float("attention_in_multiplier", 1.0)
    scale = sizes.head_dim**-0.5 * config.float("key_multiplier", 1.0) * before * before
    return AttentionSpec(
        **{**plain_attention(sizes), "scale": scale},
        rope=read_rope(config, head_dim=sizes.head_dim, max_positions=scope.max_positions),
        out_scale=before * config.float("attention_out_multiplier", 1.0),
    )


def _mamba(config: ConfigReader, sizes: DecoderSizes) -> Mamba2Spec:
    spec = read_mamba2(config, sizes)
    before = config.float("ssm_in_multiplier", 1.0)
    has_norm = config.bool("mamba_rms_norm", False)
    norm_first = config.bool("mamba_norm_before_gate", True)
    return replace(
        spec,
        norm=replace(spec.norm, norm_first=norm_first) if has_norm else ONLY_GATE,
        scales=tuple(before * scale for scale in _multipliers(config, "ssm_multipliers", 5)),
        out_scale=config.float("ssm_out_multiplier", 1.0),
    )


def _multipliers(config: ConfigReader, key: str, count: int) -> list[float]:
    values = config.list(key, [1.0] * count, of=float)
    if len(values) != count:
        raise config.wrong(key, f"{count} numbers")
    return list(values)
