"""T5Gemma (Google 2025): Gemma 2's layers in both halves, those of the decoder with
cross-attention between norms of its own; the halves may have other sizes."""

from __future__ import annotations

from dataclasses import replace

from headrace.back.layers.attention import AttentionSpec
from headrace.back.layers.cross_attention import CrossAttentionSpec
from headrace.back.layers.mlp import GATED_MLP, GatedMLP
from headrace.back.layers.norm import RMS_UNIT_OFFSET, BlockNorm
from headrace.back.layers.rope import read_rope
from headrace.back.layers.scope import Scope
from headrace.back.models.blocks import DecoderSizes, plain_attention, read_windows
from headrace.back.models.crossing_layer import CrossLayerSpec
from headrace.back.models.encoder import EncoderLayer, EncoderSizes, SpanAttentionLayer
from headrace.back.models.encoder_decoder import (
    EncoderDecoder,
    EncoderDecoderSpec,
    ReadSpec,
    StackSpec,
)
from headrace.back.models.gemma2 import embedding_scale, gemma_sizes, soft_cap
from headrace.base.config.hf import ConfigReader

PROJECTIONS = ("q_proj", "k_proj", "v_proj")
CROSS_NAMES = ("cross_attn", *PROJECTIONS, "o_proj")
BEFORE, BEHIND = (
    tuple(f"{where}_{branch}_layernorm" for branch in ("self_attn", "cross_attn", "feedforward"))
    for where in ("pre", "post")
)


def build(scope: Scope, config: ConfigReader) -> EncoderDecoder:
    """T5GemmaForConditionalGeneration."""
    scope = replace(scope, max_positions=max(scope.max_positions, scope.encoder_tokens))
    reads, says = (config.required_section(name) for name in ("encoder", "decoder"))
    read_sizes, sizes = gemma_sizes(reads), gemma_sizes(says)
    read_windows_of = _windows(reads, read_sizes)
    return EncoderDecoder(
        scope,
        EncoderDecoderSpec(
            sizes=sizes,
            encoder_layers=read_sizes.layers,
            encoder_layer=lambda at, i: _encoder_layer(at, reads, read_sizes, read_windows_of[i]),
            layers=tuple(
                _layer(scope, says, sizes, read_sizes.width, window)
                for window in _windows(says, sizes)
            ),
            norm=RMS_UNIT_OFFSET,
            encoder=StackSpec(stack="encoder", norm="norm"),
            decoder=StackSpec(stack="decoder", norm="norm"),
            shared="decoder.embed_tokens",
            embedding_scale=embedding_scale(sizes.width, scope.dtype),
            head=None if config.bool("tie_word_embeddings", True) else "lm_head.out_proj",
            logits_softcap=soft_cap(says, "final_logit_softcapping", 30.0),
            reads=ReadSpec(sizes=read_sizes, scale=embedding_scale(read_sizes.width, scope.dtype)),
        ),
    )


def _windows(config: ConfigReader, sizes: DecoderSizes) -> tuple[int | None, ...]:
    return read_windows(
        config,
        sizes.layers,
        window=config.int("sliding_window", 4096, ge=1),
        sliding=lambda layer: layer % 2 == 0,
    )


def _layer(
    scope: Scope, config: ConfigReader, sizes: DecoderSizes, source: int, window: int | None
) -> CrossLayerSpec:
    bias = config.bool("attention_bias", False)
    shared = {
        **plain_attention(sizes),
        "scale": config.float("query_pre_attn_scalar", 256.0, ge=1e-6) ** -0.5,
        "softcap": soft_cap(config, "attn_logit_softcapping", 50.0),
    }
    rope = read_rope(config, head_dim=sizes.head_dim, max_positions=scope.max_positions)
    return CrossLayerSpec(
        attention=AttentionSpec(**shared, rope=rope, window=window, qkv_bias=bias, out_bias=bias),
        cross=CrossAttentionSpec(
            **shared, source=source, span=scope.encoder_tokens, bias=bias, names=CROSS_NAMES
        ),
        feed_forward=GATED_MLP,
        norms=BEFORE,
        post=False,
        behind=BEHIND,
    )


def _encoder_layer(
    scope: Scope, config: ConfigReader, sizes: DecoderSizes, window: int | None
) -> EncoderLayer:
    def norm(name: str) -> BlockNorm:
        return RMS_UNIT_OFFSET.build(scope / name, sizes.width, eps=sizes.eps)

    same = ("vocabulary", "width", "inner", "layers", "heads", "kv_heads", "head_dim", "eps")
    encoder = EncoderSizes(
        **{name: getattr(sizes, name) for name in same}, activation=sizes.activation
    )
    return EncoderLayer(
        before_attention=norm(BEFORE[0]),
        attention=SpanAttentionLayer(
            scope / "self_attn",
            encoder,
            names=PROJECTIONS,
            out="o_proj",
            bias=config.bool("attention_bias", False),
            rope=read_rope(config, head_dim=sizes.head_dim, max_positions=scope.max_positions),
            window=window,
            scale=config.float("query_pre_attn_scalar", 256.0, ge=1e-6) ** -0.5,
            softcap=soft_cap(config, "attn_logit_softcapping", 50.0),
        ),
        behind_attention=norm(BEHIND[0]),
        before_mlp=norm(BEFORE[2]),
        mlp=GatedMLP(scope / "mlp", encoder.feed_forward),
        behind_mlp=norm(BEHIND[2]),
    )
