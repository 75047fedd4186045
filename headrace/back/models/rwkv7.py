"""RWKV 7 (Peng et al. 2025, "RWKV-7 Goose"): layers of time mixing and channel mixing behind layer
norms, without attention; under the keys and names of flash-linear-attention's checkpoints.

Layers are skipped by the values of the first one, which all others mix theirs with.
"""

from __future__ import annotations

from headrace.back.layers.norm import LAYER, LAYER_NO_BIAS, NormPlacement
from headrace.back.layers.scope import Scope
from headrace.back.layers.ssm.rwkv import ChannelMixSpec
from headrace.back.layers.ssm.rwkv7 import FirstValues, LowRanks, TimeMix7Spec
from headrace.back.layers.ssm.token_shift import TokenShiftSpec
from headrace.back.models.blocks import Decoder, DecoderNames, DecoderSizes, DecoderSpec, LayerSpec
from headrace.back.models.chained_layer import ChainedSpec
from headrace.back.models.ssm import read_recurrent_sizes
from headrace.base.config.hf import ConfigReader

UNUSED = (r".*layers\.0\.(attn|self_attn)\.v_lora\..*",)
"""What some checkpoints hold for the first layer, which has no values to mix with."""
MULTIPLE = 32
"""Of the channels between, where a config states only their ratio."""


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """RWKV7ForCausalLM."""
    sizes = read_recurrent_sizes(config, tied=False)
    config.choice("hidden_act", ("sqrelu", "relu2"), "sqrelu")
    if config.raw.get("attn") is not None:
        raise config.wrong("attn", "null: layers with attention among those of RWKV are not built")
    values, heads, eps = FirstValues(), read_heads(config, sizes), sizes.eps
    ranks = read_ranks(config)
    channel = ChannelMixSpec(
        width=sizes.width,
        inner=_inner(config, sizes),
        name="ffn",
        shift=TokenShiftSpec(names=("x_k",), flat=True),
    )

    def time(layer: int) -> TimeMix7Spec:
        return TimeMix7Spec(
            width=sizes.width,
            heads=heads,
            head_dim=sizes.width // heads,
            ranks=ranks,
            eps=eps * (sizes.width // heads),
            first=layer == 0,
            last=layer == sizes.layers - 1,
            values=values,
            flat_bonus=config.bool("flat_bonus", False),
        )

    def branch(mixer: TimeMix7Spec | ChannelMixSpec, norm: str) -> LayerSpec:
        place = NormPlacement(before_attention=norm)
        return LayerSpec(mixer=mixer, placement=place, feed_forward=None)

    layers = tuple(
        ChainedSpec(parts=(branch(time(layer), "attn_norm"), branch(channel, "ffn_norm")))
        for layer in range(sizes.layers)
    )
    norm = LAYER if config.bool("norm_bias", True) else LAYER_NO_BIAS
    first = "layers.0.pre_norm" if config.bool("norm_first", True) else None
    names = DecoderNames(embedding="embeddings", embedding_norm=first)
    return Decoder(
        scope,
        DecoderSpec(sizes=sizes, layers=layers, norm=norm, names=names, ignored=UNUSED),
    )


def read_heads(config: ConfigReader, sizes: DecoderSizes) -> int:
    """By their size, or by their number where none is stated; values are as wide as keys."""
    head_dim = config.int("head_dim", 64 if config.raw.get("num_heads") is None else None, ge=1)
    heads = sizes.width // head_dim if head_dim else config.int("num_heads", ge=1)
    if sizes.width % (head_dim or heads):
        raise config.wrong("head_dim", f"a divisor of hidden_size ({sizes.width})")
    wide = config.raw.get("value_dim")
    listed = wide if isinstance(wide, list) else [wide]
    if any(one not in (None, sizes.width) for one in listed):
        raise config.wrong("value_dim", f"hidden_size ({sizes.width}) in all layers")
    return heads


def read_ranks(config: ConfigReader, *, gated: bool = True) -> LowRanks:
    """Inner sizes of the projections that decide on a token."""
    return LowRanks(
        decay=config.int("decay_low_rank_dim", ge=1),
        rate=config.int("a_low_rank_dim", ge=1),
        value=config.int("v_low_rank_dim", ge=1),
        gate=config.int("gate_low_rank_dim", ge=1) if gated else 0,
    )


def _inner(config: ConfigReader, sizes: DecoderSizes) -> int:
    stated = config.int("intermediate_size", None, ge=1)
    if stated is not None:
        return stated
    ratio = config.float("hidden_ratio", None, ge=0.0)
    inner = int(sizes.width * (4 if ratio is None else ratio))
    return -(-inner // MULTIPLE) * MULTIPLE
