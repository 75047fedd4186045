"""The door: who is refused before any work, and when they are told to come back (reliability 1.2)."""

from __future__ import annotations

import pytest

from headrace.base.errors import Unavailable
from headrace.base.wire.request import Hello
from headrace.front.client.stream import ENDS_KEPT, MAX_WAIT_S, RETRIES_KEPT, QueueAdmission

HELLO = Hello(
    logits_width=10, max_model_len=10, capacity_tokens=10, max_running=4, max_in_flight=12,
    num_blocks=1, block_tokens=16,
)  # fmt: skip


def refused(room: QueueAdmission, in_flight: int) -> float:
    with pytest.raises(Unavailable) as caught:
        room.check(HELLO, in_flight)
    assert caught.value.retry_after_s is not None
    return caught.value.retry_after_s


def test_the_bound_is_exact() -> None:
    room = QueueAdmission(lambda: 0.0)
    room.check(HELLO, 11)
    assert 1.0 <= refused(room, 12) <= 1.25


def test_a_core_that_takes_the_more_urgent_is_never_full_here() -> None:
    open_door = Hello(
        logits_width=1, max_model_len=1, capacity_tokens=1, max_running=1, num_blocks=1, block_tokens=1
    )  # fmt: skip
    QueueAdmission(lambda: 0.0).check(open_door, 10**6)


def test_retry_after_is_the_queue_and_those_who_come_back_over_the_throughput() -> None:
    now = 0.0
    room = QueueAdmission(lambda: now)
    for _ in range(ENDS_KEPT):  # two a second
        room.ended()
        now += 0.5
    assert 4.0 <= refused(room, 12) <= 5.3
    for _ in range(10):
        refused(room, 12)
    assert 9.0 <= refused(room, 12) <= 12.3
    now += 1000
    assert refused(room, 12) == MAX_WAIT_S or refused(room, 12) >= MAX_WAIT_S


def test_memory_is_bounded_however_many_are_refused() -> None:
    room = QueueAdmission(lambda: 0.0)
    for _ in range(RETRIES_KEPT + 10):
        assert refused(room, 12) <= MAX_WAIT_S * 1.25
