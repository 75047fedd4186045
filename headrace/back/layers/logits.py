"""From hidden states to vocabulary logits: the output head, its scaling and its soft cap."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from headrace.back.kernels.linear.op import Linear
from headrace.back.layers.embedding import TokenEmbedding, vocabulary_part
from headrace.back.layers.linear import bind_linear
from headrace.back.layers.scope import Scope, not_loaded
from headrace.back.parallel.collectives import all_gather
from headrace.back.parallel.mesh import Axis
from headrace.back.parallel.shard import Shard, local_size


class LogitsHead:
    """hidden_NE -> logits_NV in float32: scale * (W hidden), then c * tanh(logits / c) with
    `softcap` c (Gemma 2).

    `tied` is the embedding whose weight the head shares; else the checkpoint holds `scope /
    "weight"`.
    """

    def __init__(
        self,
        scope: Scope,
        vocabulary: int,
        width: int,
        *,
        tied: TokenEmbedding | None = None,
        scale: float = 1.0,
        softcap: float | None = None,
    ) -> None:
        self._project: Linear = not_loaded
        self._scope = scope
        self._tied = tied
        self._scale = scale
        self._softcap = softcap
        self._part = vocabulary_part(vocabulary)
        shard = Shard(axis="tp", dim=0, parts=(self._part,))
        self._weight = (
            None
            if tied
            else scope.quantized(scope.param("weight", (vocabulary, width), shard=shard))
        )
        scope.on_finish(self._finish)

    def logits(self, hidden_NE: torch.Tensor) -> torch.Tensor:
        """See the class."""
        logits_NV = self._gather(self._project(hidden_NE)).float()
        if self._scale != 1.0:
            logits_NV = logits_NV * self._scale
        if self._softcap is not None:
            logits_NV = torch.tanh(logits_NV / self._softcap) * self._softcap
        return logits_NV

    def _gather(self, logits_NV: torch.Tensor) -> torch.Tensor:
        """The ranks' shares side by side; shares may differ by one row, so they are padded on the
        way."""
        axis = self._scope.mesh.tp
        if axis.size == 1:
            return logits_NV
        sizes = [
            local_size(self._part, Axis(size=axis.size, rank=rank, group=axis.group))
            for rank in range(axis.size)
        ]
        widest = max(sizes)
        padded = F.pad(logits_NV, (0, widest - logits_NV.shape[-1]))
        shares = all_gather(padded, axis).split(widest, dim=-1)
        return torch.cat(
            [share[:, :size] for share, size in zip(shares, sizes, strict=True)], dim=-1
        )

    def _finish(self) -> None:
        if self._weight is not None:
            self._project = bind_linear(self._scope, self._weight.take(), None, wide=True)
            return
        assert self._tied is not None and self._tied.weight_VE is not None
        weight_VE = self._tied.weight_VE
        self._project = bind_linear(self._scope, weight_VE, None, shared=True, wide=True)
