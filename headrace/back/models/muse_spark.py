"""Muse Spark (Meta 2026; text): Muse Glimmer's attention with a norm of what each head gives, a
residual that fades by learned gates, and experts over a latent, each with a norm before its
weight."""

from __future__ import annotations

from dataclasses import replace

from headrace.back.layers.gated_residual import ScaledBeforeSpec
from headrace.back.layers.mlp import GATED_MLP
from headrace.back.layers.moe.latent import LatentMixtureSpec
from headrace.back.layers.moe.mixture import MixtureSpec, RouterSpec
from headrace.back.layers.moe.weights import MergedExperts
from headrace.back.layers.norm import RMS, RMS_NO_WEIGHT, RMS_UNIT_OFFSET, NormSpec
from headrace.back.layers.scope import Scope
from headrace.back.models.blocks import Decoder, DecoderSpec, read_sizes
from headrace.back.models.gated_residual_layer import GatedResidualLayerSpec
from headrace.back.models.moe import CORRECTION_BIAS, scored_by, sparse_by_type
from headrace.back.models.muse_glimmer import GATE, NAMES, glimmer_attentions
from headrace.base.config.hf import ConfigReader

QK_SCALE, LOGITS_SCALE = 5.4730064863875, 0.1767766952966369
LAYOUT = MergedExperts(up="experts.gate_up_proj", down="experts.down_proj")
PROJECTIONS = ("pre_expert_proj", "post_expert_proj")


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """MuseSparkForConditionalGeneration, its text part."""
    sizes = read_sizes(config, eps=1e-5)
    post_eps = config.float("post_norm_eps", 1e-8, ge=0.0)
    scale = config.float("output_multiplier", LOGITS_SCALE, ge=0.0)
    mixture = _mixture(config, post_eps, sizes.eps, scale)
    gate = replace(GATE, norm_eps=sizes.eps)
    attentions = glimmer_attentions(scope, config, sizes, qk_scale=QK_SCALE, gate=gate)
    layers = tuple(
        GatedResidualLayerSpec(
            mixer=attention,
            feed_forward=mixture if sparse else GATED_MLP,
            post_eps=post_eps,
            temperature=config.float("residual_gate_temperature", 0.3, ge=1e-6),
        )
        for attention, sparse in zip(attentions, sparse_by_type(config, sizes.layers), strict=True)
    )
    return Decoder(
        scope,
        DecoderSpec(
            sizes=sizes,
            layers=layers,
            norm=RMS_UNIT_OFFSET,
            first_norm=RMS_NO_WEIGHT,
            last_norm=RMS,
            logits_scale=scale,
            logits_softcap=config.float("final_logit_softcapping", 20.0, ge=1e-6),
            names=NAMES,
        ),
    )


def _mixture(
    config: ConfigReader, post_eps: float, eps: float, logit_scale: float
) -> LatentMixtureSpec:
    experts = config.int("num_local_experts", 256, ge=1)
    latent = config.int("moe_hidden_size", 4096, ge=1)
    mixture = MixtureSpec(
        router=RouterSpec(
            experts=experts,
            top_k=config.int("num_experts_per_tok", 8, ge=1, le=experts),
            score=scored_by(config, "sigmoid"),
            renormalize=True,
            scale=config.float("routed_scaling_factor", 1.0),
            bias_name=CORRECTION_BIAS,
            logit_scale=logit_scale,
        ),
        inner=config.int("moe_intermediate_size", 4096, ge=1),
        layout=LAYOUT,
        slot_norm=("experts.post_expert_norm", ScaledBeforeSpec(eps=post_eps)),
    )
    return LatentMixtureSpec(
        mixture=mixture,
        latent=latent,
        names=PROJECTIONS,
        first_norm=("pre_expert_norm", NormSpec(offset=1.0, eps=eps)),
    )
