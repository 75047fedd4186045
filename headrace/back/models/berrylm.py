"""BerryLM (2026): layers of the gated delta rule, whose states fade channel by channel, and gated
attention in turn, experts in all; each layer begins with a mixture of the residual and of what it
was before some layers below (keys and names of the published checkpoint)."""

from __future__ import annotations

from dataclasses import replace

from headrace.back.layers.gated_mixture import GatedMixtureSpec
from headrace.back.layers.kept_states import KeptStatesSpec
from headrace.back.layers.linear import MergedTensor
from headrace.back.layers.norm import RMS_UNIT_OFFSET
from headrace.back.layers.scope import Scope
from headrace.back.layers.ssm.gated_delta import KEY, QUERY, VALUE, DeltaNames, GatedDeltaSpec
from headrace.back.models.blocks import Decoder, DecoderSizes, DecoderSpec, LayerSpec, read_sizes
from headrace.back.models.hybrid import gated_attention, linear_layers, read_gated_delta
from headrace.back.models.qwen2_moe import qwen_mixture
from headrace.back.models.skipping_layer import SkippingLayerSpec
from headrace.base.config.hf import ConfigReader

DELTA = DeltaNames(
    parts=("q", "k", "v", "in_proj_z", "in_proj_b", "f_down_proj"),
    merged=(MergedTensor(name="in_proj_qkv", parts=(QUERY, KEY, VALUE)),),
    convs=("conv1d",),
    decay_up="f_up_proj",
    out="out_proj",
)
DRAFTS = r".*\bmtp\b.*"
"""Tensors that only draft tokens."""


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """BerryLMForCausalLM."""
    for key in ("attn_output_gate", "kda_insert"):
        if not config.bool(key, True):
            raise config.wrong(key, "true")
    sizes = read_sizes(config)
    every = config.int("full_attention_interval", 4, ge=1)
    kinds = linear_layers(config, sizes.layers, default=lambda i: (i + 1) % every != 0)
    delta, attention = _delta(config, sizes), gated_attention(scope, config, sizes)
    mixture = qwen_mixture(config, renormalize=True)
    size = config.int("attn_res_block_size", 8, ge=1)
    eps = config.float("attn_res_eps", 1e-6, ge=0.0)
    gated = config.bool("attn_res_gated", True)
    layers = tuple(
        SkippingLayerSpec(
            layer=LayerSpec(mixer=delta if is_linear else attention, feed_forward=mixture),
            before=GatedMixtureSpec(
                kept=-(-index // size), keeps=index % size == 0, eps=eps, gated=gated
            ),
        )
        for index, is_linear in enumerate(kinds)
    )
    return Decoder(
        scope,
        DecoderSpec(
            sizes=sizes,
            layers=layers,
            norm=RMS_UNIT_OFFSET,
            streams=KeptStatesSpec(slots=-(-sizes.layers // size)),
            ignored=(DRAFTS,),
        ),
    )


def _delta(config: ConfigReader, sizes: DecoderSizes) -> GatedDeltaSpec:
    plain = read_gated_delta(config, sizes, DELTA)
    acts = {"silu": "silu", "swish": "silu", "sigmoid": "sigmoid"}
    act = acts[config.choice("kda_output_gate_act", acts, "silu")]
    safe = config.bool("kda_safe_gate", False)
    return replace(
        plain,
        norm=replace(plain.norm, gate=act),
        per_channel=True,
        low_rank=config.int("kda_gate_bottleneck", 128, ge=1),
        bound=config.float("kda_gate_lower_bound", le=0.0) if safe else 0.0,
    )
