"""Mamba: layers of one branch each, a norm and the selective scan."""

from __future__ import annotations

from headrace.back.layers.scope import Scope
from headrace.back.layers.ssm.mamba1 import Mamba1Spec
from headrace.back.models.blocks import Decoder, DecoderSizes, DecoderSpec, LayerSpec
from headrace.back.models.ssm import BACKBONE, ONE_BRANCH, read_mamba1, read_recurrent_sizes
from headrace.base.config.hf import ConfigReader


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """MambaForCausalLM."""
    sizes = read_recurrent_sizes(config, tied=True)
    return mamba_decoder(scope, sizes, read_mamba1(config, sizes.width))


def mamba_decoder(scope: Scope, sizes: DecoderSizes, mamba: Mamba1Spec) -> Decoder:
    """Layers of a norm and this mixer each."""
    layer = LayerSpec(mixer=mamba, placement=ONE_BRANCH, feed_forward=None)
    spec = DecoderSpec(sizes=sizes, layers=(layer,) * sizes.layers, names=BACKBONE)
    return Decoder(scope, spec)
