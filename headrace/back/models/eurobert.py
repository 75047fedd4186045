"""EuroBERT (Boizard et al. 2025), NVIDIA's embedders, and embedders that are decoders with
`is_causal` false: Llama's, Qwen 2's or Qwen 3's layers, of which each token sees both sides."""

from __future__ import annotations

from collections.abc import Callable

import torch

from headrace.back.attention.plan import Batch
from headrace.back.layers.classifier import Classifier, Dense
from headrace.back.layers.embedding import TokenEmbedding
from headrace.back.layers.mlp import GatedMLP
from headrace.back.layers.norm import RMS
from headrace.back.layers.qk_norm import QKNorm
from headrace.back.layers.rope import RopeSpec, read_rope
from headrace.back.layers.scope import Scope
from headrace.back.models.encoder import (
    Encoder,
    EncoderLayer,
    EncoderSizes,
    SpanAttentionLayer,
    TokenBranch,
    read_encoder_sizes,
)
from headrace.back.models.pooling_families import VOYAGE
from headrace.base.config.hf import ConfigReader

PROJECTIONS = ("q_proj", "k_proj", "v_proj")
IGNORED = (r"lm_head\..*",)


def build(scope: Scope, config: ConfigReader) -> Encoder:
    """EuroBertModel, EuroBertForSequenceClassification, EuroBertForTokenClassification,
    EuroBertForMaskedLM; LlamaBidirectionalModel, LlamaBidirectionalForSequenceClassification; names
    of Llama, Mistral, Qwen 2 and Qwen 3 with `is_causal` false;
    VoyageQwen3BidirectionalEmbedModel."""
    return eurobert_encoder(scope, scope if scope.head.bare else scope / "model", config)


def eurobert_encoder(scope: Scope, inside: Scope, config: ConfigReader) -> Encoder:
    """`scope` is that of the head, `inside` that of all else."""
    sizes = read_encoder_sizes(config, eps=1e-5, eps_key="rms_norm_eps", default_activation="silu")
    words = TokenEmbedding(inside / "embed_tokens", sizes.vocabulary, sizes.width)
    rope = read_rope(
        config,
        head_dim=sizes.head_dim,
        max_positions=scope.max_positions,
        default_theta=250_000.0 if "EuroBert" in config.list("architectures", of=str)[0] else 1e4,
    )
    for key in ("use_sliding_window", "dual_chunk_attention_config"):
        if config.raw.get(key):
            raise config.wrong(key, "false or null where each token sees both sides")

    def embed(batch: Batch) -> torch.Tensor:
        x_TE = words.lookup(batch.token_ids_T)
        return x_TE if batch.encoded is None else batch.encoded.put(x_TE)

    layers = [_layer(inside / "layers" / str(i), sizes, config, rope) for i in range(sizes.layers)]
    return Encoder(
        scope,
        sizes,
        embed=embed,
        layers=layers,
        norm=RMS.build(inside / "norm", sizes.width, eps=sizes.eps),
        classifier=_head(scope, config, sizes.width),
        ignored=IGNORED,
    )


def _layer(scope: Scope, sizes: EncoderSizes, config: ConfigReader, rope: RopeSpec) -> EncoderLayer:
    named = config.list("architectures", of=str)[0]
    bias, normed = config.bool("attention_bias", False), named.startswith(("Qwen3", VOYAGE))
    return both_sides_layer(
        scope,
        sizes,
        rope=rope,
        bias=bias or named.startswith("Qwen2"),
        out_bias=bias,
        mlp_bias=config.bool("mlp_bias", False),
        qk_norm=QKNorm(eps=sizes.eps) if normed else None,
    )


def both_sides_layer(
    scope: Scope,
    sizes: EncoderSizes,
    *,
    rope: RopeSpec,
    bias: bool,
    mlp_bias: bool,
    out_bias: bool | None = None,
    qk_norm: QKNorm | None = None,
    window: int | None = None,
    mlp: Callable[[Scope], TokenBranch] | None = None,
) -> EncoderLayer:
    """A decoder's layer of which each token sees both sides; see SpanAttentionLayer. `mlp`: what
    takes the place of the gated MLP."""
    branch = scope / "mlp"
    return EncoderLayer(
        before_attention=RMS.build(scope / "input_layernorm", sizes.width, eps=sizes.eps),
        attention=SpanAttentionLayer(
            scope / "self_attn",
            sizes,
            names=PROJECTIONS,
            out="o_proj",
            bias=bias,
            out_bias=out_bias,
            rope=rope,
            window=window,
            qk_norm=qk_norm,
        ),
        before_mlp=RMS.build(scope / "post_attention_layernorm", sizes.width, eps=sizes.eps),
        mlp=mlp(branch) if mlp else GatedMLP(branch, sizes.feed_forward, bias=mlp_bias),
    )


def _head(scope: Scope, config: ConfigReader, width: int) -> Classifier | None:
    head = scope.head
    if head.kind == "none":
        return None
    if config.list("architectures", of=str)[0].startswith("Llama"):
        if config.float("temperature", 1.0) != 1.0:
            raise config.wrong("temperature", "1")
        return Classifier(Dense(scope / "score", width, head.num_labels, bias=False))
    last = Dense(scope / "classifier", width, head.num_labels, bias=True)
    if head.kind == "token":
        return Classifier(last)
    first = Dense(scope / "dense", width, width, bias=True)
    return Classifier(last, first=first, activation="gelu")
