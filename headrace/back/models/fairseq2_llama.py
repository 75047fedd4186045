"""Llama by the names of fairseq2, whose rotations take neighbouring dimensions."""

from __future__ import annotations

from headrace.back.layers.scope import Scope
from headrace.back.models.blocks import Decoder
from headrace.back.models.llama import llama_decoder
from headrace.base.config.hf import ConfigReader


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """Fairseq2LlamaForCausalLM, of safetensors files."""
    return Decoder(scope, llama_decoder(scope, config, layout="pairs"))
