"""Experts that move between ranks while a model runs, as their loads change: what a mixture counts
and holds for that, and how all mixtures of a rank are rearranged, between two steps.

Weights move as bytes, in the form in which kernels hold them, from a rank that has an expert to one
that is to have it. Nothing is bound anew: tensors and tables keep their addresses, so that recorded
steps go on. All ranks call `rearrange` between the same steps.

W ranks, S slots of a rank, X experts, C turns (placement.py), T tokens, K slots of a token.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from headrace.back.layers.moe.placement import Placement, imbalance, settled, spread, turns
from headrace.back.layers.reachable import tensors_of
from headrace.back.parallel.collectives import all_parts, all_reduce, ragged_to_all
from headrace.back.parallel.mesh import Axis

log = logging.getLogger(__name__)
LEAST_GAIN = 0.02
"""Of the load of the rank with most: for less nothing is moved."""
KEPT = 0.5
"""Of earlier counts when experts are rearranged: loads that come and go do not move them to and
fro."""


class MovableExperts:
    """The experts of a mixture on this rank. `bound`: what computes them; `placement`: where they
    lie as loaded. `slot_WXC`: see placement.turns, with columns for further experts that do not
    move; it is written in place."""

    def __init__(
        self,
        bound: object,
        placement: Placement,
        *,
        experts: int,
        more: int,
        axis: Axis,
        device: torch.device,
    ) -> None:
        self._bound, self._experts, self._more, self.device = bound, experts, more, device
        self.axis, self.placement, self._loaded = axis, placement, placement
        self.slot_WXC = self._table()
        self.count_X = torch.zeros(experts + more, dtype=torch.int64, device=device)

    def _table(self) -> torch.Tensor:
        table_WXC = turns(self.placement, self._experts)
        absent = table_WXC.new_full((self.axis.size, self._more, table_WXC.shape[2]), -1)
        return torch.cat((table_WXC, absent), dim=1).to(self.device)

    def see(self, expert_TK: torch.Tensor) -> None:
        """Counts the tokens of each expert, on the device."""
        expert_P = expert_TK.flatten().to(torch.int64)
        self.count_X.scatter_add_(0, expert_P.clamp(min=0), (expert_P >= 0).to(torch.int64))

    def better(self) -> Placement | None:
        """Where the experts should lie by the tokens counted on all ranks; None: where they lie is
        as good."""
        load_X = self._loads()
        new = spread(load_X, self.axis.size, len(self.placement[0]))
        now, then = imbalance(load_X, self.placement), imbalance(load_X, new)
        return settled(self.placement, new) if then < now * (1 - LEAST_GAIN) else None

    def _loads(self) -> list[float]:
        """Tokens of each expert on all ranks; they count half the next time."""
        total_X = all_reduce(self.count_X.clone(), self.axis)[: self._experts]
        self.count_X.copy_((self.count_X * KEPT).long())
        return [float(load) for load in total_X.tolist()]

    def leave_to(self, ranks: int) -> None:
        """Every expert comes to one of the first so many ranks; the others keep what they have."""
        new = spread(self._loads(), ranks, len(self.placement[0]))
        self.move((*settled(self.placement[:ranks], new), *self.placement[ranks:]))

    def share_with(self, axis: Axis) -> None:
        """From now on with the ranks of this axis, which have what each of them had."""
        own_S = torch.tensor(self.placement[self.axis.rank], device=self.device)
        self.axis = axis
        self.placement = tuple(tuple(one.tolist()) for one in all_parts(own_S, axis))
        self.slot_WXC = self._table()
        new = spread(self._loads(), axis.size, len(self.placement[0]))
        self.move(settled(self.placement, new))

    def move(self, new: Placement) -> int:
        """Brings the experts to their new slots; how many came to this rank."""
        plan = _moves(self.placement, new, self.axis.rank)
        for tensor in self._tensors():
            _exchange(tensor, plan, self.axis)
        self.placement = new
        table_WXC = turns(new, self._experts)
        self.slot_WXC[:, : self._experts].copy_(table_WXC)
        return len(plan.into)

    def go_back(self) -> None:
        """To where the loader puts them."""
        if self.placement != self._loaded:
            self.move(self._loaded)

    def _tensors(self) -> list[torch.Tensor]:
        """What the kernels hold of the experts: tensors with a row for each slot, each byte once.
        Ranks bind alike: all have them in one order."""
        slots, tensors = len(self.placement[0]), []
        held = [one for one in tensors_of(self._bound) if one.dim() > 0 and one.shape[0] == slots]
        ends: list[tuple[int, int]] = []
        for tensor in sorted(held, key=lambda one: -one.nbytes):
            begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
            if any(begin < last and first < end for first, last in ends):
                continue
            assert tensor.is_contiguous(), (tensor.shape, tensor.stride())
            ends.append((begin, end))
            tensors.append(tensor)
        assert tensors, "the kernels hold no experts"
        return tensors


@dataclass(frozen=True, kw_only=True)
class Moves:
    """What a rank has to do: the slots whose experts it sends, rank by rank, and how many to each;
    how many come from each, and `into` which slots; and its own experts that change slots."""

    out: list[int]
    sent: list[int]
    into: list[int]
    got: list[int]


def _moves(old: Placement, new: Placement, rank: int) -> Moves:
    """Of one rank. An expert comes from the ranks that had it in turns, or from this one."""
    ranks = len(old)
    wanted: list[list[list[tuple[int, int]]]] = [[[] for _ in range(ranks)] for _ in range(ranks)]
    for to, (before, after) in enumerate(zip(old, new, strict=True)):
        for slot, expert in enumerate(after):
            if before[slot] == expert:
                continue
            holders = [r for r in range(ranks) if expert in old[r]]
            source = to if to in holders else holders[(expert + to) % len(holders)]
            wanted[source][to].append((old[source].index(expert), slot))
    return Moves(
        out=[slot for to in range(ranks) for slot, _ in wanted[rank][to]],
        sent=[len(wanted[rank][to]) for to in range(ranks)],
        into=[slot for source in range(ranks) for _, slot in wanted[source][rank]],
        got=[len(wanted[source][rank]) for source in range(ranks)],
    )


def _exchange(tensor_SX: torch.Tensor, plan: Moves, axis: Axis) -> None:
    """Sends and takes the rows of one tensor. What is sent is copied first: a slot may give its
    expert away and take another."""
    bytes_SB = tensor_SX.view(len(tensor_SX), -1).view(torch.uint8)
    got_NB = ragged_to_all(bytes_SB[plan.out].contiguous(), plan.sent, plan.got, axis)
    bytes_SB[plan.into] = got_NB


class Balancer:
    """Rearranges the mixtures of a rank every `steps` steps of its model; 0: never."""

    def __init__(self, mixtures: Sequence[MovableExperts], steps: int) -> None:
        self._mixtures, self._steps, self._count = mixtures, steps, 0

    @torch.inference_mode()
    def step(self) -> None:
        """A step is about to be launched; all ranks launch the same ones."""
        self._count += 1
        self.at(self._count)

    def at(self, count: int) -> None:
        """The same, of the step of this number."""
        if self._steps and count % self._steps == 0:
            self.rearrange()

    @torch.inference_mode()
    def rearrange(self) -> int:
        """Moves the experts of every mixture whose loads ask for it; how many came here."""
        began, came = time.perf_counter(), 0
        self._end_steps()
        for mixture in self._mixtures:
            new = mixture.better()
            if new is not None:
                came += mixture.move(new)
        self._end_steps()
        took_ms = 1000 * (time.perf_counter() - began)
        log.info("experts: %d came to this rank in %.0f ms", came, took_ms)
        return came

    def _end_steps(self) -> None:
        """On a GPU steps run on a stream of their own, and weights move between two of them."""
        for device in {one.device for one in self._mixtures if one.device.type == "cuda"}:
            torch.cuda.synchronize(device)

    @torch.inference_mode()
    def go_back(self) -> None:
        """All experts lie again where the loader puts them: who writes weights counts on that."""
        for mixture in self._mixtures:
            mixture.go_back()
