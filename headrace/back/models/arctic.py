"""Arctic (Snowflake 2024): Llama's attention and MLP, as wide as the layer, beside a mixture of
many experts that reads what the layer begins with.

T tokens, E hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.back.attention.plan import Batch
from headrace.back.layers.attention import AttentionSpec
from headrace.back.layers.layer_tail import Tail
from headrace.back.layers.linear import add_norm, sum_branches
from headrace.back.layers.mixer import MixerSpec
from headrace.back.layers.mlp import FeedForwardPlace, FeedForwardSpec, GatedMLPSpec
from headrace.back.layers.moe.mixture import MixtureSpec, RouterSpec
from headrace.back.layers.norm import NormSpec
from headrace.back.layers.rope import read_rope
from headrace.back.layers.scope import Scope
from headrace.back.models.blocks import Decoder, DecoderSpec, LayerSpec, plain_attention, read_sizes
from headrace.back.models.decoder_layer import DecoderSizes, Stream, handed_on
from headrace.back.models.mixtral import LAYOUT
from headrace.base.config.hf import ConfigReader

EXPERTS = "block_sparse_moe"


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """ArcticForCausalLM. The weights of the chosen experts add up to 1, unless it is one."""
    sizes = read_sizes(config, eps=1e-5)
    experts = config.int("num_local_experts", 8, ge=1)
    top_k = config.int("num_experts_per_tok", 1, ge=1, le=experts)
    attention = AttentionSpec(
        **plain_attention(sizes),
        rope=read_rope(config, head_dim=sizes.head_dim, max_positions=scope.max_positions),
        window=config.int("sliding_window", None, ge=1),
        qkv_bias=config.bool("attention_bias", False),
        out_bias=config.bool("attention_bias", False),
    )
    mixture = MixtureSpec(
        router=RouterSpec(experts=experts, top_k=top_k, renormalize=top_k > 1),
        inner=sizes.inner,
        layout=LAYOUT,
        name=EXPERTS,
    )
    every = config.int("moe_layer_frequency", 2, ge=1)
    with_experts = LayerSpec(mixer=attention, feed_forward=mixture)
    if config.bool("use_residual", False) and config.bool("parallel_attn_mlp_res", True):
        beside = _mlp("residual_mlp", inner=sizes.width)
        with_experts = ArcticLayerSpec(mixer=attention, experts=mixture, mlp=beside)
    dense = LayerSpec(mixer=attention, feed_forward=_mlp(f"{EXPERTS}.mlp"))
    layers = tuple(dense if (layer + 1) % every else with_experts for layer in range(sizes.layers))
    return Decoder(scope, DecoderSpec(sizes=sizes, layers=layers))


def _mlp(name: str, *, inner: int | None = None) -> GatedMLPSpec:
    return GatedMLPSpec(name=name, gate="w1", up="w3", down="w2", inner=inner)


@dataclass(frozen=True, kw_only=True)
class ArcticLayerSpec:
    """Attention, then `mlp`; to both is added what `experts` make of what goes into the layer."""

    mixer: MixerSpec
    experts: FeedForwardSpec
    mlp: FeedForwardSpec

    def build(self, scope: Scope, cache: int, sizes: DecoderSizes, norms: NormSpec) -> ArcticLayer:
        """See DecoderLayerSpec."""
        return ArcticLayer(scope, cache, self, sizes, norms)


class ArcticLayer:
    """See ArcticLayerSpec."""

    takes_adapters = True
    tail: Tail | None = None

    def __init__(
        self, scope: Scope, cache: int, spec: ArcticLayerSpec, sizes: DecoderSizes, norms: NormSpec
    ) -> None:
        self._before_attention, self._before_experts, self._before_mlp = (
            norms.build(scope / name, sizes.width, eps=sizes.eps)
            for name in ("input_layernorm", "post_attention_layernorm", "residual_layernorm")
        )
        self.mixer = spec.mixer.build(scope, cache, adds=True)
        place = FeedForwardPlace(
            width=sizes.width, inner=sizes.inner, activation=sizes.activation, adds=True
        )
        self._experts = spec.experts.build(scope, place)
        self._mlp = spec.mlp.build(scope, place)
        self._adapters = scope.adapters
        self.kv_forms = self.mixer.kv_forms

    def forward(self, stream: Stream, batch: Batch, *, last: bool) -> Stream:
        """See Layer."""
        branch_TE, residual_TE = stream
        x_TE = add_norm(self._before_attention, branch_TE, residual_TE)
        handed, residual_TE, batch = handed_on(
            self.mixer, x_TE, residual_TE, batch, self._adapters, last=last
        )
        routed_TE = self._experts.forward_into(self._before_experts.norm(residual_TE), residual_TE)
        branch_TE = self.mixer.attend_into(handed, residual_TE, batch)
        x_TE = add_norm(self._before_mlp, branch_TE, residual_TE)
        return sum_branches(self._mlp.forward_into(x_TE, residual_TE), routed_TE), residual_TE
