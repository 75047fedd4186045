"""DeepSeek V3 and who followed it: multi-head latent attention, dense layers first, then experts
beside shared ones, routed by sigmoid with a bias that only chooses and by each group's best two."""

from __future__ import annotations

from dataclasses import replace

from headrace.back.layers.moe.mixture import MixtureSpec
from headrace.back.layers.norm import PRE
from headrace.back.layers.scope import Scope
from headrace.back.models.blocks import Decoder, DecoderSpec, LayerSpec, read_sizes
from headrace.back.models.latent import read_latent_attention
from headrace.back.models.moe import dense_first, draft_layers, feed_forwards, sigmoid_mixture
from headrace.base.config.hf import ConfigReader


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """DeepseekV3ForCausalLM (also of R1 and Kimi-K2), Glm4MoeLiteForCausalLM."""
    layout = "pairs" if config.bool("rope_interleave", True) else "half"
    return deepseek_decoder(scope, config, sigmoid_mixture(config), layout=layout)


def deepseek_decoder(
    scope: Scope,
    config: ConfigReader,
    mixture: MixtureSpec,
    *,
    layout: str,
    after_experts: str | None = None,
) -> Decoder:
    """The decoder around its experts. `layout` of the rotation: see kernels/rope. `after_experts`:
    the norm behind them; that of dense layers is ignored."""
    sizes = read_sizes(config)
    attention = read_latent_attention(scope, config, sizes, layout=layout)
    types = config.list("mlp_layer_types", None, of=str)
    sparse = dense_first(
        config,
        sizes.layers,
        default=0 if types is None else types.count("dense"),
        every=config.int("moe_layer_freq", 1, ge=1),
    )
    layers = tuple(
        LayerSpec(
            mixer=attention,
            placement=replace(PRE, after_mlp=after_experts) if is_sparse else PRE,
            feed_forward=feed_forward,
        )
        for is_sparse, feed_forward in zip(sparse, feed_forwards(mixture, sparse), strict=True)
    )
    ignored = draft_layers(config, sizes.layers)
    if after_experts is not None:
        dense = [i for i, is_sparse in enumerate(sparse) if not is_sparse]
        ignored += tuple(rf"model\.layers\.{i}\.{after_experts}\.weight" for i in dense)
    return Decoder(scope, DecoderSpec(sizes=sizes, layers=layers, ignored=ignored))
