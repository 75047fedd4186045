"""Beam (Reflection AI, 2026): windows with rope in five of six layers, the others without position
embedding and with queries that grow with their position; attention under a gate with a bias for
each head; four norms a layer; dense layers first, then experts routed as DeepSeek-V3 routes them.

The model takes means of its residual and what a branch gives: behind addition n, counted from 2,
x is x * sqrt((n - 1) / n) + y / sqrt(n). So sqrt(n) * x is a plain sum, which is what the residual
here is; a root mean square norm of x is that of the sum with n times the epsilon.
"""

from __future__ import annotations

from collections.abc import Iterator

from headrace.back.layers.attention import AttentionSpec, QKNorm
from headrace.back.layers.norm import SANDWICH, NormSpec
from headrace.back.layers.output_gate import OutputGate
from headrace.back.layers.query_scale import PowerScale
from headrace.back.layers.rope import RopeSpec, read_rope
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
from headrace.back.models.moe import feed_forwards, sigmoid_mixture, sparse_by_type
from headrace.base.config.hf import ConfigReader

GATE = OutputGate(name="gate_proj", bias="gate_bias")
FAR = PowerScale(exponent=0.1, length=2048)
"""Of layers without position embedding; no key states it."""
LOCAL, WHOLE = "sliding_attention", "full_attention"
DENSE_LAYERS = 3
"""Where `mlp_layer_types` does not say."""


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """BeamForCausalLM."""
    sizes = read_sizes(config)
    branches = feed_forwards(
        sigmoid_mixture(config), sparse_by_type(config, sizes.layers, dense=DENSE_LAYERS)
    )
    layers = tuple(
        LayerSpec(
            mixer=attention,
            placement=SANDWICH,
            feed_forward=feed_forward,
            norms={
                "input_layernorm": _norm(sizes, additions=2 * index),
                "pre_feedforward_layernorm": _norm(sizes, additions=2 * index + 1),
            },
        )
        for index, (attention, feed_forward) in enumerate(
            zip(_attentions(scope, config, sizes), branches, strict=True)
        )
    )
    return Decoder(
        scope,
        DecoderSpec(
            sizes=sizes,
            layers=layers,
            last_norm=_norm(sizes, additions=2 * sizes.layers),
            logits_softcap=config.float("final_logit_softcapping", None, ge=1e-6),
        ),
    )


def _norm(sizes: DecoderSizes, *, additions: int) -> NormSpec:
    """That of the residual behind so many additions."""
    return NormSpec(eps=(additions + 1) * sizes.eps)


def _attentions(scope: Scope, config: ConfigReader, sizes: DecoderSizes) -> Iterator[AttentionSpec]:
    windows = read_windows(
        config,
        sizes.layers,
        window=config.int("sliding_window", 512, ge=1),
        sliding=lambda layer: (layer + 1) % 6 != 0 and layer != sizes.layers - 1,
    )
    ropes = {kind: _rope(scope, config, sizes.head_dim, kind) for kind in (LOCAL, WHOLE)}
    bias = config.bool("attention_bias", False)
    for window in windows:
        rope = ropes[LOCAL if window else WHOLE]
        yield AttentionSpec(
            **plain_attention(sizes),
            rope=rope,
            window=window,
            qkv_bias=bias,
            out_bias=bias,
            qk_norm=QKNorm(eps=sizes.eps),
            query_scale=None if rope else FAR,
            gate=GATE,
        )


def _rope(scope: Scope, config: ConfigReader, head_dim: int, kind: str) -> RopeSpec | None:
    """That of layers of this kind: none where `rope_parameters` has null for it."""
    stated = config.section("rope_parameters")
    absent = kind == WHOLE if stated is None else kind not in stated
    if absent:
        return None
    return read_rope(config, head_dim=head_dim, max_positions=scope.max_positions, layer_type=kind)
