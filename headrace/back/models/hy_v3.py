"""Hunyuan v3: Qwen 3's attention, a dense layer first, then experts by sigmoid with a bias that
only chooses, beside shared ones."""

from __future__ import annotations

from headrace.back.layers.moe.mixture import MixtureSpec, RouterSpec, SharedSpec
from headrace.back.layers.scope import Scope
from headrace.back.models.blocks import Decoder, read_sizes
from headrace.back.models.moe import feed_forwards, scored_by, sparse_by_type
from headrace.back.models.qwen3 import qwen3_decoder
from headrace.base.config.hf import ConfigReader

THETA = 11_158_840.0


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """HYV3ForCausalLM."""
    sizes = read_sizes(config, eps=1e-5)
    sparse = sparse_by_type(config, sizes.layers, dense=1)
    branches = feed_forwards(_mixture(config), sparse)
    ignored = (rf"model\.layers\.{sizes.layers}\..*",)  # drafts tokens
    return qwen3_decoder(scope, config, sizes, branches, default_theta=THETA, ignored=ignored)


def _mixture(config: ConfigReader) -> MixtureSpec:
    experts = config.int("num_experts", 192, ge=1)
    inner = config.int("moe_intermediate_size", ge=1)
    shared = config.int("num_shared_experts", 1, ge=0)
    return MixtureSpec(
        router=RouterSpec(
            experts=experts,
            top_k=config.int("num_experts_per_tok", 8, ge=1, le=experts),
            score=scored_by(config, "sigmoid"),
            renormalize=True,
            scale=config.float("router_scaling_factor", 1.0),
            name="router.gate",
            bias_name="expert_bias",
        ),
        inner=inner,
        shared=SharedSpec(inner=inner * shared, name="shared_mlp") if shared else None,
    )
