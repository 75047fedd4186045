"""Attention inside texts within a window on each side, with a learned score per head beside those
of the keys (a sink, Xiao et al. 2024), by PyTorch's operations.

T tokens, H query heads, K KV heads, D head_dim, Q queries of a tile, S keys that they may see.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F

from headrace.back.attention.plan import Batch
from headrace.back.layers.scope import Scope
from headrace.back.parallel.shard import Part, Shard

TILE = 256
"""Queries of one call: its mask stays small however long the text."""


class SinkSpans:
    """(q_THD, k_TKD, v_TKD) -> y_THD inside each text. `window`: tokens seen on each side;
    `scope / "sinks"`: a score for each of `heads`, of which a rank has its share."""

    def __init__(self, scope: Scope, heads: int, head_dim: int, *, window: int) -> None:
        shard = Shard(axis="tp", dim=0, parts=(Part("sinks", heads, heads),))
        self._sinks = scope.param("sinks", (heads,), shard=shard, init="zeros")
        self._sinks_H = torch.empty(0)
        self._scale, self._window = head_dim**-0.5, window
        scope.on_finish(self._finish)

    def attend(
        self, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, batch: Batch
    ) -> torch.Tensor:
        """See the class."""
        assert batch.query_start is not None
        y_THD = torch.empty_like(q_THD)
        for begin, end in pairwise(batch.query_start.tolist()):
            for at in range(begin, end, TILE):
                stop = min(at + TILE, end)
                seen = slice(max(begin, at - self._window), min(end, stop + self._window))
                rows = slice(at, stop)
                y_THD[rows] = self._tile(
                    q_THD[rows], k_TKD[seen], v_TKD[seen], before=at - seen.start
                )
        return y_THD

    def _tile(
        self, q_QHD: torch.Tensor, k_SKD: torch.Tensor, v_SKD: torch.Tensor, *, before: int
    ) -> torch.Tensor:
        """y_QHD. `before`: how many keys stand in front of that of the first query. The sink is a
        key behind the others, of zeros and with a value of zeros, to whose score it is added."""
        (queries, heads, _), device = q_QHD.shape, q_QHD.device
        at_Q = torch.arange(queries, device=device) + before
        distance_QS = (at_Q[:, None] - torch.arange(len(k_SKD), device=device)).abs()
        mask_HQS = q_QHD.new_zeros(heads, queries, len(k_SKD) + 1)
        mask_HQS[..., :-1].masked_fill_(distance_QS > self._window, float("-inf"))
        mask_HQS[..., -1] = self._sinks_H[:, None]
        k_KSD, v_KSD = (F.pad(x, (0, 0, 0, 0, 0, 1)).transpose(0, 1) for x in (k_SKD, v_SKD))
        y_HQD = F.scaled_dot_product_attention(
            q_QHD.transpose(0, 1)[None],
            k_KSD[None],
            v_KSD[None],
            attn_mask=mask_HQS[None],
            scale=self._scale,
            enable_gqa=True,
        )[0]
        return y_HQD.transpose(0, 1)

    def _finish(self) -> None:
        self._sinks_H = self._sinks.take()
