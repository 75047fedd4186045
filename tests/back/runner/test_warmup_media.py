"""The made-up inputs of a start: the largest that a form allows, within the tokens of a step."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from headrace.back.runner.warmup_media import grid_of, media_plans
from headrace.base.wire.media import MEDIA_HOOK, MediaForm, MediaPayload

ANY = MediaForm(kind="image", row_bytes=588, patch=14, merge=2)
ROWS = MediaForm(kind="image", row_bytes=768, patch=16, breaks=1)
FIXED = MediaForm(kind="image", row_bytes=588, patch=14, sides=((24, 24),))


@pytest.mark.parametrize(
    ("form", "tokens", "grid"),
    [
        (ANY, 1, (1, 2, 2)),
        (ANY, 16, (1, 8, 8)),
        (ANY, 1 << 20, (1, 128, 128)),
        (ROWS, 11, (1, 3, 3)),
        (ROWS, 10, (1, 2, 2)),
        (FIXED, 16, (1, 24, 24)),
    ],
)
def test_the_largest_input(form: MediaForm, tokens: int, grid: tuple[int, int, int]) -> None:
    assert grid_of(form, tokens) == grid


def test_a_plan_brings_its_pixels_and_another_takes_them_back() -> None:
    seen, end = media_plans((ANY, FIXED), tokens=16, num_groups=2, block_tokens=16, small=True)
    (start,) = seen.starts
    assert start.tokens.size == start.media[0].num_tokens == seen.num_tokens[0] == 16
    payload = msgspec.msgpack.decode(seen.hook_payloads[MEDIA_HOOK], type=MediaPayload)
    assert len(payload.added[0].rows) == 64 * 588
    assert list(zip(seen.block_group.tolist(), seen.block_index.tolist(), strict=True)) == [
        (group, index) for group in (0, 1) for index in (0, 1)
    ]
    gone = msgspec.msgpack.decode(end.hook_payloads[MEDIA_HOOK], type=MediaPayload)
    assert gone.evicted == (start.media[0].key,) and np.array_equal(end.ends, [0])


def test_an_input_longer_than_a_step_is_reached_by_its_first_chunk() -> None:
    plans = list(media_plans((FIXED,), tokens=100, num_groups=1, block_tokens=16, small=False))
    assert plans[0].num_tokens.tolist() == [100] and plans[0].starts[0].num_prompt == 576
    assert plans[-2].num_tokens.tolist() == [16]  # the last within one block


def test_smaller_inputs_follow() -> None:
    plans = list(media_plans((ANY,), tokens=1024, num_groups=1, block_tokens=16, small=False))
    assert [plan.num_tokens.tolist() for plan in plans[::2]] == [[1024], [64], [16]]
