"""MiniMax M2: norms over all queries and all keys, partly rotated heads, and sigmoid routing with
a bias that only chooses."""

from __future__ import annotations

from headrace.back.layers.attention import AttentionSpec, QKNorm
from headrace.back.layers.moe.mixture import MixtureSpec, RouterSpec
from headrace.back.layers.rope import read_rope
from headrace.back.layers.scope import Scope
from headrace.back.models.blocks import Decoder, DecoderSpec, LayerSpec, plain_attention, read_sizes
from headrace.back.models.mixtral import LAYOUT
from headrace.back.models.moe import scored_by
from headrace.base.config.hf import ConfigReader

THETA = 5_000_000.0


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """MiniMaxM2ForCausalLM."""
    sizes = read_sizes(config)
    experts = config.int("num_local_experts", ge=1, aliases=("num_experts",))
    layer = LayerSpec(
        mixer=AttentionSpec(
            **plain_attention(sizes),
            rope=read_rope(
                config,
                head_dim=sizes.head_dim,
                max_positions=scope.max_positions,
                default_theta=THETA,
                default_share=config.int("rotary_dim", sizes.head_dim, ge=2, le=sizes.head_dim)
                / sizes.head_dim,
            ),
            qk_norm=QKNorm(over="width", eps=sizes.eps),
        ),
        feed_forward=MixtureSpec(
            router=RouterSpec(
                experts=experts,
                top_k=config.int("num_experts_per_tok", 8, ge=1, le=experts),
                score=scored_by(config, "sigmoid"),
                renormalize=True,
                bias_name="e_score_correction_bias",
            ),
            inner=sizes.inner,
            layout=LAYOUT,
            name="block_sparse_moe",
        ),
    )
    return Decoder(scope, DecoderSpec(sizes=sizes, layers=(layer,) * sizes.layers))
