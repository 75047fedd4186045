"""Jina Embeddings v2 (Günther et al. 2023): BERT whose scores fall with the distance of two tokens,
to either side (ALiBi), instead of positions, with gated MLPs. Those for code and for two languages
norm queries and keys, and have a norm more in each layer."""

from __future__ import annotations

from collections.abc import Callable

import torch

from headrace.back.attention.plan import Batch
from headrace.back.layers.alibi import alibi_slopes
from headrace.back.layers.linear import MergedTensor
from headrace.back.layers.mlp import GatedMLP
from headrace.back.layers.norm import LayerNorm
from headrace.back.layers.position_bias import SlopeBias
from headrace.back.layers.scope import Scope
from headrace.back.models.bert import BertNames, build_bert, pooler_head
from headrace.back.models.encoder import Encoder, EncoderSizes, SpanAttentionLayer, TokenLayer
from headrace.base.config.hf import ConfigReader

NAMES = BertNames(after_mlp="mlp.layernorm", renamed=((r"^bert\.", ""),))
ACTIVATIONS = {"geglu": "gelu", "reglu": "relu"}
UP_GATE = MergedTensor(name="up_gated_layer", parts=(1, 0))


POST_NORM = BertNames(
    behind_attention="attention.output.LayerNorm",
    after_attention="layer_norm_1",
    after_mlp="layer_norm_2",
    renamed=NAMES.renamed,
)


def build(scope: Scope, config: ConfigReader) -> Encoder:
    """JinaBertModel, JinaBertForMaskedLM, JinaBertForSequenceClassification. `qk_post_norm`: see
    published_keys.py."""
    config.choice("position_embedding_type", ("alibi",), "alibi")
    gate = config.choice("feed_forward_type", ACTIVATIONS, "geglu")
    raw = {**config.raw, "position_embedding_type": "absolute", "hidden_act": ACTIVATIONS[gate]}
    separate = config.bool("separate_gate", False)  # GGUF files may have gate and up apart
    normed = config.bool("qk_post_norm", False)

    def mlp(at: Scope, sizes: EncoderSizes) -> GatedMLP:
        if normed:
            return GatedMLP(
                at / "mlp",
                sizes.feed_forward,
                down_bias=True,
                merged=UP_GATE,
                names=("gate", "up", "down_layer"),
            )
        return GatedMLP(
            at / "mlp",
            sizes.feed_forward,
            down_bias=True,
            merged=None if separate else "gated_layers",
            names=("gated_layers_w", "gated_layers_v", "wo") if separate else ("", "", "wo"),
        )

    def slopes(inside: Scope, sizes: EncoderSizes) -> SlopeBias:
        return SlopeBias(inside, alibi_slopes(sizes.heads), reach=scope.max_positions)

    def attention(inside: Scope, sizes: EncoderSizes) -> Callable[[Scope], TokenLayer]:
        bias = slopes(inside, sizes)
        return lambda at: _AddedAttention(_normed_attention(at, sizes, bias))

    return build_bert(
        scope,
        ConfigReader(raw, config.where),
        prefix="",
        first_position=None,
        head=pooler_head,
        names=POST_NORM if normed else NAMES,
        bias_of=None if normed else slopes,
        attention_of=attention if normed else None,
        mlp_of=mlp,
    )


def _normed_attention(at: Scope, sizes: EncoderSizes, bias: SlopeBias) -> SpanAttentionLayer:
    of_q, of_k = (
        LayerNorm(at / f"attention.self.layer_norm_{one}", sizes.width, eps=sizes.eps)
        for one in "qk"
    )
    return SpanAttentionLayer(
        at,
        sizes,
        names=NAMES.projections,
        out=NAMES.out,
        position_bias=bias,
        wide_norms=(of_q, of_k),
    )


class _AddedAttention:
    """x_TE -> x_TE and what its attention gives: a norm of their sum stands before another sum."""

    def __init__(self, attention: SpanAttentionLayer) -> None:
        self._attention = attention

    def forward(self, x_TE: torch.Tensor, batch: Batch) -> torch.Tensor:
        """See the class."""
        return x_TE + self._attention.forward(x_TE, batch)
