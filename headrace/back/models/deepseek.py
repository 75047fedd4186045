"""DeepSeek V2 and V3: multi-head latent attention, dense layers first, then experts beside shared
ones. V2 routes by softmax and, in groups, by each group's best expert; V3 by sigmoid with a bias
that only chooses, and by each group's best two."""

from __future__ import annotations

from headrace.back.layers.moe.mixture import MixtureSpec, RouterSpec, SharedSpec
from headrace.back.layers.scope import Scope
from headrace.back.models.blocks import GATED_MLP, Decoder, DecoderSpec, LayerSpec, read_sizes
from headrace.back.models.latent import read_latent_attention
from headrace.back.models.moe import draft_layers, sigmoid_mixture
from headrace.base.config.hf import ConfigReader


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """DeepseekV2ForCausalLM, DeepseekV3ForCausalLM (also of R1 and Kimi-K2),
    Glm4MoeLiteForCausalLM."""
    sizes = read_sizes(config)
    is_v2 = config.str("model_type", "deepseek_v3") == "deepseek_v2"
    pairs = is_v2 or config.bool("rope_interleave", True)
    attention = read_latent_attention(scope, config, sizes, layout="pairs" if pairs else "half")
    mixture = _softmax_mixture(config) if is_v2 else sigmoid_mixture(config)
    types = config.list("mlp_layer_types", None, of=str)
    first = config.int("first_k_dense_replace", 0 if types is None else types.count("dense"), ge=0)
    every = config.int("moe_layer_freq", 1, ge=1)
    layers = tuple(
        LayerSpec(
            attention=attention,
            feed_forward=mixture if i >= first and i % every == 0 else GATED_MLP,
        )
        for i in range(sizes.layers)
    )
    ignored = draft_layers(config, sizes.layers)
    return Decoder(scope, DecoderSpec(sizes=sizes, layers=layers, ignored=ignored))


def _softmax_mixture(config: ConfigReader) -> MixtureSpec:
    experts = config.int("n_routed_experts", ge=1, aliases=("num_experts", "num_local_experts"))
    method = config.choice("topk_method", ("greedy", "group_limited_greedy"), "greedy")
    groups = config.int("n_group", 1, ge=1, le=64) if method == "group_limited_greedy" else 1
    if experts % groups:
        raise config.wrong("n_group", f"a divisor of n_routed_experts ({experts})")
    inner = config.int("moe_intermediate_size", ge=1)
    shared = config.int("n_shared_experts", 0, ge=0)
    return MixtureSpec(
        router=RouterSpec(
            experts=experts,
            top_k=config.int("num_experts_per_tok", ge=1, le=experts),
            scale=config.float("routed_scaling_factor", 1.0),
            groups=groups,
            kept_groups=config.int("topk_group", 1, ge=1, le=groups) if groups > 1 else 1,
        ),
        inner=inner,
        shared=SharedSpec(inner=inner * shared) if shared else None,
    )
