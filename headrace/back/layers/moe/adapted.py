"""Low-rank adapters of experts: see layers/adapters.py. A pair of a token and an expert has the
slot of both: an expert's matrices in an adapter's slot are a slot of op lora_linear (op lora_pairs
says which).

What is added to gates and ups goes into the kernel in front of the activation; what is added to
downs is computed of the inner values that the kernel leaves (op experts, `beside`).

T tokens, K slots of a token, X experts, E hidden size, I this rank's inner size, R ranks, P pairs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from headrace.back.kernels.experts.op import Experts, ExpertsProblem
from headrace.back.kernels.lora_linear.op import (
    OP,
    LoraLinear,
    LoraLinearProblem,
    LoraWeights,
    empty_weights,
)
from headrace.back.kernels.lora_pairs.op import PAIRS_OP, SUM_OP, LoraPairsProblem, new_pairs
from headrace.back.layers.adapter_shares import AdaptedModule, LowRank
from headrace.back.layers.adapters import AdapterSlots
from headrace.back.layers.moe.split import ExpertSizes
from headrace.back.layers.moe.weights import ExpertNames
from headrace.back.parallel.mesh import Axis

GATE, UP, DOWN = "gate", "up", "down"


@dataclass(frozen=True, kw_only=True, eq=False)
class ExpertsShare:
    """What one adapter holds for the experts that it changes, `at_N`: of gates and ups a [N, 2R, E]
    and b [N, R, 2I], of downs a [N, R, I] and b [N, R, E]; scale float32 and rank int32 [N, 3]."""

    at_N: torch.Tensor
    up_a: torch.Tensor
    up_b: torch.Tensor
    down_a: torch.Tensor
    down_b: torch.Tensor
    scale_N3: torch.Tensor
    rank_N3: torch.Tensor

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """What goes into slots."""
        return self.up_a, self.up_b, self.down_a, self.down_b, self.scale_N3, self.rank_N3


class AdaptedExperts:
    """The slots of one layer's experts, whose names are below `path`: the routed ones by `names`,
    and `shared` experts behind them, which are one MLP, `shared_name`."""

    def __init__(
        self,
        slots: AdapterSlots,
        names: ExpertNames,
        sizes: ExpertSizes,
        *,
        path: str,
        shared_name: str,
        shared: int,
        axis: Axis,
        kind: str,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._slots, self._axis = slots, axis
        self._routed, self._count = sizes.experts, sizes.experts + shared
        self._width, self._whole, self._inner = sizes.width, sizes.inner, sizes.inner // axis.size
        self.modules: dict[str, AdaptedModule] = {}
        self._places: dict[str, tuple[str, int | None]] = {}
        for name, place in zip(names.fused, (UP, DOWN), strict=True):
            self._add(f"{path}.{name}", place, None, of=sizes.experts, fused=True)
        for expert in range(sizes.experts):
            for name, place in zip(names.each, (GATE, UP, DOWN), strict=True):
                self._add(f"{path}.{name.format(expert)}", place, expert)
        for place in (GATE, UP, DOWN) if shared else ():
            self._add(f"{path}.{shared_name}.{place}_proj", place, None, size=shared * sizes.inner)
        self._up = LoraLinearProblem(
            device=kind,
            dtype=dtype,
            inputs=sizes.width,
            parts=(self._inner, self._inner),
            rank=slots.max_rank,
            slots=slots.count * self._count,
            wide=True,
        )
        self._down = replace(self._up, inputs=self._inner, parts=(sizes.width,))
        self.up_weights: LoraWeights = empty_weights(self._up, device)
        self.down_weights: LoraWeights = empty_weights(self._down, device)

    def _add(
        self,
        name: str,
        place: str,
        expert: int | None,
        *,
        size: int | None = None,
        of: int = 1,
        fused: bool = False,
    ) -> None:
        inner = (size or self._whole) * (2 if fused and place == UP else 1)
        inputs, outputs = (inner, self._width) if place == DOWN else (self._width, inner)
        kind = "parameter" if fused else "linear"
        self.modules[name] = AdaptedModule(
            inputs=inputs, outputs=outputs, parts=(), pieces=(), kind=kind, experts=of
        )
        self._places[name] = place, expert

    @property
    def num_bytes(self) -> int:
        """Bytes of all slots on this rank."""
        tensors = [
            tensor
            for weights in (self.up_weights, self.down_weights)
            for tensor in (weights.a_SKI, weights.b_SRO, weights.scale_SP, weights.rank_SP)
        ]
        return sum(tensor.nbytes for tensor in tensors)

    def add_to(
        self,
        plain: Experts,
        adapted: Experts,
        problem: ExpertsProblem,
        bind: Callable[..., LoraLinear],
    ) -> Experts:
        """`plain` experts, or the `adapted` kernel, whose problem is `problem`, with what its
        pairs' adapters add. `bind`: see Scope."""
        slots = self._slots
        pairs_problem = LoraPairsProblem(
            device=problem.device,
            dtype=problem.dtype,
            experts=self._count,
            slots=problem.slots,
            width=self._width,
            inner=problem.inner,
        )
        split, add_sums = bind(PAIRS_OP, pairs_problem), bind(SUM_OP, pairs_problem)
        add_up = bind(OP, self._up, self.up_weights)
        add_down = bind(OP, self._down, self.down_weights)

        def experts(
            x_TE: torch.Tensor, expert_TK: torch.Tensor, weight_TK: torch.Tensor
        ) -> torch.Tensor:
            rows_T = slots.rows_T
            if rows_T is None:
                return plain(x_TE, expert_TK, weight_TK)
            pairs, (tokens, each) = new_pairs(pairs_problem, x_TE), expert_TK.shape
            split(x_TE, rows_T, expert_TK, pairs)
            add_up(pairs.x_PE, pairs.more_PI, pairs.slot_P)
            inner_TKI = x_TE.new_empty((tokens, each, problem.inner))
            beside = pairs.more_PI.view(tokens, each, -1), inner_TKI
            y_TE = adapted(x_TE, expert_TK, weight_TK, beside)
            add_down(inner_TKI.flatten(0, 1), pairs.down_PE, pairs.slot_P)
            add_sums(y_TE, weight_TK, pairs)
            return y_TE

        return experts

    def share(self, pairs: dict[str, LowRank]) -> ExpertsShare:
        """See AdaptedLayer. Of parameters a is [X * R, I] and b [O, R * X]."""
        of: dict[tuple[int, str], LowRank] = {}
        for name, pair in pairs.items():
            of.update(self._each_of(name, pair))
        experts = sorted({expert for expert, _ in of})
        place_of = {expert: at for at, expert in enumerate(experts)}
        most = max(len(pair.a_RI) for pair in of.values())
        count, width, inner = len(experts), self._width, self._inner
        new = {"dtype": self._up.dtype}
        share = ExpertsShare(
            at_N=torch.tensor(experts),
            up_a=torch.zeros((count, 2, most, width), **new),
            up_b=torch.zeros((count, most, 2 * inner), **new),
            down_a=torch.zeros((count, most, inner), **new),
            down_b=torch.zeros((count, most, width), **new),
            scale_N3=torch.zeros((count, 3)),
            rank_N3=torch.zeros((count, 3), dtype=torch.int32),
        )
        mine = slice(self._axis.rank * inner, (self._axis.rank + 1) * inner)
        for (expert, place), pair in of.items():
            at, rank = place_of[expert], len(pair.a_RI)
            part = (GATE, UP, DOWN).index(place)
            share.scale_N3[at, part], share.rank_N3[at, part] = pair.scale, rank
            if place == DOWN:
                share.down_a[at, :rank] = pair.a_RI[:, mine]
                share.down_b[at, :rank] = pair.b_OR.t()
            else:
                share.up_a[at, part, :rank] = pair.a_RI
                share.up_b[at, :rank, part * inner : (part + 1) * inner] = pair.b_OR[mine].t()
        return share

    def _each_of(self, name: str, pair: LowRank) -> dict[tuple[int, str], LowRank]:
        """The matrices of each expert in those of a module."""
        place, expert = self._places[name]
        module = self.modules[name]
        if expert is not None:
            return {(expert, place): pair}
        of = {}
        if module.kind == "linear":  # shared experts, cut along their inner values
            for shared in range(self._count - self._routed):
                mine = slice(shared * self._whole, (shared + 1) * self._whole)
                cut = {"a_RI": pair.a_RI[:, mine]} if place == DOWN else {"b_OR": pair.b_OR[mine]}
                of[self._routed + shared, place] = replace(pair, **cut)
            return of
        a_XRI = pair.a_RI.unflatten(0, (self._routed, -1))
        b_ORX = pair.b_OR.unflatten(1, (-1, self._routed))
        for number in range(self._routed):
            one = replace(pair, a_RI=a_XRI[number], b_OR=b_ORX[..., number])
            if place == DOWN:
                of[number, DOWN] = one
                continue
            for part, half_OR in zip((GATE, UP), one.b_OR.chunk(2), strict=True):
                of[number, part] = replace(one, b_OR=half_OR)
        return of

    def put(self, slot: int, share: ExpertsShare | None) -> None:
        """See AdaptedLayer."""
        count, most = self._count, self._up.rank
        mine = slice((slot - 1) * count, slot * count)
        up, down = self.up_weights, self.down_weights
        up.rank_SP[mine], down.rank_SP[mine] = 0, 0
        if share is None:
            return
        rank = share.down_a.shape[1]
        at_N = share.at_N.to(up.rank_SP.device) + (slot - 1) * count
        for to, values in (
            (up.a_SKI.view(len(up.a_SKI), 2, most, -1)[:, :, :rank], share.up_a),
            (up.b_SRO[:, :rank], share.up_b),
            (down.a_SKI[:, :rank], share.down_a),
            (down.b_SRO[:, :rank], share.down_b),
            (up.scale_SP, share.scale_N3[:, :2]),
            (down.scale_SP, share.scale_N3[:, 2:]),
            (up.rank_SP, share.rank_N3[:, :2]),
            (down.rank_SP, share.rank_N3[:, 2:]),
        ):
            to.index_copy_(0, at_N, values.to(to.device))
