"""Ranks with whole experts: their shares of every layout's mixture add up to what one rank computes, and each reads its
own experts alone (PAR-12)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headrace.back.layers.moe.exchange import EXCHANGES
from headrace.back.layers.moe.mixture import Mixture, MixtureSpec, RouterSpec, SharedSpec
from headrace.back.layers.moe.placement import turns
from headrace.back.layers.moe.split import ExpertSizes
from headrace.back.layers.moe.stacked import (
    FlatExperts,
    FlatUngatedExperts,
    PairedExperts,
    UngatedExperts,
)
from headrace.back.layers.moe.weights import (
    InterleavedExperts,
    MergedExperts,
    SeparateExperts,
    StackedExperts,
    TransposedExperts,
)
from headrace.back.layers.scope import Ledger, Scope
from headrace.back.parallel.mesh import Axis, Mesh, with_whole_experts
from headrace.back.parallel.param import Param, copies
from headrace.back.parallel.rounds import MixtureRounds
from headrace.back.quant.parts import PartSchemes
from headrace.base.errors import ConfigError
from tests.back.parallel.test_rounds import STOP, Bells, Orders
from tests.back.parallel.thread_ranks import run_threads

WIDTH, INNER, EXPERTS, TOP_K = 32, 16, 5, 2
CPU = torch.device("cpu")
BIASES = ("gate_bias", "up_bias", "down_bias")
LAYOUTS = {
    "separate": SeparateExperts(),
    "separate, biased": SeparateExperts(bias_names=BIASES),
    "merged": MergedExperts(up="gate_up", down="down"),
    "stacked": StackedExperts(),
    "transposed": TransposedExperts(),
    "interleaved": InterleavedExperts(),
    "flat": FlatExperts(gate="w1", up="v1", down="w2"),
    "paired": PairedExperts(up="up", down="down"),
    "ungated": UngatedExperts(
        up="{}.up", down="{}.down", up_bias="{}.up_bias", down_bias="{}.down_bias"
    ),
    "flat, ungated": FlatUngatedExperts(up="w1", down="w2"),
}
ROUTER = RouterSpec(experts=EXPERTS, top_k=TOP_K, renormalize=True)
SPECS = {
    **{name: MixtureSpec(router=ROUTER, inner=INNER, layout=one) for name, one in LAYOUTS.items()},
    "shared": MixtureSpec(
        router=ROUTER, inner=INNER, shared=SharedSpec(inner=2 * INNER, gate="shared_gate")
    ),
    "shared by the router": MixtureSpec(
        router=replace(ROUTER, score="sigmoid"),
        inner=INNER,
        shared=SharedSpec(inner=INNER, joint=True, layout=MergedExperts(up="gate_up", down="down")),
    ),
    "idle": MixtureSpec(router=replace(ROUTER, experts=EXPERTS + 2, idle=2), inner=INNER),
    "weighed inputs": MixtureSpec(
        router=replace(ROUTER, weighs_inputs=True), inner=INNER, shared=SharedSpec(inner=INNER)
    ),
    "scaled": MixtureSpec(router=replace(ROUTER, expert_scale="scale"), inner=INNER),
}


def rank_of(ranks: int, rank: int, *, whole: bool) -> Mesh:
    """Nothing is summed: each rank's share is looked at."""
    group: Any = object() if ranks > 1 else None
    mesh = Mesh(tp=Axis(size=ranks, rank=rank, group=group))
    return with_whole_experts(mesh) if whole else mesh


def build(spec: MixtureSpec, mesh: Mesh, **more: Any) -> tuple[Mixture, list[Param]]:
    scope = Scope(
        ledger=Ledger(),
        mesh=mesh,
        device=CPU,
        dtype=torch.float32,
        block_tokens=8,
        max_positions=64,
        **more,
    )
    return Mixture(scope, spec, WIDTH, activation="silu"), scope.ledger.params


def checkpoint_of(params: list[Param]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    pieces = {piece.name: piece for param in params for piece in param.pieces}
    return {
        name: torch.randn(piece.shape, generator=generator) * 0.3
        for name, piece in sorted(pieces.items())
    }


def fill(params: list[Param], checkpoint: dict[str, torch.Tensor]) -> int:
    """Fills them; the values that were read."""
    read = 0
    for param in params:
        for copy in copies(param):
            source = checkpoint[copy.name][copy.source]
            param.target(copy).copy_(source * copy.scale)
            read += source.numel() if param.routed else 0
        param.filled()
    return read


def shares(spec: MixtureSpec, ranks: int, *, whole: bool, **more: Any) -> tuple[Any, list[int]]:
    """Each rank's share of 9 tokens, and how many values of experts it read."""
    _, params = build(spec, Mesh())
    checkpoint = checkpoint_of(params)
    x_TE = torch.randn(9, WIDTH, generator=torch.Generator().manual_seed(5))
    found, read = [], []
    for rank in range(ranks):
        mixture, params = build(spec, rank_of(ranks, rank, whole=whole), **more)
        read.append(fill(params, checkpoint))
        mixture._scope.ledger.finish()
        found.append(mixture.mixed(x_TE, x_TE))
    return torch.stack(found), read


@pytest.mark.parametrize("name", SPECS)
def test_shares_of_ranks_with_whole_experts_add_up(name: str) -> None:
    """Five experts on two ranks: one has three."""
    (alone, *_), (whole, *_) = shares(SPECS[name], 1, whole=False)
    found, read = shares(SPECS[name], 2, whole=True)
    assert (found.sum(0) - alone).abs().max() <= 2e-6 * alone.abs().max() + 1e-7
    assert all(one.abs().max() > 0 for one in found)
    assert sum(read) == whole and read[0] * 3 == read[1] * 2


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("name", ["shared", "weighed inputs"])
@pytest.mark.parametrize("tokens", [9, 1])
def test_every_exchange_of_tokens_gives_the_same(
    exchange: str, name: str, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PAR-11: three ranks, of which some have no token of the step."""
    spec = replace(SPECS[name], inner=3 * INNER)
    if spec.shared is not None:
        spec = replace(spec, shared=replace(spec.shared, inner=3 * INNER))
    _, params = build(spec, Mesh())
    checkpoint = checkpoint_of(params)
    x_TE = torch.randn(tokens, WIDTH, generator=torch.Generator().manual_seed(5))

    def share_of(mesh: Mesh) -> torch.Tensor:
        mixture, params = build(spec, mesh)
        fill(params, checkpoint)
        mixture._scope.ledger.finish()
        return mixture.mixed(x_TE, x_TE)

    def rank_main(rank: int, axis: Callable[..., Axis]) -> torch.Tensor:
        return share_of(with_whole_experts(Mesh(tp=axis("tp")), exchange))

    alone = share_of(Mesh())
    found = torch.stack(run_threads(monkeypatch, 3, rank_main)).sum(0)
    assert (found - alone).abs().max() <= 3e-6 * alone.abs().max()


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("alike", [1, 2])
def test_cores_with_tokens_of_their_own_get_what_one_rank_computes(
    exchange: str, alike: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PAR-10, PAR-11: three tokens here, seven there; then nothing here, where the others are served."""
    spec = SPECS["shared"]
    _, params = build(spec, Mesh())
    checkpoint = checkpoint_of(params)
    x_TE = torch.randn(10, WIDTH, generator=torch.Generator().manual_seed(5))
    orders = [Orders() for _ in range(2 * alike)]
    done = threading.Barrier(alike, action=lambda: [one.put(STOP) for one in orders])

    def mixture_on(mesh: Mesh) -> Mixture:
        mixture, params = build(spec, mesh)
        fill(params, checkpoint)
        mixture._scope.ledger.finish()
        return mixture

    def rank_main(rank: int, axis: Callable[..., Axis]) -> list[torch.Tensor]:
        rounds = MixtureRounds(axis("rounds"), alike=alike, bell=Bells(orders, rank))
        mesh = Mesh(tp=axis("tp", alike), ep=axis("ep"), token_exchange=exchange, rounds=rounds)
        mixture = mixture_on(mesh)
        core, shares = rank // alike, []
        for mine in ((x_TE[:3], x_TE[3:]), (None, x_TE)):
            tokens = mine[core]
            if tokens is not None:
                shares.append(mixture.mixed(tokens, tokens))
        if core:
            done.wait()
        assert rounds.next(orders[rank], joint=list) == STOP
        return shares

    alone = mixture_on(Mesh()).mixed(x_TE, x_TE)
    found = run_threads(monkeypatch, 2 * alike, rank_main)
    sums = [
        sum(each) for shares in (found[:alike], found[alike:]) for each in zip(*shares, strict=True)
    ]
    for ours, expected in zip(sums, (alone[:3], alone[3:], alone), strict=True):
        assert (ours - expected).abs().max() <= 3e-6 * alone.abs().max()


@pytest.mark.parametrize("name", ["separate, biased", "merged"])
def test_quantized_experts_are_those_of_one_rank(name: str) -> None:
    """A rank's experts have the scales that they have on one rank."""
    online = PartSchemes("int8")
    (plain, *_), _ = shares(SPECS[name], 1, whole=False)
    (alone, *_), _ = shares(SPECS[name], 1, whole=False, online=online)
    found, _ = shares(SPECS[name], 3, whole=True, online=online)
    assert (alone - plain).abs().max() > 1e-3 * plain.abs().max()
    assert (found.sum(0) - alone).abs().max() <= 2e-6 * alone.abs().max()


def test_fewer_experts_than_ranks_are_refused() -> None:
    mesh = rank_of(8, 0, whole=True)
    with pytest.raises(ConfigError, match="5 experts cannot be shared out to 8 ranks") as caught:
        build(SPECS["merged"], mesh)
    assert caught.value.field == "enable_expert_parallel"


def test_adapters_of_experts_are_refused() -> None:
    slots: Any = SimpleNamespace(kinds=("experts",))
    with pytest.raises(ConfigError, match="adapters of experts"):
        build(SPECS["separate"], rank_of(2, 0, whole=True), adapters=slots)


def test_where_experts_lie() -> None:
    sizes = ExpertSizes(experts=5, width=8, inner=4, axis="ep", ranks=3)
    own = [sizes.local(rank_of(3, rank, whole=True)) for rank in range(3)]
    assert [(one.experts, one.inner) for one in own] == [(1, 4), (2, 4), (2, 4)]
    assert sizes.placement == ((0,), (1, 2), (3, 4))
    assert turns(sizes.placement, 5)[..., 0].tolist() == [
        [0, -1, -1, -1, -1],
        [-1, 0, 1, -1, -1],
        [-1, -1, -1, 0, 1],
    ]
    assert replace(sizes, axis="tp").local(rank_of(2, 1, whole=True)).inner == 2
