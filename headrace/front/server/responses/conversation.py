"""to_request: a request of the Responses dialect, and the items before it, as the house's
conversation."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.base.errors import InvalidRequest
from headrace.front.server.conversation.context import ServedModel
from headrace.front.server.conversation.resolved import Conversation, TranslatedRequest, resolved
from headrace.front.server.responses.items import ItemMessages, Unseal
from headrace.front.server.responses.schema import (
    LOGPROBS,
    InputRequest,
    Json,
    ReasoningOptions,
    ResponsesRequest,
    TextConfig,
    extensions,
)
from headrace.front.server.responses.tools import Offered, to_choice

_NAMES = {
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "verbosity": "text.verbosity",
    "reasoning_effort": "reasoning.effort",
    "logprobs": "include",
    "prompt": "input",
    "messages": "input",
}


def to_request(
    request: InputRequest,
    document: Json,
    *,
    tools: Offered,
    history: Sequence[Json],
    own_items: Sequence[Json],
    unseal: Unseal,
    max_model_len: int,
) -> TranslatedRequest:
    """The conversation. `history`: items of the responses before; `given`: this request's own."""
    folded = ItemMessages(tools, unseal)
    folded.instructions(request.instructions)
    before = "previous_response_id" if request.conversation is None else "conversation"
    for item in history:
        folded.take(item, before)
    for i, item in enumerate(own_items):
        folded.take(item, "input" if isinstance(request.input, str) else f"input[{i}]")
    if not folded.messages:
        raise InvalidRequest("input: holds nothing to answer", field="input")
    chat: Json = {
        **extensions(document),
        "model": request.model,
        "messages": folded.messages,
        "parallel_tool_calls": request.parallel_tool_calls,
        **to_choice(request.tool_choice, tools),
        **_reasoning(request.reasoning, document),
        **_text(request.text, document),
    }
    if isinstance(request, ResponsesRequest):
        chat |= _sampling(request, max_model_len=max_model_len)
    kept = {key: value for key, value in chat.items() if value is not None}
    return TranslatedRequest(document=kept, places=folded.places, names=_NAMES)


def to_conversation(translated: TranslatedRequest, served: ServedModel, *, id: str) -> Conversation:
    """The request, resolved; the items before it were read while it was translated."""
    return resolved(translated.typed(), served, id=id, sent=translated)


def _sampling(request: ResponsesRequest, *, max_model_len: int) -> Json:
    limit = request.max_output_tokens
    scored = LOGPROBS in (request.include or ()) or bool(request.top_logprobs)
    return {
        "max_completion_tokens": None if limit is None else min(limit, max_model_len),
        "temperature": request.temperature,
        "top_p": request.top_p,
        "logprobs": scored or None,
        "top_logprobs": request.top_logprobs if scored else None,
    }


def _reasoning(reasoning: ReasoningOptions | None, document: Json) -> Json:
    """An effort switches templates that have a switch; without one the template decides."""
    effort = None if reasoning is None else reasoning.effort
    if effort is None:
        return {}
    on = effort != "none"
    own = document.get("chat_template_kwargs")
    kwargs = {"enable_thinking": on, "thinking": on, **(own if isinstance(own, dict) else {})}
    return {"reasoning_effort": effort, "chat_template_kwargs": kwargs}


def _text(text: TextConfig | None, document: Json) -> Json:
    if text is None:
        return {}
    fields: Json = {"verbosity": text.verbosity}
    form = text.format
    kind = "text" if form is None else form.get("type")
    if kind == "text":
        return fields
    if document.get("structured_outputs") is not None:
        raise InvalidRequest(
            "structured_outputs: does not go with text.format; send one of them",
            field="structured_outputs",
        )
    if form is None or kind not in ("json_object", "json_schema"):
        raise InvalidRequest(
            f"text.format.type: {kind!r:.80} given; allowed: text, json_object, json_schema",
            field="text.format.type",
        )
    if kind == "json_object":
        return {**fields, "response_format": {"type": kind}}
    if not isinstance(form.get("schema"), dict):
        raise InvalidRequest(
            "text.format.schema: an object (JSON schema) is needed", field="text.format.schema"
        )
    schema = {key: value for key, value in form.items() if key != "type"}
    return {**fields, "response_format": {"type": kind, "json_schema": schema}}
