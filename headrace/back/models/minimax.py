"""MiniMax-Text-01: seven layers of lightning attention to one of softmax attention, experts in all.
A branch is added to what the norm before it gives, times a factor (MiniMax 2025, section 2)."""

from __future__ import annotations

from headrace.back.layers.attention import AttentionSpec
from headrace.back.layers.moe.mixture import MixtureSpec, RouterSpec
from headrace.back.layers.rope import read_rope
from headrace.back.layers.scope import Scope
from headrace.back.layers.ssm.gated_norm import GatedNormSpec
from headrace.back.layers.ssm.lightning import LightningSpec
from headrace.back.models.blocks import (
    Decoder,
    DecoderSizes,
    DecoderSpec,
    LayerSpec,
    plain_attention,
    read_sizes,
)
from headrace.back.models.hybrid import linear_layers
from headrace.back.models.mixtral import LAYOUT
from headrace.base.config.hf import ConfigReader

NORM_EPS = 1e-6
"""Of the norms behind lightning attention, in all published models: not the model's own."""


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """MiniMaxForCausalLM."""
    sizes = read_sizes(config, eps=1e-5)
    experts = config.int("num_local_experts", 8, ge=1)
    mixture = MixtureSpec(
        router=RouterSpec(
            experts=experts,
            top_k=config.int("num_experts_per_tok", 2, ge=1, le=experts),
            renormalize=True,
        ),
        inner=sizes.inner,
        layout=LAYOUT,
        name="block_sparse_moe",
    )
    attention = AttentionSpec(
        **plain_attention(sizes),
        rope=read_rope(
            config, head_dim=sizes.head_dim, max_positions=scope.max_positions, default_theta=1e6
        ),
        window=config.int("sliding_window", None, ge=1),
    )
    whole, linear, mlp = (_factor(config, name) for name in ("full_attn", "linear_attn", "mlp"))
    kinds = linear_layers(config, sizes.layers, default=lambda i: i % 2 == 1)
    layers = tuple(
        LayerSpec(
            mixer=_lightning(sizes, index) if is_linear else attention,
            feed_forward=mixture,
            normed_residual=(linear if is_linear else whole, mlp),
        )
        for index, is_linear in enumerate(kinds)
    )
    buffers = r".*\.self_attn\.(slope_rate|query_decay|key_decay|diagonal_decay)"
    return Decoder(scope, DecoderSpec(sizes=sizes, layers=layers, ignored=(buffers,)))


def _lightning(sizes: DecoderSizes, index: int) -> LightningSpec:
    """Heads forget at rates from 2^(-8 / H) on, later layers less."""
    less = 1 - index / (sizes.layers - 1 + 1e-5) + 1e-5
    slopes = tuple(2 ** (-8 * (head + 1) / sizes.heads) * less for head in range(sizes.heads))
    return LightningSpec(
        width=sizes.width,
        heads=sizes.heads,
        head_dim=sizes.head_dim,
        slopes=slopes,
        activation=sizes.activation,
        norm=GatedNormSpec(eps=NORM_EPS, norm_first=True, gate="sigmoid"),
    )


def _factor(config: ConfigReader, name: str) -> float:
    """Of the residual; the branch's own must be 1, as in all published models."""
    key = f"{name}_beta_factor"
    if config.float(key, 1.0) != 1.0:
        raise config.wrong(key, "1: branches are not scaled")
    return config.float(f"{name}_alpha_factor", 1.0)
