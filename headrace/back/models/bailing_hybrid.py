"""Ling 3 (Bailing hybrid, Bailing MoE V3): Kimi delta attention whose gates are bounded below, and
in each group's last layer latent attention with a gate for each head or value; dense layers, then
experts."""

from __future__ import annotations

from dataclasses import replace

from headrace.back.kernels.experts.op import SWIGLU_STEP
from headrace.back.layers.latent_attention import LatentNames
from headrace.back.layers.mlp import GATED_MLP, FeedForwardSpec
from headrace.back.layers.moe.beside import BesideSpec, LoneExpert
from headrace.back.layers.moe.mixture import MixtureSpec
from headrace.back.layers.output_gate import OutputGate
from headrace.back.layers.scope import Scope
from headrace.back.layers.ssm.gated_delta import DeltaNames, GatedDeltaSpec
from headrace.back.models.blocks import (
    Decoder,
    DecoderNames,
    DecoderSizes,
    DecoderSpec,
    LayerSpec,
    read_sizes,
)
from headrace.back.models.hybrid import MAX_TAPS, linear_layers
from headrace.back.models.kimi_linear import delta_norm
from headrace.back.models.latent import read_latent_attention
from headrace.back.models.moe import (
    draft_layers,
    sigmoid_mixture,
    sparse_by_type,
)
from headrace.base.config.hf import ConfigReader

NAMES = DecoderNames(embedding="word_embeddings")
DELTA = DeltaNames(
    module="attention",
    parts=("q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "f_proj"),
    out="dense",
)
LATENT = LatentNames(module="attention", out="dense")
GATES = {"head_wise": True, "element_wise": False}
DRAFTS = (r"model\.mtp\..*",)
LIMITS = ("expert_swiglu_limit_list", "share_expert_swiglu_limit_list")


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """BailingHybridForCausalLM, BailingMoeV3ForCausalLM."""
    sizes = read_sizes(config)
    for key, value in (("no_kda_lora", True), ("use_mla_nope", False)):
        if config.bool(key, value) is not value:
            raise config.wrong(key, str(value).lower())
    layout = "pairs" if config.bool("rope_interleave", True) else "half"
    latent = replace(
        read_latent_attention(scope, config, sizes, layout=layout),
        gate=_gate(config),
        names=LATENT,
    )
    delta = _delta(config, sizes)
    every = config.int("layer_group_size", 6, ge=1)
    kinds = linear_layers(config, sizes.layers, default=lambda i: (i + 1) % every != 0)
    mixture = sigmoid_mixture(config, bias_name="gate.expert_bias")
    sparse = sparse_by_type(config, sizes.layers, dense=2)
    layers = tuple(
        LayerSpec(
            mixer=delta if kinds[i] else latent,
            feed_forward=_experts(config, mixture, i) if sparse[i] else GATED_MLP,
        )
        for i in range(sizes.layers)
    )
    ignored = (*DRAFTS, *draft_layers(config, sizes.layers))
    return Decoder(scope, DecoderSpec(sizes=sizes, layers=layers, names=NAMES, ignored=ignored))


def _gate(config: ConfigReader) -> OutputGate | None:
    kinds = (*GATES, "none")
    kind = config.choice("gated_attention_proj_granularity_type", kinds, "head_wise")
    return OutputGate(name="g_proj", per_head=GATES[kind]) if kind in GATES else None


def _experts(config: ConfigReader, mixture: MixtureSpec, layer: int) -> FeedForwardSpec:
    """Where the layer's gates and ups are bounded, shared experts may have a bound of their own."""
    bounds = [
        float(listed[layer] or 0.0) if layer < len(listed) else 0.0
        for listed in (config.raw.get(key) or () for key in LIMITS)
    ]
    if not any(bounds):
        return mixture
    acts = [SWIGLU_STEP if bound else "silu" for bound in bounds]
    bounded = replace(mixture, activation=acts[0], clamp=bounds[0], shared=None)
    if mixture.shared is None:
        return bounded
    beside = LoneExpert(
        inner=mixture.shared.inner,
        name=f"{mixture.name}.{mixture.shared.name}",
        activation=acts[1],
        clamp=bounds[1],
    )
    return BesideSpec(mixture=bounded, shared=beside)


def _delta(config: ConfigReader, sizes: DecoderSizes) -> GatedDeltaSpec:
    head_dim = config.int("linear_head_dim", None, ge=1) or config.int("head_dim", 128, ge=1)
    bounded = config.bool("kda_safe_gate", True)
    return GatedDeltaSpec(
        width=sizes.width,
        key_heads=sizes.heads,
        heads=sizes.heads,
        key_dim=head_dim,
        value_dim=head_dim,
        taps=config.int("short_conv_kernel_size", 4, ge=2, le=MAX_TAPS),
        norm=delta_norm(sizes.heads, sizes.eps),
        names=DELTA,
        per_channel=True,
        bound=config.float("kda_lower_bound", -5.0, le=0.0) if bounded else 0.0,
    )
