"""DBRX: layer norms without bias, clipped queries, keys and values in one tensor, experts
(Databricks 2024)."""

from __future__ import annotations

from headrace.back.layers.attention import AttentionNames, AttentionSpec
from headrace.back.layers.moe.mixture import MixtureSpec, RouterSpec
from headrace.back.layers.moe.stacked import FlatExperts
from headrace.back.layers.moe.weights import SeparateExperts
from headrace.back.layers.norm import LAYER_NO_BIAS, NormPlacement
from headrace.back.layers.rope import read_rope
from headrace.back.layers.scope import Scope
from headrace.back.models.blocks import (
    Decoder,
    DecoderNames,
    DecoderSpec,
    LayerSpec,
    plain_attention,
    read_activation,
    read_sizes,
)
from headrace.back.models.cached_layers import kv_heads_of
from headrace.back.models.families import HEADS
from headrace.base.config.hf import ConfigReader

NAMES = DecoderNames(prefix="transformer", embedding="wte", layers="blocks", norm="norm_f")
ATTENTION = AttentionNames(module="norm_attn_norm.attn", merged="Wqkv", out="out_proj")
PLACEMENT = NormPlacement(
    before_attention="norm_attn_norm.norm_1", before_mlp="norm_attn_norm.norm_2"
)
LAYOUT = FlatExperts(gate="experts.mlp.w1", up="experts.mlp.v1", down="experts.mlp.w2")


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """DbrxForCausalLM. The weights of the chosen experts add up to 1, or are left as they are."""
    attention, experts = (config.required_section(name) for name in ("attn_config", "ffn_config"))
    heads = config.int("num_attention_heads", aliases=HEADS, ge=1)
    inner = experts.int("ffn_hidden_size", ge=1)
    sizes = read_sizes(config, eps=1e-5, kv_heads=kv_heads_of("dbrx", config, heads), inner=inner)
    rope = read_rope(
        config,
        head_dim=sizes.head_dim,
        max_positions=scope.max_positions,
        default_theta=attention.float("rope_theta", 10_000.0, ge=1.0),
    )
    layer = LayerSpec(
        mixer=AttentionSpec(
            **plain_attention(sizes),
            rope=rope,
            clip=attention.float("clip_qkv", None, ge=0.0),
            names=ATTENTION,
        ),
        placement=PLACEMENT,
        feed_forward=_mixture(experts, inner, separate=config.bool("separate_experts", False)),
    )
    return Decoder(
        scope,
        DecoderSpec(sizes=sizes, layers=(layer,) * sizes.layers, norm=LAYER_NO_BIAS, names=NAMES),
    )


def _mixture(config: ConfigReader, inner: int, *, separate: bool) -> MixtureSpec:
    """`separate`: a tensor for each expert, or one of all of its matrices (GGUF)."""
    experts = config.int("moe_num_experts", ge=1)
    power = config.float("moe_normalize_expert_weights", None)
    if power not in (None, 1.0):
        raise config.wrong("moe_normalize_expert_weights", "1 or null")
    stated = config.section("ffn_act_fn")
    return MixtureSpec(
        router=RouterSpec(
            experts=experts,
            top_k=config.int("moe_top_k", ge=1, le=experts),
            renormalize=power is not None,
            name="router.layer",
        ),
        inner=inner,
        layout=SeparateExperts() if separate else LAYOUT,
        name="ffn",
        activation=None if stated is None else read_activation(stated, ("name",), "silu"),
    )
