"""Whether a request's images, video, audio and spectrograms are what the model takes, and where its
placeholders are. The front made them; this is the last line before the device."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import numpy as np

from headrace.base.errors import ContextTooLong, InvalidRequest
from headrace.base.wire.media import (
    KEY_BYTES,
    MARK_BYTES,
    MAX_STEP_S,
    MAX_TIME_POSITIONS,
    PROMPT,
    MediaCut,
    MediaForm,
    MediaInput,
    MediaSpan,
    encoder_outputs,
)
from headrace.base.wire.request import EngineRequest
from headrace.base.wire.step import WorkerFacts
from headrace.core.request import TOKEN_BYTES

MAX_INPUTS = 4096
MARK_AT_BYTES = 4


def check_media(request: EngineRequest, facts: WorkerFacts) -> None:
    """Refuses inputs of a kind, shape or size that the model does not take, or that do not stand
    in order within the prompt, which an encoder may read; with the field, what was given and what
    is allowed."""
    prompt = request.encoder if facts.encoder_tokens else request.prompt
    num_prompt = len(prompt) // TOKEN_BYTES
    forms = {form.kind: form for form in facts.media}
    if len(request.media) > MAX_INPUTS:
        raise _wrong("media", f"{len(request.media)} inputs, at most {MAX_INPUTS} are allowed")
    if request.sampling.prompt_logprobs is not None and PROMPT in [m.kind for m in request.media]:
        raise InvalidRequest(
            "prompt_logprobs: does not go with vectors in the place of tokens",
            field="prompt_logprobs",
        )
    end = 0
    for index, one in enumerate(request.media):
        field = f"media[{index}]"
        form = forms.get(one.kind)
        if form is None:
            takes = ", ".join(forms) or "none"
            raise _wrong(f"{field}.kind", f"{one.kind!r}; kinds this model takes: {takes}")
        if one.embedded:
            _check_embedded(field, one, form, facts.media_width)
        else:
            _check_shape(field, one, form)
        if one.offset < end:
            raise _wrong(f"{field}.offset", f"{one.offset}, the input before it ends at {end}")
        end = one.offset + one.num_tokens
        if end > num_prompt and not form.adds:
            raise _wrong(
                f"{field}.offset",
                f"{one.offset}: its {one.num_tokens} tokens end behind the prompt's {num_prompt}",
            )
    _check_keys(request.media)
    _check_parts(request.media, forms)
    total = sum(one.num_tokens for one in whole_inputs(request.media).values())
    if total > facts.media_tokens:
        raise _wrong(
            "media",
            f"the inputs have {total} tokens together, the encoder cache holds "
            f"{facts.media_tokens}: send fewer or smaller ones",
        )


def uncut_spans(
    request: EngineRequest, facts: WorkerFacts, step_tokens: int
) -> tuple[tuple[int, int], ...]:
    """The first token of each span of a prompt that one step must compute whole, as its tokens see
    each other, and the one behind its last; InvalidRequest where a step takes fewer tokens."""
    forms = {form.kind: form for form in facts.media}
    num_prompt = len(request.prompt) // TOKEN_BYTES
    pooled = request.pooling is not None and facts.pools_whole
    if pooled or any(form.mutual == "prompt" for form in facts.media):
        spans: tuple[tuple[int, int], ...] = ((0, num_prompt),)
    else:
        inputs = (one for one in request.media if forms[one.kind].mutual)
        spans = tuple((one.offset, one.offset + one.num_tokens) for one in inputs)
    longest = max((end - begin for begin, end in spans), default=0)
    if longest > step_tokens:
        raise ContextTooLong(
            f"{longest} tokens that see each other are computed in one step, which takes "
            f"{step_tokens} tokens at most: send less, or serve with --max-step-tokens {longest}",
            field="prompt",
        )
    return spans


def _check_shape(field: str, one: MediaInput, form: MediaForm) -> None:
    if len(one.key) != KEY_BYTES:
        raise _wrong(f"{field}.key", f"{len(one.key)} bytes, it has {KEY_BYTES}")
    if not 0.0 <= one.step_s <= MAX_STEP_S:
        raise _wrong(f"{field}.step_s", f"{one.step_s}, allowed is 0 .. {MAX_STEP_S:g}")
    t, h, w = one.grid
    num_rows = t * h * w
    if min(one.grid) < 1 or h % form.merge or w % form.merge:
        raise _wrong(
            f"{field}.grid",
            f"{one.grid}: t, h and w are at least 1, h and w multiples of {form.merge}",
        )
    if num_rows > form.max_rows or t > form.max_t:
        raise _wrong(
            f"{field}.grid",
            f"{one.grid}: {num_rows} patches in {t} steps, at most {form.max_rows} in "
            f"{form.max_t} are allowed",
        )
    if form.sides and (h, w) not in form.sides:
        raise _wrong(f"{field}.grid", f"{one.grid}, allowed for h and w are {form.sides}")
    positions = (t - 1) * form.positions_per_s * one.step_s
    if positions > MAX_TIME_POSITIONS:
        raise _wrong(
            f"{field}.step_s",
            f"{one.step_s}: {t} steps so far apart take {positions:.0f} positions, at most "
            f"{MAX_TIME_POSITIONS} are allowed",
        )
    if one.cut is not None and one.cut.kept:
        _check_kept(field, one.cut, num_rows // form.merge**2, form)
    elif one.cut is not None:
        if form.packing is None:
            raise _wrong(f"{field}.cut", "set; this model shows all of an input")
        if problem := form.packing.problem(one.grid, form.merge, one.cut):
            raise _wrong(f"{field}.cut", problem)
    if one.marks and not (form.adds and len(one.marks) == MARK_BYTES * one.num_tokens):
        raise _wrong(
            f"{field}.marks",
            f"{len(one.marks)} bytes, none or {MARK_BYTES} for each token are allowed, and none "
            "where tokens depend on what follows",
        )
    num_tokens = form.num_tokens(one.grid, one.cut)
    if not (one.first >= 0 and 1 <= one.num_tokens <= num_tokens - one.first):
        raise _wrong(
            f"{field}.num_tokens",
            f"{one.num_tokens} behind {one.first}, its grid makes {num_tokens}",
        )
    if one.num_tokens != num_tokens and (form.breaks or form.adds or form.mutual or one.cut):
        raise _wrong(f"{field}.num_tokens", f"{one.num_tokens}, its grid makes {num_tokens}")
    needed = 0 if one.first or one.unsent else num_rows * form.row_bytes
    if len(one.rows) != needed:
        raise _wrong(
            f"{field}.rows",
            f"{len(one.rows)} bytes, {needed} are needed: {num_rows} patches of {form.row_bytes} "
            "with the first part of an input, none with the others",
        )


def _check_embedded(field: str, one: MediaInput, form: MediaForm, width: int) -> None:
    """Of an input that comes as vectors."""
    if form.adds or (form.packing is not None and form.packing.marks):
        raise _wrong(f"{field}.embedded", "true; this model takes no vectors in place of inputs")
    if len(one.key) != KEY_BYTES:
        raise _wrong(f"{field}.key", f"{len(one.key)} bytes, it has {KEY_BYTES}")
    t, h, w = one.grid
    if min(one.grid) < 1 or h % form.merge or w % form.merge or t * h * w > form.max_rows:
        raise _wrong(
            f"{field}.grid",
            f"{one.grid}: t, h and w are at least 1, h and w multiples of {form.merge}, their "
            f"product at most {form.max_rows}",
        )
    tokens = t * h * w if form.sound is not None else form.num_tokens(one.grid)
    if form.sound is not None and form.breaks:
        raise _wrong(f"{field}.embedded", "true; this model's sounds have marks between tokens")
    if one.first or one.cut or one.marks or one.step_s or one.num_tokens != tokens:
        raise _wrong(
            f"{field}.num_tokens",
            f"{one.num_tokens}, a grid of {one.grid} makes {tokens}: send the grid with vectors, "
            "or other numbers of them",
        )
    vectors = form.num_rows(one.grid) if form.sound is None else tokens
    if len(one.rows) != 4 * vectors * width:
        numbers = len(one.rows) / (4 * vectors)
        raise _wrong(
            f"{field}.rows", f"vectors of {numbers:g} numbers; those of this model have {width}"
        )


def _check_kept(field: str, cut: MediaCut, windows: int, form: MediaForm) -> None:
    if not form.prunes:
        raise _wrong(f"{field}.cut.kept", "set; this model shows all of an input")
    spare = 8 * len(cut.kept) - windows
    bits = int.from_bytes(cut.kept, "big")
    if not 0 <= spare < 8 or bits & ((1 << spare) - 1) or not bits or cut.columns or cut.tail:
        raise _wrong(f"{field}.cut.kept", f"{windows} bits are needed, one of them set")


def _check_keys(media: tuple[MediaInput, ...]) -> None:
    """One key stands for one content."""
    grids: dict[bytes, tuple[str, tuple[int, int, int]]] = {}
    for index, one in enumerate(media):
        shape = (one.kind, one.grid)
        if grids.setdefault(one.key, shape) != shape:
            raise _wrong(f"media[{index}].key", "the same as that of an input of another shape")


def _check_parts(media: tuple[MediaInput, ...], forms: Mapping[str, MediaForm]) -> None:
    """Parts of an input follow each other to its end."""
    reached: dict[bytes, int] = {}
    for index, one in enumerate(media):
        if one.first and one.first != reached.get(one.key):
            before = reached.get(one.key, 0)
            raise _wrong(f"media[{index}].first", f"{one.first}, the part before ends at {before}")
        reached[one.key] = one.first + one.num_tokens
    for index, one in enumerate(media):
        num_tokens = forms[one.kind].num_tokens(one.grid, one.cut)
        if reached[one.key] != num_tokens:
            raise _wrong(
                f"media[{index}].num_tokens",
                f"{reached[one.key]} in all its parts, its grid makes {num_tokens}",
            )


def whole_inputs(media: tuple[MediaInput, ...]) -> dict[bytes, MediaInput]:
    """The inputs by key, each with its content and the tokens of all its parts."""
    whole: dict[bytes, MediaInput] = {}
    for one in media:
        before = whole.get(one.key)
        if before is None:
            whole[one.key] = one
        elif before.num_tokens < one.first + one.num_tokens:
            tokens = one.first + one.num_tokens
            whole[one.key] = msgspec.structs.replace(before, num_tokens=tokens)
    return whole


def _wrong(field: str, what: str) -> InvalidRequest:
    return InvalidRequest(f"{field} is {what}", field=field)


def media_mark(media: tuple[MediaSpan, ...], start: int, end: int) -> bytes:
    """What stands for the inputs with tokens at positions start .. end-1, beside these tokens, in
    the hash of a block: of each its place relative to `start` and its key, or the mark of its last
    token there."""
    return b"".join(
        (one.offset - one.first - start).to_bytes(MARK_AT_BYTES, "little", signed=True)
        + one.key_before(end)
        for one in media
        if one.offset < end and one.offset + one.num_tokens > start
    )


def check_spectrogram(encoder: bytes, shape: tuple[int, ...]) -> None:
    """Refuses what is no spectrogram of this shape (WorkerFacts.spectrogram)."""
    bands, frames = shape[:2]
    if not encoder:
        raise InvalidRequest(
            "the model reads speech, not text: ask by /v1/audio/transcriptions", field="prompt"
        )
    count, rest = divmod(len(encoder), 4 * bands)
    if len(shape) > 2:
        if rest or count > frames or encoder_outputs(shape, count) < 1:
            raise InvalidRequest(
                f"a sound of {len(encoder)} bytes; frames of {4 * bands} bytes are needed, at most "
                f"{frames}, and enough for one output",
                field="file",
            )
    elif len(encoder) != 4 * bands * frames:
        raise InvalidRequest(
            f"a spectrogram of {len(encoder)} bytes; {bands} bands of {frames} frames take "
            f"{4 * bands * frames}",
            field="file",
        )
    if not np.isfinite(np.frombuffer(encoder, "<f4")).all():
        raise InvalidRequest("the spectrogram has values that are not finite", field="file")
