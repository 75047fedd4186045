"""One way to pool for every dialect: texts, ids, pairs or conversations in, vectors out.

A request pools at most MAX_TEXTS texts; they share the request's place in the queue and its
deadline, and the first failure ends all. Nothing is run before everything was tokenized and
checked."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

import msgspec

from headrace.base.config.pooling import PoolingSpec
from headrace.base.errors import ContextTooLong, InvalidRequest
from headrace.base.wire.media import MediaInput
from headrace.base.wire.pooling import RowPooling
from headrace.front.client.admission_retry import run_admitted
from headrace.front.client.events import Events
from headrace.front.client.pooling import (
    Float32,
    PooledAnswer,
    behind_lead,
    finish_embedding,
    fold_pooled,
    pooling_generation,
)
from headrace.front.client.transcription import PooledSound
from headrace.front.server.conversation.context import RequestContext
from headrace.front.server.conversation.stages import measured
from headrace.front.server.http.auth import completion_id

MAX_TEXTS = 2048


class PoolInput(msgspec.Struct, frozen=True, kw_only=True):
    """One text to pool, tokenized. `second_at`: where the second text of a pair begins, 0 for a
    single one. `media`: what its placeholders stand for."""

    ids: list[int]
    second_at: int = 0
    media: tuple[MediaInput, ...] = ()


class PoolJob(msgspec.Struct, frozen=True, kw_only=True):
    """What all texts of one request share."""

    how: str
    head: bool = False
    priority: int = 0
    cache_salt: str = ""
    timeout_s: float | None = None


async def tokenized(
    context: RequestContext,
    text: str,
    *,
    field: str,
    special: bool = True,
    truncate: int | None = None,
    side: str = "right",
    longest: int = 0,
    warnings: list[str] | None = None,
) -> list[int]:
    """A text's ids; with `truncate` its first so many (-1: what the model can hold; side left: its
    last), else refused if there are more than the model can hold, or `longest` if that is more.
    `warnings` gets a sentence about what was cut off, for dialects that cut unasked."""
    services = context.services
    most = services.text.max_model_len
    limit = None if truncate is not None else max(most, longest)
    ids = await services.tokenizer.encode_async(
        text, add_special_tokens=special, max_tokens=limit, field=field
    )
    kept = shortened(ids, truncate, most=most, field=field, side=side, longest=longest)
    if warnings is not None and len(kept) < len(ids):
        which = "last" if side == "left" else "first"
        warnings.append(f"{field}: of {len(ids)} tokens only the {which} {len(kept)} were read")
    return kept


def shortened(
    ids: list[int],
    truncate: int | None,
    *,
    most: int,
    field: str,
    side: str = "right",
    longest: int = 0,
) -> list[int]:
    """Applies `truncate` on that side; ContextTooLong for what still exceeds both `most` and
    `longest`."""
    if truncate is not None:
        keep = most if truncate == -1 else truncate
        ids = ids if len(ids) <= keep else _cut(ids, keep, side)
    allowed = max(most, longest)
    if len(ids) > allowed:
        raise ContextTooLong(
            f"{field} is too long: {len(ids)} tokens > {allowed} maximum", field=field
        )
    if not ids:
        raise InvalidRequest(f"{field} is empty; at least one token is needed", field=field)
    return ids


def _cut(ids: list[int], keep: int, side: str) -> list[int]:
    """The first ids and the closing one, or the opening one and the last: encoders were trained
    with both in place."""
    if keep < 2:
        return ids[:keep]
    return [*ids[: keep - 1], ids[-1]] if side == "right" else [ids[0], *ids[1 - keep :]]


async def pooled(
    context: RequestContext, inputs: Sequence[PoolInput], job: PoolJob
) -> list[PooledAnswer]:
    """The pooled answer of each input, in order."""
    if len(inputs) > MAX_TEXTS:
        raise InvalidRequest(
            f"input: {len(inputs)} texts given, at most {MAX_TEXTS} are allowed", field="input"
        )
    if context.services.speech is not None:
        raise InvalidRequest(
            "the model writes down speech, and pools nothing: use /v1/audio/transcriptions",
            field="model",
        )
    label = completion_id("pool")
    inputs = [padded(each, context.services.text.pooling) for each in inputs]
    context.hold("tokens", sum(len(pool_input.ids) for pool_input in inputs))
    services = context.services

    async def one(number: int, pool_input: PoolInput) -> PooledAnswer:
        first = behind_lead(pool_input.ids, services.text.pooling, services.tokenizer)
        wanted = RowPooling(how=job.how, head=job.head, second_at=pool_input.second_at, first=first)
        generation = msgspec.structs.replace(
            pooling_generation(pool_input.ids, wanted),
            label=f"{label}-{number}" if number else label,
            external_id=context.external_id,
            tenant=context.tenant,
            priority=job.priority,
            cache_salt=job.cache_salt,
            deadline_s=context.deadline_s(job.timeout_s),
            media=pool_input.media,
        )
        events = services.engine.generate(generation)
        counted = measured(events, context, generation)
        return await fold_pooled(counted, num_prompt=len(pool_input.ids))

    works = ((len(each.ids), partial(one, i, each)) for i, each in enumerate(inputs))
    return await run_admitted(works, services.engine)


def pooled_sound(
    context: RequestContext, ids: list[int], sound: PooledSound, *, label: str
) -> Events:
    """The events of one sound whose labels are asked for."""
    context.hold("tokens", len(ids))
    generation = msgspec.structs.replace(
        pooling_generation(ids, sound.pooling),
        label=label,
        external_id=context.external_id,
        tenant=context.tenant,
        deadline_s=context.deadline_s(None),
        media=sound.media,
        on_queued=context.queued.set,
    )
    engine = context.retrying_engine or context.services.engine
    return measured(engine.generate(generation), context, generation)


def padded(pool_input: PoolInput, spec: PoolingSpec) -> PoolInput:
    """A text filled up to the length that the model was trained on, if it was; InvalidRequest for
    one where nothing reads texts."""
    if spec.media_alone and not pool_input.media:
        raise InvalidRequest(
            "input: text alone is given, and this server encodes images, video and sound only "
            "(--mm-encoder-only)",
            field="input",
        )
    length, token = spec.padded
    missing = length - len(pool_input.ids)
    if pool_input.media or missing <= 0:
        return pool_input
    return msgspec.structs.replace(pool_input, ids=[*pool_input.ids, *[token] * missing])


def usage_of(answers: Sequence[Counted]) -> dict[str, Any]:
    """OpenAI's usage of answers without tokens of their own."""
    prompt = sum(answer.num_prompt for answer in answers)
    cached = sum(answer.num_cached for answer in answers)
    return {
        "prompt_tokens": prompt,
        "total_tokens": prompt,
        "completion_tokens": 0,
        "prompt_tokens_details": {"cached_tokens": cached} if cached else None,
    }


def listed(
    context: RequestContext,
    model: str | None,
    data: list[dict[str, Any]],
    usage: dict[str, Any],
    *,
    kind: str,
) -> dict[str, Any]:
    """The envelope of an answer that is a list; `kind` begins its id."""
    return {
        "id": completion_id(kind),
        "object": "list",
        "created": int(time.time()),
        "model": context.services.base_name(model),
        "data": data,
        "usage": usage,
    }


class Counted(Protocol):
    """An answer of the engine, as far as usage is concerned."""

    @property
    def num_prompt(self) -> int:
        """Prompt tokens."""
        ...

    @property
    def num_cached(self) -> int:
        """Those of them that were found in the prefix cache."""
        ...


def one_vector(context: RequestContext) -> PoolingSpec:
    """The model's pooling; refused where there is a vector per token and none for a text."""
    spec = context.services.text.pooling
    if spec.how == "tokens":
        raise InvalidRequest(
            "the model has a vector for every token and none for a text; use /pooling, /score "
            "or /rerank",
            field="model",
        )
    return spec


def embeddings(
    context: RequestContext,
    answers: list[PooledAnswer],
    dimensions: int | None,
    normalize: bool | None,
) -> list[Float32]:
    """One embedding per answer."""
    spec = context.services.text.pooling
    check_dimensions(context, dimensions)
    wanted = spec.normalize if normalize is None else normalize
    return [
        finish_embedding(answer.values[0], dimensions=dimensions, normalize=wanted)
        for answer in answers
    ]


def check_dimensions(context: RequestContext, dimensions: int | None) -> None:
    spec = context.services.text.pooling
    if dimensions is None or spec.matryoshka is None:
        if dimensions is not None:
            raise InvalidRequest(
                f"dimensions: {dimensions} given; the model was not trained for shorter embeddings "
                "(its config.json has neither is_matryoshka nor matryoshka_dimensions)",
                field="dimensions",
            )
        return
    if spec.matryoshka and dimensions not in spec.matryoshka:
        known = ", ".join(str(one) for one in spec.matryoshka)
        raise InvalidRequest(
            f"dimensions: {dimensions} given; allowed: {known}", field="dimensions"
        )
