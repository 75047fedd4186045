"""Gemma 3n, text: several streams that each layer predicts and corrects, inputs of each layer's
own, upper layers that read the caches of lower ones, and lower layers whose MLP keeps the largest
activations alone."""

from __future__ import annotations

from headrace.back.layers.altup import AltUpStreamsSpec
from headrace.back.layers.attention import AttentionSpec, QKNorm
from headrace.back.layers.layer_tail import LayerInputsSpec
from headrace.back.layers.mixer import MixerSpec
from headrace.back.layers.mlp import GatedMLPSpec
from headrace.back.layers.scope import Scope
from headrace.back.models.altup_layer import AltUpLayerSpec
from headrace.back.models.blocks import (
    Decoder,
    DecoderSizes,
    DecoderSpec,
    plain_attention,
    read_windows,
)
from headrace.back.models.gemma2 import embedding_scale, gemma_sizes, soft_cap
from headrace.back.models.gemma3 import local_and_global_ropes
from headrace.back.models.gemma4 import OTHER_PARTS, shared_caches, unread_projections
from headrace.base.config.hf import ConfigReader

SPARSE_LAYERS, SPARSITY = 10, 0.95
"""Where the config does not say: of deeper models the first layers, and by how much."""


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """Gemma3nForCausalLM."""
    inner = _inner_sizes(config)
    sizes = gemma_sizes(ConfigReader({**config.raw, "intermediate_size": inner[0]}, config.where))
    first_shared = sizes.layers - config.int("num_kv_shared_layers", 15, ge=0, le=sizes.layers - 1)
    width = config.int("hidden_size_per_layer_input", 256, ge=1)
    streams = config.int("altup_num_inputs", 4, ge=1)
    shape = {
        "streams": streams,
        "active": config.int("altup_active_idx", 0, ge=0, le=streams - 1),
        "rank": config.int("laurel_rank", 64, ge=1),
        "input_width": width,
        "scaled": config.bool("altup_correct_scale", True),
    }
    mixers = _mixers(scope, config, sizes, first_shared)
    layers = tuple(
        AltUpLayerSpec(
            mixer=mixer, feed_forward=GatedMLPSpec(inner=size, sparsity=sparsity), **shape
        )
        for mixer, size, sparsity in zip(
            mixers, inner, _sparsities(config, sizes.layers), strict=True
        )
    )
    vocabulary = config.int("vocab_size_per_layer_input", 262_144, ge=1)
    inputs = LayerInputsSpec(
        vocabulary=vocabulary,
        covers=vocabulary >= sizes.vocabulary,
        width=width,
        scale=embedding_scale(width, scope.dtype),
    )
    return Decoder(
        scope,
        DecoderSpec(
            sizes=sizes,
            layers=layers,
            embedding_scale=embedding_scale(sizes.width, scope.dtype),
            logits_softcap=soft_cap(config, "final_logit_softcapping", 30.0),
            layer_inputs=inputs,
            streams=AltUpStreamsSpec(count=streams),
            ignored=(OTHER_PARTS, *unread_projections(first_shared, sizes.layers)),
        ),
    )


def _mixers(
    scope: Scope, config: ConfigReader, sizes: DecoderSizes, first_shared: int
) -> tuple[MixerSpec, ...]:
    windows = read_windows(
        config,
        sizes.layers,
        window=config.int("sliding_window", 512, ge=1),
        sliding=lambda layer: (layer + 1) % 5 != 0,
    )
    bias = config.bool("attention_bias", False)
    attention = {
        **plain_attention(sizes),
        "scale": 1.0,
        "qkv_bias": bias,
        "out_bias": bias,
        "qk_norm": QKNorm(eps=sizes.eps),
        "value_eps": sizes.eps,
    }
    local, whole = local_and_global_ropes(scope, config, sizes.head_dim)
    specs = tuple(
        AttentionSpec(**attention, window=window, rope=local if window else whole)
        for window in windows
    )
    return shared_caches(config, specs, first_shared)


def _inner_sizes(config: ConfigReader) -> tuple[int, ...]:
    """Of each layer's MLP: one for all, or a list."""
    layers = config.int("num_hidden_layers", ge=1)
    if not isinstance(config.raw.get("intermediate_size"), list):
        return (config.int("intermediate_size", ge=1),) * layers
    sizes = config.list("intermediate_size", of=int, length=layers)
    if min(sizes) < 1:
        raise config.wrong("intermediate_size", "a list of numbers of at least 1")
    return sizes


def _sparsities(config: ConfigReader, layers: int) -> tuple[float, ...]:
    """The share of activations that each layer's MLP sets to zero."""
    sparse = SPARSE_LAYERS if layers > SPARSE_LAYERS else 0
    default = (SPARSITY,) * sparse + (0.0,) * (layers - sparse)
    shares = config.list("activation_sparsity_pattern", default, of=float, length=layers)
    if not all(0.0 <= share < 1.0 for share in shares):
        raise config.wrong("activation_sparsity_pattern", "a list of numbers from 0 to below 1")
    return shares
