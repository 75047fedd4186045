"""Llama 4, text: most layers attend within chunks of the positions, the others to all of them
without position embedding; experts in some layers or all, whose weights multiply their input."""

from __future__ import annotations

from dataclasses import replace

from headrace.back.layers.attention import AttentionSpec, QKNorm
from headrace.back.layers.mlp import GatedMLPSpec
from headrace.back.layers.moe.mixture import MixtureSpec, RouterSpec, SharedSpec
from headrace.back.layers.moe.weights import SeparateExperts, TransposedExperts
from headrace.back.layers.norm import RMS_NO_WEIGHT
from headrace.back.layers.query_scale import QueryScale
from headrace.back.layers.rope import read_rope
from headrace.back.layers.scope import Scope
from headrace.back.models.blocks import (
    Decoder,
    DecoderSizes,
    DecoderSpec,
    LayerSpec,
    plain_attention,
    read_sizes,
)
from headrace.back.models.smollm3 import rotated_layers
from headrace.base.config.hf import ConfigReader

MODULE = "feed_forward"
LAYOUT = TransposedExperts()
DENSE = GatedMLPSpec(name=MODULE)
KINDS = ("chunked_attention", "full_attention")


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """Llama4ForCausalLM."""
    sizes = read_sizes(config, eps=1e-5)
    dense_inner = config.int("intermediate_size_mlp", sizes.inner, ge=1)
    step = config.int("interleave_moe_layer_step", 1, ge=1)
    sparse = config.list("moe_layers", list(range(step - 1, sizes.layers, step)), of=int)
    mixture = _mixture(config, sizes.inner)
    layers = tuple(
        LayerSpec(mixer=attention, feed_forward=mixture if i in sparse else DENSE)
        for i, attention in enumerate(_attentions(scope, config, sizes))
    )
    return Decoder(scope, DecoderSpec(sizes=replace(sizes, inner=dense_inner), layers=layers))


def _attentions(
    scope: Scope, config: ConfigReader, sizes: DecoderSizes
) -> tuple[AttentionSpec, ...]:
    rope = read_rope(
        config,
        head_dim=sizes.head_dim,
        max_positions=scope.max_positions,
        default_theta=500_000.0,
        layout="pairs",
    )
    rotated = rotated_layers(config, sizes.layers)
    names = tuple(KINDS[not one] for one in rotated)
    kinds = config.list("layer_types", names, of=str, length=sizes.layers)
    if not set(kinds) <= set(KINDS):
        raise config.wrong("layer_types", f"{sizes.layers} of {', '.join(KINDS)}")
    chunk = config.int("attention_chunk_size", 8192, ge=1)
    bias = config.bool("attention_bias", False)
    # A rotation keeps the root mean square of a head, so that the norm may come before it.
    normed = QKNorm(norm=RMS_NO_WEIGHT, eps=sizes.eps)
    qk_norm = normed if config.bool("use_qk_norm", True) else None
    scale = _query_scale(config)
    return tuple(
        AttentionSpec(
            **plain_attention(sizes),
            rope=rope if has_rope else None,
            chunk=chunk if kind == KINDS[0] else None,
            qkv_bias=bias,
            out_bias=bias,
            qk_norm=qk_norm if has_rope else None,
            query_scale=None if has_rope else scale,
        )
        for has_rope, kind in zip(rotated, kinds, strict=True)
    )


def _query_scale(config: ConfigReader) -> QueryScale | None:
    if not config.bool("attn_temperature_tuning", True):
        return None
    return QueryScale(
        beta=config.float("attn_scale", 0.1, ge=0.0),
        length=config.int("floor_scale", 8192, ge=1),
        offset=1,
    )


def _mixture(config: ConfigReader, inner: int) -> MixtureSpec:
    experts = config.int("num_local_experts", 16, ge=1)
    return MixtureSpec(
        router=RouterSpec(
            experts=experts,
            top_k=config.int("num_experts_per_tok", 1, ge=1, le=experts),
            score="sigmoid",
            name="router",
            weighs_inputs=True,
        ),
        inner=inner,
        layout=SeparateExperts() if config.bool("separate_experts", False) else LAYOUT,
        shared=SharedSpec(inner=inner, name="shared_expert"),
        name=MODULE,
    )
