"""Qwen 2 with RWKV's time mixing in place of attention, of version 6 (QRWKV 6) or 7 (ARWKV 7); the
rest of a layer is Qwen's."""

from __future__ import annotations

from dataclasses import replace

from headrace.back.layers.mixer import MixerSpec
from headrace.back.layers.scope import Scope
from headrace.back.layers.ssm.rwkv6 import TimeMix6Names, TimeMix6Spec
from headrace.back.layers.ssm.rwkv7 import FirstValues, TimeMix7Spec
from headrace.back.models.blocks import Decoder, DecoderSizes, DecoderSpec, LayerSpec
from headrace.back.models.rwkv7 import UNUSED, read_ranks
from headrace.back.models.ssm import read_recurrent_sizes
from headrace.base.config.hf import ConfigReader

MODULE = "self_attn"
QWEN_NAMES = TimeMix6Names(
    module=MODULE,
    receptance="q_proj",
    key="k_proj",
    value="v_proj",
    out="o_proj",
)
HEAD_EPS = 64e-5
"""Of the norm of heads, whatever that of the layers is."""


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """RWKV6Qwen2ForCausalLM; RwkvHybridForCausalLM, of GGUF files alone."""
    sizes = read_recurrent_sizes(config, tied=False, eps=1e-6)
    sizes = replace(sizes, inner=config.int("intermediate_size", ge=1))
    config.choice("hidden_act", ("silu",), "silu")
    head_dim = config.int("head_size", ge=1)
    if sizes.width % head_dim:
        raise config.wrong("head_size", f"a divisor of hidden_size ({sizes.width})")
    version = config.int("wkv_version", ge=6, le=7)
    mixers = (_six if version == 6 else _seven)(config, sizes, head_dim)
    layers = tuple(LayerSpec(mixer=mixer) for mixer in mixers)
    return Decoder(scope, DecoderSpec(sizes=sizes, layers=layers, ignored=UNUSED))


def _six(config: ConfigReader, sizes: DecoderSizes, head_dim: int) -> list[MixerSpec]:
    heads = sizes.width // head_dim
    keys = config.int("num_key_value_heads", heads, ge=1)
    if heads % keys:
        raise config.wrong("num_key_value_heads", f"a divisor of the number of heads ({heads})")
    spec = TimeMix6Spec(
        width=sizes.width,
        heads=heads,
        key_heads=keys,
        head_dim=head_dim,
        mix_rank=config.int("time_mix_extra_dim", ge=1),
        decay_rank=config.int("time_decay_extra_dim", ge=1),
        eps=None,
        gate="sigmoid",
        bias=config.bool("attention_bias", False),
        names=replace(QWEN_NAMES, by_output=config.bool("low_rank_by_output", False)),
    )
    return [spec] * sizes.layers


def _seven(config: ConfigReader, sizes: DecoderSizes, head_dim: int) -> list[MixerSpec]:
    values, normed = FirstValues(), config.bool("wkv_has_group_norm", True)
    ranks = read_ranks(config, gated=config.bool("wkv_has_gate", True))
    return [
        TimeMix7Spec(
            width=sizes.width,
            heads=sizes.width // head_dim,
            head_dim=head_dim,
            ranks=ranks,
            eps=HEAD_EPS if normed else None,
            first=layer == 0,
            last=layer == sizes.layers - 1,
            values=values,
            flat_bonus=True,
            name=MODULE,
        )
        for layer in range(sizes.layers)
    ]
