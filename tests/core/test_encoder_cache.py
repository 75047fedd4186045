"""The core's books of the encoder cache: an input is told to the workers once while any request refers to it,
the places never overflow, and every wait ends."""

from __future__ import annotations

import random
from math import prod
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.base.errors import InvalidRequest, MediaGone, from_wire
from headrace.base.wire.media import MEDIA_HOOK, MediaForm, MediaInput, MediaPayload
from headrace.base.wire.step import StepPlan
from headrace.core import encoder_cache
from headrace.core.encoder_cache import EncoderCacheHook, encoder_cache_hooks
from tests.core.harness import Driver, make_request, make_spec

IMAGE = MediaForm(kind="image", row_bytes=12, patch=2, merge=2, max_rows=256)
SHORT_CLIP = MediaForm(kind="video", row_bytes=24, patch=2, frames=2, merge=2, max_t=2)
FORMS = (IMAGE, SHORT_CLIP)


def image(name: int, offset: int, *, side: int = 4) -> MediaInput:
    """side x side patches, side^2 / 4 tokens."""
    shape = {"grid": (1, side, side), "num_tokens": side * side // 4}
    rows = bytes([name]) * (side * side * 12)
    return MediaInput(kind="image", key=bytes([name]) * 32, offset=offset, rows=rows, **shape)


class Books:
    """What workers that obey the payloads hold; they never hold more than their places."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.held: dict[bytes, int] = {}
        self.added: list[bytes] = []
        self.work: list[tuple[int, int, int]] = []
        self.open: dict[bytes, int] = {}

    def take(self, plan: StepPlan) -> None:
        if MEDIA_HOOK in plan.hook_payloads:
            payload = msgspec.msgpack.decode(plan.hook_payloads[MEDIA_HOOK], type=MediaPayload)
            for key in payload.evicted:
                del self.held[key]
                self.open.pop(key, None)
            for content in payload.added:
                assert content.key not in self.held
                self.held[content.key] = prod(content.grid) // 4
                self.added.append(content.key)
            for one in payload.work:
                assert one.key in self.held and one.done == self.open.get(one.key, 0) + 1
                self.work.append((one.key[0], one.done, one.parts))
                self.open[one.key] = one.done
                if one.done == one.parts:
                    del self.open[one.key]
        assert sum(self.held.values()) <= self.capacity
        for start in plan.starts:
            assert {span.key for span in start.media} <= self.held.keys()


def media_driver(
    capacity: int, *, step_tokens: int = 64, rows: int = 0, **spec: Any
) -> tuple[Driver, Books, EncoderCacheHook]:
    (hook,) = encoder_cache_hooks(capacity, step_tokens, {"image": rows} if rows else {})
    assert isinstance(hook, EncoderCacheHook)
    driver = Driver(make_spec(**spec), hooks=(hook,))
    executor, books = driver.executor, Books(capacity)
    executor._facts = msgspec.structs.replace(executor.facts, media=FORMS, media_tokens=capacity)
    submit = executor.submit

    def watched(plan: StepPlan) -> Any:
        books.take(plan)
        return submit(plan)

    vars(executor)["submit"] = watched
    return driver, books, hook


def test_a_model_without_media_has_no_hook() -> None:
    assert encoder_cache_hooks(0, 64) == ()


def test_the_same_image_is_told_once_while_it_has_a_place() -> None:
    """ENG-23."""
    driver, books, hook = media_driver(64)
    driver.add(make_request(1, 20, media=(image(1, 4), image(1, 12))))
    driver.run()
    driver.add(make_request(2, 20, media=(image(1, 6), image(2, 12))))
    driver.run()
    assert books.added == [b"\1" * 32, b"\2" * 32]
    assert (hook.num_added, hook.num_reused, hook.num_held) == (2, 1, 0)
    assert hook.figures() == {"media_queries": 3, "media_hits": 1}
    driver.assert_at_rest()


def test_the_least_recently_used_goes_first() -> None:
    driver, books, _ = media_driver(8)
    for id, name in enumerate((1, 2, 1, 3)):
        driver.add(make_request(id, 20, media=(image(name, 4),)))
        driver.run()
    assert books.held.keys() == {b"\1" * 32, b"\3" * 32}


def test_a_request_waits_while_its_image_finds_no_place() -> None:
    """REG-089: the budget is one of tokens, and nobody hangs."""
    driver, books, _ = media_driver(8)
    driver.add(make_request(1, 20, media=(image(1, 4), image(2, 10)), max_tokens=30))
    driver.step()
    driver.add(make_request(2, 20, media=(image(3, 4),), max_tokens=1))
    driver.add(make_request(3, 20, max_tokens=1))
    for _ in range(6):
        driver.step()
    assert 3 in driver.finished and 2 not in driver.finished
    assert "room for 0" in next(iter(driver.core.scheduler.queue)).reason
    driver.run()
    assert driver.finished[2].reason == "length" and books.held.keys() == {b"\2" * 32, b"\3" * 32}


def test_one_step_takes_in_so_many_tokens_or_one_request() -> None:
    driver, books, _ = media_driver(64, step_tokens=6)
    for id in (1, 2, 3):
        driver.add(make_request(id, 20, media=(image(id, 4, side=8 if id == 1 else 4),)))
    driver.step()
    assert len(books.added) == 1
    driver.run()
    assert len(books.added) == 3


def test_a_preempted_request_keeps_its_places() -> None:
    driver, books, _ = media_driver(64, num_blocks=12)
    for id in (1, 2):
        driver.add(make_request(id, 16, media=(image(id, 4),), max_tokens=24))
    driver.run()
    assert driver.core.scheduler.num_preemptions and len(books.added) == 2
    driver.assert_at_rest()


def test_others_decode_while_an_image_is_encoded_in_parts() -> None:
    """A step takes what is worth 16 patches: an image of 64 takes four, in which the other request decodes; one that
    comes alone is encoded by the step that reaches it."""
    driver, books, _ = media_driver(64, rows=16)
    driver.add(make_request(1, 20, media=(image(1, 0, side=8),), max_tokens=14))
    driver.step()
    assert not books.work and len(driver.tokens[1]) <= 1
    driver.add(make_request(2, 40, media=(image(2, 0, side=8), image(3, 17)), max_tokens=2))
    reasons = []
    for _ in range(6):
        before = len(driver.tokens[1])
        driver.step()
        reasons += [one.reason for one in driver.core.scheduler.queue]
        assert len(driver.tokens[1]) == before + 1 or not before
    assert books.work == [(2, 1, 4), (2, 2, 4), (2, 3, 4), (2, 4, 4), (3, 1, 1)]
    assert any("2 of 5 parts" in reason for reason in reasons)
    driver.run()
    assert len(driver.tokens[2]) == 2 and books.added == [bytes([i]) * 32 for i in (1, 2, 3)]
    driver.assert_at_rest()


def test_small_images_share_a_step_and_what_is_cached_is_not_encoded_ahead() -> None:
    driver, books, _ = media_driver(64, rows=32, num_blocks=200)
    driver.add(make_request(1, 20, max_tokens=30))
    driver.step()
    small = tuple(image(10 + i, 4 * i) for i in range(5))
    driver.add(make_request(2, list(range(3, 51)), media=small, max_tokens=1))
    while 2 not in driver.finished:
        driver.step()
    assert books.work == [(10 + i, 1, 1) for i in range(5)]
    books.work.clear()
    for i in range(20, 24):  # the encoder's places go to others, the prefix stays
        driver.add(make_request(i, 70, media=(image(i, 0, side=16),), max_tokens=1))
        while i not in driver.finished:
            driver.step()
    assert not books.held.keys() & {one.key for one in small}
    books.work.clear()
    driver.add(make_request(3, list(range(3, 51)), media=small, max_tokens=1))
    while 3 not in driver.finished:
        driver.step()
    assert driver.cached[-1][1] >= 40 and not books.work
    driver.run()
    driver.assert_at_rest()


@pytest.mark.parametrize("how", ["abort", "alone", "renew", "weights"])
def test_a_pass_that_is_under_way_ends_with_its_reason(how: str) -> None:
    """Who is aborted leaves nothing; who is left alone starts at once; other workers, and other weights, begin anew."""
    driver, books, hook = media_driver(64, rows=4)
    driver.add(make_request(1, 20, max_tokens=30))
    driver.step()
    driver.add(make_request(2, 20, media=(image(2, 0, side=8),), max_tokens=2))
    for _ in range(3):
        driver.step()
    assert books.work == [(2, i, 16) for i in (1, 2, 3)]
    if how == "abort":
        driver.core.abort([2])
        driver.step()
        driver.step()
        assert not books.held and not books.open
    elif how == "alone":
        driver.core.abort([1])
        driver.step()
        driver.step()
        assert len(books.work) <= 5
    elif how == "renew":
        books.held.clear()
        books.open.clear()
        hook.renew()
    else:
        hook.renew_content()
        driver.step()
        assert books.added == [b"\2" * 32] * 2 and books.work[-1] == (2, 1, 16)
    driver.run()
    assert (2 in driver.finished) and all(end.error is None for end in driver.finished.values())
    driver.assert_at_rest()


def test_content_that_was_sent_once_need_not_be_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """For an input that waits, one that the workers hold, and other workers after them; else the sender is asked."""
    driver, books, hook = media_driver(64)
    bare = msgspec.structs.replace(image(1, 4), rows=b"", unsent=True)
    driver.add(make_request(1, 20, media=(image(1, 4),)))
    driver.add(make_request(2, 20, media=(bare,)))
    driver.run()
    driver.add(make_request(3, 20, media=(bare,)))
    hook.renew()
    books.held.clear()
    driver.run()
    assert books.added == [b"\1" * 32] * 2
    assert all(driver.finished[i].error is None for i in (1, 2, 3))
    monkeypatch.setattr(encoder_cache, "MOST_KEPT_BYTES", 100)
    driver.add(make_request(4, 20, media=(image(2, 4),)))
    driver.run()
    for id, name in ((5, 2), (6, 9)):
        unsent = msgspec.structs.replace(image(name, 4), rows=b"", unsent=True)
        driver.add(make_request(id, 20, media=(unsent,)))
        driver.run()
        error = driver.finished[id].error
        assert error is not None and isinstance(from_wire(error), MediaGone)
    driver.assert_at_rest()


def test_other_workers_are_told_again() -> None:
    driver, books, hook = media_driver(64)
    driver.add(make_request(1, 20, media=(image(1, 4),)))
    driver.run()
    books.held.clear()
    hook.renew()
    driver.add(make_request(2, 20, media=(image(1, 4),)))
    driver.run()
    assert books.added == [b"\1" * 32] * 2


def test_prefixes_are_shared_up_to_what_differs() -> None:
    """A block's name covers what its placeholders stand for, also in blocks that decoding fills."""
    driver, _, _ = media_driver(64)
    prompt = list(range(3, 27))
    for id, name in enumerate((1, 1, 2)):
        driver.add(make_request(id, prompt, media=(image(name, 10),), max_tokens=2))
        driver.run()
    assert driver.cached == [(0, 0), (1, 20), (2, 8)]
    driver, _, _ = media_driver(64)
    for id, name in enumerate((1, 2)):  # the image lies in the block that the answer fills
        one = image(name, 9, side=2)
        driver.add(make_request(id, prompt[:10], media=(one,), max_tokens=8))
        driver.run()
    answer = [*prompt[:10], *driver.tokens[0], 5]
    for id, name in ((3, 1), (4, 2), (5, 3)):
        driver.add(make_request(id, answer, media=(image(name, 9, side=2),), max_tokens=1))
        driver.run()
    assert driver.cached[2:] == [
        (3, 16),
        (4, 16 if driver.tokens[1] == driver.tokens[0] else 8),
        (5, 8),
    ]


@pytest.mark.parametrize(
    ("changes", "field", "words"),
    [
        ({"kind": "audio"}, "media[0].kind", "image, video"),
        ({"key": b"x"}, "media[0].key", "32"),
        ({"grid": (1, 3, 4)}, "media[0].grid", "multiples of 2"),
        ({"grid": (0, 4, 4)}, "media[0].grid", "at least 1"),
        ({"grid": (1, 32, 16)}, "media[0].grid", "256"),
        ({"num_tokens": 5}, "media[0].num_tokens", "4"),
        ({"rows": b"abc"}, "media[0].rows", "16 patches of 12"),
        ({"offset": 17}, "media[0].offset", "20"),
        ({"offset": -1}, "media[0].offset", "-1"),
        ({"step_s": float("nan")}, "media[0].step_s", "3600"),
        ({"kind": "video", "grid": (3, 4, 4)}, "media[0].grid", "at most 65536 in 2"),
    ],
)
def test_a_malformed_input_is_refused_with_its_field(
    changes: dict[str, Any], field: str, words: str
) -> None:
    driver, _, _ = media_driver(64)
    driver.add(make_request(1, 20, media=(msgspec.structs.replace(image(1, 4), **changes),)))
    driver.run()
    error = driver.finished[1].error
    assert error is not None
    raised = from_wire(error)
    assert isinstance(raised, InvalidRequest) and raised.field == field
    assert words in raised.message
    driver.assert_at_rest()


def test_inputs_must_not_overlap_nor_pass_the_cache() -> None:
    driver, _, _ = media_driver(8)
    driver.add(make_request(1, 20, media=(image(1, 4), image(2, 6))))
    driver.add(make_request(2, 20, media=(image(1, 0), image(2, 4), image(3, 8))))
    driver.add(make_request(3, 20, media=(image(1, 0), image(1, 4), image(1, 8))))
    driver.add(make_request(4, 30, media=(image(1, 0), image(1, 4, side=8))))
    driver.run()
    errors = {id: one.error for id, one in driver.finished.items() if one.error is not None}
    assert errors.keys() == {1, 2, 4}
    assert "ends at 8" in errors[1].message
    assert "12 tokens together" in errors[2].message
    assert "another shape" in errors[4].message


def test_a_model_of_text_refuses_media() -> None:
    driver = Driver(make_spec())
    driver.add(make_request(1, 20, media=(image(1, 4),)))
    driver.run()
    error = driver.finished[1].error
    assert error is not None and "none" in error.message


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_any_traffic_ends_and_places_never_overflow(seed: int) -> None:
    """Requests with images that repeat, aborts, little memory: the workers hold what rows refer to."""
    pick = random.Random(seed)
    driver, _, hook = media_driver(
        24,
        step_tokens=8,
        rows=pick.choice((0, 3, 8, 20)),
        num_blocks=30,
        max_running=4,
        overlap=pick.random() < 0.5,
    )
    for id in range(1, 24):
        media, offset = [], pick.randrange(4)
        while offset < 24 and pick.random() < 0.6:
            name = pick.randrange(6)
            media.append(image(name, offset, side=4 if name % 2 else 2))
            offset = media[-1].end + pick.randrange(5)
        tokens = pick.randrange(1, 12)
        driver.add(make_request(id, 32, media=tuple(media), max_tokens=tokens))
        for _ in range(pick.randrange(3)):
            driver.step()
        if pick.random() < 0.2:
            driver.core.abort([pick.randrange(1, id + 1)])
    driver.run()
    assert len(driver.finished) == 23 and hook.num_held == 0
    assert all(end.error is None for end in driver.finished.values())
    driver.assert_at_rest()
