"""from_events: a generation's events as the events of a response; the full response is their fold.
A call of a tool that is run here pauses it: another generation follows.

Every event has the next sequence number. Items follow one another, each opened, said and closed
before the next one; `output` of the response holds what was opened, under the same ids. Budget of a
text delta: 5 us, of which most is JSON."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

import orjson

from headrace.base.errors import Unavailable
from headrace.front.client.events import Delta, Ended, Event, ScoredToken, Started
from headrace.front.server.conversation.calls import custom_input, cut_input
from headrace.front.server.conversation.fold import chat_logprobs
from headrace.front.server.conversation.stages import WaitingSpace, parts_of
from headrace.front.server.http.failures import Failure
from headrace.front.server.http.sse import Chunks, padding
from headrace.front.server.responses.document import (
    ResponseReply,
    added,
    error_of,
    new_response,
    object_of,
    usage,
)
from headrace.front.server.responses.items import item_id
from headrace.front.server.responses.schema import Json
from headrace.front.text.parsing.engine import (
    CallArguments,
    CallBegin,
    CallEnd,
    Content,
    Part,
    Reasoning,
)

_CALLS = frozenset({"function_call", "custom_tool_call", "tool_search_call", "mcp_call"})
_ARGUMENTS = {
    "function_call": "response.function_call_arguments",
    "mcp_call": "response.mcp_call_arguments",
}
OF_CLIENTS = _CALLS - {"mcp_call"}
"""Calls that the client carries out."""
_CUT = {"length": "max_output_tokens", "repetition": "repetition"}
TERMINAL = frozenset({"response.completed", "response.incomplete", "response.failed"})


@dataclass
class ResponseStream:
    """Turns events into events; `response` is the response as far as it has come. `warm`: no output
    is wanted; `prompt_ids`: the prompt, once it is known; `pending`: complete calls that are to be
    run here."""

    reply: ResponseReply
    status: str = "in_progress"
    number: int = 0
    warm: bool = False
    prompt_ids: list[int] = field(default_factory=list)
    pending: list[Json] = field(default_factory=list)
    response: Json = field(init=False)
    _open: Json | None = field(init=False, default=None)
    _texts: list[str] = field(init=False, default_factory=list)
    _scores: list[Json] = field(init=False, default_factory=list)
    _space: WaitingSpace = field(init=False, default_factory=WaitingSpace)
    _unsaid: list[Json] = field(init=False, default_factory=list)
    _begun: bool = field(init=False, default=False)
    _num_prompt: int = field(init=False, default=0)
    _usage: Json | None = field(init=False, default=None)
    _ids: list[int] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self.response = new_response(self.reply, status=self.status)

    def begin(self) -> list[Json]:
        """The events before any output; once."""
        if self._begun:
            return []
        self._begun = True
        created = self._about("response.created")
        about = self._about(f"response.{self.response['status']}")
        return [created, about, *self._listed()]

    def take(self, event: Event) -> list[Json]:
        """The response's events for one event."""
        match event:
            case Started():
                return self._start(event)
            case Delta():
                return self._delta(event)
            case Ended():
                return self._end(event)
        return []

    def fail(self, failure: Failure) -> list[Json]:
        """The events that end a response which failed."""
        return self._stop("failed", error=error_of(failure))

    def cancel(self) -> list[Json]:
        """The events that end a response which was cancelled."""
        return self._stop("cancelled")

    def _stop(self, status: str, **fields: object) -> list[Json]:
        events = [*self.begin(), *self._close(complete=False)]
        self.response |= {"status": status, **fields}
        kind = "failed" if status == "failed" else "incomplete"
        return [*events, self._about(f"response.{kind}")]

    def _start(self, event: Started) -> list[Json]:
        self._num_prompt = event.num_prompt
        if self._usage is not None:
            return []  # a further generation
        queued = self._begun
        self.response["status"] = "in_progress"
        return [self._about("response.in_progress")] if queued else self.begin()

    def _delta(self, event: Delta) -> list[Json]:
        parts = parts_of(event)
        if self.reply.decode is not None:
            self._ids += event.token_ids
        if self.reply.scores and event.scores and self._is_content(parts):
            self._unsaid += _logprobs(event.scores)
        return [events for part in parts for events in self._part(part)]

    def _is_content(self, parts: Sequence[Part]) -> bool:
        """Whether a delta's tokens belong to a message: those without text (half a character, the
        end) do inside one. How tokens were cut into deltas must not show."""
        if parts:
            return any(isinstance(part, Content) for part in parts)
        return self._open is None or self._open["type"] == "message"

    def _part(self, part: Part) -> list[Json]:
        match part:
            case Content():
                return self._content(part.text)
            case Reasoning():
                events = self._become("reasoning", "rs", summary=[], content=[])
                self._texts.append(part.text)
                return [*events, self._said("response.reasoning_text.delta", 0, delta=part.text)]
            case CallBegin():
                return self._call(part)
            case CallArguments():
                self._texts.append(part.text)
                item = self._open
                if item is None or item["type"] not in _ARGUMENTS:
                    return []  # told at the end: an input inside the arguments, or an object
                return [self._said(f"{_ARGUMENTS[item['type']]}.delta", None, delta=part.text)]
            case CallEnd():
                return self._close(complete=True, ends_call=True)

    def _content(self, text: str) -> list[Json]:
        if self._open is None or self._open["type"] != "message":
            text = self._space.before(text)
            if not text:
                return []
        scores, self._unsaid = self._unsaid, []
        events = self._become("message", "msg", role="assistant", content=[])
        self._texts.append(text)
        self._scores += scores
        delta = self._said("response.output_text.delta", 0, delta=text, logprobs=scores)
        return [*events, delta]

    def _call(self, part: CallBegin) -> list[Json]:
        events = self._close(complete=True)
        tool = self.reply.tools.tool(part.name)
        fields: Json = {"call_id": part.id, "name": tool.name}
        if tool.namespace is not None:
            fields["namespace"] = tool.namespace
        if tool.server is not None:
            where = {"server_label": tool.server, "approval_request_id": None}
            outcome = {"arguments": "", "output": None, "error": None}
            return events + self._become("mcp_call", "mcp", name=tool.name, **where, **outcome)
        if tool.search:
            return events + self._become(
                "tool_search_call", "tsc", call_id=part.id, execution="client", arguments={}
            )
        if tool.custom:
            return events + self._become("custom_tool_call", "ctc", **fields, input="")
        return events + self._become("function_call", "fc", **fields, arguments="")

    def _become(self, kind: str, prefix: str, **fields: object) -> list[Json]:
        """Opens an item of this kind unless it is open."""
        if self._open is not None and self._open["type"] == kind:
            return []
        events = self._close(complete=True)
        ident = item_id(prefix, self.reply.id, self._index + 1)
        self._open = {"id": ident, "type": kind, "status": "in_progress", **fields}
        self._space.drop()
        self._unsaid = []
        self.response["output"].append(self._open)
        events.append(self._item("response.output_item.added"))
        if kind in ("message", "reasoning"):
            events.append(self._said("response.content_part.added", 0, part=self._whole("")))
        return events

    def _close(self, *, complete: bool, ends_call: bool = False) -> list[Json]:
        """Says the open item's whole text and closes it. A call is complete only where its own end
        closes it."""
        item = self._open
        if item is None:
            return []
        complete = complete and (ends_call or item["type"] not in _CALLS)
        whole = "".join(self._texts)
        match item["type"]:
            case "message":
                events = self._end_message(item, whole)
            case "reasoning":
                events = self._end_reasoning(item, whole)
            case "custom_tool_call":
                events = self._end_custom(
                    item, custom_input(whole) if complete else cut_input(whole)
                )
            case "tool_search_call":
                item["arguments"] = object_of(whole)
                events = []
            case kind:
                item["arguments"] = whole
                done, name = f"{_ARGUMENTS[kind]}.done", item["name"]
                events = [self._said(done, None, arguments=whole, name=name)]
        if complete and item["type"] == "mcp_call":
            self.pending.append(item)
            events.append(self._said("response.mcp_call.in_progress", None))
        else:
            item["status"] = "completed" if complete else "incomplete"
            events.append(self._item("response.output_item.done"))
        self._open = None
        self._texts.clear()
        self._scores = []
        return events

    def run_call(self, item: Json, output: str | None, error: str | None) -> list[Json]:
        """The events that end a pending call, which has been run."""
        status = "completed" if error is None else "failed"
        item |= {"output": output, "error": error, "status": status}
        self.pending.remove(item)
        at = self.response["output"].index(item)
        ended = self._event(f"response.mcp_call.{status}", item_id=item["id"], output_index=at)
        done = self._event("response.output_item.done", output_index=at, item={**item})
        return [ended, done]

    def _listed(self) -> list[Json]:
        """The items that say which tools of servers are offered."""
        events = []
        for listing in self.reply.tools.listings.values():
            events += self._become(
                "mcp_list_tools", "mcpl", server_label=listing.label, tools=[], error=None
            )
            assert self._open is not None
            events.append(self._said("response.mcp_list_tools.in_progress", None))
            self._open |= {"tools": listing.tools, "status": "completed"}
            events.append(self._said("response.mcp_list_tools.completed", None))
            events.append(self._item("response.output_item.done"))
            self._open = None
        return events

    def _end_message(self, item: Json, whole: str) -> list[Json]:
        self._scores += self._unsaid
        self._unsaid = []
        part = self._whole(whole)
        item["content"] = [part]
        return [
            self._said("response.output_text.done", 0, text=whole, logprobs=part["logprobs"]),
            self._said("response.content_part.done", 0, part=part),
        ]

    def _end_reasoning(self, item: Json, whole: str) -> list[Json]:
        part = self._whole(whole)
        item["content"] = [part]
        events = [
            self._said("response.reasoning_text.done", 0, text=whole),
            self._said("response.content_part.done", 0, part=part),
        ]
        if self.reply.summarizes:
            summary = {"type": "summary_text", "text": whole}
            item["summary"] = [summary]
            kind = "response.reasoning_summary_"
            for name, fields in (
                ("part.added", {"part": {**summary, "text": ""}}),
                ("text.delta", {"delta": whole}),
                ("text.done", {"text": whole}),
                ("part.done", {"part": summary}),
            ):
                events.append(self._said(kind + name, None, summary_index=0, **fields))
        if self.reply.encrypts:
            item["encrypted_content"] = self.reply.seal(whole)
        return events

    def _end_custom(self, item: Json, text: str) -> list[Json]:
        item["input"] = text
        kind = "response.custom_tool_call_input."
        return [
            self._said(kind + "delta", None, delta=text),
            self._said(kind + "done", None, input=text),
        ]

    def _whole(self, text: str) -> Json:
        """The one content part of the open item."""
        assert self._open is not None
        if self._open["type"] == "reasoning":
            return {"type": "reasoning_text", "text": text}
        scores = list(self._scores)
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": scores}

    @property
    def _index(self) -> int:
        return len(self.response["output"]) - 1

    def _event(self, kind: str, **fields: object) -> Json:
        event = {"type": kind, "sequence_number": self.number, **fields}
        self.number += 1
        return event

    def _about(self, kind: str) -> Json:
        """An event about the whole response, as it is now."""
        output = [{**item} for item in self.response["output"]]
        return self._event(kind, response={**self.response, "output": output})

    def _item(self, kind: str) -> Json:
        assert self._open is not None
        return self._event(kind, output_index=self._index, item={**self._open})

    def _said(self, kind: str, content_index: int | None, **fields: object) -> Json:
        assert self._open is not None
        where: Json = {"item_id": self._open["id"], "output_index": self._index}
        if content_index is not None:
            where["content_index"] = content_index
        if self.reply.pads and "delta" in fields:
            fields["obfuscation"] = padding(len(orjson.dumps(fields)))
        return self._event(kind, **where, **fields)

    def _end(self, ended: Ended) -> list[Json]:
        if ended.reason == "abort":
            raise Unavailable("the request was ended by an administrator", retry_after_s=1.0)
        cut = _CUT.get("" if self.warm else ended.reason)
        events = self._close(complete=cut is None)
        self._usage = added(self._usage, usage(self._num_prompt, ended))
        if self.pending and cut is None:
            return events
        for item in list(self.pending):
            events += self.run_call(item, None, "the response was cut off before it was run")
        return [*events, *self.finish(cut)]

    def finish(self, cut: str | None = None) -> list[Json]:
        """The last event."""
        self.response |= {
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": cut} if cut else None,
            "completed_at": None if cut else int(time.time()),
            "usage": self._usage,
            **self._messages(),
        }
        return [self._about(f"response.{self.response['status']}")]

    @property
    def num_output(self) -> int:
        """Tokens of all generations so far."""
        return 0 if self._usage is None else int(self._usage["output_tokens"])

    def _messages(self) -> Json:
        """Prompt and answer as they went through the model, where that is asked."""
        decode = self.reply.decode
        if decode is None:
            return {}
        return {
            name: [{"type": "raw_message_tokens", "message": decode(ids), "tokens": ids}]
            for name, ids in (("input_messages", self.prompt_ids), ("output_messages", self._ids))
        }


def _logprobs(scores: list[ScoredToken]) -> list[Json]:
    content = chat_logprobs(scores, as_id=False)["content"]
    assert isinstance(content, list)
    return content


def encoded(event: Json) -> bytes:
    """One event on a stream, with its name."""
    kind: str = event["type"]
    return b"event: " + kind.encode() + b"\ndata: " + orjson.dumps(event) + b"\n\n"


async def to_chunks(events: AsyncGenerator[Json, None]) -> Chunks:
    """The stream of a response's events."""
    async with aclosing(events):
        async for event in events:
            yield encoded(event)


async def to_answer(events: AsyncGenerator[Json, None], stream: ResponseStream) -> Json:
    """The full answer: the response as its last event leaves it."""
    async with aclosing(events):
        async for _ in events:
            pass
    return stream.response
