"""From hidden states to vocabulary logits: the output head, its scaling and its soft cap."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import Protocol

import torch
import torch.nn.functional as F

from headrace.back.kernels.greedy.op import OP as GREEDY
from headrace.back.kernels.greedy.op import GreedyProblem
from headrace.back.kernels.linear.op import Linear
from headrace.back.kernels.linear_top.op import NUM_CANDIDATES, LinearTopProblem
from headrace.back.kernels.linear_top.op import OP as LINEAR_TOP
from headrace.back.layers.adapter_shares import TABLES
from headrace.back.layers.adapters import AdaptedLinear
from headrace.back.layers.embedding import vocabulary_part
from headrace.back.layers.gemms import Weight, bind_linear, gemm_of
from headrace.back.layers.scope import Scope, not_loaded
from headrace.back.parallel.collectives import all_gather
from headrace.back.parallel.mesh import Axis
from headrace.back.parallel.param import Param, WeightPiece
from headrace.back.parallel.shard import Shard, local_size

TopOf = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


class HeadWeight(Protocol):
    """What a head shares its weight with; it is there once the head is finished."""

    @property
    def weight_VE(self) -> Weight | None: ...


class LogitsHead:
    """hidden_NE -> logits_NV in float32: scale * (W hidden + b), then c * tanh(logits / c) with
    `softcap` c (Gemma 2).

    `argmax`: hidden_NE -> what op greedy gives for these logits, of which no whole rows are written
    (CPU), or which are not converted to float32 (other devices); None where there is no kernel for
    it, or where the logits are not the GEMMs themselves. `top_candidates`: hidden_NE -> the best
    NUM_CANDIDATES ids and logits of each row, in the order of op linear_top; CPUs only. Where ranks
    share the vocabulary, each takes the best of its own rows and only those pairs are gathered, not
    logits.

    With adapters `logits` and `argmax` add what those of their rows add, whose slots they ask for,
    and there are no `top_candidates`; `alone` is the head without, for drafters.

    `tied` is the embedding whose weight the head shares; else the checkpoint holds `scope /
    "weight"`. `normed`: its rows are divided by their lengths (Baichuan 2). `bias`: it holds
    `scope / "bias"` too; or where it holds one, as [1, V].
    """

    def __init__(
        self,
        scope: Scope,
        vocabulary: int,
        width: int,
        *,
        tied: HeadWeight | None = None,
        bias: bool | Scope = False,
        scale: float = 1.0,
        softcap: float | None = None,
        normed: bool = False,
    ) -> None:
        self._project: Linear = not_loaded
        self.argmax: TopOf | None = None
        self.top_candidates: TopOf | None = None
        self.alone = self
        self._scope = scope
        self._tied = tied
        self._scale = scale
        self._softcap = softcap
        self._normed = normed
        self._part = vocabulary_part(vocabulary)
        shard = Shard(axis="tp", dim=0, parts=(self._part,))
        self._weight, self._adapted = None, None
        if not tied:
            weight = scope.param("weight", (vocabulary, width), shard=shard)
            self._weight = weight if normed else scope.quantized_table(weight, "head")
            self._adapted = None if normed else _adapted(scope, weight)
        elif not normed:
            self._adapted = _adapted(scope, _named(scope, (vocabulary, width), shard))
        self._bias = None
        if isinstance(bias, Scope):
            row = Shard(axis="tp", dim=1, parts=(self._part,))
            piece = WeightPiece(name=bias.path, shape=(1, vocabulary), dim=1)
            self._bias = scope.param(
                "bias", (1, vocabulary), pieces=(piece,), shard=row, init="zeros"
            )
        elif bias:
            self._bias = scope.param("bias", (vocabulary,), shard=shard, init="zeros")
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
            if self._normed and isinstance(weight_VE, torch.Tensor):
                weight_VE = F.normalize(weight_VE.float(), dim=1).to(weight_VE.dtype)
        else:
            assert self._tied is not None and self._tied.weight_VE is not None
            weight_VE, shared = self._tied.weight_VE, True
        bias_V = None if self._bias is None else self._bias.take().view(-1)
        self._project = bind_linear(self._scope, weight_VE, bias_V, shared=shared, wide=True)
        plain = self._scale == 1.0 and self._softcap is None and bias_V is None
        if plain and self._scope.kind == "cpu":
            self.argmax = self._bind_argmax(weight_VE, shared=shared)
            self.top_candidates = self._bind_top_candidates(
                weight_VE, NUM_CANDIDATES, shared=shared
            )
        elif plain and isinstance(weight_VE, torch.Tensor):
            self.argmax = self._bind_narrow_argmax(weight_VE, shared=shared)
        if self._adapted is not None:
            self._adapt(self._adapted, weight_VE, bias_V)

    def _adapt(
        self, adapted: AdaptedLinear, weight_VE: Weight, bias_V: torch.Tensor | None
    ) -> None:
        """Rows with adapters go by whole rows of logits."""
        slots, gemm, self.alone = self._scope.adapters, self._project, copy(self)
        assert slots is not None
        add = adapted.bound(self._scope.bind, weight_VE, bias_V)

        def project(hidden_NE: torch.Tensor) -> torch.Tensor:
            logits_NV, rows_N = gemm(hidden_NE), slots.head_rows(len(hidden_NE))
            if rows_N is not None:
                add(hidden_NE, logits_NV, rows_N)
            return logits_NV

        self._project = project
        greedy = self._scope.bind(GREEDY, GreedyProblem(device=self._scope.kind))
        self.top_candidates = (
            None  # a sampler asks for more of them later, whatever their slots are
        )
        if (top := self.argmax) is not None:
            self.argmax = lambda hidden_NE: (
                top(hidden_NE) if slots.rows_T is None else greedy(self.logits(hidden_NE))
            )

    def _bind_narrow_argmax(self, weight_VE: torch.Tensor, *, shared: bool) -> TopOf | None:
        """From logits in the weight's own type: widening is exact, so the choice is the same."""
        choice = GREEDY.choose(GreedyProblem(device=self._scope.kind))
        if choice.kernel is GREEDY.reference:
            return None
        greedy = choice.bind()
        gemm = bind_linear(self._scope, weight_VE, None, shared=shared)
        if self._scope.mesh.tp.size == 1:
            return lambda hidden_NE: greedy(gemm(hidden_NE))

        def best(hidden_NE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            token_N, value_N = greedy(gemm(hidden_NE))
            return token_N[:, None], value_N[:, None]

        return first_of(self._over_ranks(best, 1))

    def _bind_argmax(self, weight_VE: Weight, *, shared: bool) -> TopOf | None:
        top = self._bind_top_candidates(weight_VE, 1, shared=shared)
        return None if top is None else first_of(top)

    def _bind_top_candidates(self, weight_VE: Weight, count: int, *, shared: bool) -> TopOf | None:
        _, gemm = gemm_of(
            weight_VE,
            device=self._scope.kind,
            dtype=self._scope.dtype,
            shared=shared,
            wide=True,
        )
        problem = LinearTopProblem(gemm=gemm, count=count)
        top = self._scope.bind_fused(LINEAR_TOP, problem, weight_VE)
        if top is None or self._scope.mesh.tp.size == 1:
            return top
        return self._over_ranks(top, count)

    def _over_ranks(self, top: TopOf, count: int) -> TopOf:
        axis = self._scope.mesh.tp
        first = Shard(axis="tp", dim=0, parts=(self._part,)).spans(axis)[0].start
        return gathered_top(top, count=count, first=first, axis=axis)


def _adapted(scope: Scope, weight: Param) -> AdaptedLinear | None:
    """The slots of a head, if there are any."""
    slots = scope.adapters
    if slots is None or TABLES not in slots.kinds:
        return None
    return slots.over(weight, scope.mesh, scope.device, scope.kind, wide=True)


def _named(scope: Scope, shape: tuple[int, int], shard: Shard) -> Param:
    """The weight that a tied head would have, without one."""
    return Param(
        name=scope.name("weight"),
        shape=shape,
        dtype=scope.dtype,
        pieces=(WeightPiece(name=scope.name("weight"), shape=shape),),
        tensor=None,
        shard=shard,
        spans=shard.spans(scope.mesh.tp),
    )


def gathered_top(top: TopOf, *, count: int, first: int, axis: Axis) -> TopOf:
    """hidden_NE -> the best `count` (id_NC, value_NC) over all ranks of the axis, from `top`, the
    best of this rank's rows, whose ids count from `first`. 8 bytes a pair cross the link.

    Ranks hold the vocabulary in order, so among equal values a stable sort keeps the lower id
    first; a NaN goes before all numbers.
    """

    def gathered(hidden_NE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        id_NC, value_NC = top(hidden_NE)
        pairs = torch.cat((value_NC.view(torch.int32), (id_NC + first).to(torch.int32)), dim=1)
        pair_NRC = all_gather(pairs, axis).view(len(pairs), axis.size, 2, -1)
        value_NK = pair_NRC[:, :, 0].flatten(1).view(torch.float32)
        value_NK, place_NK = value_NK.sort(dim=1, descending=True, stable=True)
        id_NK = pair_NRC[:, :, 1].flatten(1).gather(1, place_NK)
        return id_NK[:, :count].long(), value_NK[:, :count].contiguous()

    return gathered


def first_of(top: TopOf) -> TopOf:
    """The first of each row's best, without the dimension of candidates."""

    def first(hidden_NE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        id_NC, value_NC = top(hidden_NE)
        return id_NC[:, 0], value_NC[:, 0]

    return first
