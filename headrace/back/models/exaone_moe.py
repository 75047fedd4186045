"""EXAONE with experts (K-EXAONE): EXAONE 4's attention between norms before both branches, dense
layers first, then experts routed as DeepSeek-V3 routes them."""

from __future__ import annotations

from headrace.back.layers.scope import Scope
from headrace.back.models.blocks import Decoder, DecoderSpec, LayerSpec, read_sizes
from headrace.back.models.exaone4 import exaone_attentions
from headrace.back.models.moe import BIAS_BESIDE, feed_forwards, sigmoid_mixture, sparse_by_type
from headrace.base.config.hf import ConfigReader


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """ExaoneMoeForCausalLM."""
    sizes = read_sizes(config, eps=1e-5)
    mixture = sigmoid_mixture(config, bias_name=BIAS_BESIDE)
    sparse = sparse_by_type(config, sizes.layers, dense=1)
    layers = tuple(
        LayerSpec(mixer=attention, feed_forward=feed_forward)
        for attention, feed_forward in zip(
            exaone_attentions(scope, config, sizes),
            feed_forwards(mixture, sparse),
            strict=True,
        )
    )
    return Decoder(scope, DecoderSpec(sizes=sizes, layers=layers, ignored=(r"mtp\..*",)))
