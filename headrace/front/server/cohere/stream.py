"""to_chunks and to_answer: a generation's events as the events of a Cohere chat; the full answer is
their fold.

Parts of the content are numbered from 0 and never overlap; calls have numbers of their own. White
space between parts opens none."""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import orjson

from headrace.base.errors import Unavailable
from headrace.front.client.events import Delta, Ended, Event, Events, ScoredToken, Started
from headrace.front.server.conversation.fold import logprob
from headrace.front.server.conversation.stages import WaitingSpace, parts_of
from headrace.front.server.http.sse import DONE, Chunks
from headrace.front.text.parsing.engine import (
    CallArguments,
    CallBegin,
    CallEnd,
    Content,
    Part,
    Reasoning,
)

Json = dict[str, Any]


@dataclass
class CohereStream:
    """Turns events into events; `answer` is the full answer as far as it has come. `scores`:
    whether it holds log-probabilities."""

    id: str
    scores: bool = False
    answer: Json = field(init=False)
    _content: list[Json] = field(init=False, default_factory=list)
    _calls: list[Json] = field(init=False, default_factory=list)
    _logprobs: list[Json] = field(init=False, default_factory=list)
    _open: str | None = field(init=False, default=None)
    _in_call: bool = field(init=False, default=False)
    _space: WaitingSpace = field(init=False, default_factory=WaitingSpace)
    _num_prompt: int = field(init=False, default=0)

    def take(self, event: Event) -> list[Json]:
        """The chat's events for one event."""
        match event:
            case Started():
                self._num_prompt = event.num_prompt
                message = {"role": "assistant", "content": [], "tool_plan": "", "tool_calls": []}
                delta = {"message": {**message, "citations": []}}
                return [{"type": "message-start", "id": self.id, "delta": delta}]
            case Delta():
                frames = [frame for part in parts_of(event) for frame in self._part(part)]
                return self._scored(frames, event.scores or [])
            case Ended():
                return self._end(event)
        return []

    def _part(self, part: Part) -> list[Json]:
        match part:
            case Content():
                return self._text("text", part.text)
            case Reasoning():
                return self._text("thinking", part.text)
            case CallBegin():
                frames = [*self._close(), *self._close_call()]
                function = {"name": part.name, "arguments": ""}
                call = {"id": part.id, "type": "function", "function": function}
                self._calls.append({**call, "function": {**function}})
                self._in_call = True
                return [*frames, self._call("tool-call-start", call)]
            case CallArguments():
                self._calls[-1]["function"]["arguments"] += part.text
                return [self._call("tool-call-delta", {"function": {"arguments": part.text}})]
            case CallEnd():
                return self._close_call()

    def _text(self, kind: str, text: str) -> list[Json]:
        frames: list[Json] = []
        if self._open != kind:
            text = self._space.before(text)
            if not text:
                return []
            frames = [*self._close(), *self._close_call()]
            self._open = kind
            self._content.append({"type": kind, kind: ""})
            frames.append(self._delta("content-start", {"type": kind, kind: ""}))
        self._content[-1][kind] += text
        frames.append(self._delta("content-delta", {kind: text}))
        return frames

    def _delta(self, kind: str, content: Json) -> Json:
        index = len(self._content) - 1
        return {"type": kind, "index": index, "delta": {"message": {"content": content}}}

    def _call(self, kind: str, call: Json) -> Json:
        index = len(self._calls) - 1
        return {"type": kind, "index": index, "delta": {"message": {"tool_calls": call}}}

    def _close(self) -> list[Json]:
        if self._open is None:
            return []
        self._open = None
        self._space.drop()
        return [{"type": "content-end", "index": len(self._content) - 1}]

    def _close_call(self) -> list[Json]:
        if not self._in_call:
            return []
        self._in_call = False
        return [{"type": "tool-call-end", "index": len(self._calls) - 1}]

    def _scored(self, frames: list[Json], scores: list[ScoredToken]) -> list[Json]:
        """The log-probabilities of a delta stand in its first piece of content; of tokens without
        text in an empty one."""
        if not self.scores or not scores:
            return frames
        tokens = [scored.token for scored in scores]
        item = {
            "text": "".join(token.text for token in tokens),
            "token_ids": [token.id for token in tokens],
            "logprobs": [logprob(token.logprob) for token in tokens],
        }
        self._logprobs.append(item)
        deltas = [frame for frame in frames if frame["type"] == "content-delta"]
        if not deltas and self._open is not None:
            deltas = [self._delta("content-delta", {self._open: ""})]
            frames += deltas
        if deltas:
            deltas[0]["logprobs"] = item
        return frames

    def _end(self, ended: Ended) -> list[Json]:
        if ended.reason == "abort":
            raise Unavailable("the request was ended by an administrator", retry_after_s=1.0)
        cut = self._in_call  # a complete call has ended itself
        frames = [*self._close(), *self._close_call()]
        delta = {"finish_reason": self._reason(ended, cut=cut), "usage": self._usage(ended)}
        message: Json = {"role": "assistant"}
        if self._content or not self._calls:
            message["content"] = self._content or [{"type": "text", "text": ""}]
        if self._calls:
            message["tool_calls"] = self._calls
        self.answer = {"id": self.id, **delta, "message": message}
        if self.scores:
            self.answer["logprobs"] = self._logprobs
        return [*frames, {"type": "message-end", "id": self.id, "delta": delta}]

    def _reason(self, ended: Ended, *, cut: bool) -> str:
        if ended.reason == "length":
            return "MAX_TOKENS"
        if isinstance(ended.stop, str):
            return "STOP_SEQUENCE"
        return "TOOL_CALL" if self._calls and not cut else "COMPLETE"

    def _usage(self, ended: Ended) -> Json:
        tokens = {"input_tokens": self._num_prompt, "output_tokens": ended.num_output}
        cached = min(ended.num_cached, self._num_prompt)
        return {"billed_units": tokens, "tokens": tokens, "cached_tokens": cached}


async def to_chunks(events: Events, stream: CohereStream) -> Chunks:
    """The stream: every event with its name, then the end mark."""
    async with aclosing(events):
        async for event in events:
            for frame in stream.take(event):
                name = frame["type"].encode()
                yield b"event: " + name + b"\ndata: " + orjson.dumps(frame) + b"\n\n"
    yield DONE


async def to_answer(events: Events, stream: CohereStream) -> Json:
    """The full answer."""
    async with aclosing(events):
        async for event in events:
            stream.take(event)
    return stream.answer
