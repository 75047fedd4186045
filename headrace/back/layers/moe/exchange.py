"""How tokens come to the ranks that have their experts, and back, where ranks have whole experts:
three ways behind one face. By each a rank is responsible for a share of the tokens, and has what
all experts give for them; the sum over the ranks that follows anyway puts the shares together.

    allgather_reducescatter   all ranks get all shares; what they compute is summed and scattered
    ragged                    a rank gets the tokens that chose one of its experts, and no others:
                              how many is exchanged first, and read on the host
    padded                    each rank sends every other a message of one size, in which tokens
                              that chose none of its experts are zeros: the host reads nothing

Without one of these ("allreduce") every rank computes its experts for all tokens, which all ranks
have: then nothing but the sum is sent.

W ranks, T tokens, S of a share, E hidden size, X experts, K slots of a token, C turns
(placement.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from headrace.back.kernels.experts.op import Experts, ExpertsProblem
from headrace.back.parallel.collectives import all_parts, all_to_all, ragged_to_all, reduce_scatter
from headrace.back.parallel.mesh import Axis, Mesh

ALLREDUCE = "allreduce"
Share = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""x_SE, expert_SK (-1: none) and weight_SK of the tokens that a rank is responsible for."""


class ExpertPlaces(Protocol):
    """Where experts lie: `slot_WXC`, see placement.turns, on the ranks of `axis`."""

    slot_WXC: torch.Tensor
    axis: Axis


def exchanged(
    experts: Experts, places: ExpertPlaces, mesh: Mesh, rows: Callable[[int], int] = int
) -> Experts:
    """f(x_TE, expert_TK, weight_TK) -> y_TE, of which a rank fills the rows of its share of what
    the ranks of "tp" have, by this rank's `experts`. `rows`: how many rows each rank sends, by
    those of a share."""
    exchange, alike = EXCHANGES[mesh.token_exchange], mesh.tp

    def over_ranks(
        x_TE: torch.Tensor, expert_TK: torch.Tensor, weight_TK: torch.Tensor
    ) -> torch.Tensor:
        count = -(-len(x_TE) // alike.size)
        mine = slice(alike.rank * count, min((alike.rank + 1) * count, len(x_TE)))
        size, own = rows(count), max(0, mine.stop - mine.start)
        share = tuple(_share(x, mine, size) for x in (x_TE, expert_TK, weight_TK))
        share[1][own:] = -1
        y_TE = torch.zeros_like(x_TE)
        y_SE = exchange(experts, (share[0], share[1], share[2]), places.slot_WXC, places.axis)
        y_TE[mine] = y_SE[:own]
        return y_TE

    return over_ranks


def exchanged_in_rounds(
    experts: Experts,
    places: ExpertPlaces,
    mesh: Mesh,
    problem: ExpertsProblem,
    *,
    name: str,
    device: torch.device,
) -> Experts:
    """The same of engine cores that have tokens of their own: all ranks send as many rows as the
    core with most, and those that have none at this mixture only serve. `problem`: of the tokens;
    `name`: the mixture's in the model."""
    rounds, exchange = mesh.rounds, EXCHANGES[mesh.token_exchange]
    assert rounds is not None, mesh

    def serve(size: int) -> None:
        x_SE = torch.zeros((size, problem.width), dtype=problem.dtype, device=device)
        expert_SK = torch.full((size, problem.slots), -1, dtype=torch.int32, device=device)
        weight_SK = torch.zeros(expert_SK.shape, device=device)
        exchange(experts, (x_SE, expert_SK, weight_SK), places.slot_WXC, places.axis)

    number = rounds.join(name, serve)
    return exchanged(experts, places, mesh, lambda count: rounds.enter(number, count))


def slots_on(slot_WXC: torch.Tensor, expert_TK: torch.Tensor) -> torch.Tensor:
    """int32 [W, T, K]: in which slot each rank computes these experts, -1: another one does. Copies
    of an expert take turns, token by token."""
    expert_P = expert_TK.flatten()
    if slot_WXC.shape[2] == 1:
        slot_WP = slot_WXC[..., 0].index_select(1, expert_P.clamp(min=0))
    else:
        turn_T = torch.arange(len(expert_TK), device=expert_P.device) % slot_WXC.shape[2]
        turn_P = turn_T.repeat_interleave(expert_TK.shape[1])
        at_P = expert_P.clamp(min=0) * slot_WXC.shape[2] + turn_P
        slot_WP = slot_WXC.flatten(1).index_select(1, at_P)
    return slot_WP.masked_fill(expert_P < 0, -1).view(-1, *expert_TK.shape)


def _share(x_TX: torch.Tensor, mine: slice, size: int) -> torch.Tensor:
    """Those rows, and zeros up to so many."""
    share_SX = x_TX.new_zeros((size, *x_TX.shape[1:]))
    own_SX = x_TX[mine]
    share_SX[: len(own_SX)] = own_SX
    return share_SX


def _gather_and_scatter(
    experts: Experts, share: Share, slot_WXC: torch.Tensor, axis: Axis
) -> torch.Tensor:
    x_TE, expert_TK, weight_TK = (torch.cat(all_parts(one, axis)) for one in share)
    own_TK = slots_on(slot_WXC[axis.rank : axis.rank + 1], expert_TK)[0]
    y_TE = experts(x_TE, own_TK.contiguous(), weight_TK)
    return reduce_scatter(y_TE.view(axis.size, -1, y_TE.shape[1]), axis)


def _padded(experts: Experts, share: Share, slot_WXC: torch.Tensor, axis: Axis) -> torch.Tensor:
    x_SE, expert_SK, weight_SK = share
    on_WSK = slots_on(slot_WXC, expert_SK)
    wanted_WS1 = (on_WSK >= 0).any(2, keepdim=True)
    sent_WSE = torch.where(wanted_WS1, x_SE, 0.0)
    weight_WSK = weight_SK.expand(on_WSK.shape).contiguous()
    got = [all_to_all(one, axis) for one in (sent_WSE, on_WSK.contiguous(), weight_WSK)]
    x_TE, own_TK, weight_TK = (one.flatten(0, 1) for one in got)
    y_WSE = experts(x_TE, own_TK, weight_TK).view(sent_WSE.shape)
    return all_to_all(y_WSE, axis).float().sum(0).to(x_SE.dtype)


def _ragged(experts: Experts, share: Share, slot_WXC: torch.Tensor, axis: Axis) -> torch.Tensor:
    x_SE, expert_SK, weight_SK = share
    on_WSK = slots_on(slot_WXC, expert_SK)
    rank_P, at_P = (on_WSK >= 0).any(2).nonzero(as_tuple=True)
    count_W = rank_P.bincount(minlength=axis.size)
    sent, got = count_W.tolist(), all_to_all(count_W, axis).tolist()
    x_NE, own_NK, weight_NK = (
        ragged_to_all(one.contiguous(), sent, got, axis)
        for one in (x_SE[at_P], on_WSK[rank_P, at_P], weight_SK[at_P])
    )
    y_PE = ragged_to_all(experts(x_NE, own_NK, weight_NK), got, sent, axis)
    y_SE = torch.zeros(x_SE.shape, dtype=torch.float32, device=x_SE.device)
    return y_SE.index_add_(0, at_P, y_PE.float()).to(x_SE.dtype)


EXCHANGES: dict[str, Callable[[Experts, Share, torch.Tensor, Axis], torch.Tensor]] = {
    "allgather_reducescatter": _gather_and_scatter,
    "ragged": _ragged,
    "padded": _padded,
}
"""By the words of --all2all-backend."""
