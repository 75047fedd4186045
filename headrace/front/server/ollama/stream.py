"""to_chunks and to_answer: a generation's events as lines of Ollama's; the full answer is their
fold.

A call goes out whole, for its arguments are an object: one that was cut off is no call, and is left
out. Durations are nanoseconds."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import orjson

from headrace.base.errors import Unavailable
from headrace.front.client.events import Delta, Ended, Event, Events, ScoredToken, Started
from headrace.front.server.conversation.context import Timeline
from headrace.front.server.conversation.fold import chat_logprobs
from headrace.front.server.conversation.stages import parts_of
from headrace.front.server.http.sse import Chunks
from headrace.front.text.parsing.engine import (
    CallArguments,
    CallBegin,
    CallEnd,
    Content,
    Part,
    Reasoning,
)

Json = dict[str, Any]
NANOSECONDS = 1e9


def now_text() -> str:
    """The time, as the dialect writes it."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


@dataclass
class OllamaStream:
    """Turns events into lines; `answer` is the full answer as far as it has come. `chats`: texts
    stand in a message, else in `response`. `load_s`: how long the model was waited for; `timeline`:
    where the time went, once the end is there."""

    model: str
    chats: bool
    load_s: float
    timeline: Callable[[], Timeline | None]
    answer: Json = field(init=False, default_factory=dict)
    _content: list[str] = field(init=False, default_factory=list)
    _thinking: list[str] = field(init=False, default_factory=list)
    _calls: list[Json] = field(init=False, default_factory=list)
    _scores: list[Any] = field(init=False, default_factory=list)
    _call: Json | None = field(init=False, default=None)
    _num_prompt: int = field(init=False, default=0)

    def take(self, event: Event) -> list[Json]:
        """The lines for one event."""
        match event:
            case Started():
                self._num_prompt = event.num_prompt
            case Delta():
                lines = [line for part in parts_of(event) for line in self._part(part)]
                return self._scored(lines, event.scores or [])
            case Ended():
                return self._end(event)
        return []

    def _part(self, part: Part) -> list[Json]:
        match part:
            case Content():
                self._content.append(part.text)
                return [self._line(part.text)]
            case Reasoning():
                self._thinking.append(part.text)
                return [self._line("", thinking=part.text)]
            case CallBegin():
                self._call = {"id": part.id, "function": {"name": part.name, "arguments": ""}}
            case CallArguments() if self._call is not None:
                self._call["function"]["arguments"] += part.text
            case CallEnd():
                return self._end_call()
        return []

    def _end_call(self) -> list[Json]:
        call, self._call = self._call, None
        if call is None:
            return []
        function = call["function"]
        try:
            arguments = orjson.loads(function["arguments"] or "{}")
        except orjson.JSONDecodeError:
            return []
        if not isinstance(arguments, dict):
            return []
        function |= {"arguments": arguments, "index": len(self._calls)}
        self._calls.append(call)
        return [self._line("", tool_calls=[call])]

    def _line(self, text: str, **more: Any) -> Json:
        line: Json = {"model": self.model, "created_at": now_text()}
        if self.chats:
            line["message"] = {"role": "assistant", "content": text, **more}
        else:
            line |= {"response": text, **more}
        return {**line, "done": False}

    def _scored(self, lines: list[Json], scores: list[ScoredToken]) -> list[Json]:
        """The log-probabilities of a delta stand in its first line."""
        if not scores:
            return lines
        entries: Any = chat_logprobs(scores, as_id=False)["content"]
        self._scores += entries
        lines = lines or [self._line("")]
        lines[0]["logprobs"] = entries
        return lines

    def _end(self, ended: Ended) -> list[Json]:
        if ended.reason == "abort":
            raise Unavailable("the request was ended by an administrator", retry_after_s=1.0)
        last = {
            **self._line(""),
            "done": True,
            "done_reason": "length" if ended.reason == "length" else "stop",
            **self._durations(ended),
        }
        more: Json = {"thinking": "".join(self._thinking)} if self._thinking else {}
        if self._calls:
            more["tool_calls"] = self._calls
        self.answer = {**last, **self._line("".join(self._content), **more), "done": True}
        if self._scores:
            self.answer["logprobs"] = self._scores
        return [last]

    def _durations(self, ended: Ended) -> Json:
        where = self.timeline()
        prefill_s, decode_s, total_s = (
            (0.0, 0.0, 0.0) if where is None else (where.prefill_s, where.decode_s, where.total_s)
        )
        return {
            "total_duration": round(total_s * NANOSECONDS),
            "load_duration": round(self.load_s * NANOSECONDS),
            "prompt_eval_count": self._num_prompt,
            "prompt_eval_duration": round(prefill_s * NANOSECONDS),
            "eval_count": ended.num_output,
            "eval_duration": round(decode_s * NANOSECONDS),
        }


async def to_chunks(events: Events, stream: OllamaStream) -> Chunks:
    """The stream: a line for each piece, the last of which is done."""
    async with aclosing(events):
        async for event in events:
            for line in stream.take(event):
                yield orjson.dumps(line) + b"\n"


async def to_answer(events: Events, stream: OllamaStream) -> Json:
    """The full answer."""
    async with aclosing(events):
        async for event in events:
            stream.take(event)
    return stream.answer
