"""From hidden states to vocabulary logits: the output head, its scaling and its soft cap."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from headrace.back.kernels.greedy.op import OP as GREEDY
from headrace.back.kernels.greedy.op import GreedyProblem
from headrace.back.kernels.linear.op import Linear
from headrace.back.kernels.linear_top.op import OP as LINEAR_TOP
from headrace.back.kernels.linear_top.op import TOPS, LinearTopProblem
from headrace.back.layers.embedding import TokenEmbedding, vocabulary_part
from headrace.back.layers.linear import Weight, bind_linear, product_of
from headrace.back.layers.scope import Scope, not_loaded
from headrace.back.parallel.collectives import all_gather
from headrace.back.parallel.mesh import Axis
from headrace.back.parallel.shard import Shard, local_size

Pick = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


class LogitsHead:
    """hidden_NE -> logits_NV in float32: scale * (W hidden), then c * tanh(logits / c) with
    `softcap` c (Gemma 2).

    `pick`: hidden_NE -> what op greedy gives for these logits, of which no whole rows are written (CPU), or which are
    not widened to float32 (other devices); None where there is no kernel for it, or where the logits are not the
    products themselves. `tops`: hidden_NE -> the best TOPS ids and logits of each row, in the order of op
    linear_top; CPUs only.

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
        self.tops: Pick | None = None
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
        if plain and self._scope.kind == "cpu":
            self.pick = self._bind_pick(weight_VE, shared=shared)
            self.tops = self._bind_tops(weight_VE, TOPS, shared=shared)
        elif plain and isinstance(weight_VE, torch.Tensor):
            self.pick = self._bind_narrow_pick(weight_VE, shared=shared)

    def _bind_narrow_pick(self, weight_VE: torch.Tensor, *, shared: bool) -> Pick | None:
        """From logits in the weight's own type: widening is exact, so the choice is the same."""
        choice = GREEDY.choose(GreedyProblem(device=self._scope.kind))
        if choice.kernel is GREEDY.reference:
            return None
        greedy = choice.bind()
        product = bind_linear(self._scope, weight_VE, None, shared=shared)
        return lambda hidden_NE: greedy(product(hidden_NE))

    def _bind_pick(self, weight_VE: Weight, *, shared: bool) -> Pick | None:
        top = self._bind_tops(weight_VE, 1, shared=shared)
        if top is None:
            return None

        def pick(hidden_NE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            token_N1, value_N1 = top(hidden_NE)
            return token_N1[:, 0], value_N1[:, 0]

        return pick

    def _bind_tops(self, weight_VE: Weight, count: int, *, shared: bool) -> Pick | None:
        _, product = product_of(
            weight_VE,
            device=self._scope.kind,
            dtype=self._scope.dtype,
            shared=shared,
            wide=True,
        )
        problem = LinearTopProblem(product=product, count=count)
        return self._scope.bind_fused(LINEAR_TOP, problem, weight_VE)
