"""PAR-12: experts that move between ranks as their loads change: the ranks' shares stay those of one rank's mixture,
for every layout and form of weights, and the load of the rank with most falls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from headrace.back.layers.moe.balance import Balancer
from headrace.back.layers.moe.exchange import EXCHANGES
from headrace.back.layers.moe.mixture import Mixture
from headrace.back.layers.moe.placement import Placement, imbalance
from headrace.back.parallel.mesh import Axis, Mesh, with_whole_experts
from headrace.back.parallel.rounds import MixtureRounds
from headrace.back.quant.parts import PartSchemes
from headrace.base.errors import ConfigError
from tests.back.layers.moe.test_split import (
    EXPERTS,
    SPECS,
    WIDTH,
    build,
    checkpoint_of,
    fill,
    rank_of,
)
from tests.back.parallel.test_rounds import Bells, Orders
from tests.back.parallel.thread_ranks import run_threads

RANKS = 2


def tokens(count: int = 9) -> torch.Tensor:
    """Alike, so that few experts have most of them."""
    generator = torch.Generator().manual_seed(5)
    shared_E = torch.randn(WIDTH, generator=generator)
    return shared_E + 0.3 * torch.randn(count, WIDTH, generator=generator)


def moved(
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    *,
    redundant: int,
    exchange: str = "allreduce",
    **more: Any,
) -> tuple[torch.Tensor, list[dict[str, Any]]]:
    """What one rank computes, and of each of two ranks what it did."""
    spec = SPECS[name]
    _, params = build(spec, Mesh())
    checkpoint, x_TE = checkpoint_of(params), tokens()
    alone, params = build(spec, Mesh(), **more)
    fill(params, checkpoint)
    alone._scope.ledger.finish()

    def rank_main(rank: int, axis: Callable[..., Axis]) -> dict[str, Any]:
        mesh = with_whole_experts(Mesh(tp=axis("tp", RANKS)), exchange, redundant)
        mixture, params = build(spec, mesh, **more)
        fill(params, checkpoint)
        mixture._scope.ledger.finish()
        (experts,) = mixture._scope.ledger.movable
        loaded = [one.clone() for one in experts._tensors()]
        at_start, before = experts.placement, mixture.mixed(x_TE, x_TE)
        load_X = [float(count) for count in experts.count_X[:EXPERTS]]
        balancer = Balancer([experts], 0)
        came, table = balancer.rearrange(), experts.slot_WXC
        after, now = mixture.mixed(x_TE, x_TE), experts.placement
        balancer.go_back()
        assert experts.slot_WXC is table, "recorded steps hold the table"
        for tensor, first in zip(experts._tensors(), loaded, strict=True):
            assert torch.equal(tensor, first)
        return {
            "before": before,
            "after": after,
            "back": mixture.mixed(x_TE, x_TE),
            "came": came,
            "load": load_X,
            "placements": (at_start, now),
        }

    return alone.mixed(x_TE, x_TE), run_threads(monkeypatch, RANKS, rank_main)


def check(alone: torch.Tensor, found: list[dict[str, Any]]) -> None:
    for when in ("before", "after", "back"):
        total = torch.stack([one[when] for one in found]).sum(0)
        assert (total - alone).abs().max() <= 3e-6 * alone.abs().max() + 1e-7, when
    first, second = found
    assert first["placements"] == second["placements"] and first["load"] == second["load"]
    at_start, now = first["placements"]
    assert imbalance(first["load"], now) < 0.98 * imbalance(first["load"], at_start)
    assert sum(one["came"] for one in found) > 0


@pytest.mark.parametrize("name", sorted(SPECS.keys() - {"weighed inputs"}))
def test_experts_of_every_layout_move(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five experts on two ranks with three slots each: one has a copy."""
    check(*moved(name, monkeypatch, redundant=0))


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_copies_take_turns_by_every_exchange(
    exchange: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(*moved("shared", monkeypatch, redundant=3, exchange=exchange))


@pytest.mark.parametrize("scheme", ["int8", "fp8", "int4"])
def test_packed_experts_move(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    alone, found = moved("merged", monkeypatch, redundant=0, online=PartSchemes(scheme))
    plain, _ = moved("merged", monkeypatch, redundant=0)
    assert (alone - plain).abs().max() > 1e-3 * plain.abs().max()
    check(alone, found)


def test_nothing_moves_for_equal_loads_and_steps_are_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def rank_main(rank: int, axis: Callable[..., Axis]) -> list[int]:
        mesh = with_whole_experts(Mesh(tp=axis("tp", RANKS)), redundant=1)
        mixture, params = build(SPECS["merged"], mesh)
        fill(params, checkpoint_of(params))
        mixture._scope.ledger.finish()
        (experts,) = mixture._scope.ledger.movable
        moves: list[int] = []
        monkeypatch.setattr(type(experts), "better", lambda self: moves.append(1))
        experts.count_X[:EXPERTS] = 7
        assert experts.placement == experts._loaded
        balancer = Balancer([experts], 3)
        for _ in range(7):
            balancer.step()
        return moves

    assert [len(one) for one in run_threads(monkeypatch, 1, rank_main)] == [2]


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_experts_follow_ranks_that_come_and_go(
    exchange: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PAR-06, PAR-07: 2, 3, 2, 4 ranks with three slots each, for which two would do."""
    spec, x_TE, counts = SPECS["shared"], tokens(), (2, 3, 2, 4)
    _, params = build(spec, Mesh())
    checkpoint = checkpoint_of(params)
    orders = [Orders() for _ in range(4)]

    def mixture_on(mesh: Mesh) -> Mixture:
        mixture, params = build(spec, mesh)
        fill(params, checkpoint)
        mixture._scope.ledger.finish()
        return mixture

    def rank_main(rank: int, axis: Callable[..., Axis]) -> list[tuple[torch.Tensor, Placement]]:
        mixture, found, bell = None, [], Bells(orders, rank)
        for number, count in enumerate(counts):
            if mixture is not None and count < counts[number - 1]:
                mixture._scope.ledger.movable[0].leave_to(count)
            if rank >= count:
                mixture = None
                continue
            names, is_new = (f"numbers {number}", f"tokens {number}"), mixture is None
            if mixture is None:
                group: Any = object()
                place = Axis(name="ep", size=rank + 1, rank=rank, group=group)
                mesh = Mesh(
                    ep=place if number else axis(names[1], count),
                    token_exchange=exchange,
                    rounds=MixtureRounds(Axis(name="ep"), alike=1, bell=bell),
                    least_ranks=2,
                    alone=number > 0,
                )
                mixture = mixture_on(mesh)
            rounds, (experts,) = mixture._scope.mesh.rounds, mixture._scope.ledger.movable
            assert isinstance(rounds, MixtureRounds)
            rounds.renew(axis(names[0], count), bell)
            if number or not is_new:
                experts.share_with(axis(names[1], count))
            own = x_TE[rank::count].contiguous()
            found.append((mixture.mixed(own, own), experts.placement))
        return found

    alone = mixture_on(Mesh()).mixed(x_TE, x_TE)
    by_rank = run_threads(monkeypatch, 4, rank_main)
    for count in counts:
        for rank in range(count):
            ours, placement = by_rank[rank].pop(0)
            assert (ours - alone[rank::count]).abs().max() <= 3e-6 * alone.abs().max()
            assert [len(one) for one in placement] == [3] * count
            assert {one for mine in placement for one in mine} == set(range(EXPERTS))


def test_more_slots_than_experts_are_refused() -> None:
    mesh = replace(rank_of(2, 0, whole=True), redundant_experts=6)
    with pytest.raises(ConfigError, match="6: 2 ranks with 6 slots each for the 5") as caught:
        build(SPECS["merged"], mesh)
    assert caught.value.field == "num_redundant_experts"
