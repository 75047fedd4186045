"""Step-3 (Step team 2025): queries by two matrices over one key and value for all heads; experts by
softmax beside an MLP of their own width."""

from __future__ import annotations

from headrace.back.layers.attention import AttentionSpec
from headrace.back.layers.factored_attention import FactoredAttentionSpec
from headrace.back.layers.mlp import GATED_MLP, FeedForwardSpec, GatedMLPSpec, SummedSpec
from headrace.back.layers.moe.mixture import MixtureSpec, RouterSpec
from headrace.back.layers.moe.weights import StackedExperts
from headrace.back.layers.rope import read_rope
from headrace.back.layers.scope import Scope
from headrace.back.models.blocks import Decoder, DecoderSpec, LayerSpec, plain_attention, read_sizes
from headrace.base.config.hf import ConfigReader


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """Step3TextForCausalLM."""
    sizes = read_sizes(config, eps=1e-5)
    attention = AttentionSpec(
        **plain_attention(sizes),
        rope=read_rope(
            config,
            head_dim=sizes.head_dim,
            max_positions=scope.max_positions,
            default_theta=500_000.0,
        ),
    )
    rank = config.int("share_q_dim", None, ge=1) or sizes.head_dim
    factored = FactoredAttentionSpec(attention=attention, rank=rank, eps=sizes.eps)
    mixture = _mixture(config)
    layers = tuple(
        LayerSpec(mixer=factored, feed_forward=mixture if is_sparse else GATED_MLP)
        for is_sparse in _sparse(config, sizes.layers)
    )
    return Decoder(scope, DecoderSpec(sizes=sizes, layers=layers))


def _mixture(config: ConfigReader) -> FeedForwardSpec:
    experts = config.int("moe_num_experts", ge=1)
    mixture = MixtureSpec(
        router=RouterSpec(
            experts=experts,
            top_k=config.int("moe_top_k", ge=1, le=experts),
            renormalize=config.bool("norm_expert_weight", True),
        ),
        inner=config.int("moe_intermediate_size", ge=1),
        layout=StackedExperts(),
        name="moe",
    )
    shared = GatedMLPSpec(name="share_expert", inner=config.int("share_expert_dim", ge=1))
    return SummedSpec(experts=mixture, beside=shared)


def _sparse(config: ConfigReader, layers: int) -> list[bool]:
    """`moe_layers_enum` lists them, also in one text; without it all but the first."""
    listed = config.raw.get("moe_layers_enum")
    if listed is None:
        return [layer > 0 for layer in range(layers)]
    if isinstance(listed, str):
        names = {name.strip() for name in listed.split(",")}
        return [str(layer) in names for layer in range(layers)]
    numbers = config.list("moe_layers_enum", of=int)
    return [layer in numbers for layer in range(layers)]
