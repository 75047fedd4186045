"""gpt-oss: windows in every other layer, attention sinks, YaRN, and experts with biases and a
clamped gate (OpenAI 2025). Plain weights, or its experts in MXFP4."""

from __future__ import annotations

from headrace.back.kernels.experts.op import OAI_ALPHA, SWIGLU_OAI
from headrace.back.layers.attention import AttentionSpec
from headrace.back.layers.moe.mixture import MixtureSpec, RouterSpec
from headrace.back.layers.moe.weights import InterleavedExperts, SeparateExperts
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
from headrace.base.config.hf import ConfigReader

LAYOUT = InterleavedExperts()
SEPARATE = SeparateExperts(
    bias_names=("experts.gate_proj.bias", "experts.up_proj.bias", "experts.down_proj.bias")
)
THETA = 150_000.0


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """GptOssForCausalLM."""
    sizes = read_sizes(config, eps=1e-5)
    bias = config.bool("attention_bias", True)
    rope = read_rope(
        config,
        head_dim=sizes.head_dim,
        max_positions=scope.max_positions,
        default_theta=THETA,
    )
    mixture = _mixture(config, sizes.inner)
    window = config.int("sliding_window", 128, ge=1)
    layers = tuple(
        LayerSpec(
            mixer=AttentionSpec(
                **plain_attention(sizes),
                rope=rope,
                window=one,
                qkv_bias=bias,
                out_bias=bias,
                sinks=True,
            ),
            feed_forward=mixture,
        )
        for one in read_windows(
            config, sizes.layers, window=window, sliding=lambda layer: layer % 2 == 0
        )
    )
    return Decoder(scope, DecoderSpec(sizes=sizes, layers=layers))


def _mixture(config: ConfigReader, inner: int) -> MixtureSpec:
    experts = config.int("num_local_experts", ge=1, aliases=("num_experts",))
    if config.float("swiglu_alpha", OAI_ALPHA) != OAI_ALPHA:
        raise config.wrong("swiglu_alpha", str(OAI_ALPHA))
    return MixtureSpec(
        router=RouterSpec(
            experts=experts,
            top_k=config.int(
                "num_experts_per_tok", 4, ge=1, le=experts, aliases=("experts_per_token",)
            ),
            softmax_chosen=True,
            name="router",
            linear_bias=True,
        ),
        inner=inner,
        layout=SEPARATE if config.bool("separate_experts", False) else LAYOUT,
        activation=SWIGLU_OAI,
        clamp=config.float("swiglu_limit", 7.0, ge=0.0),
    )
