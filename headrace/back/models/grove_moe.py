"""GroveMoE: Qwen 3's decoder with experts, every two of which share an adjugate expert."""

from __future__ import annotations

from dataclasses import replace

from headrace.back.layers.mlp import GATED_MLP
from headrace.back.layers.moe.grove import GroveSpec
from headrace.back.layers.moe.weights import SeparateExperts
from headrace.back.layers.scope import Scope
from headrace.back.models.blocks import Decoder, read_sizes
from headrace.back.models.moe import sparse_layers
from headrace.back.models.qwen2_moe import qwen_mixture
from headrace.back.models.qwen3 import qwen3_decoder
from headrace.base.config.hf import ConfigReader

ADJUGATES = SeparateExperts(
    gate="chunk_experts.{}.gate_proj.weight",
    up="chunk_experts.{}.up_proj.weight",
    down="chunk_experts.{}.down_proj.weight",
)
UNUSED = (r".*\.mlp\.expert_bias",)
"""Zeros in all checkpoints, which no pass reads."""


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """GroveMoeForCausalLM. The weights of the chosen always add up to 1. How large groups and
    adjugate experts are, and how much these count, published configs leave unsaid."""
    sizes = read_sizes(config)
    mixture = qwen_mixture(config)
    members = config.int("num_experts_per_group", 2, ge=1)
    if mixture.router.experts % members:
        raise config.wrong("num_experts", f"a multiple of the group of {members}")
    grove = GroveSpec(
        mixture=replace(mixture, router=replace(mixture.router, renormalize=True)),
        members=members,
        inner=config.int("parallel_expert_intermediate_size", 128, ge=1),
        scale=config.float("expert_group_scale", 0.05),
        layout=ADJUGATES,
    )
    branches = [
        grove if is_sparse else GATED_MLP for is_sparse in sparse_layers(config, sizes.layers)
    ]
    return qwen3_decoder(scope, config, sizes, branches, ignored=UNUSED)
