"""RWKV 4 (Peng et al. 2023): layers of time mixing and channel mixing behind layer norms, without
attention. Weights are used as they are stored: halving them every few layers is for float16
alone."""

from __future__ import annotations

from headrace.back.layers.norm import LAYER, NormPlacement
from headrace.back.layers.scope import Scope
from headrace.back.layers.ssm.rwkv import ChannelMixSpec, TimeMixSpec
from headrace.back.models.blocks import Decoder, DecoderNames, DecoderSpec, LayerSpec
from headrace.back.models.chained_layer import ChainedSpec
from headrace.back.models.ssm import read_recurrent_sizes
from headrace.base.config.hf import ConfigReader

NAMES = DecoderNames(
    prefix="rwkv",
    embedding="embeddings",
    embedding_norm="blocks.0.pre_ln",
    layers="blocks",
    norm="ln_out",
    head="head",
)


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """RwkvForCausalLM."""
    sizes = read_recurrent_sizes(config, tied=False)
    time = TimeMixSpec(
        width=sizes.width,
        channels=config.int("attention_hidden_size", None, ge=1) or sizes.width,
    )
    channel = ChannelMixSpec(
        width=sizes.width,
        inner=config.int("intermediate_size", None, ge=1) or 4 * sizes.width,
    )
    layer = ChainedSpec(
        parts=tuple(
            LayerSpec(
                mixer=mixer, placement=NormPlacement(before_attention=norm), feed_forward=None
            )
            for mixer, norm in ((time, "ln1"), (channel, "ln2"))
        )
    )
    return Decoder(
        scope, DecoderSpec(sizes=sizes, layers=(layer,) * sizes.layers, norm=LAYER, names=NAMES)
    )
