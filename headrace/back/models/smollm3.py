"""SmolLM3: Llama's decoder in which some layers have no position embedding (NoPE, every fourth by
default)."""

from __future__ import annotations

from headrace.back.layers.attention import AttentionSpec
from headrace.back.layers.mlp import GatedMLPSpec
from headrace.back.layers.rope import read_rope
from headrace.back.layers.scope import Scope
from headrace.back.models.blocks import (
    Decoder,
    DecoderSpec,
    LayerSpec,
    plain_attention,
    read_sizes,
    read_windows,
)
from headrace.base.config.hf import ConfigReader


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """SmolLM3ForCausalLM. Windows, if switched on, are in the layers without rope."""
    sizes = read_sizes(config, tied=True)
    rope = read_rope(
        config, head_dim=sizes.head_dim, max_positions=scope.max_positions, default_theta=2e6
    )
    rotated = rotated_layers(config, sizes.layers)
    used = config.bool("use_sliding_window", False)
    window = config.int("sliding_window", None, ge=1)
    windows = read_windows(
        config,
        sizes.layers,
        window=window if used else None,
        sliding=lambda layer: not rotated[layer],
    )
    bias = config.bool("attention_bias", False)
    mlp_bias = config.bool("mlp_bias", False)
    layers = tuple(
        LayerSpec(
            mixer=AttentionSpec(
                **plain_attention(sizes),
                rope=rope if has_rope else None,
                window=layer_window,
                qkv_bias=bias,
                out_bias=bias,
            ),
            feed_forward=GatedMLPSpec(bias=mlp_bias),
        )
        for has_rope, layer_window in zip(rotated, windows, strict=True)
    )
    return Decoder(scope, DecoderSpec(sizes=sizes, layers=layers))


def rotated_layers(config: ConfigReader, layers: int) -> tuple[bool, ...]:
    """Whether each layer has rope: no_rope_layers lists 1 for yes and 0 for no, in spite of its
    name."""
    interval = config.int("no_rope_layer_interval", 4, ge=1)
    listed = config.list("no_rope_layers", None, of=int)
    if listed is None:
        return tuple((layer + 1) % interval != 0 for layer in range(layers))
    if len(listed) < layers:
        raise config.wrong("no_rope_layers", f"a list of at least {layers} numbers")
    return tuple(bool(one) for one in listed[:layers])
