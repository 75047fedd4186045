"""Placeholders: one for each medium or all of them, as text or as ids, give the same prompt."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.base.config.media import MediaSpec, ProcessorSettings
from headrace.base.errors import InvalidRequest
from headrace.base.wire.media import MediaInput
from headrace.front.media.placeholders import PreparedMedium, expanded

IMAGE, VIDEO, START, END = 90, 91, 92, 93
SPEC = MediaSpec(
    processor="qwen_vl", settings=ProcessorSettings(), image_token=IMAGE, video_token=VIDEO
)


def medium(kind: str, *tokens: int) -> PreparedMedium:
    inputs = tuple(
        MediaInput(kind=kind, key=bytes(32), offset=0, num_tokens=n, grid=(1, 2, 2 * n))
        for n in tokens
    )
    layout: tuple[str | int, ...] = (0,)
    if kind == "video":
        layout = tuple(piece for i in range(len(tokens)) for piece in (f"<{i}>", i, "."))
    return PreparedMedium(kind=kind, inputs=inputs, layout=layout, merge=2)


def encode(text: str) -> list[int]:
    return [ord(character) for character in text]


def expand(ids: list[int], *media: PreparedMedium) -> tuple[list[int], list[int]]:
    whole, inputs = expanded(ids, media, SPEC, encode, field="prompt")
    for each in inputs:
        token = IMAGE if each.kind == "image" else VIDEO
        assert whole[each.offset : each.offset + each.num_tokens] == [token] * each.num_tokens
    return whole, [each.offset for each in inputs]


def test_a_placeholder_becomes_as_many_as_its_input_has_tokens() -> None:
    ids = [1, START, IMAGE, END, 2, START, IMAGE, END]
    whole, offsets = expand(ids, medium("image", 3), medium("image", 1))
    assert whole == [1, START, IMAGE, IMAGE, IMAGE, END, 2, START, IMAGE, END]
    assert offsets == [2, 8]


def test_a_video_s_frames_stand_between_their_texts() -> None:
    whole, offsets = expand([START, VIDEO, END], medium("video", 2, 1))
    text = [encode(f"<{i}>") for i in range(2)]
    dot = encode(".")
    assert whole == [START, *text[0], VIDEO, VIDEO, *dot, *text[1], VIDEO, *dot, END]
    assert offsets == [4, 10]


@settings(deadline=None, max_examples=100)
@given(st.data())
def test_prompts_with_all_placeholders_stay_what_they_are(data: st.DataObject) -> None:
    """MOD-15: expanding what is expanded changes nothing, whatever the order of kinds."""
    kinds = data.draw(st.lists(st.sampled_from(["image", "video", "text"]), max_size=8))
    media, ids = [], [5]
    for kind in kinds:
        if kind == "text":
            ids += [7, 8]
            continue
        counts = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
        media.append(medium(kind, *(counts[:1] if kind == "image" else counts)))
        ids += [START, IMAGE if kind == "image" else VIDEO, END]
    once = expand(ids, *media)
    assert expand(once[0], *media) == once


@pytest.mark.parametrize(
    ("ids", "media"),
    [
        ([1, 2], (medium("image", 3),)),
        ([IMAGE, IMAGE], (medium("image", 3),)),
        ([IMAGE] * 4, (medium("image", 3),)),
        ([VIDEO], (medium("image", 3),)),
        ([IMAGE, IMAGE, 1, IMAGE, IMAGE], (medium("image", 3), medium("image", 1))),
    ],
)
def test_numbers_that_do_not_fit_are_refused(
    ids: list[int], media: tuple[PreparedMedium, ...]
) -> None:
    with pytest.raises(InvalidRequest, match=r"^prompt: \d placeholders"):
        expand(ids, *media)


def test_rows_of_placeholders_are_broken_by_text() -> None:
    """Pixtral's: a break behind each row but the last, an end behind all."""
    one = MediaInput(kind="image", key=bytes(32), offset=0, num_tokens=8, grid=(1, 6, 4))
    broken = PreparedMedium(kind="image", inputs=(one,), layout=(0, "!"), row_break=";", merge=2)
    row = [IMAGE, IMAGE]
    ids, _ = expanded([1, IMAGE, 2], [broken], SPEC, encode, field="prompt")
    assert ids == [1, *row, ord(";"), *row, ord(";"), *row, ord("!"), 2]
    assert ids[1 : 1 + one.num_tokens] == [*row, ord(";"), *row, ord(";"), *row]
    again, inputs = expanded(ids, [broken], SPEC, encode, field="prompt")
    assert again == ids and inputs[0].offset == 1


def test_placeholders_without_media_are_text() -> None:
    assert expand([IMAGE, 1, VIDEO]) == ([IMAGE, 1, VIDEO], [])


def test_a_video_s_tokens_may_be_those_of_images() -> None:
    """MUL-03, MOD-15: with a mark for each, or all expanded, the same prompt."""
    spec = msgspec.structs.replace(SPEC, video_soft=IMAGE)
    media = [medium("video", 2, 1), medium("image", 3)]
    marked = [START, VIDEO, 5, IMAGE]
    whole, inputs = expanded(marked, media, spec, encode, field="prompt")
    texts = [encode(f"<{i}>") for i in range(2)]
    clip = [*texts[0], IMAGE, IMAGE, *encode("."), *texts[1], IMAGE, *encode(".")]
    assert whole == [START, *clip, 5, IMAGE, IMAGE, IMAGE]
    assert [one.num_tokens for one in inputs] == [2, 1, 3]
    assert expanded(whole, media, spec, encode, field="prompt") == (whole, inputs)
