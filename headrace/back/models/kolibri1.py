"""Kolibri 1 (Aleph Alpha): EXAONE 4's attention between four norms, and in every layer
experts chosen by their logits and a bias, which weigh by the sigmoid of them alone."""

from __future__ import annotations

from headrace.back.kernels.route.op import CHOSEN_SIGMOID
from headrace.back.layers.moe.mixture import MixtureSpec, RouterSpec, SharedSpec
from headrace.back.layers.norm import NormPlacement
from headrace.back.layers.scope import Scope
from headrace.back.models.blocks import Decoder, DecoderSpec, LayerSpec, read_sizes
from headrace.back.models.exaone4 import exaone_attentions
from headrace.back.models.moe import CORRECTION_BIAS, divided
from headrace.base.config.hf import ConfigReader

PLACEMENT = NormPlacement(
    before_attention="input_layernorm",
    after_attention="post_attn_norm",
    before_mlp="post_attention_layernorm",
    after_mlp="post_ffn_norm",
)
RENAMED = ((r"\.moe\.router\.expert_bias$", f".mlp.{CORRECTION_BIAS}"),)
"""The bias stands apart from the rest of the experts' module."""


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """Kolibri1ForCausalLM. Every layer has experts, so nothing states the size of a dense one."""
    inner = config.int("moe_intermediate_size", 512, ge=1)
    sizes = read_sizes(config, inner=inner)
    mixture = _mixture(config, inner)
    layers = tuple(
        LayerSpec(mixer=attention, placement=PLACEMENT, feed_forward=mixture)
        for attention in exaone_attentions(scope, config, sizes)
    )
    return Decoder(scope, DecoderSpec(sizes=sizes, layers=layers, renamed=RENAMED))


def _mixture(config: ConfigReader, inner: int) -> MixtureSpec:
    experts = config.int("num_experts", 384, ge=1, aliases=("num_local_experts",))
    shared = config.int("shared_expert_intermediate_size", 512, ge=1)
    return MixtureSpec(
        router=RouterSpec(
            experts=experts,
            top_k=config.int("num_experts_per_tok", 6, ge=1, le=experts),
            score=CHOSEN_SIGMOID,
            renormalize=config.bool("norm_topk_prob", False),
            bias_name=CORRECTION_BIAS,
        ),
        inner=inner,
        shared=SharedSpec(inner=divided(config, "shared_expert_intermediate_size", shared, inner)),
    )
