"""Ministral 3, text: Mistral's decoder; queries far behind the original length are scaled up."""

from __future__ import annotations

from headrace.back.layers.attention import AttentionSpec
from headrace.back.layers.query_scale import QueryScale
from headrace.back.layers.rope import read_rope
from headrace.back.layers.scope import Scope
from headrace.back.models.blocks import Decoder, DecoderSpec, LayerSpec, plain_attention, read_sizes
from headrace.base.config.hf import ConfigReader


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """Ministral3ForCausalLM."""
    sizes = read_sizes(config, eps=1e-5)
    rope = read_rope(config, head_dim=sizes.head_dim, max_positions=scope.max_positions)
    layer = LayerSpec(
        mixer=AttentionSpec(
            **plain_attention(sizes),
            rope=rope,
            window=config.int("sliding_window", None, ge=1),
            query_scale=read_query_scale(config),
        )
    )
    return Decoder(scope, DecoderSpec(sizes=sizes, layers=(layer,) * sizes.layers))


def read_query_scale(config: ConfigReader) -> QueryScale | None:
    """What queries of far positions are multiplied with."""
    rope = config.section("rope_parameters") or config.section("rope_scaling")
    beta = None if rope is None else rope.float("llama_4_scaling_beta", None, ge=0.0)
    if rope is None or not beta:
        return None
    return QueryScale(beta=beta, length=rope.int("original_max_position_embeddings", ge=1))
