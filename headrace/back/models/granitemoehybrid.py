"""Granite 4: Mamba 2 and attention in turn, with experts and a shared MLP, or one MLP alone."""

from __future__ import annotations

from headrace.back.layers.scope import Scope
from headrace.back.models.blocks import Decoder, read_sizes
from headrace.back.models.granite import granite_attention, granite_decoder
from headrace.back.models.granitemoe import granite_experts
from headrace.back.models.ssm import HYBRID_KINDS, read_layer_kinds, read_mamba2
from headrace.base.config.hf import ConfigReader


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """GraniteMoeHybridForCausalLM."""
    sizes = read_sizes(config)
    kinds = read_layer_kinds(config, sizes.layers, HYBRID_KINDS, default="mamba")
    known = {"rope": True, "nope": False}
    position = config.choice("position_embedding_type", known, "nope")
    mixers = {
        "mamba": read_mamba2(config, sizes),
        "attention": granite_attention(scope, config, sizes, rotated=known[position]),
    }
    shared = config.int("shared_intermediate_size", 1024, ge=0)
    feed_forward = granite_experts(config, sizes, shared=shared)
    return granite_decoder(scope, config, sizes, [mixers[kind] for kind in kinds], feed_forward)
