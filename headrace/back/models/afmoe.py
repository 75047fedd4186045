"""Trinity (AFMoE): windows with rope in most layers, the others without position embedding, gated
attention between four norms, dense layers first, then experts by sigmoid with a bias that only
chooses."""

from __future__ import annotations

from headrace.back.layers.attention import AttentionSpec, QKNorm
from headrace.back.layers.moe.mixture import MixtureSpec, RouterSpec, SharedSpec
from headrace.back.layers.norm import NormPlacement
from headrace.back.layers.output_gate import OutputGate
from headrace.back.layers.rope import read_rope
from headrace.back.layers.scope import Scope
from headrace.back.models.blocks import (
    Decoder,
    DecoderSpec,
    LayerSpec,
    plain_attention,
    read_sizes,
    read_windows,
)
from headrace.back.models.moe import feed_forwards, scored_by
from headrace.base.config.hf import ConfigReader

PLACEMENT = NormPlacement(
    before_attention="input_layernorm",
    after_attention="post_attention_layernorm",
    before_mlp="pre_mlp_layernorm",
    after_mlp="post_mlp_layernorm",
)


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """AfmoeForCausalLM."""
    sizes = read_sizes(config, eps=1e-5)
    period = config.int("global_attn_every_n_layers", 4, ge=1)
    windows = read_windows(
        config,
        sizes.layers,
        window=config.int("sliding_window", 1024, ge=1),
        sliding=lambda layer: (layer + 1) % period != 0,
    )
    rope = read_rope(config, head_dim=sizes.head_dim, max_positions=scope.max_positions)
    bias = config.bool("attention_bias", False)
    dense = config.int("num_dense_layers", 1, ge=0)
    branches = feed_forwards(_mixture(config), [i >= dense for i in range(sizes.layers)])
    layers = tuple(
        LayerSpec(
            mixer=AttentionSpec(
                **plain_attention(sizes),
                rope=rope if window else None,
                window=window,
                qkv_bias=bias,
                out_bias=bias,
                qk_norm=QKNorm(eps=sizes.eps),
                gate=OutputGate(name="gate_proj"),
            ),
            placement=PLACEMENT,
            feed_forward=feed_forward,
        )
        for window, feed_forward in zip(windows, branches, strict=True)
    )
    scale = sizes.width**0.5 if config.bool("mup_enabled", False) else 1.0
    return Decoder(scope, DecoderSpec(sizes=sizes, layers=layers, embedding_scale=scale))


def _mixture(config: ConfigReader) -> MixtureSpec:
    experts = config.int("num_experts", 64, ge=1)
    inner = config.int("moe_intermediate_size", ge=1)
    shared = config.int("num_shared_experts", 2, ge=0)
    return MixtureSpec(
        router=RouterSpec(
            experts=experts,
            top_k=config.int("num_experts_per_tok", 6, ge=1, le=experts),
            score=scored_by(config, "sigmoid"),
            renormalize=True,
            scale=config.float("route_scale", 1.0),
            name="router.gate",
            bias_name="expert_bias",
        ),
        inner=inner,
        shared=SharedSpec(inner=inner * shared) if shared else None,
    )
