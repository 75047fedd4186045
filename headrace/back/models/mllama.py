"""Llama 3.2 Vision, text: Llama 3 whose layers of cross-attention read images alone; without any
they leave the residual as it is."""

from __future__ import annotations

from dataclasses import replace

from headrace.back.layers.norm import NormPlacement
from headrace.back.layers.scope import Scope
from headrace.back.models.blocks import Decoder, LayerSpec
from headrace.back.models.llama import llama_decoder
from headrace.base.config.hf import ConfigReader

MEDIA_ROWS = 8
"""Of the embedding, behind the vocabulary's: the image's token is among them."""
PASSED = LayerSpec(mixer=None, feed_forward=None, placement=NormPlacement())
IGNORED = (r"(model\.)?(vision_model|multi_modal_projector)\..*",)
CROSS_LAYERS = (3, 8, 13, 18, 23, 28, 33, 38)


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """MllamaForCausalLM, MllamaForConditionalGeneration."""
    spec = llama_decoder(scope, config)
    cross = config.list("cross_attention_layers", CROSS_LAYERS, of=int)
    if not set(cross) < set(range(spec.sizes.layers)):
        raise config.wrong("cross_attention_layers", f"some of the {spec.sizes.layers} layers")
    layers = tuple(PASSED if i in cross else layer for i, layer in enumerate(spec.layers))
    passed = tuple(rf"(.*\.)?layers\.{i}\..*" for i in cross)
    spec = replace(spec, layers=layers, media_rows=MEDIA_ROWS, ignored=(*IGNORED, *passed))
    return Decoder(scope, spec)
