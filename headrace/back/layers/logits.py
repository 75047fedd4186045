"""From hidden states to vocabulary logits: the output head, its scaling and its soft cap."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F

from headrace.back.kernels.greedy.op import OP as GREEDY
from headrace.back.kernels.greedy.op import GreedyProblem
from headrace.back.kernels.linear.op import Linear
from headrace.back.kernels.linear_blocks.layout import PANEL as BLOCK_PANEL
from headrace.back.kernels.linear_blocks.layout import BlockWeight
from headrace.back.kernels.linear_quant.layout import PANEL
from headrace.back.kernels.running_greedy.op import OP as RUNNING_GREEDY
from headrace.back.kernels.running_greedy.op import RunningGreedyProblem
from headrace.back.layers.embedding import TokenEmbedding, vocabulary_part
from headrace.back.layers.linear import Weight, bind_linear
from headrace.back.layers.scope import Scope, not_loaded
from headrace.back.parallel.collectives import all_gather
from headrace.back.parallel.mesh import Axis
from headrace.back.parallel.shard import Shard, local_size

PART = 16 * 1024
"""Outputs of a part of the product: the logits of 32 rows are 2 MiB, which the second-level caches hold."""
FEW_ROWS = 4

Pick = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


class LogitsHead:
    """hidden_NE -> logits_NV in float32: scale * (W hidden), then c * tanh(logits / c) with
    `softcap` c (Gemma 2).

    `pick`: hidden_NE -> what op greedy gives for these logits, of which no whole rows are written where there are
    several (CPU), or which are not widened to float32 (other devices); None where there is no kernel for it, or where
    the logits are not the products themselves.

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
        self.pick: Pick | None = None
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
            weight_VE, shared = self._weight.take(), False
        else:
            assert self._tied is not None and self._tied.weight_VE is not None
            weight_VE, shared = self._tied.weight_VE, True
        self._project = bind_linear(self._scope, weight_VE, None, shared=shared, wide=True)
        plain = self._scope.mesh.tp.size == 1 and self._scale == 1.0 and self._softcap is None
        if plain and self._scope.device.type == "cpu":
            self.pick = self._bind_pick(weight_VE, shared=shared)
        elif plain and isinstance(weight_VE, torch.Tensor):
            self.pick = self._bind_narrow_pick(weight_VE, shared=shared)

    def _bind_narrow_pick(self, weight_VE: torch.Tensor, *, shared: bool) -> Pick | None:
        """From logits in the weight's own type: widening is exact, so the choice is the same."""
        choice = GREEDY.choose(GreedyProblem(device=self._scope.device.type))
        if choice.kernel is GREEDY.reference:
            return None
        greedy = choice.bind()
        product = bind_linear(self._scope, weight_VE, None, shared=shared)
        return lambda hidden_NE: greedy(product(hidden_NE))

    def _bind_pick(self, weight_VE: Weight, *, shared: bool) -> Pick | None:
        problem = RunningGreedyProblem(device=self._scope.device.type)
        running = self._scope.bind_fused(RUNNING_GREEDY, problem)
        vocabulary = weight_outputs(weight_VE)
        if running is None or vocabulary is None:
            return None
        cuts = range(0, vocabulary, PART)
        parts = [
            (
                first,
                bind_linear(
                    self._scope,
                    weight_part(weight_VE, first, min(first + PART, vocabulary)),
                    None,
                    shared=shared,
                    wide=True,
                ),
            )
            for first in cuts
        ]

        def pick(hidden_NE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            rows = hidden_NE.shape[0]
            token_N = hidden_NE.new_empty(rows, dtype=torch.int64)
            value_N = hidden_NE.new_empty(rows, dtype=torch.float32)
            # Of a few rows the logits stay in the cache, and each part costs two more calls of some microseconds.
            for first, product in parts if rows >= FEW_ROWS else [(0, self._project)]:
                running(product(hidden_NE), first, token_N, value_N)
            return token_N, value_N

        return pick


def weight_outputs(weight: Weight) -> int | None:
    """Its outputs; None if it cannot be cut, as one that is put together cannot."""
    if isinstance(weight, torch.Tensor):
        return weight.shape[0]
    if isinstance(weight, BlockWeight) and len(weight.segments) > 1:
        return None
    return weight.outputs


def weight_part(weight: Weight, first: int, last: int) -> Weight:
    """The outputs first .. last in place; `first` is a multiple of PART."""
    if isinstance(weight, torch.Tensor):
        return weight[first:last]
    if isinstance(weight, BlockWeight):
        (segment,) = weight.segments
        panels = segment.panels[first // BLOCK_PANEL : -(-last // BLOCK_PANEL)]
        return replace(weight, segments=(replace(segment, outputs=last - first, panels=panels),))
    panels = weight.panels[first // PANEL : -(-last // PANEL)]
    return replace(weight, outputs=last - first, panels=panels)
