"""JetMoE: experts in place of MLPs, and of the projections of queries and of what heads give."""

from __future__ import annotations

from dataclasses import dataclass, replace

from headrace.back.layers.moe.biased import BiasedMixtureSpec
from headrace.back.layers.moe.mixture import MixtureSpec, RouterSpec
from headrace.back.layers.moe.weights import MergedExperts
from headrace.back.layers.norm import RMS, BlockNorm
from headrace.back.layers.rope import read_rope
from headrace.back.layers.routed_attention import RoutedAttentionSpec
from headrace.back.layers.scope import Scope
from headrace.back.models.blocks import Decoder, DecoderSpec, LayerSpec, read_sizes
from headrace.base.config.hf import ConfigReader


@dataclass(frozen=True)
class _Fixed:
    """Layers' norms have an epsilon of their own, whatever the config says (transformers 5.23)."""

    def build(self, scope: Scope, width: int, *, eps: float) -> BlockNorm:
        """See BlockNormSpec."""
        return RMS.build(scope, width, eps=1e-6)


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """JetMoeForCausalLM."""
    sizes = read_sizes(config, activation=("activation_function",), tied=True)
    sizes = replace(sizes, head_dim=config.int("kv_channels", 128, ge=1))
    experts = config.int("num_local_experts", 8, ge=1)
    chosen = config.int("num_experts_per_tok", 2, ge=1, le=experts)
    if sizes.heads != sizes.kv_heads * chosen:
        raise config.wrong("num_attention_heads", f"{sizes.kv_heads} KV heads x {chosen} experts")
    layer = LayerSpec(
        mixer=RoutedAttentionSpec(
            width=sizes.width,
            kv_heads=sizes.kv_heads,
            head_dim=sizes.head_dim,
            experts=experts,
            chosen=chosen,
            rope=read_rope(config, head_dim=sizes.head_dim, max_positions=scope.max_positions),
        ),
        feed_forward=BiasedMixtureSpec(
            mixture=MixtureSpec(
                router=RouterSpec(
                    experts=experts, top_k=chosen, softmax_chosen=True, name="router.layer"
                ),
                inner=sizes.inner,
                layout=MergedExperts(up="input_linear.weight", down="output_linear.weight"),
            )
        ),
        norms={"input_layernorm": _Fixed(), "post_attention_layernorm": _Fixed()},
    )
    return Decoder(scope, DecoderSpec(sizes=sizes, layers=(layer,) * sizes.layers))
