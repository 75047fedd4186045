"""K2 Horizon (IFM 2026): Llama's attention, or one whose values experts make, whose heads may be
gated, and of whose pairs the first turn; norms in groups; dense layers first, or alone, then
experts by sigmoid with a bias that only chooses, beside shared ones."""

from __future__ import annotations

from dataclasses import replace
from math import log
from typing import Any

from headrace.back.layers.attention import AttentionSpec
from headrace.back.layers.grouped_norm import GroupedNormSpec
from headrace.back.layers.mlp import GATED_MLP
from headrace.back.layers.moe.mixture import MixtureSpec, RouterSpec, SharedSpec
from headrace.back.layers.norm import PRE
from headrace.back.layers.output_gate import OutputGate
from headrace.back.layers.rope import RopeSpec, read_rope
from headrace.back.layers.scope import Scope
from headrace.back.layers.value_experts import ValueExperts, ValueExpertsSpec
from headrace.back.models.blocks import (
    Decoder,
    DecoderSizes,
    DecoderSpec,
    LayerSpec,
    plain_attention,
    read_sizes,
)
from headrace.back.models.moe import sparse_layers
from headrace.base.config.hf import ConfigReader

SCORES = ("sigmoid", "softmax")
NORMS = (str(PRE.before_attention), str(PRE.before_mlp))
BASE_2 = log(2)
"""softplus is log2(1 + 2^x): that of x * ln 2, divided by it."""


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """K2HorizonForCausalLM."""
    if config.bool("query_key_norm", False):
        raise config.wrong("query_key_norm", "false: norms of queries and keys are not built here")
    sizes = read_sizes(config)
    experts = config.int("num_experts", 0, ge=0)
    mixture = _mixture(config, experts) if experts else GATED_MLP
    sparse = [one and experts > 0 for one in sparse_layers(config, sizes.layers)]
    norm = _group_norm(config, sizes.width)
    norms = {} if norm is None else dict.fromkeys(NORMS, norm)
    attention, routed = _attentions(scope, config, sizes)
    layers = tuple(
        LayerSpec(mixer=routed, feed_forward=mixture, norms=norms)
        if has_experts
        else LayerSpec(mixer=attention, norms=norms)
        for has_experts in sparse
    )
    return Decoder(scope, DecoderSpec(sizes=sizes, layers=layers, last_norm=norm))


def _group_norm(config: ConfigReader, width: int) -> GroupedNormSpec | None:
    """None: a plain one."""
    groups = config.int("layernorm_num_groups", 1, ge=1)
    if width % groups:
        raise config.wrong("layernorm_num_groups", f"a divisor of hidden_size ({width})")
    return GroupedNormSpec(groups=groups) if groups > 1 else None


def _attentions(
    scope: Scope, config: ConfigReader, sizes: DecoderSizes
) -> tuple[AttentionSpec, AttentionSpec]:
    """That of dense layers, and that of layers with experts."""
    bias = config.bool("attention_bias", False)
    shared: dict[str, Any] = {
        **plain_attention(sizes),
        "rope": _rope(scope, config, sizes.head_dim),
        "qkv_bias": bias,
        "out_bias": bias,
    }
    gate = config.choice("attention_gate_func", ("silu", "softplus"), None)
    if gate is not None:
        base = BASE_2 if gate == "softplus" else 1.0
        shared |= {"gate": OutputGate(name="gate_proj", act=gate, scale=base)}
        shared |= {"out_scale": 1.0 / base}
    attention = AttentionSpec(**shared)
    experts = config.int("mova_num_experts", 0, ge=0)
    if not experts:
        return attention, attention
    values = ValueExperts(
        experts=experts,
        chosen=config.int("mova_num_experts_per_tok", ge=1, le=experts),
        score=config.choice("router_score_func", SCORES, "sigmoid"),
        scale=config.float("router_scaling_factor", 1.0),
        biased=config.bool("moe_gate_bias", True),
    )
    return attention, ValueExpertsSpec(**shared, values=values)


def _rope(scope: Scope, config: ConfigReader, head_dim: int) -> RopeSpec:
    """Pairs are the halves of a whole head, of which the first `rope_head_dim` / 2 turn, as fast as
    in a head of that size."""
    turning = config.int("rope_head_dim", head_dim, ge=2, le=head_dim)
    rope = read_rope(config, head_dim=turning, max_positions=scope.max_positions)
    still = (0.0,) * ((head_dim - turning) // 2)
    return replace(rope, head_dim=head_dim, frequencies=(*rope.frequencies, *still))


def _mixture(config: ConfigReader, experts: int) -> MixtureSpec:
    inner = config.int("moe_intermediate_size", ge=1)
    shared = config.int("num_shared_experts", 0, ge=0)
    return MixtureSpec(
        router=RouterSpec(
            experts=experts,
            top_k=config.int("num_experts_per_tok", ge=1, le=experts),
            score=config.choice("router_score_func", SCORES, "sigmoid"),
            renormalize=config.bool("norm_topk_prob", True),
            scale=config.float("router_scaling_factor", 1.0),
            bias_name="gate.bias" if config.bool("moe_gate_bias", True) else None,
        ),
        inner=inner,
        shared=SharedSpec(inner=inner * shared) if shared else None,
    )
