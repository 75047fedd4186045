"""The response object: what a request is answered with, and what of the request it repeats.

All fields that OpenAI's own document requires are there, null where nothing is meant.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import orjson

from headrace.front.client.events import Ended
from headrace.front.server.conversation.stages import ParsedEnded
from headrace.front.server.http.failures import Failure
from headrace.front.server.responses.schema import (
    ENCRYPTED,
    LOGPROBS,
    Json,
    ResponsesRequest,
    conversation_of,
)
from headrace.front.server.responses.tools import Offered


@dataclass(frozen=True, kw_only=True)
class ResponseReply:
    """What is known of a response before it is made. `seal` encrypts reasoning for its owner;
    `decode`: the text of tokens, where the response tells its tokens."""

    id: str
    model: str
    created: int
    request: ResponsesRequest
    document: Json
    tools: Offered
    seal: Callable[[str], str]
    stored: bool
    defaults: Json = field(default_factory=dict)
    decode: Callable[[list[int]], str] | None = None

    @property
    def encrypts(self) -> bool:
        """Whether reasoning also goes out sealed."""
        return ENCRYPTED in (self.request.include or ())

    @property
    def summarizes(self) -> bool:
        """Whether reasoning also goes out as a summary, which is the whole of it."""
        reasoning = self.request.reasoning
        return reasoning is not None and reasoning.summary is not None

    @property
    def pads(self) -> bool:
        """Whether deltas are padded."""
        options = self.request.stream_options
        return options is not None and bool(options.include_obfuscation)

    @property
    def scores(self) -> bool:
        """Whether text carries log-probabilities."""
        return LOGPROBS in (self.request.include or ()) or bool(self.request.top_logprobs)


def new_response(reply: ResponseReply, *, status: str) -> Json:
    """The response before anything has been said."""
    request = reply.request
    talk = conversation_of(request)
    text = {"format": {"type": "text"}, "verbosity": "medium"}
    if request.text is not None:
        options = {"format": request.text.format, "verbosity": request.text.verbosity}
        text |= {key: value for key, value in options.items() if value is not None}
    reasoning = request.reasoning
    return {
        "id": reply.id,
        "object": "response",
        "created_at": reply.created,
        "completed_at": None,
        "status": status,
        "background": bool(request.background),
        "error": None,
        "incomplete_details": None,
        "instructions": request.instructions,
        "conversation": None if talk is None else {"id": talk},
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": request.max_tool_calls,
        "metadata": request.metadata or {},
        "model": reply.model,
        "output": [],
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": request.previous_response_id,
        "reasoning": {
            "effort": reasoning.effort if reasoning else None,
            "summary": reasoning.summary if reasoning else None,
        },
        "service_tier": request.service_tier or "default",
        "store": reply.stored,
        "temperature": _or(request.temperature, reply.defaults.get("temperature", 1.0)),
        "text": text,
        "tool_choice": _or(request.tool_choice, "auto"),
        "tools": [_shown(tool) for tool in request.tools or []],
        "top_logprobs": request.top_logprobs or 0,
        "top_p": _or(request.top_p, reply.defaults.get("top_p", 1.0)),
        "truncation": request.truncation or "disabled",
        "usage": None,
        "user": request.user,
    }


def _shown(tool: Json) -> Json:
    """A tool as it was sent; a function with the fields that its published schema requires."""
    if tool.get("type") != "function":
        return tool
    return {"parameters": None, "strict": None, **tool}


def _or(value: object, default: object) -> object:
    return default if value is None else value


def usage(num_prompt: int, ended: Ended | None) -> Json:
    """input + output == total; cached is part of the input, reasoning of the output."""
    num_output = 0 if ended is None else ended.num_output
    cached = 0 if ended is None else min(ended.num_cached, num_prompt)
    reasoning = ended.num_reasoning if isinstance(ended, ParsedEnded) else 0
    return {
        "input_tokens": num_prompt,
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": num_output,
        "output_tokens_details": {"reasoning_tokens": reasoning},
        "total_tokens": num_prompt + num_output,
    }


def added(before: Json | None, usage: Json) -> Json:
    """The usage of one more generation of the same response."""
    if before is None:
        return usage
    return {
        name: added(before[name], value) if isinstance(value, dict) else before[name] + value
        for name, value in usage.items()
    }


def object_of(text: str) -> Json:
    """Arguments as an object; text that is none stands under INVALID_JSON."""
    try:
        document = orjson.loads(text)
    except orjson.JSONDecodeError:
        document = None
    return document if isinstance(document, dict) else {"INVALID_JSON": text}


def error_of(failure: Failure) -> Json:
    """The `error` of a failed response; its codes are a closed set."""
    code = "server_error"
    if failure.status == 429:
        code = "rate_limit_exceeded"
    elif failure.status == 400:
        code = "invalid_prompt"
    return {"code": code, "message": failure.message}
