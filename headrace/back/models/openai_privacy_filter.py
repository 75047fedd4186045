"""OpenAI's privacy filter (2026): gpt-oss's layers, of which each token sees a window on both
sides, below a head that says of every token whether it belongs to a name, an address or another
secret."""

from __future__ import annotations

import torch

from headrace.back.attention.plan import Batch
from headrace.back.kernels.experts.op import SWIGLU_OAI
from headrace.back.layers.classifier import Classifier, Dense
from headrace.back.layers.embedding import TokenEmbedding
from headrace.back.layers.moe.mixture import MixtureSpec, RouterSpec
from headrace.back.layers.moe.weights import InterleavedExperts
from headrace.back.layers.norm import RMS
from headrace.back.layers.rope import RopeSpec, read_rope
from headrace.back.layers.scope import Scope
from headrace.back.layers.sink_spans import SinkSpans
from headrace.back.models.encoder import (
    Encoder,
    EncoderLayer,
    EncoderSizes,
    SpanAttentionLayer,
    WholeBranch,
    read_encoder_sizes,
)
from headrace.back.models.eurobert import PROJECTIONS
from headrace.back.models.gpt_oss import THETA
from headrace.base.config.hf import ConfigReader

LAYOUT = InterleavedExperts(in_turn=False)


def build(scope: Scope, config: ConfigReader) -> Encoder:
    """OpenAIPrivacyFilterForTokenClassification."""
    inside = scope / "model"
    sizes = read_encoder_sizes(config, eps=1e-5, eps_key="rms_norm_eps", default_activation="silu")
    words = TokenEmbedding(inside / "embed_tokens", sizes.vocabulary, sizes.width)
    rope = read_rope(
        config,
        head_dim=sizes.head_dim,
        max_positions=scope.max_positions,
        default_theta=THETA,
        layout="pairs",
    )
    mixture = _mixture(config, sizes.inner)

    def embed(batch: Batch) -> torch.Tensor:
        return words.lookup(batch.token_ids_T)

    return Encoder(
        scope,
        sizes,
        embed=embed,
        layers=[
            _layer(inside / "layers" / str(i), sizes, config, rope, mixture)
            for i in range(sizes.layers)
        ],
        norm=RMS.build(inside / "norm", sizes.width, eps=sizes.eps),
        classifier=Classifier(
            Dense(scope / "score", sizes.width, scope.head.num_labels, bias=True)
        ),
        ignored=(),
    )


def _layer(
    scope: Scope, sizes: EncoderSizes, config: ConfigReader, rope: RopeSpec, mixture: MixtureSpec
) -> EncoderLayer:
    at = scope / "self_attn"
    window = config.int("sliding_window", 128, ge=1)
    return EncoderLayer(
        before_attention=RMS.build(scope / "input_layernorm", sizes.width, eps=sizes.eps),
        attention=SpanAttentionLayer(
            at,
            sizes,
            names=PROJECTIONS,
            out="o_proj",
            bias=config.bool("attention_bias", True),
            rope=rope,
            spans=SinkSpans(at, sizes.heads, sizes.head_dim, window=window),
        ),
        before_mlp=RMS.build(scope / "post_attention_layernorm", sizes.width, eps=sizes.eps),
        mlp=WholeBranch(mixture.build(scope, sizes.feed_forward)),
    )


def _mixture(config: ConfigReader, inner: int) -> MixtureSpec:
    """gpt-oss's; weights are divided by the number of chosen experts and what these give is
    multiplied with it, which leaves neither."""
    experts = config.int("num_local_experts", 128, ge=1, aliases=("num_experts",))
    return MixtureSpec(
        router=RouterSpec(
            experts=experts,
            top_k=config.int("num_experts_per_tok", 4, ge=1, le=experts),
            softmax_chosen=True,
            name="router",
            linear_bias=True,
        ),
        inner=inner,
        layout=LAYOUT,
        activation=SWIGLU_OAI,
        clamp=config.float("swiglu_limit", 7.0, ge=0.0),
    )
