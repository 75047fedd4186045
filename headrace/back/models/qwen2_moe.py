"""Qwen 2 with experts: softmax routing, and one shared MLP that a gate of its own weighs."""

from __future__ import annotations

from headrace.back.layers.moe.mixture import MixtureSpec, RouterSpec, SharedSpec
from headrace.back.layers.scope import Scope
from headrace.back.models.blocks import Decoder, read_sizes
from headrace.back.models.moe import divided, feed_forwards, sparse_layers
from headrace.back.models.qwen2 import qwen2_decoder
from headrace.base.config.hf import ConfigReader


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """Qwen2MoeForCausalLM."""
    sizes = read_sizes(config)
    mixtures = feed_forwards(qwen_mixture(config), sparse_layers(config, sizes.layers))
    return qwen2_decoder(scope, config, sizes, mixtures, bias=config.bool("qkv_bias", True))


def qwen_mixture(config: ConfigReader, *, renormalize: bool = False) -> MixtureSpec:
    """The experts of Qwen's layers; a shared MLP where the config has one. `renormalize`: the
    family's default."""
    experts = config.int("num_experts", ge=1, aliases=("num_local_experts",))
    inner = config.int("moe_intermediate_size", ge=1)
    shared = config.int("shared_expert_intermediate_size", None, ge=1)
    return MixtureSpec(
        router=RouterSpec(
            experts=experts,
            top_k=config.int("num_experts_per_tok", ge=1, le=experts),
            renormalize=config.bool("norm_topk_prob", renormalize),
        ),
        inner=inner,
        shared=None
        if shared is None
        else SharedSpec(
            inner=divided(config, "shared_expert_intermediate_size", shared, inner),
            name="shared_expert",
            gate="shared_expert_gate",
        ),
    )
