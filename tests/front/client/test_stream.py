"""The door: who is refused before any work, and when they are told to come back (reliability 1.2)."""

from __future__ import annotations

import pytest

from headrace.base.errors import QueueFull, Unavailable
from headrace.base.wire.control import Hello
from headrace.base.wire.request import Load
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


BUSY = Load(
    waiting=100, waiting_tokens=1600, running=8, rows=8, prefill_token_s=0.0001, decode_step_s=0.004,
    prompt_tokens=16.0, output_tokens=40.0, dues=(0.5, 1.0, 1.5, 2.0),
)  # fmt: skip
"""A request's share of the engine's time is 0.0216 s."""


def test_who_would_wait_too_long_is_refused_at_the_door() -> None:
    room = QueueAdmission(lambda: 0.0)
    room.check_deadline(0.001)  # nothing is known of the core
    room.load = BUSY
    with pytest.raises(QueueFull, match=r"wait about 2.2 s now; this one's time is 2 s") as caught:
        room.check_deadline(2.0)
    assert caught.value.retry_after_s is not None
    assert 2.18 <= caught.value.retry_after_s <= 1.25 * 2.19
    room.check_deadline(3600.0)
    room.check_deadline(3.0)
    room.sent = 30  # come before it too
    with pytest.raises(QueueFull):
        room.check_deadline(2.9)
    room.sent = 0
    with pytest.raises(QueueFull):
        room.check_deadline(3.0, service_s=0.6)


def test_those_due_later_are_not_waited_for() -> None:
    room = QueueAdmission(lambda: 0.0)
    room.load = Load(
        **{**{n: getattr(BUSY, n) for n in BUSY.__struct_fields__}, "dues": (8.0, 9.0)}
    )
    room.check_deadline(2.0)
    with pytest.raises(QueueFull):
        room.check_deadline(0.02)


def test_who_finds_a_free_row_does_not_wait() -> None:
    assert Load(rows=8, running=6, waiting=1, decode_step_s=1.0, output_tokens=9.0).wait_s(1) == 0.0
    assert (
        Load(rows=8, running=6, waiting=2, decode_step_s=1.0, output_tokens=12.0).wait_s(2) == 2.0
    )
