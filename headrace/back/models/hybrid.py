"""What families with the gated delta rule share: the keys of config.json."""

from __future__ import annotations

from collections.abc import Callable

from headrace.back.layers.attention import AttentionSpec, QKNorm
from headrace.back.layers.mixer import MixerSpec
from headrace.back.layers.mlp import FeedForwardSpec
from headrace.back.layers.norm import RMS_UNIT_OFFSET
from headrace.back.layers.output_gate import OutputGate
from headrace.back.layers.rope import read_rope
from headrace.back.layers.scope import Scope
from headrace.back.layers.ssm.gated_delta import DeltaNames, GatedDeltaSpec
from headrace.back.layers.ssm.gated_norm import GatedNormSpec
from headrace.back.models.blocks import DecoderSizes, LayerSpec, plain_attention
from headrace.base.config.hf import ConfigReader

MAX_TAPS = 8


def linear_layers(
    config: ConfigReader, layers: int, *, default: Callable[[int], bool]
) -> list[bool]:
    """Which layers are recurrent: those that `layer_types` calls linear_attention, else those that
    `default` does."""
    types = config.list("layer_types", None, of=str)
    if types is None:
        return [default(i) for i in range(layers)]
    known = ("linear_attention", "full_attention")
    if len(types) != layers or not set(types) <= set(known):
        raise config.wrong("layer_types", f"{layers} of {', '.join(known)}")
    return [name == known[0] for name in types]


def read_gated_delta(
    config: ConfigReader,
    sizes: DecoderSizes,
    names: DeltaNames,
    *,
    heads: int | None = None,
    key_dim: int | None = None,
    eps: float | None = None,
    norm: str = "norm",
    beta_scale: float = 1.0,
) -> GatedDeltaSpec:
    """A layer by the keys `linear_...`; `heads` and `key_dim` are the family's defaults, `eps` its
    own of the gated norm, which is the module `norm`."""
    values = config.int("linear_num_value_heads", heads or 32, ge=1)
    keys = config.int("linear_num_key_heads", heads or 16, ge=1)
    if values % keys:
        raise config.wrong(
            "linear_num_key_heads", f"a divisor of linear_num_value_heads ({values})"
        )
    key_dim = config.int("linear_key_head_dim", key_dim or 128, ge=1)
    value_dim = config.int("linear_value_head_dim", 2 * key_dim if heads else 128, ge=1)
    return GatedDeltaSpec(
        width=sizes.width,
        key_heads=keys,
        heads=values,
        key_dim=key_dim,
        value_dim=value_dim,
        taps=config.int("linear_conv_kernel_dim", 4, ge=2, le=MAX_TAPS),
        norm=GatedNormSpec(
            eps=sizes.eps if eps is None else eps,
            groups=values,
            norm_first=True,
            shared=True,
            name=norm,
        ),
        names=names,
        beta_scale=beta_scale,
    )


def gated_attention(scope: Scope, config: ConfigReader, sizes: DecoderSizes) -> AttentionSpec:
    """The attention beside it in Qwen's models: heads that are rotated in part, each query with a
    gate for what it gives."""
    bias = config.bool("attention_bias", False)
    return AttentionSpec(
        **plain_attention(sizes),
        rope=read_rope(
            config,
            head_dim=sizes.head_dim,
            max_positions=scope.max_positions,
            default_share=0.25,
        ),
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=QKNorm(norm=RMS_UNIT_OFFSET, eps=sizes.eps),
        gate=OutputGate(),
    )


def qwen_mixers(
    scope: Scope, config: ConfigReader, sizes: DecoderSizes, names: DeltaNames
) -> tuple[MixerSpec, ...]:
    """Each layer's mixer in Qwen's hybrid models."""
    every = config.int("full_attention_interval", 4, ge=1)
    linear, whole = read_gated_delta(config, sizes, names), gated_attention(scope, config, sizes)
    kinds = linear_layers(config, sizes.layers, default=lambda i: (i + 1) % every != 0)
    return tuple(linear if is_linear else whole for is_linear in kinds)


def qwen_draft_layer(
    scope: Scope, config: ConfigReader, sizes: DecoderSizes, feed_forward: FeedForwardSpec
) -> LayerSpec:
    """The layer of their heads for multi-token prediction, which attends."""
    return LayerSpec(mixer=gated_attention(scope, config, sizes), feed_forward=feed_forward)
