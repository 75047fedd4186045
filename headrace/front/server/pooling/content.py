"""Queries, documents and inputs as they are sent: a text, an object, or the parts of a message.

Every shape is read and checked for every model. Texts are what all of them take; another medium is
refused by its place in the request where the model takes text only, on both sides alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from headrace.base.errors import InvalidRequest
from headrace.front.server.conversation.context import RequestContext
from headrace.front.server.conversation.media import media_request
from headrace.front.server.conversation.pooling import PoolInput, shortened
from headrace.front.server.pooling.schema import Parts, PoolingContent, Sent
from headrace.front.text.chat import parts_text
from headrace.front.text.media_parts import has_media

Content = str | PoolingContent


def sent_of(content: Content, field: str, context: RequestContext) -> Sent:
    """A query or document: its text, whose parts are joined by line breaks, or, of models that see,
    the parts of a message with media in it."""
    if isinstance(content, str):
        return content
    named = [name for name in ("text", "content", "image") if getattr(content, name) is not None]
    if len(named) != 1:
        raise InvalidRequest(
            f"{field}: exactly one of text, content and image is needed", field=field
        )
    sees = context.services.media is not None
    if content.image is not None:
        if not sees:
            raise InvalidRequest(
                f"{field}.image: images are not accepted by this model (only text is)",
                field=f"{field}.image",
            )
        image = {"type": "image_url", "image_url": {"url": content.image}}
        return Parts(parts=(image,), field=field)
    inside = content.text if content.content is None else content.content
    if sees and has_media([{"content": inside}]):
        assert isinstance(inside, list)
        return Parts(parts=tuple(inside), field=field)
    return parts_text(inside, f"{field}.{named[0]}")


def sent_side(contents: Content | list[Content], field: str, context: RequestContext) -> list[Sent]:
    """One side."""
    if isinstance(contents, list):
        return [sent_of(one, f"{field}[{i}]", context) for i, one in enumerate(contents)]
    return [sent_of(contents, field, context)]


def only_texts(sent: Sequence[Sent]) -> list[str]:
    """For what takes no media: refused by their place."""
    texts = []
    for one in sent:
        if isinstance(one, Parts):
            raise InvalidRequest(
                f"{one.field}: images and video are not accepted by this way of scoring (only text "
                "is)",
                field=one.field,
            )
        texts.append(one)
    return texts


async def pool_input_of(context: RequestContext, sent: Parts) -> PoolInput:
    """The prompt of a content with media: what the checkpoint puts around an image if it says so,
    else a message of the user through the chat template."""
    services = context.services
    assert services.media is not None, "models that see alone have parts"
    late = services.text.pooling.late
    form = "" if late is None else late.image_form
    form = form or services.text.pooling.image_form
    try:
        prepared = await services.media.prepare(
            [{"role": "user", "content": list(sent.parts)}], media_request(context)
        )
        if form:
            _check_alone(sent, len(prepared.media))
            special = late is not None and late.adds_special
            ids = services.tokenizer.encode(form, add_special_tokens=special)
        else:
            ids = await services.template.render_async(
                prepared.messages, add_generation_prompt=True
            )
        ids, media = services.media.expand(ids, prepared.media, field=sent.field)
    except InvalidRequest as error:
        message = error.message.replace("messages[0].content", f"{sent.field}.content")
        raise type(error)(message, field=sent.field) from None
    ids = shortened(ids, None, most=services.text.max_model_len, field=sent.field)
    return PoolInput(ids=ids, media=media)


async def pair_input_of(context: RequestContext, query: str, sent: Parts) -> PoolInput:
    """A query and a document with an image, which stands before both texts, of models that judge
    them in one step."""
    services = context.services
    form = services.text.pooling.pair
    seen = services.text.media
    if services.media is None or seen is None or seen.ahead is None or form is None:
        only_texts([sent])
        raise AssertionError("what takes no media was refused")
    try:
        prepared = await services.media.prepare(
            [{"role": "user", "content": list(sent.parts)}], media_request(context)
        )
        text = parts_text(prepared.messages[0]["content"], f"{sent.field}.content")
        ids = services.tokenizer.encode_plain(f" {form[0]}{query}{form[1]}{text}")
        ids, media = services.media.expand(ids, prepared.media, field=sent.field)
    except InvalidRequest as error:
        message = error.message.replace("messages[0].content", f"{sent.field}.content")
        raise type(error)(message, field=sent.field) from None
    ids = shortened(ids, None, most=services.text.max_model_len, field=sent.field)
    return PoolInput(ids=ids, media=media)


def _check_alone(sent: Parts, num_media: int) -> None:
    """Whether it is one image and nothing else, as such models were trained on."""
    if len(sent.parts) != 1 or num_media != 1:
        raise InvalidRequest(
            f"{sent.field}: {len(sent.parts)} parts with {num_media} images given; this model "
            "takes one image, or a text",
            field=sent.field,
        )


def document_of(sent: Sent) -> dict[str, Any]:
    """It as answers name it."""
    if isinstance(sent, Parts):
        return {"multi_modal": {"content": [_shown(part) for part in sent.parts]}}
    return {"text": sent}


def _shown(part: Any) -> Any:
    """A part without the bytes of a data URL."""
    text = msgspec.json.encode(part).decode()
    return part if len(text) < 4096 else {"type": part.get("type")}
