"""Flint: windows with rope in most layers, the others without position embedding, sinks in all;
dense layers first, then experts by sigmoid beside a shared one."""

from __future__ import annotations

from headrace.back.layers.attention import AttentionNames, AttentionSpec, QKNorm
from headrace.back.layers.moe.mixture import MixtureSpec, RouterSpec, SharedSpec
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
from headrace.back.models.moe import divided, feed_forwards, scored_by
from headrace.base.config.hf import ConfigReader

DENSE = (0, 1)
NAMES = AttentionNames(sinks="softmax_offset")


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """FlintForCausalLM."""
    sizes = read_sizes(config)
    last = sizes.layers - 1
    windows = read_windows(
        config,
        sizes.layers,
        window=config.int("sliding_window", 513, ge=1),
        sliding=lambda layer: layer > 1 and layer % 4 != 1 and layer != last,
    )
    rope = read_rope(config, head_dim=sizes.head_dim, max_positions=scope.max_positions)
    bias = config.bool("attention_bias", False)
    dense = config.list("mlp_only_layers", DENSE, of=int)
    branches = feed_forwards(_mixture(config), [i not in dense for i in range(sizes.layers)])
    layers = tuple(
        LayerSpec(
            mixer=AttentionSpec(
                **plain_attention(sizes),
                rope=rope if window else None,
                window=window,
                qkv_bias=bias,
                out_bias=bias,
                qk_norm=QKNorm(eps=sizes.eps),
                sinks=True,
                names=NAMES,
            ),
            feed_forward=feed_forward,
        )
        for window, feed_forward in zip(windows, branches, strict=True)
    )
    return Decoder(scope, DecoderSpec(sizes=sizes, layers=layers))


def _mixture(config: ConfigReader) -> MixtureSpec:
    experts = config.int("num_experts", 256, ge=1, aliases=("num_local_experts",))
    inner = config.int("moe_intermediate_size", 512, ge=1)
    key = "shared_expert_intermediate_size"
    return MixtureSpec(
        router=RouterSpec(
            experts=experts,
            top_k=config.int("num_experts_per_tok", 6, ge=1, le=experts),
            score=scored_by(config, "sigmoid"),
            renormalize=config.bool("norm_topk_prob", True),
        ),
        inner=inner,
        shared=SharedSpec(
            inner=divided(config, key, config.int(key, 1024, ge=1), inner), name="shared_expert"
        ),
    )
