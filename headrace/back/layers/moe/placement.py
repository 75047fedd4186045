"""On which ranks the experts of a mixture lie where these have more slots than there are experts,
or exchange them as their loads change: plain numbers, the same on all ranks.

A *slot* is room for one expert on a rank. An expert may have *copies* on several ranks, at most one
on each, which take turns at its tokens. W ranks, S slots of a rank, X experts, C turns.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
import torch

Placement = tuple[tuple[int, ...], ...]
"""The experts in the slots of each rank: [W][S]."""

TURNS = 64
"""Residues of a token's place in the step by which the copies of an expert share its tokens: so
many that they need not divide it."""


def slots_of_rank(experts: int, redundant: int, ranks: int) -> int:
    """Slots that every rank has for these experts and so many copies, or more where ranks would
    have unequally many."""
    return -(-(experts + redundant) // ranks)


def spread(load_X: Sequence[float], ranks: int, slots: int) -> Placement:
    """Experts to slots, so that the ranks' loads come close to each other. All slots are filled;
    there is one for every expert, and no more than every rank has for each.

    Copies for those with most tokens for each copy, then the heaviest first, to the rank with least
    so far. A copy may bring more to a rank that has enough: the same is tried with half of the
    copies for the lightest instead, and with all.
    """
    experts = len(load_X)
    assert experts <= ranks * slots <= experts * ranks, (experts, ranks, slots)
    further = ranks * slots - experts
    candidates = [
        _packed(load_X, _copies(load_X, ranks, heavy, further - heavy), ranks, slots)
        for heavy in sorted({further, further // 2, 0}, reverse=True)
    ]
    return min(candidates, key=lambda placement: imbalance(load_X, placement))


def _packed(load_X: Sequence[float], copies_X: list[int], ranks: int, slots: int) -> Placement:
    """So many copies of each, the heaviest first."""
    share_X = [load / copies for load, copies in zip(load_X, copies_X, strict=True)]
    held: list[dict[int, None]] = [{} for _ in range(ranks)]
    total = [0.0] * ranks
    for expert in sorted(range(len(load_X)), key=lambda x: (-share_X[x], x)):
        for _ in range(copies_X[expert]):
            rank = _room_for(expert, held, total, slots, share_X)
            held[rank][expert] = None
            total[rank] += share_X[expert]
    return tuple(map(tuple, held))


def _copies(load_X: Sequence[float], most: int, heavy: int, light: int) -> list[int]:
    """How many of each expert there are, at most `most`: `heavy` further ones of those with most
    tokens for each, then `light` of those with least."""
    copies_X = [1] * len(load_X)
    for number, sign in ((heavy, -1.0), (light, 1.0)):
        queue = [(sign * load / copies_X[x], copies_X[x], x) for x, load in enumerate(load_X)]
        heapq.heapify(queue)
        for _ in range(number):
            while queue[0][1] >= most:
                heapq.heappop(queue)
            _, copies, x = queue[0]
            copies_X[x] = copies + 1
            heapq.heapreplace(queue, (sign * load_X[x] / copies_X[x], copies_X[x], x))
    return copies_X


def _room_for(
    expert: int, held: list[dict[int, None]], total: list[float], slots: int, share_X: list[float]
) -> int:
    """The rank with least load that has a slot and not this expert. Where those with a slot have
    it, one of their slots is made elsewhere: a full rank without it gives one expert away."""
    free = [r for r, mine in enumerate(held) if len(mine) < slots]
    fit = [r for r in free if expert not in held[r]]
    if fit:
        return min(fit, key=lambda r: (total[r], r))
    taker = min(free, key=lambda r: (total[r], r))
    giver = min(
        (r for r, mine in enumerate(held) if expert not in mine), key=lambda r: (total[r], r)
    )
    # The taker holds fewer experts than the giver, and one that the giver has not.
    moved = min(
        (x for x in held[giver] if x not in held[taker]), key=lambda x: (abs(share_X[x]), x)
    )
    del held[giver][moved]
    held[taker][moved] = None
    total[giver] -= share_X[moved]
    total[taker] += share_X[moved]
    return giver


def settled(old: Placement, new: Placement) -> Placement:
    """`new` with the ranks' experts in other slots: those that a rank had stay where they are."""
    placement = []
    for before, after in zip(old, new, strict=True):
        coming = [x for x in after if x not in before]
        placement.append(tuple(x if x in after else coming.pop() for x in before))
    return tuple(placement)


def imbalance(load_X: Sequence[float], placement: Placement) -> float:
    """The load of the rank with most, of the mean; 1: all have the same, or nothing."""
    copies_X = [0] * len(load_X)
    for mine in placement:
        for expert in mine:
            copies_X[expert] += 1
    totals = [sum(load_X[x] / copies_X[x] for x in mine) for mine in placement]
    mean = sum(totals) / len(totals)
    return max(totals) / mean if mean else 1.0


def turns(placement: Placement, experts: int) -> torch.Tensor:
    """int32 [W, X, C]: the slot of each rank in which it computes each expert for the tokens of
    each turn, -1: it does not. Every turn of an expert is one rank's."""
    holders: list[list[tuple[int, int]]] = [[] for _ in range(experts)]
    for rank, mine in enumerate(placement):
        for slot, expert in enumerate(mine):
            holders[expert].append((rank, slot))
    count = 1 if all(len(each) == 1 for each in holders) else TURNS
    slot_WXC = np.full((len(placement), experts, count), -1, np.int32)
    for expert, each in enumerate(holders):
        for number, (rank, slot) in enumerate(each):
            # Experts begin with different copies: few tokens are not all on one rank.
            slot_WXC[rank, expert, (number - expert) % len(each) :: len(each)] = slot
    return torch.from_numpy(slot_WXC)
