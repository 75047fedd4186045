"""Emu3, text: Llama's decoder, beside a coder of images that is not read."""

from __future__ import annotations

from headrace.back.layers.scope import Scope
from headrace.back.models.blocks import Decoder
from headrace.back.models.llama import llama_decoder
from headrace.base.config.hf import ConfigReader


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """Emu3ForCausalLM, Emu3ForConditionalGeneration."""
    return Decoder(scope, llama_decoder(scope, config, ignored=(r"model\.vqmodel\..*",)))
