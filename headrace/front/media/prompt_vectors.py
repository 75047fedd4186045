"""Vectors in place of a prompt's tokens (vLLM's `prompt_embeds`): one for each token, as they enter
the model's first layer. In a completion they are the prompt; in a chat a part of a message,

    {"type": "prompt_embeds", "data": FILE}        a file in base64 (tensors.py)

around which the template stands as around text. The prompt's ids have a placeholder for each; what
stands there is an input of the kind PROMPT, as an image is one (base/wire/media.py).
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from typing import Any, TypeAlias

import msgspec
import numpy as np

from headrace.base.config.resolved import TextSpec
from headrace.base.errors import ContextTooLong, InvalidRequest
from headrace.base.wire.media import MAX_ROWS, PROMPT, MediaInput
from headrace.front.media.embeds import vectors_of
from headrace.front.media.parts import MediaPart, check_role
from headrace.front.media.placeholders import PreparedMedium
from headrace.front.media.preparation import MediaPreparer, MediaRequest, PreparedChat
from headrace.front.text.media_parts import NO_TOKEN, VECTORS_PART, MediaMark
from headrace.front.text.tokenizer import VECTORS, Tokenizer

Prompt: TypeAlias = tuple[list[int], tuple[MediaInput, ...]]
_STAND_INS = ("pad_token", "unk_token", "bos_token")
"""Tokens whose id stands where vectors do, the first that the vocabulary has: penalties see it."""


class VectorsPreparer:
    """Takes vectors of `width` numbers, at most `most_tokens` in a prompt, and what `others`
    takes, if there is anything."""

    def __init__(
        self,
        others: MediaPreparer | None,
        tokenizer: Tokenizer,
        *,
        width: int,
        most_tokens: int,
    ) -> None:
        self._others = others
        self._width, self._most = width, min(most_tokens, MAX_ROWS)
        ids = [tokenizer.special_id(name) for name in _STAND_INS]
        self._stand_in = next((i for i in ids if i is not None), 0)

    def prompt(self, content: Any, field: str) -> Prompt:
        """A prompt of vectors alone: a file, or an array of offline use."""
        medium = self._medium(content, field)
        return [self._stand_in] * medium.inputs[0].num_tokens, medium.inputs

    async def prepare(
        self, messages: Sequence[dict[str, Any]], request: MediaRequest
    ) -> PreparedChat:
        """See MediaPreparer: of every part with vectors too."""
        marked = [dict(message) for message in messages]
        vectors: list[PreparedMedium] = []
        for i, message in enumerate(marked):
            content = message.get("content")
            if not isinstance(content, list):
                continue
            message["content"] = content = list(content)
            for j, part in enumerate(content):
                if isinstance(part, dict) and part.get("type") == VECTORS_PART:
                    field = f"messages[{i}].content[{j}]"
                    check_role(message, field)
                    data = part.get("data"), f"{field}.data"
                    vectors.append(await asyncio.to_thread(self._medium, *data))
                    self._check_total(vectors, field)
                    content[j] = MediaMark(PROMPT, VECTORS)
        if self._others is None:
            return PreparedChat(messages=marked, media=vectors)
        prepared = await self._others.prepare(marked, request)
        return PreparedChat(messages=prepared.messages, media=[*prepared.media, *vectors])

    async def media_of(
        self, parts: Sequence[MediaPart], request: MediaRequest
    ) -> list[list[PreparedMedium]]:
        """See MediaPreparer."""
        if self._others is None:
            field = parts[0].field if parts else "media"
            raise InvalidRequest(f"{field}: this model takes no {parts[0].kind}", field=field)
        return await self._others.media_of(parts, request)

    def expand(self, ids: list[int], media: Sequence[PreparedMedium], *, field: str) -> Prompt:
        """See MediaPreparer: NO_TOKEN among the ids is a place of vectors, in their order."""
        others = [one for one in media if one.kind != PROMPT]
        inputs: tuple[MediaInput, ...] = ()
        if self._others is not None and others:
            ids, inputs = self._others.expand(ids, others, field=field)
        waiting = [one.inputs[0] for one in media if one.kind == PROMPT]
        if ids.count(NO_TOKEN) != len(waiting):
            raise InvalidRequest(
                f"{field}: the chat template renders {ids.count(NO_TOKEN)} of {len(waiting)} parts "
                "with vectors",
                field=field,
            )
        return _with_vectors(ids, list(inputs), waiting, self._stand_in)

    def close(self) -> None:
        """Ends the processes."""
        if self._others is not None:
            self._others.close()

    def _medium(self, content: Any, field: str) -> PreparedMedium:
        row_bytes = 4 * self._width
        vectors_NE = vectors_of(
            content, field, most_rows=self._most, most_bytes=self._most * row_bytes
        )
        if vectors_NE.shape[1] != self._width:
            raise InvalidRequest(
                f"{field}: vectors of {vectors_NE.shape[1]} numbers; those of this model have "
                f"{self._width}",
                field=field,
            )
        return _medium_of(vectors_NE)

    def _check_total(self, media: Sequence[PreparedMedium], field: str) -> None:
        total = sum(one.num_placeholders for one in media)
        if total > self._most:
            raise ContextTooLong(
                f"prompt is too long: its vectors alone stand for {total} tokens > {self._most} "
                "maximum",
                field=field,
            )


Preparer: TypeAlias = MediaPreparer | VectorsPreparer


def preparer_of(text: TextSpec, tokenizer: Tokenizer) -> Preparer | None:
    """What prepares all that the model takes beside text; None: it takes nothing."""
    media = None if text.media is None else MediaPreparer(text.media, tokenizer)
    if not text.prompt_width:
        return media
    sizes = {"width": text.prompt_width, "most_tokens": text.max_model_len}
    return VectorsPreparer(media, tokenizer, **sizes)


def _medium_of(vectors_NE: np.ndarray) -> PreparedMedium:
    count, rows = vectors_NE.shape[0], vectors_NE.tobytes()
    one = MediaInput(
        kind=PROMPT,
        key=hashlib.sha256(f"vectors {vectors_NE.shape}".encode() + rows).digest(),
        offset=0,
        num_tokens=count,
        grid=(1, 1, count),
        rows=rows,
    )
    return PreparedMedium(kind=PROMPT, inputs=(one,), layout=(0,))


def _with_vectors(
    ids: list[int], inputs: list[MediaInput], waiting: list[MediaInput], stand_in: int
) -> Prompt:
    """The prompt with as many placeholders for each NO_TOKEN as there are vectors, and all inputs
    at their offsets."""
    whole: list[int] = []
    placed: list[MediaInput] = []
    for position, token in enumerate(ids):
        while inputs and inputs[0].offset == position:
            placed.append(msgspec.structs.replace(inputs.pop(0), offset=len(whole)))
        if token != NO_TOKEN:
            whole.append(token)
            continue
        vectors = waiting.pop(0)
        placed.append(msgspec.structs.replace(vectors, offset=len(whole)))
        whole += [stand_in] * vectors.num_tokens
    return whole, tuple(placed)
