"""Granite 3 with experts, and with a shared MLP beside them: the weights of the chosen experts are
a softmax of their own."""

from __future__ import annotations

from headrace.back.layers.mlp import FeedForwardSpec, GatedMLPSpec, SummedSpec
from headrace.back.layers.moe.mixture import MixtureSpec, RouterSpec
from headrace.back.layers.moe.weights import ExpertLayout, MergedExperts, SeparateExperts
from headrace.back.layers.scope import Scope
from headrace.back.models.blocks import Decoder, DecoderSizes, read_sizes
from headrace.back.models.granite import granite_attention, granite_decoder
from headrace.base.config.hf import ConfigReader

LAYOUT = MergedExperts(up="input_linear.weight", down="output_linear.weight")


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """GraniteMoeForCausalLM, GraniteMoeSharedForCausalLM."""
    sizes = read_sizes(config)
    attention = granite_attention(scope, config, sizes)
    shared = config.int("shared_intermediate_size", 0, ge=0)
    feed_forward = granite_experts(config, sizes, shared=shared)
    return granite_decoder(scope, config, sizes, [attention] * sizes.layers, feed_forward)


def granite_experts(
    config: ConfigReader,
    sizes: DecoderSizes,
    *,
    shared: int,
    layout: ExpertLayout = LAYOUT,
    router: str = "router.layer",
) -> FeedForwardSpec:
    """Experts, a shared MLP of that inner size (0: none), or both, as the config says. `layout`,
    `router`: what the checkpoint calls their weights."""
    mlp = GatedMLPSpec(
        name="shared_mlp", merged="input_linear", down="output_linear", inner=shared or None
    )
    experts = config.int("num_local_experts", 8, ge=0)
    if not experts and not shared:
        raise config.wrong("num_local_experts", "at least 1, or shared_intermediate_size above 0")
    if not experts:
        return mlp
    mixture = MixtureSpec(
        router=RouterSpec(
            experts=experts,
            top_k=config.int("num_experts_per_tok", 2, ge=1, le=experts),
            softmax_chosen=True,
            name=router,
        ),
        inner=sizes.inner,
        layout=SeparateExperts() if config.bool("separate_experts", False) else layout,
        name="block_sparse_moe",
    )
    return SummedSpec(experts=mixture, beside=mlp) if shared else mixture
