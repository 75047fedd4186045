"""Prompts of completions as token ids, and what a request may be told of its prompt: the text, and
each token's span in it."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, Literal

import msgspec

from headrace.base.errors import InvalidRequest
from headrace.base.wire.media import MediaInput
from headrace.front.client.context_shift import most_tokens
from headrace.front.server.conversation.context import RequestContext
from headrace.front.server.conversation.request import CompletionRequest
from headrace.front.server.conversation.resolved import truncation_of
from headrace.front.server.http.limits import Name, typed
from headrace.front.text.fim import between
from headrace.front.text.languages import languages_of
from headrace.front.text.threads import TEXT_THREADS
from headrace.front.text.tokenizer import Tokenizer

ASKS = ("return_prompt_text", "return_token_offsets", "return_mm_kwargs", "mm_payload")


class Asks(msgspec.Struct, frozen=True, kw_only=True):
    """What to tell. There are no media, so that nothing of them can be asked for."""

    return_prompt_text: bool | None = None
    return_token_offsets: bool | None = None
    return_mm_kwargs: Literal[False] | None = None
    mm_payload: Literal["none"] | None = None


def taken_out(document: Any) -> tuple[Any, Asks]:
    """The request without these fields, and what they ask for."""
    asks = typed(document, Asks)
    return {name: value for name, value in document.items() if name not in ASKS}, asks


async def prompt_facts(tokenizer: Tokenizer, ids: list[int], asks: Asks) -> dict[str, Any]:
    """The fields to add to a rendered request."""
    return await TEXT_THREADS.run(2 * len(ids), partial(_prompt_facts, tokenizer, ids, asks))


def _prompt_facts(tokenizer: Tokenizer, ids: list[int], asks: Asks) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if asks.return_prompt_text:
        fields["prompt_text"] = tokenizer.decode(ids, skip_special_tokens=False)
    if asks.return_token_offsets:
        fields["token_offsets"] = spans(tokenizer, ids)
    return fields


def spans(
    tokenizer: Tokenizer, ids: list[int], *, continues: bool = False
) -> list[tuple[int, int]]:
    """[begin, end) of each token in the text of all, control tokens included, in code points. A
    character that several tokens make belongs to each of them. `continues`: they stand behind
    others, so that a first space stays."""
    data = [tokenizer.token_bytes(i) for i in ids]
    begun = [0, *accumulate(sum(byte & 0xC0 != 0x80 for byte in one) for one in data)]
    ranges = [
        (begin - bool(one and one[0] & 0xC0 == 0x80), end)
        for one, (begin, end) in zip(data, pairwise(begun), strict=True)
    ]
    whole = b"".join(data[:2])
    cut = int(tokenizer.drop_first_space and not continues and whole.startswith(b" "))
    return [(max(0, begin - cut), max(0, end - cut)) for begin, end in ranges]


async def prompt_of(
    context: RequestContext, request: CompletionRequest, prompt: str | list[int] | SentVectors
) -> Prompt:
    """One prompt of a completion as ids, with its text where it is echoed."""
    if isinstance(prompt, SentVectors):
        return await _of_vectors(context, request, prompt)
    tokenizer, text = context.services.tokenizer, context.services.text
    longest = text.encoder_tokens or text.max_model_len
    if text.encoder_tokens:
        _check_encoder(request)
    elif request.source_language or request.target_language:
        field = "source_language" if request.source_language else "target_language"
        raise InvalidRequest(f"{field}: this model is no translator", field=field)
    if isinstance(prompt, str):
        special = True if request.add_special_tokens is None else request.add_special_tokens
        limit = None
        if request.truncate_prompt_tokens is None:
            limit = most_tokens(longest, shifts=context.services.server.context_shift)
        ids = await tokenizer.encode_async(prompt, add_special_tokens=special, max_tokens=limit)
    else:
        tokenizer.check_ids(prompt, field="prompt")
        ids = prompt
    if (truncation := truncation_of(request)) is not None:
        ids = truncation(ids, max_model_len=longest)
    if request.source_language or request.target_language:
        source, target = request.source_language, request.target_language
        ids = languages_of(tokenizer).prompt(ids, source=source, target=target)
    if request.suffix:
        tokenizer.check_length(request.suffix, longest)
        ids = between(tokenizer, ids, request.suffix)
    prompt_text = (
        tokenizer.decode(ids, skip_special_tokens=False) if request.return_prompt_text else None
    )
    if not request.echo:
        return Prompt(ids=ids, control_text=prompt_text)
    whole = prompt if isinstance(prompt, str) and truncation is None else None
    echoed = tokenizer.decode(ids) if whole is None else whole
    first = tokenizer.token_text(ids[0]) if ids else ""
    return Prompt(ids=ids, text=echoed, first=first, control_text=prompt_text)


async def _of_vectors(
    context: RequestContext, request: CompletionRequest, prompt: SentVectors
) -> Prompt:
    """A prompt of vectors; InvalidRequest for what needs its text or its tokens."""
    preparer = context.services.media
    if not context.services.text.prompt_width:
        raise InvalidRequest(
            "prompt_embeds: not accepted: --enable-prompt-embeds is off", field="prompt_embeds"
        )
    for field in ("echo", "suffix", "truncate_prompt_tokens", "source_language", "target_language"):
        if getattr(request, field):
            raise InvalidRequest(f"{field}: does not go with prompt_embeds", field=field)
    from headrace.front.media.prompt_vectors import VectorsPreparer

    assert isinstance(preparer, VectorsPreparer), preparer
    ids, media = await asyncio.to_thread(preparer.prompt, prompt.content, prompt.field)
    return Prompt(ids=ids, media=media)


def _check_encoder(request: CompletionRequest) -> None:
    """Refuses what is said of a prompt that the model continues: this one is read by an encoder."""
    for field, asked in (("echo", request.echo), ("suffix", request.suffix)):
        if asked:
            raise InvalidRequest(
                f"{field}: does not go with an encoder-decoder, whose prompt its encoder reads",
                field=field,
            )


MAX_PROMPTS = 1024


MAX_CHOICES = 4096


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One prompt. `text` and `first` (the text of its first token) are filled only where they are
    echoed, `control_text` (its text with control tokens) where that is asked for. `media`: what its
    ids stand for where it came as vectors."""

    ids: list[int]
    text: str = ""
    first: str = ""
    control_text: str | None = None
    media: tuple[MediaInput, ...] = ()


@dataclass(frozen=True, kw_only=True)
class SentVectors:
    """A prompt that came as vectors: a file in base64."""

    content: str
    field: str


def prompts_of(request: CompletionRequest) -> list[str | list[int] | SentVectors]:
    """The prompts of the request, each a text, a list of ids or vectors; InvalidRequest for a
    mixture of texts and ids, and for too many."""
    sent = request.prompt_embeds
    vectors = [
        SentVectors(
            content=one, field="prompt_embeds" if isinstance(sent, str) else f"prompt_embeds[{i}]"
        )
        for i, one in enumerate([sent] if isinstance(sent, str) else sent or [])
    ]
    if request.prompt is None and not vectors:
        raise InvalidRequest("prompt: this field is required", field="prompt")
    texts = _texts_of(request.prompt) if request.prompt or not vectors else []
    prompts = [*vectors, *texts]
    _check_count(len(prompts), max(request.n or 1, request.best_of or 1))
    return prompts


def _texts_of(prompt: Any) -> list[str | list[int]]:
    if isinstance(prompt, str):
        return [prompt]
    if prompt and isinstance(prompt[0], int):
        with suppress(msgspec.ValidationError):
            return [msgspec.convert(prompt, list[int])]
    if not (all(isinstance(e, str) for e in prompt) or all(isinstance(e, list) for e in prompt)):
        raise InvalidRequest(
            "prompt: one text, one list of ids, or a list of only texts or only lists",
            field="prompt",
        )
    return msgspec.convert(prompt, list[str | list[int]])


def _check_count(count: int, choices: int) -> None:
    if count > MAX_PROMPTS:
        raise InvalidRequest(
            f"prompt: {count} prompts given, {MAX_PROMPTS} allowed", field="prompt"
        )
    if count * choices > MAX_CHOICES:
        raise InvalidRequest(
            f"prompt: {count} prompts with {choices} choices each; {MAX_CHOICES} in all allowed",
            field="prompt",
        )


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A raw prompt."""

    prompt: str
    model: Name | None = None
    add_special_tokens: bool = True
    return_token_strs: bool = False
