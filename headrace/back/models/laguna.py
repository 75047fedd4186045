"""Laguna (poolside): windows in some layers, with rotations and head counts of their own, what
heads give times the softplus of a gate; a dense layer, then experts by sigmoid with a bias that
only chooses, beside a shared one."""

from __future__ import annotations

from headrace.back.layers.attention import AttentionSpec, QKNorm
from headrace.back.layers.moe.mixture import MixtureSpec, RouterSpec, SharedSpec
from headrace.back.layers.output_gate import OutputGate
from headrace.back.layers.rope import read_rope
from headrace.back.layers.scope import Scope
from headrace.back.models.blocks import (
    Decoder,
    DecoderSizes,
    DecoderSpec,
    LayerSpec,
    plain_attention,
    read_sizes,
    read_windows,
)
from headrace.back.models.moe import divided, feed_forwards, scored_by, sparse_by_type
from headrace.base.config.hf import ConfigReader

THETAS = {"full_attention": 500_000.0, "sliding_attention": 10_000.0}
SHARES = {"full_attention": 0.5, "sliding_attention": 1.0}
PER_HEAD, PER_ELEMENT = "per-head", "per-element"


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """LagunaForCausalLM."""
    sizes = read_sizes(config)
    windows = read_windows(
        config,
        sizes.layers,
        window=config.int("sliding_window", 512, ge=1),
        sliding=lambda layer: False,
    )
    sparse = sparse_by_type(config, sizes.layers, dense=1)
    layers = tuple(
        LayerSpec(mixer=_attention(scope, config, sizes, heads, window), feed_forward=feed_forward)
        for heads, window, feed_forward in zip(
            _heads(config, sizes),
            windows,
            feed_forwards(_mixture(config), sparse),
            strict=True,
        )
    )
    return Decoder(scope, DecoderSpec(sizes=sizes, layers=layers))


def _heads(config: ConfigReader, sizes: DecoderSizes) -> list[int]:
    """The query heads of each layer."""
    key = "num_attention_heads_per_layer"
    heads = config.list(key, [sizes.heads] * sizes.layers, of=int)
    if len(heads) != sizes.layers or any(one < 1 or one % sizes.kv_heads for one in heads):
        allowed = f"{sizes.layers} multiples of num_key_value_heads ({sizes.kv_heads})"
        raise config.wrong(key, allowed)
    return heads


def _attention(
    scope: Scope, config: ConfigReader, sizes: DecoderSizes, heads: int, window: int | None
) -> AttentionSpec:
    kind = "sliding_attention" if window else "full_attention"
    bias = config.bool("attention_bias", False)
    return AttentionSpec(
        **{**plain_attention(sizes), "heads": heads},
        rope=read_rope(
            config,
            head_dim=sizes.head_dim,
            max_positions=scope.max_positions,
            layer_type=kind,
            default_theta=THETAS[kind],
            default_share=SHARES[kind],
        ),
        window=window,
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=QKNorm(eps=sizes.eps),
        gate=OutputGate(name="g_proj", per_head=_gates_heads(config), act="softplus"),
    )


def _gates_heads(config: ConfigReader) -> bool:
    """Whether a gate stands for a whole head."""
    if isinstance(config.raw.get("gating"), str):
        return config.choice("gating", (PER_HEAD, PER_ELEMENT), PER_HEAD) == PER_HEAD
    return config.bool("gating", True)


def _mixture(config: ConfigReader) -> MixtureSpec:
    if config.bool("moe_apply_router_weight_on_input", False):
        raise config.wrong("moe_apply_router_weight_on_input", "false: weights are of the outputs")
    experts = config.int("num_experts", 256, ge=1, aliases=("num_local_experts",))
    inner = config.int("moe_intermediate_size", 512, ge=1)
    key = "shared_expert_intermediate_size"
    return MixtureSpec(
        router=RouterSpec(
            experts=experts,
            top_k=config.int("num_experts_per_tok", 8, ge=1, le=experts),
            score=scored_by(config, "sigmoid"),
            renormalize=True,
            scale=config.float("moe_routed_scaling_factor", 1.0),
            bias_name="experts.e_score_correction_bias",
            softcap=config.float("moe_router_logit_softcapping", 0.0, ge=0.0),
        ),
        inner=inner,
        shared=SharedSpec(
            inner=divided(config, key, config.int(key, 512, ge=1), inner), name="shared_expert"
        ),
    )
