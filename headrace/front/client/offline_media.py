"""Images and video of `LLM`: in conversations, and beside plain prompts."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar, Unpack

import numpy as np

from headrace.base.config.resolved import TextSpec
from headrace.base.errors import InvalidRequest
from headrace.base.wire.media import MediaInput
from headrace.front.text.chat import ChatTemplate, RenderOptions
from headrace.front.text.media_parts import has_media
from headrace.front.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from headrace.front.media.parts import MediaPart
    from headrace.front.media.prompt_vectors import Preparer

T = TypeVar("T")
Wait = Callable[[Coroutine[Any, Any, T]], T]
Encoded = tuple[list[int], tuple[MediaInput, ...]]


class PromptWithMedia(TypedDict, total=False):
    """A prompt with placeholders: `prompt` or `prompt_token_ids`, and in `multi_modal_data` an
    `image`, `video` or `audio` or a list of them (bytes, Pillow images, uint8 arrays,
    addresses)."""

    prompt: str
    prompt_token_ids: list[int]
    prompt_embeds: Any
    multi_modal_data: dict[str, Any]
    mm_processor_kwargs: dict[str, Any]


class OfflineMedia:
    """Prompts with media, for one model; the processes are started when they are first needed."""

    def __init__(self, text: TextSpec, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        self._text, self._tokenizer, self._template = text, tokenizer, template
        self._preparer: Preparer | None = None

    def rendered(
        self,
        messages: Sequence[dict[str, Any]],
        wait: Callable[[Coroutine[Any, Any, Any]], Any],
        **options: Unpack[RenderOptions],
    ) -> Encoded:
        """A conversation as ids, and its media."""
        takes = self._text.media is not None or self._text.prompt_width
        if not (takes and has_media(messages)):
            return self._template.render(messages, **options), ()
        from headrace.front.media.preparation import MediaRequest

        preparer = self._prepares()
        prepared = wait(preparer.prepare(messages, MediaRequest()))
        ids = self._template.render(prepared.messages, **options)
        return preparer.expand(ids, prepared.media, field="messages")

    def encoded(
        self,
        prompt: str | list[int] | PromptWithMedia,
        wait: Callable[[Coroutine[Any, Any, Any]], Any],
        max_tokens: int,
    ) -> Encoded:
        """A prompt as ids, and its media."""
        if isinstance(prompt, str):
            return self._tokenizer.encode(prompt, max_tokens=max_tokens), ()
        if isinstance(prompt, list):
            return prompt, ()
        if (vectors := prompt.get("prompt_embeds")) is not None:
            return self._of_vectors(vectors)
        ids = prompt.get("prompt_token_ids")
        if ids is None:
            special = self._text.media is None or not self._text.media.alone
            ids = self._tokenizer.encode(
                prompt.get("prompt", ""), add_special_tokens=special, max_tokens=max_tokens
            )
        data = prompt.get("multi_modal_data")
        if not data:
            return ids, ()
        from headrace.front.media.preparation import MediaRequest

        preparer = self._prepares()
        request = MediaRequest(arguments=prompt.get("mm_processor_kwargs"))
        media = wait(preparer.media_of(list(_parts(data)), request))
        return preparer.expand(ids, [one for each in media for one in each], field="prompt")

    def _of_vectors(self, vectors: Any) -> Encoded:
        """A prompt of vectors: an array [tokens, width], or a tensor on the CPU."""
        if not self._text.prompt_width:
            raise InvalidRequest(
                "prompt_embeds: not accepted: enable_prompt_embeds is off", field="prompt_embeds"
            )
        from headrace.front.media.prompt_vectors import VectorsPreparer

        preparer = self._prepares()
        assert isinstance(preparer, VectorsPreparer), preparer
        return preparer.prompt(np.asarray(vectors, np.float32), "prompt_embeds")

    def close(self) -> None:
        """Ends the processes."""
        if self._preparer is not None:
            self._preparer.close()

    def _prepares(self) -> Preparer:
        if self._text.media is None and not self._text.prompt_width:
            raise InvalidRequest(
                "multi_modal_data: not accepted by this model (only text is)",
                field="multi_modal_data",
            )
        if self._preparer is None:
            from headrace.front.media.prompt_vectors import preparer_of

            self._preparer = preparer_of(self._text, self._tokenizer)
        assert self._preparer is not None, "the model takes something"
        return self._preparer


def _parts(data: dict[str, Any]) -> list[MediaPart]:
    from headrace.front.media.parts import MediaPart

    parts = []
    for kind, value in data.items():
        field = f"multi_modal_data.{kind}"
        if kind not in ("image", "video", "audio"):
            raise InvalidRequest(
                f"{field}: not accepted; allowed: image, video, audio", field=field
            )
        for one in _each(kind, value):
            where = {"address": one} if isinstance(one, str) else {"content": one}
            parts.append(MediaPart(kind=kind, field=field, **where))
    return parts


def _each(kind: str, value: Any) -> list[Any]:
    """One medium or several; pictures in a row are the frames of one video."""
    if not isinstance(value, list | tuple):
        return [value]
    if kind in ("image", "audio"):
        return list(value)
    whole = all(
        isinstance(one, str | bytes | list | tuple)
        or (isinstance(one, np.ndarray) and one.ndim == 4)
        for one in value
    )
    return list(value) if whole else [list(value)]
