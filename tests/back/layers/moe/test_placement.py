"""PAR-12: where experts lie: every slot has one, no rank has one twice, loads are spread, and the turns of copies are
each one rank's."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.back.layers.moe.placement import (
    TURNS,
    Placement,
    imbalance,
    settled,
    slots_of_rank,
    spread,
    turns,
)


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[float], int, int]:
    """Loads, ranks and slots of a rank."""
    experts, ranks = draw(st.integers(1, 24)), draw(st.integers(1, 6))
    slots = draw(st.integers(-(-experts // ranks), experts))
    loads = draw(st.lists(st.integers(0, 1000), min_size=experts, max_size=experts))
    return [float(load) for load in loads], ranks, slots


def check(placement: Placement, experts: int, ranks: int, slots: int) -> None:
    assert len(placement) == ranks and all(len(set(mine)) == slots for mine in placement)
    assert {x for mine in placement for x in mine} == set(range(experts))


@given(cases(), cases())
def test_experts_fill_all_slots_and_stay_where_they_can(
    case: tuple[list[float], int, int], other: tuple[list[float], int, int]
) -> None:
    loads, ranks, slots = case
    placement = spread(loads, ranks, slots)
    check(placement, len(loads), ranks, slots)
    old = spread([1.0] * len(loads), ranks, slots)
    after = settled(old, placement)
    assert [set(mine) for mine in after] == [set(mine) for mine in placement]
    for before, mine in zip(old, after, strict=True):
        stays = [slot for slot, x in enumerate(before) if x in mine]
        assert all(mine[slot] == before[slot] for slot in stays)


@given(cases())
def test_every_turn_of_an_expert_is_one_ranks(case: tuple[list[float], int, int]) -> None:
    loads, ranks, slots = case
    placement = spread(loads, ranks, slots)
    slot_WXC = turns(placement, len(loads))
    assert ((slot_WXC >= 0).sum(0) == 1).all()
    for rank, expert, turn in (slot_WXC >= 0).nonzero().tolist():
        assert placement[rank][slot_WXC[rank, expert, turn]] == expert
    copies = Counter(x for mine in placement for x in mine)
    if slot_WXC.shape[2] == TURNS:
        for rank, mine in enumerate(placement):
            for expert in mine:
                count = int((slot_WXC[rank, expert] >= 0).sum())
                assert abs(count - TURNS / copies[expert]) < 1


def test_the_heaviest_expert_is_copied_and_the_others_make_room() -> None:
    loads = [800.0, 100, 100, 100, 100, 100, 50, 50]
    assert slots_of_rank(8, 0, 4) == 2 and slots_of_rank(8, 3, 4) == 3
    alone = spread(loads, 4, 2)
    assert imbalance(loads, alone) == 850 / 350, "an expert is not divided without copies"
    copied = spread(loads, 4, 3)
    copies = Counter(x for mine in copied for x in mine)
    assert copies[0] == 4 and imbalance(loads, copied) < 1.2
    assert imbalance([0.0] * 8, alone) == 1.0


def test_a_spread_comes_close_to_equal_loads() -> None:
    """Loads as of a Zipf distribution, 64 experts on 8 ranks."""
    loads = [1000 / (1 + rank) for rank in range(64)]
    order = [loads[(37 * i) % 64] for i in range(64)]
    neighbours = tuple(tuple(range(8 * r, 8 * r + 8)) for r in range(8))
    assert imbalance(order, neighbours) > 2
    heaviest = (order[0] + sum(sorted(order)[:7])) / (sum(order) / 8)
    assert imbalance(order, spread(order, 8, 8)) == pytest.approx(heaviest), (
        "with the lightest beside it"
    )
    assert imbalance(order, spread(order, 8, 9)) < 1.05
