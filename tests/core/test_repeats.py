"""An answer that goes round in a circle ends: exactly where a search through all of it would have ended it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.base.wire.repetition import RepetitionDetection
from headrace.core.repeats import Repeats
from tests.core.harness import Driver, make_request, make_spec


def ends_at(tokens: list[int], rule: RepetitionDetection, min_tokens: int) -> int | None:
    """By definition: the first place whose last tokens are one pattern, so many times over."""
    for end in range(max(1, min_tokens), len(tokens) + 1):
        for size in range(max(rule.min_pattern_size, 1), rule.max_pattern_size + 1):
            tail = tokens[:end][-size * rule.min_count :]
            if len(tail) == size * rule.min_count and tail == tail[-size:] * rule.min_count:
                return end
    return None


@st.composite
def rules(draw: st.DrawFn) -> RepetitionDetection:
    most = draw(st.integers(1, 5))
    least, count = draw(st.integers(0, most)), draw(st.integers(2, 4))
    return RepetitionDetection(max_pattern_size=most, min_pattern_size=least, min_count=count)


@given(st.lists(st.integers(0, 2), max_size=120), rules(), st.integers(0, 9))
def test_it_ends_where_the_definition_says(
    tokens: list[int], rule: RepetitionDetection, min_tokens: int
) -> None:
    repeats = Repeats(rule, min_tokens=min_tokens)
    found = next((i for i, token in enumerate(tokens, 1) if repeats.add(token)), None)
    assert found == ends_at(tokens, rule, min_tokens)


@given(st.integers(1, 300), st.integers(2, 5))
def test_long_patterns_are_found_at_their_last_token(size: int, count: int) -> None:
    """Also where the window has slid many times."""
    repeats = Repeats(RepetitionDetection(max_pattern_size=300, min_count=count), min_tokens=0)
    lead = list(range(10_000, 13_000))
    assert not any(map(repeats.add, lead))
    told = [repeats.add(token) for token in [*range(size)] * count]
    assert told.index(True) == size * count - 1


RULE = RepetitionDetection(max_pattern_size=2, min_count=2)


def test_a_request_that_asks_ends_and_one_beside_it_goes_on() -> None:
    """What repeats is decided by the tokens: a pattern of one token, once over, is any token."""
    driver = Driver(make_spec())
    asks = make_request(1, max_tokens=30)
    stop = msgspec.structs.replace(asks.stop, repetition=RULE, min_tokens=0)
    driver.add(msgspec.structs.replace(asks, stop=stop), make_request(2, max_tokens=30))
    (row,) = [r for r in driver.core.requests if r.repeats is not None]
    for token in (7, 8):  # as if the answer had begun with these
        assert not row.repeats.add(token)
    row.repeats._runs[:] = 99
    row.repeats._wanted[:] = 0
    driver.run()
    assert (driver.finished[1].reason, len(driver.tokens[1])) == ("repetition", 1)
    assert (driver.finished[2].reason, len(driver.tokens[2])) == ("length", 30)
    assert not driver.core.rows.repeats
    driver.assert_at_rest()


@pytest.mark.parametrize(
    "wrong",
    [{"max_pattern_size": 1025}, {"min_pattern_size": 3}, {"min_count": 1}, {"min_count": 65537}],
)
def test_the_core_takes_no_rule_beyond_its_bounds(wrong: dict[str, Any]) -> None:
    request = make_request(1)
    rule = msgspec.structs.replace(RULE, **wrong)
    stop = msgspec.structs.replace(request.stop, repetition=rule)
    driver = Driver(make_spec())
    driver.add(msgspec.structs.replace(request, stop=stop))
    driver.run()
    error = driver.finished[1].error
    assert error is not None and error.kind == "InvalidRequest"
    assert error.field == "repetition_detection." + next(iter(wrong))
