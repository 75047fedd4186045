"""API-17, REG-105: fewer chunks, the same text; the first and the last always go out."""

from __future__ import annotations

from collections.abc import AsyncIterator

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.front.client.events import Delta, Ended, Event, ScoredToken, Started, TokenScore
from headrace.front.server.conversation.context import StreamInterval
from headrace.front.server.conversation.stages import WaitingSpace, coalesced


def score(token: int) -> ScoredToken:
    return ScoredToken(token=TokenScore(token, -0.5, str(token), b"x"))


def deltas(count: int, *, index: int = 0, scored: bool = False) -> list[Event]:
    made: list[Event] = []
    for i in range(count):
        scores = [score(i)] if scored else None
        made.append(Delta(index=index, text=f"{i} ", token_ids=[i], scores=scores))
    return [*made, Ended(index=index, reason="stop", num_output=count)]


async def run(events: list[Event], pace: StreamInterval, tick_s: float = 0.01) -> list[Event]:
    now = 0.0

    async def source() -> AsyncIterator[Event]:
        nonlocal now
        for event in events:
            now += tick_s
            yield event

    return [event async for event in coalesced(source(), pace, clock=lambda: now)]


async def test_tokens_are_counted_from_the_first_delta_on() -> None:
    found = await run([Started(3), *deltas(8)], StreamInterval(3, None))
    sizes = [len(event.token_ids) for event in found if isinstance(event, Delta)]
    assert sizes == [1, 3, 3, 1]
    assert isinstance(found[0], Started) and isinstance(found[-1], Ended)


async def test_time_is_a_bound_of_its_own_and_the_first_reached_counts() -> None:
    by_time = await run(deltas(21), StreamInterval(None, 0.045))
    assert [len(e.token_ids) for e in by_time if isinstance(e, Delta)] == [1, 5, 5, 5, 5]
    both = await run(deltas(9), StreamInterval(2, 10.0))
    assert [len(e.token_ids) for e in both if isinstance(e, Delta)] == [1, 2, 2, 2, 2]


async def test_no_time_at_all_sends_every_token() -> None:
    assert len(await run(deltas(7), StreamInterval(None, 0.0))) == 8


@settings(max_examples=50, deadline=None)
@given(
    counts=st.lists(st.integers(0, 12), min_size=1, max_size=3),
    tokens=st.one_of(st.none(), st.integers(1, 9)),
    seconds=st.one_of(st.none(), st.floats(0, 0.1)),
    order=st.randoms(use_true_random=False),
)
def test_joined_it_is_the_same_for_every_choice(
    counts: list[int], tokens: int | None, seconds: float | None, order: object
) -> None:
    import asyncio
    import random

    assert isinstance(order, random.Random)
    streams = [deltas(count, index=i, scored=True) for i, count in enumerate(counts)]
    mixed: list[Event] = []
    while any(streams):
        mixed.append(order.choice([stream for stream in streams if stream]).pop(0))
    found = asyncio.run(run(mixed, StreamInterval(tokens, seconds)))
    for index in range(len(counts)):
        assert _joined(found, index) == _joined(mixed, index)
        ends = [i for i, e in enumerate(found) if isinstance(e, Ended) and e.index == index]
        mine = [i for i, e in enumerate(found) if isinstance(e, Delta) and e.index == index]
        assert len(ends) == 1 and max(mine, default=-1) < ends[0]


def _joined(events: list[Event], index: int) -> tuple[str, list[int], list[ScoredToken]]:
    text, ids, scores = "", [], []
    for event in events:
        if isinstance(event, Delta) and event.index == index:
            text += event.text
            ids += event.token_ids
            scores += event.scores or []
    return text, ids, scores


@given(st.lists(st.text(alphabet=" \n\tab", max_size=3)))
def test_white_space_before_text_opens_nothing_and_is_not_lost(pieces: list[str]) -> None:
    space, whole = WaitingSpace(), "".join(pieces)
    texts = [space.before(piece) for piece in pieces]
    written = "".join(texts)
    assert whole.startswith(written) and not whole[len(written) :].strip()
    assert all(text.strip() for text in texts if text)
    space.drop()
    assert space.before("a") == "a"
