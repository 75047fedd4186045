"""Granite with sliding windows and experts."""

from __future__ import annotations

from headrace.back.layers.moe.weights import MergedExperts
from headrace.back.layers.scope import Scope
from headrace.back.models.blocks import Decoder, read_sizes
from headrace.back.models.granite import granite_decoder
from headrace.back.models.granite_swa import swa_mixers
from headrace.back.models.granitemoe import granite_experts
from headrace.base.config.hf import ConfigReader

LAYOUT = MergedExperts(up="experts.gate_up_proj", down="experts.down_proj")


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """GraniteMoeSWAForCausalLM."""
    sizes = read_sizes(config)
    shared = config.int("shared_intermediate_size", 0, ge=0)
    experts = granite_experts(config, sizes, shared=shared, layout=LAYOUT, router="router")
    return granite_decoder(scope, config, sizes, swa_mixers(scope, config, sizes), experts)
