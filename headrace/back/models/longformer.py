"""Longformer (Beltagy et al. 2020): RoBERTa whose tokens see a window around them; where texts are
classified the first token sees all and is seen by all, by projections of its own.

T tokens, E hidden size, H this rank's heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
import torch.nn.functional as F

from headrace.back.attention.plan import Batch
from headrace.back.layers.linear import ColumnLinear, RowLinear
from headrace.back.layers.scope import Scope
from headrace.back.models.bert import BERT, build_bert
from headrace.back.models.encoder import Encoder, EncoderSizes, SpanAttentionLayer, TokenLayer
from headrace.back.models.led import read_windows
from headrace.back.models.roberta import first_token_head
from headrace.back.parallel.shard import Part, local_units
from headrace.base.config.hf import ConfigReader

GLOBAL = r"(.*\.)?attention\.self\.\w+_global\.(weight|bias)"


def build(scope: Scope, config: ConfigReader) -> Encoder:
    """LongformerModel, LongformerForSequenceClassification, LongformerForTokenClassification,
    LongformerForMaskedLM."""
    windows = iter(read_windows(config, config.int("num_hidden_layers", ge=1)))
    judges = scope.head.kind == "sequence"

    def attention_of(inside: Scope, sizes: EncoderSizes) -> Callable[[Scope], TokenLayer]:
        def layer(at: Scope) -> TokenLayer:
            window = next(windows) // 2
            if judges:
                return FirstTokenAttention(at, sizes, window=window)
            return SpanAttentionLayer(
                at, sizes, names=BERT.projections, out=BERT.out, window=window
            )

        return layer

    return build_bert(
        scope,
        config,
        prefix="longformer",
        first_position=config.int("pad_token_id", 1, ge=0) + 1,
        head=first_token_head,
        attention_of=attention_of,
        ignored=(GLOBAL,),
    )


class FirstTokenAttention:
    """x_TE -> y_TE, a text at a time, by PyTorch's operations: see the file. `window`: tokens seen
    on each side."""

    def __init__(self, scope: Scope, sizes: EncoderSizes, *, window: int) -> None:
        size = sizes.heads * sizes.head_dim
        local, whole = (
            tuple(Part(f"{name}{suffix}", size, sizes.heads) for name in BERT.projections)
            for suffix in ("", "_global")
        )
        self._heads, self._window = local_units(local[0], scope.mesh.tp), window
        self._local, self._whole = (
            ColumnLinear(scope, sizes.width, parts, bias=True) for parts in (local, whole)
        )
        self._out = RowLinear(scope / BERT.out, local[0], sizes.width, bias=True)

    def forward(self, x_TE: torch.Tensor, batch: Batch) -> torch.Tensor:
        """See the class."""
        q_HTD, k_HTD, v_HTD = self._heads_of(self._local, x_TE)
        first_HTD, keys_HTD, values_HTD = self._heads_of(self._whole, x_TE)
        y_HTD = torch.empty_like(q_HTD)
        assert batch.query_start is not None
        for start, end in pairwise(batch.query_start.tolist()):
            at = torch.arange(end - start, device=x_TE.device)
            seen = ((at[:, None] - at).abs() <= self._window) | (at == 0)
            y_HTD[:, start:end] = F.scaled_dot_product_attention(
                q_HTD[:, start:end], k_HTD[:, start:end], v_HTD[:, start:end], attn_mask=seen
            )
            y_HTD[:, start : start + 1] = F.scaled_dot_product_attention(
                first_HTD[:, start : start + 1],
                keys_HTD[:, start:end],
                values_HTD[:, start:end],
            )
        return self._out.project(y_HTD.transpose(0, 1).flatten(1))

    def _heads_of(
        self, projection: ColumnLinear, x_TE: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values, each [H, T, D]."""
        qkv_THD = projection.project(x_TE).unflatten(1, (3 * self._heads, -1))
        q, k, v = qkv_THD.transpose(0, 1).split_with_sizes([self._heads] * 3, dim=0)
        return q, k, v
