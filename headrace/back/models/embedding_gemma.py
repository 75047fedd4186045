"""EmbeddingGemma (Schechter Vera et al. 2025): Gemma 3's layers, of which each token sees both
sides. Local layers see half of `sliding_window` on each side."""

from __future__ import annotations

import torch

from headrace.back.attention.plan import Batch
from headrace.back.layers.attention import QKNorm
from headrace.back.layers.embedding import TokenEmbedding
from headrace.back.layers.mlp import GatedMLP
from headrace.back.layers.norm import RMS_UNIT_OFFSET, BlockNorm
from headrace.back.layers.rope import RopeSpec
from headrace.back.layers.scope import Scope
from headrace.back.models.encoder import (
    Encoder,
    EncoderLayer,
    EncoderSizes,
    SpanAttentionLayer,
    read_encoder_sizes,
)
from headrace.back.models.gemma2 import embedding_scale
from headrace.back.models.gemma3 import gemma3_windows, local_and_global_ropes
from headrace.base.config.hf import ConfigReader

_PROJECTIONS = ("q_proj", "k_proj", "v_proj")


def build(scope: Scope, config: ConfigReader) -> Encoder:
    """Gemma3TextModel with `use_bidirectional_attention`."""
    sizes = read_encoder_sizes(
        config,
        eps=1e-6,
        activation_key="hidden_activation",
        eps_key="rms_norm_eps",
        default_activation="gelu_pytorch_tanh",
    )
    if config.float("attn_logit_softcapping", None) is not None:
        raise config.wrong("attn_logit_softcapping", "null where attention is bidirectional")
    words = TokenEmbedding(
        scope / "embed_tokens",
        sizes.vocabulary,
        sizes.width,
        scale=embedding_scale(sizes.width, scope.dtype),
    )
    local, whole = local_and_global_ropes(scope, config, sizes.head_dim)
    layers = [
        _layer(
            scope / "layers" / str(i), sizes, config, window=window, rope=local if window else whole
        )
        for i, window in enumerate(gemma3_windows(config, sizes.layers))
    ]

    def embed(batch: Batch) -> torch.Tensor:
        return words.lookup(batch.token_ids_T)

    return Encoder(
        scope,
        sizes,
        embed=embed,
        layers=layers,
        norm=RMS_UNIT_OFFSET.build(scope / "norm", sizes.width, eps=sizes.eps),
        classifier=None,
        ignored=(),
    )


def _layer(
    scope: Scope,
    sizes: EncoderSizes,
    config: ConfigReader,
    *,
    window: int | None,
    rope: RopeSpec,
) -> EncoderLayer:
    def norm(name: str) -> BlockNorm:
        return RMS_UNIT_OFFSET.build(scope / name, sizes.width, eps=sizes.eps)

    return EncoderLayer(
        before_attention=norm("input_layernorm"),
        attention=SpanAttentionLayer(
            scope / "self_attn",
            sizes,
            names=_PROJECTIONS,
            out="o_proj",
            bias=config.bool("attention_bias", False),
            rope=rope,
            window=window // 2 if window else None,
            scale=config.float("query_pre_attn_scalar", 256.0, ge=1e-6) ** -0.5,
            qk_norm=QKNorm(norm=RMS_UNIT_OFFSET, eps=sizes.eps),
        ),
        behind_attention=norm("post_attention_layernorm"),
        before_mlp=norm("pre_feedforward_layernorm"),
        mlp=GatedMLP(scope / "mlp", sizes.feed_forward),
        behind_mlp=norm("post_feedforward_layernorm"),
    )
