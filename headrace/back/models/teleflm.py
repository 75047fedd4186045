"""Tele-FLM (Li et al. 2024): Llama's decoder with multipliers on embeddings and logits."""

from __future__ import annotations

from dataclasses import replace

from headrace.back.layers.scope import Scope
from headrace.back.models.blocks import Decoder
from headrace.back.models.llama import llama_decoder
from headrace.base.config.hf import ConfigReader


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """TeleFLMForCausalLM."""
    spec = llama_decoder(scope, config)
    if config.bool("use_mup", False):
        narrower = config.float("output_mult") / config.float("mup_scale_factor", 1.0, ge=1e-6)
        into = config.float("input_mult")
        spec = replace(spec, embedding_scale=into, logits_scale=narrower)
    return Decoder(scope, spec)
