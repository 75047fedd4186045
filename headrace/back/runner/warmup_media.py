"""Made-up prompts with images and video, for models that take them: their encoder's kernels are
compiled, and its memory is measured, before a request comes."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from msgspec import msgpack
from msgspec.structs import replace

from headrace.base.wire.media import (
    KEY_BYTES,
    MEDIA_HOOK,
    MediaContent,
    MediaForm,
    MediaPayload,
    MediaSpan,
    MediaWork,
    SoundSteps,
)
from headrace.base.wire.pooling import RowPooling
from headrace.base.wire.request import RowSampling
from headrace.base.wire.step import RowStart, StepPlan

KEY = bytes(KEY_BYTES)
MOST_PATCHES = 16_384
"""Of a made-up input: as many as the runner gives to an encoder at a time."""
SMALLER = 64
"""Tokens of a further made-up input."""
SHARED = 1


def media_plans(
    forms: tuple[MediaForm, ...],
    *,
    tokens: int,
    num_groups: int,
    block_tokens: int,
    small: bool,
    generates: bool = True,
    before_decoder: bool = False,
) -> Iterator[StepPlan]:
    """For each form a step of one row, of at most `tokens` tokens, with the largest input, and one
    that ends it; of the first form then smaller ones, whose kernels may be others, the last within
    one block of the cache. `small`: inputs of one size are left out, and of others there is the
    last alone. `before_decoder`: an encoder reads them, and the decoder begins with one token."""
    for form in forms:
        if form.sides and small:
            continue
        sizes = [tokens]
        if form is forms[0]:
            sizes += [min(tokens, SMALLER), min(tokens, block_tokens)]
        if small:
            sizes = [min(tokens, block_tokens)]
        seen: set[tuple[int, ...]] = set()
        for size in sizes:
            grid = grid_of(form, size)
            shape = (*grid, min(size, form.num_tokens(grid)))
            if shape not in seen:
                seen.add(shape)
                plan = _seeing(form, size, num_groups, block_tokens, generates=generates)
                yield _read_before(plan, num_groups, block_tokens) if before_decoder else plan
                yield _end()


def under_way(forms: tuple[MediaForm, ...], tokens: int) -> dict[str, bytes]:
    """For a step's `hook_payloads`: a pass over the largest input has come half way, and rests
    while the step runs. What is made up with the next input drops it."""
    pictures = [form for form in forms if form.sound is None]
    if not pictures:
        return {}
    payload = MediaPayload(
        evicted=(KEY,),
        added=(_content(pictures[0], grid_of(pictures[0], tokens)),),
        work=(MediaWork(key=KEY, done=1, parts=2),),
    )
    return {MEDIA_HOOK: msgpack.encode(payload)}


def grid_of(form: MediaForm, tokens: int) -> tuple[int, int, int]:
    """The largest square of windows with so many tokens, or the one size there is."""
    if form.sides:
        return (1, *form.sides[0])
    if form.sound is not None:
        return (1, 1, _frames(form, form.sound, tokens))
    most = min(tokens, min(form.max_rows, MOST_PATCHES) // form.merge**2)
    side = max(1, math.isqrt(most))
    while side > 1 and form.num_tokens((1, side * form.merge, side * form.merge)) > tokens:
        side -= 1
    return (1, side * form.merge, side * form.merge)


def _frames(form: MediaForm, sound: SoundSteps, tokens: int) -> int:
    """The most frames with so many tokens; the fewest with one, if that is more."""
    frames = min(form.max_rows, MOST_PATCHES)
    while sound.tokens(frames) > tokens and sound.tokens(frames // 2) > 0:
        frames //= 2
    return frames


def _seeing(
    form: MediaForm, tokens: int, num_groups: int, block_tokens: int, *, generates: bool
) -> StepPlan:
    grid = grid_of(form, tokens)
    span = MediaSpan(kind=form.kind, key=KEY, offset=0, num_tokens=form.num_tokens(grid), grid=grid)
    payload = MediaPayload(evicted=(KEY,), added=(_content(form, grid),))
    start = RowStart(
        row=0,
        request=-1,
        tokens=np.zeros(span.num_tokens, np.int32),
        num_prompt=span.num_tokens,
        num_computed=0,
        sampling=RowSampling(temperature=0.0),
        pooling=None if generates else RowPooling(),
        media=(span,),
    )
    count = min(tokens, span.num_tokens)
    return _plan(
        starts=[start],
        **_blocks(num_groups, 1 + count // block_tokens),
        rows=np.zeros(1, np.int32),
        num_tokens=np.full(1, count, np.int32),
        num_computed=np.zeros(1, np.int32),
        sample=np.zeros(1, np.bool_),
        hook_payloads={MEDIA_HOOK: msgpack.encode(payload)},
    )


def _read_before(plan: StepPlan, num_groups: int, block_tokens: int) -> StepPlan:
    """The same of an encoder-decoder: what stands in the prompt is read ahead of it."""
    (start,) = plan.starts
    reads = start.num_prompt
    one = replace(
        start,
        tokens=start.tokens[:1],
        num_prompt=1,
        encoder=start.tokens.astype("<i4").tobytes(),
        cross_tokens=reads,
    )
    blocks = _blocks(num_groups, 1 + reads // block_tokens)
    return replace(plan, starts=[one], num_tokens=np.ones(1, np.int32), **blocks)


def _blocks(num_groups: int, columns: int) -> dict[str, np.ndarray]:
    """So many blocks of the one row in each group, of which all are one."""
    group, index = (place.ravel().astype(np.int32) for place in np.indices((num_groups, columns)))
    return {
        "block_group": group,
        "block_row": np.zeros(group.size, np.int32),
        "block_index": index,
        "block_id": np.full(group.size, SHARED, np.int32),
    }


def _content(form: MediaForm, grid: tuple[int, int, int]) -> MediaContent:
    rows = bytes(math.prod(grid) * form.row_bytes)
    return MediaContent(key=KEY, kind=form.kind, grid=grid, rows=rows)


def _end() -> StepPlan:
    payload = msgpack.encode(MediaPayload(evicted=(KEY,)))
    return _plan(ends=np.zeros(1, np.int32), hook_payloads={MEDIA_HOOK: payload})


def _plan(**fields: object) -> StepPlan:
    none = np.empty(0, np.int32)
    names = ("ends", "block_group", "block_row", "block_index", "block_id", "rows", "num_tokens")
    empty = dict.fromkeys((*names, "num_computed", "sample"), none)
    return StepPlan(step=-1, **{"starts": [], **empty, **fields})
