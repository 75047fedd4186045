"""Kimi Linear: three layers of Kimi delta attention to one of latent attention without position
embedding; a dense layer, then experts routed by sigmoid (Kimi Team 2025)."""

from __future__ import annotations

from dataclasses import replace

from headrace.back.layers.latent_attention import LatentAttentionSpec
from headrace.back.layers.mixer import MixerSpec
from headrace.back.layers.rope import RopeSpec
from headrace.back.layers.scope import Scope
from headrace.back.layers.ssm.gated_delta import DeltaNames, GatedDeltaSpec
from headrace.back.layers.ssm.gated_norm import GatedNormSpec
from headrace.back.models.blocks import Decoder, DecoderSizes, DecoderSpec, LayerSpec, read_sizes
from headrace.back.models.hybrid import MAX_TAPS, linear_layers
from headrace.back.models.latent import read_latent_attention
from headrace.back.models.mixtral import LAYOUT
from headrace.back.models.moe import feed_forwards, sigmoid_mixture, sparse_by_type
from headrace.base.config.hf import ConfigReader

RENAMED = ((r"\.block_sparse_moe\.", ".mlp."),)
"""Experts, and in some checkpoints dense layers too, stand below a name of their own."""
NAMES = DeltaNames(
    module="self_attn",
    parts=("q_proj", "k_proj", "v_proj", "g_a_proj", "b_proj", "f_a_proj"),
    gate_up="g_b_proj",
    decay_up="f_b_proj",
)


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """KimiLinearForCausalLM."""
    sizes = read_sizes(config, eps=1e-5)
    delta, latent = _delta(config, sizes), _latent(scope, config, sizes)
    mixture = replace(sigmoid_mixture(config), layout=LAYOUT)
    sparse = sparse_by_type(config, sizes.layers, dense=1)
    layers = tuple(
        LayerSpec(mixer=mixer, feed_forward=feed_forward)
        for mixer, feed_forward in zip(
            _mixers(config, sizes.layers, delta, latent),
            feed_forwards(mixture, sparse),
            strict=True,
        )
    )
    return Decoder(scope, DecoderSpec(sizes=sizes, layers=layers, renamed=RENAMED))


def _latent(scope: Scope, config: ConfigReader, sizes: DecoderSizes) -> LatentAttentionSpec:
    """Its positions are those of the other layers: what would be rotated turns by 0."""
    spec = read_latent_attention(scope, config, sizes)
    still = RopeSpec(
        kind="default",
        head_dim=spec.rope.head_dim,
        frequencies=(0.0,) * len(spec.rope.frequencies),
    )
    return replace(spec, rope=still)


def _delta(config: ConfigReader, sizes: DecoderSizes) -> GatedDeltaSpec:
    """By keys of their own, or of the section that the first checkpoints have."""
    section = config.section("linear_attn_config") or config
    heads = section.int("linear_num_heads", 32, aliases=("num_heads",), ge=1)
    head_dim = section.int("linear_head_dim", 128, aliases=("head_dim",), ge=1)
    taps = section.int(
        "linear_conv_kernel_dim", 4, aliases=("short_conv_kernel_size",), ge=2, le=MAX_TAPS
    )
    return GatedDeltaSpec(
        width=sizes.width,
        key_heads=heads,
        heads=heads,
        key_dim=head_dim,
        value_dim=head_dim,
        taps=taps,
        norm=delta_norm(heads, sizes.eps),
        names=NAMES,
        per_channel=True,
        low_rank=head_dim,
        decay_shape=(1, 1, -1, 1),
    )


def delta_norm(heads: int, eps: float) -> GatedNormSpec:
    """The gated norm of Kimi delta attention."""
    return GatedNormSpec(
        eps=eps, groups=heads, norm_first=True, gate="sigmoid", shared=True, name="o_norm"
    )


def _mixers(
    config: ConfigReader, layers: int, delta: MixerSpec, latent: MixerSpec
) -> list[MixerSpec]:
    """By `layer_types`, or by the section's lists, which count layers from 1."""
    section = config.section("linear_attn_config")
    if "layer_types" not in config and section is not None:
        kinds = section.list("kda_layers", of=int)
        return [delta if i + 1 in kinds else latent for i in range(layers)]
    is_linear = linear_layers(config, layers, default=lambda i: i == 0 or i % 4 != 0)
    return [delta if linear else latent for linear in is_linear]
