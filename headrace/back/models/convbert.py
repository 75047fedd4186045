"""ConvBERT (Jiang et al. 2020): BERT of which half of the heads are convolutions over the tokens
around, whose weights follow from them. Each rank computes all of the attention.

T tokens, E hidden size, H heads of D, A = H D, K taps, N tokens of a text.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import torch
import torch.nn.functional as F

from headrace.back.attention.plan import Batch
from headrace.back.layers.grouped_dense import GroupedDense, GroupedMLP
from headrace.back.layers.linear import WholeLinear
from headrace.back.layers.mlp import ElementwiseActivation, PlainMLP
from headrace.back.layers.scope import Scope
from headrace.back.models.bert import BERT, MLP, BertNames, build_bert
from headrace.back.models.encoder import Encoder, EncoderSizes, SpanHeads, TokenBranch
from headrace.back.models.roberta import first_token_head
from headrace.base.config.hf import ConfigReader

NAMES = BertNames(wide="embeddings_project")


def build(scope: Scope, config: ConfigReader) -> Encoder:
    """ConvBertModel, ConvBertForSequenceClassification, ConvBertForTokenClassification,
    ConvBertForMaskedLM."""
    return build_bert(
        scope,
        config,
        prefix="convbert",
        first_position=0,
        head=partial(first_token_head, activation="gelu"),
        names=NAMES,
        attention_of=lambda inside, sizes: partial(MixedAttention, sizes=sizes, config=config),
        mlp_of=lambda at, sizes: _mlp(at, sizes, config),
    )


def _mlp(scope: Scope, sizes: EncoderSizes, config: ConfigReader) -> TokenBranch:
    groups = config.int("num_groups", 1, ge=1)
    activation = ElementwiseActivation(scope, sizes.activation)
    if groups == 1:
        return PlainMLP(scope, MLP, sizes.feed_forward, activation)
    if sizes.width % groups or sizes.inner % groups:
        raise config.wrong("num_groups", f"a divisor of {sizes.width} and {sizes.inner}")
    return GroupedMLP(
        GroupedDense(scope / MLP.up, sizes.width, sizes.inner, groups, turned=True),
        GroupedDense(scope / MLP.down, sizes.inner, sizes.width, groups, turned=True),
        activation,
    )


class MixedAttention:
    """x_TE -> y_TE: see the file."""

    def __init__(self, scope: Scope, *, sizes: EncoderSizes, config: ConfigReader) -> None:
        ratio, width = config.int("head_ratio", 2, ge=1), sizes.width
        self._heads = max(1, sizes.heads // ratio)
        if width % (2 * self._heads):
            raise config.wrong(
                "num_attention_heads", f"such that twice {self._heads} divide {width}"
            )
        self._taps = config.int("conv_kernel_size", 9, ge=1)
        if self._taps % 2 == 0:
            raise config.wrong("conv_kernel_size", "an odd number")
        inside, half = scope / "attention.self", width // 2
        self._query, self._key, self._value, self._seen = (
            WholeLinear(inside / name, width, half, bias=True)
            for name in ("query", "key", "value", "conv_out_layer")
        )
        taps = self._heads * self._taps
        self._weights = WholeLinear(inside / "conv_kernel_layer", half, taps, bias=True)
        around = inside / "key_conv_attn_layer"
        self._depthwise = around.param("depthwise.weight", (width, 1, self._taps))
        self._pointwise = around.param("pointwise.weight", (half, width, 1))
        self._bias = around.param("bias", (half, 1), init="zeros")
        self._tensors: tuple[torch.Tensor, ...] = ()
        self._spans = SpanHeads(scope, self._heads, self._heads, half // self._heads)
        self._out = WholeLinear(scope / BERT.out, width, width, bias=True)
        scope.on_finish(self._finish)

    def forward(self, x_TE: torch.Tensor, batch: Batch) -> torch.Tensor:
        """See the class."""
        q_TA, seen_TA = self._query.project(x_TE), self._seen.project(x_TE)
        k_THD, v_THD = (
            one.project(x_TE).unflatten(1, (self._heads, -1)) for one in (self._key, self._value)
        )
        y_THD = self._spans.attend(q_TA.unflatten(1, (self._heads, -1)), k_THD, v_THD, batch)
        assert batch.query_start is not None
        texts = list(pairwise(batch.query_start.tolist()))
        around_TA = torch.cat([self._around(x_TE[a:b]) for a, b in texts])
        weights_TX = self._weights.project(around_TA * q_TA)
        weights_THK = weights_TX.unflatten(1, (self._heads, -1)).float().softmax(-1)
        side = self._taps // 2
        windows_TAK = torch.cat(
            [F.pad(seen_TA[a:b], (0, 0, side, side)).unfold(0, self._taps, 1) for a, b in texts]
        )
        windows_THDK = windows_TAK.unflatten(1, (self._heads, -1))
        mixed_THD = torch.einsum("thdk,thk->thd", windows_THDK, weights_THK.to(x_TE.dtype))
        return self._out.project(torch.cat((y_THD, mixed_THD), dim=1).flatten(1))

    def _around(self, x_NE: torch.Tensor) -> torch.Tensor:
        """[N, A]: each token with those around it in one text."""
        depthwise, pointwise, bias_A = self._tensors
        y_EN = F.conv1d(x_NE.t(), depthwise, padding=self._taps // 2, groups=x_NE.shape[1])
        return F.linear(y_EN.t(), pointwise, bias_A)

    def _finish(self) -> None:
        self._tensors = (
            self._depthwise.take(),
            self._pointwise.take().squeeze(2),
            self._bias.take().squeeze(1),
        )
