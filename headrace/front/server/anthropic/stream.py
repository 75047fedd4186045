"""from_events: a generation's events as the events of a message; the full message is their fold.

Blocks follow one another with indices from 0 and never overlap. White space between blocks opens
none. The signature of a thinking block is the last thing it says: of a text shown, or the sealed
text itself where it is not shown."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import orjson

from headrace.base.errors import Unavailable
from headrace.front.client.events import Delta, Ended, Event, Events, Started
from headrace.front.server.anthropic.arguments import ToolInput
from headrace.front.server.conversation.stages import ParsedEnded, WaitingSpace, parts_of
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


@dataclass(frozen=True, kw_only=True)
class MessageReply:
    """What is known of a message before it is made. `sign` makes the signature of a thinking
    text. `cached_block_tokens`: see EngineClient."""

    id: str
    model: str
    max_tokens: int
    sign: Callable[[str], str]
    show_thinking: bool = True
    managed: bool = False
    cached_block_tokens: int = 0


@dataclass
class MessageStream:
    """Turns events into events; `message` is the message as far as it has come."""

    reply: MessageReply
    message: Json = field(init=False)
    _open: str | None = field(init=False, default=None)
    _texts: list[str] = field(init=False, default_factory=list)
    _input: ToolInput = field(init=False, default_factory=ToolInput)
    _space: WaitingSpace = field(init=False, default_factory=WaitingSpace)
    _num_prompt: int = field(init=False, default=0)
    _complete_calls: int = field(init=False, default=0)
    _cut: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self.message = {
            "id": self.reply.id,
            "type": "message",
            "role": "assistant",
            "model": self.reply.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(None),
        }

    def take(self, event: Event) -> list[Json]:
        """The message's events for one event."""
        match event:
            case Started():
                self._num_prompt = event.num_prompt
                counts = self._usage(None, num_cached=event.num_cached)
                self.message["usage"] = counts
                return [{"type": "message_start", "message": {**self.message, "content": []}}]
            case Delta():
                return [frame for part in parts_of(event) for frame in self._part(part)]
            case Ended():
                return self._end(event)
        return []

    def _part(self, part: Part) -> list[Json]:
        match part:
            case Content():
                return self._content(part.text)
            case Reasoning():
                frames = self._become("thinking", {"thinking": "", "signature": ""})
                self._texts.append(part.text)
                if self.reply.show_thinking:
                    frames.append(self._delta({"type": "thinking_delta", "thinking": part.text}))
                return frames
            case CallBegin():
                ident = "toolu_" + part.id.removeprefix("call_")
                frames = self._close()
                frames += self._become("tool_use", {"id": ident, "name": part.name, "input": {}})
                return frames
            case CallArguments():
                return self._input_delta(self._input.push(part.text))
            case CallEnd():
                self._complete_calls += 1
                return self._close()

    def _content(self, text: str) -> list[Json]:
        if self._open != "text":
            text = self._space.before(text)
            if not text:
                return []
        frames = self._become("text", {"text": ""})
        self._texts.append(text)
        frames.append(self._delta({"type": "text_delta", "text": text}))
        return frames

    def _become(self, kind: str, fields: Json) -> list[Json]:
        """Opens a block of this kind unless it is open."""
        if self._open == kind:
            return []
        frames = self._close()
        self._open = kind
        self._space.drop()
        block = {"type": kind, **fields}
        self.message["content"].append(block)
        frames.append(
            {"type": "content_block_start", "index": self._index, "content_block": {**block}}
        )
        return frames

    def _close(self) -> list[Json]:
        """Closes the open block and writes its whole text into the message."""
        if self._open is None:
            return []
        kind, whole = self._open, "".join(self._texts)
        block = self.message["content"][-1]
        frames: list[Json] = []
        match kind:
            case "text":
                block["text"] = whole
            case "thinking":
                block["thinking"] = whole if self.reply.show_thinking else ""
                block["signature"] = self.reply.sign(whole)
                frames.append(
                    self._delta({"type": "signature_delta", "signature": block["signature"]})
                )
            case "tool_use":
                frames += self._input_delta(self._input.end())
                block["input"] = orjson.Fragment(self._input.document)
                self._input = ToolInput()
        frames.append({"type": "content_block_stop", "index": self._index})
        self._open = None
        self._texts.clear()
        return frames

    def _input_delta(self, text: str) -> list[Json]:
        return [self._delta({"type": "input_json_delta", "partial_json": text})] if text else []

    @property
    def _index(self) -> int:
        return len(self.message["content"]) - 1

    def _delta(self, delta: Json) -> Json:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

    def _end(self, ended: Ended) -> list[Json]:
        if ended.reason == "abort":
            raise Unavailable("the request was ended by an administrator", retry_after_s=1.0)
        self._cut = self._open == "tool_use"  # a complete call closed its block itself
        frames = self._close()
        stop = {
            "stop_reason": self._stop_reason(ended),
            "stop_sequence": ended.stop if isinstance(ended.stop, str) else None,
        }
        self.message |= {**stop, "usage": self._usage(ended, num_cached=ended.num_cached)}
        last: Json = {"type": "message_delta", "delta": stop, "usage": self.message["usage"]}
        if self.reply.managed:
            applied: Json = {"context_management": {"applied_edits": []}}
            self.message |= applied
            last |= applied
        return [*frames, last, {"type": "message_stop"}]

    def _usage(self, ended: Ended | None, *, num_cached: int = 0) -> Json:
        """The prompt is the sum of what was read from the cache, what was newly written into it
        (the whole blocks behind), and the rest; thinking is part of the output."""
        prompt, block = self._num_prompt, self.reply.cached_block_tokens
        cached = min(num_cached, prompt)
        created = max(prompt // block * block - cached, 0) if block else 0
        thinking = ended.num_reasoning if isinstance(ended, ParsedEnded) else 0
        return {
            "input_tokens": prompt - cached - created,
            "cache_creation_input_tokens": created,
            "cache_read_input_tokens": cached,
            "output_tokens": 0 if ended is None else ended.num_output,
            "output_tokens_details": {"thinking_tokens": thinking},
        }

    def _stop_reason(self, ended: Ended) -> str:
        if ended.reason == "length":
            asked = ended.num_output >= self.reply.max_tokens
            return "max_tokens" if asked else "model_context_window_exceeded"
        if isinstance(ended.stop, str):
            return "stop_sequence"
        return "tool_use" if self._complete_calls and not self._cut else "end_turn"


async def to_chunks(events: Events, reply: MessageReply) -> Chunks:
    """The stream: every event with its name."""
    stream = MessageStream(reply)
    async with aclosing(events):
        async for event in events:
            for frame in stream.take(event):
                yield (
                    b"event: "
                    + frame["type"].encode()
                    + b"\ndata: "
                    + orjson.dumps(frame)
                    + b"\n\n"
                )


async def to_answer(events: Events, reply: MessageReply) -> Json:
    """The full message."""
    stream = MessageStream(reply)
    async with aclosing(events):
        async for event in events:
            stream.take(event)
    return stream.message
