"""Gemma 2: norms around both branches (weights stored minus 1), soft caps on scores and logits,
every other layer with a sliding window, embeddings scaled by sqrt(hidden_size)."""

from __future__ import annotations

import torch

from headrace.back.layers.attention import AttentionSpec
from headrace.back.layers.norm import RMS_UNIT_OFFSET, SANDWICH, NormPlacement
from headrace.back.layers.rope import read_rope
from headrace.back.layers.scope import Scope
from headrace.back.models.blocks import (
    Decoder,
    DecoderSizes,
    DecoderSpec,
    LayerSpec,
    plain_attention,
    read_sizes,
    read_windows,
)
from headrace.base.config.hf import ConfigReader


def build(scope: Scope, config: ConfigReader, *, placement: NormPlacement = SANDWICH) -> Decoder:
    """Gemma2ForCausalLM. `placement`: where the norms stand."""
    sizes = gemma_sizes(config)
    rope = read_rope(config, head_dim=sizes.head_dim, max_positions=scope.max_positions)
    windows = read_windows(
        config,
        sizes.layers,
        window=config.int("sliding_window", 4096, ge=1),
        sliding=lambda layer: layer % 2 == 0,
    )
    bias = config.bool("attention_bias", False)
    attention = {
        **plain_attention(sizes),
        "rope": rope,
        "scale": config.float("query_pre_attn_scalar", 256.0, ge=1e-6) ** -0.5,
        "softcap": soft_cap(config, "attn_logit_softcapping", 50.0),
        "qkv_bias": bias,
        "out_bias": bias,
    }
    layers = tuple(
        LayerSpec(mixer=AttentionSpec(**attention, window=window), placement=placement)
        for window in windows
    )
    return Decoder(
        scope,
        DecoderSpec(
            sizes=sizes,
            layers=layers,
            norm=RMS_UNIT_OFFSET,
            embedding_scale=embedding_scale(sizes.width, scope.dtype),
            logits_softcap=soft_cap(config, "final_logit_softcapping", 30.0),
        ),
    )


def gemma_sizes(config: ConfigReader) -> DecoderSizes:
    """The common sizes with Gemma's defaults; hidden_activation is what counts where both keys are
    there."""
    return read_sizes(
        config,
        activation=("hidden_activation", "hidden_act"),
        default_activation="gelu_pytorch_tanh",
        tied=True,
    )


def soft_cap(config: ConfigReader, key: str, absent: float) -> float | None:
    """A cap; null switches it off, an absent key means the value the first checkpoints were trained
    with."""
    return config.float(key, None if key in config.raw else absent, ge=1e-6)


def embedding_scale(width: int, dtype: torch.dtype) -> float:
    """sqrt(width), rounded to the model's dtype as in training (transformers 5.23,
    Gemma2TextScaledWordEmbedding)."""
    return torch.tensor(width**0.5, dtype=dtype).item()
