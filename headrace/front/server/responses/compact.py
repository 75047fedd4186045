"""POST /v1/responses/compact: a conversation as one sealed item that stands for it.

The model itself sums the conversation up; the summary goes out sealed for its owner and is unfolded
where the item comes back (items.py), as a system message."""

from __future__ import annotations

import time
from contextlib import aclosing
from typing import Any

import msgspec
from starlette.responses import Response

from headrace.base.errors import InvalidRequest
from headrace.front.client.events import Delta, Ended, Started
from headrace.front.server.conversation.context import RequestContext, json_response
from headrace.front.server.conversation.pipeline import begin
from headrace.front.server.conversation.resolved import TranslatedRequest, resolved
from headrace.front.server.conversation.stages import parts_of
from headrace.front.server.http.auth import response_id
from headrace.front.server.responses.document import usage
from headrace.front.server.responses.items import item_id
from headrace.front.server.responses.run import PURPOSE, recall_from, translate
from headrace.front.server.responses.schema import parse_prompt
from headrace.front.text.parsing.engine import Content

MAX_SUMMARY_TOKENS = 2048
ASK = (
    "Write a summary of this conversation for yourself. Keep every fact, decision, name, "
    "number, open question and "
    "result of a tool that is needed to go on. Write only the summary."
)


async def post_compact(context: RequestContext, document: Any) -> Response:
    """The compacted conversation."""
    request = msgspec.structs.replace(
        parse_prompt(document), tools=None, tool_choice=None, text=None
    )
    ident = response_id()
    _, _, _, translated = await translate(
        context, request, document, ident=ident, recall=recall_from(context)
    )
    messages = [*translated.document["messages"], {"role": "user", "content": ASK}]
    limit = min(MAX_SUMMARY_TOKENS, context.services.text.max_model_len)
    asked = TranslatedRequest(
        document={**translated.document, "messages": messages, "max_completion_tokens": limit},
        places=[*translated.places, "input"],
        names=translated.names,
    )
    summary, used = await _summary(context, asked, label=ident)
    sealed = context.services.sealer.seal(summary, owner=context.tenant, purpose=PURPOSE)
    item = {"id": item_id("cmp", ident, 0), "type": "compaction", "encrypted_content": sealed}
    return json_response(
        {
            "id": ident,
            "object": "response.compaction",
            "created_at": int(time.time()),
            "output": [item],
            "usage": used,
        }
    )


async def _summary(
    context: RequestContext, asked: TranslatedRequest, *, label: str
) -> tuple[str, dict[str, Any]]:
    texts: list[str] = []
    prompt, ended = 0, None
    conversation = resolved(asked.typed(), context.services.served, id=label, sent=asked)
    _, events = await begin(context, conversation)
    async with aclosing(events):
        async for event in events:
            match event:
                case Started():
                    prompt = event.num_prompt
                case Delta():
                    texts += [part.text for part in parts_of(event) if isinstance(part, Content)]
                case Ended():
                    ended = event
    if not "".join(texts).strip():
        raise InvalidRequest("input: the model wrote no summary of it", field="input")
    return "".join(texts).strip(), usage(prompt, ended)
