"""An engine core that follows a script, behind the real wire protocol on a real Unix socket.

`follow(request, tokens so far)` gives the log-probabilities [logits_width] of the next token; the core samples greedily
(the greatest, or the one `logit_bias` forces through the script). It answers one token per turn of its loop to every
request, and records what it was sent.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Container
from pathlib import Path

import msgspec
import numpy as np

from headrace.base.errors import MediaGone, QueueFull, WireError, to_wire
from headrace.base.wire.codec import HEADER, Codec
from headrace.base.wire.control import Call, Hello, Reply
from headrace.base.wire.request import (
    AbortRequests,
    EngineRequest,
    Finished,
    PromptLogprobs,
    ToCore,
    TokenBatch,
    TokenLogprobs,
)

Follow = Callable[[EngineRequest, list[int]], np.ndarray]
WIDTH = 500


def spell(ids: list[int], width: int = WIDTH) -> Follow:
    """A script that says `ids` one after the other, whatever it is asked."""

    def follow(request: EngineRequest, tokens: list[int]) -> np.ndarray:
        scores = np.full(width, -20.0, np.float32)
        scores[ids[len(tokens) % len(ids)]] = -0.5
        return scores

    return follow


class ScriptedCore:
    """Serves any number of connections; `step` must be set for tokens to flow (it is, unless the test clears it)."""

    def __init__(self, path: Path, follow: Follow, **hello: int) -> None:
        self.path = str(path)
        self.follow = follow
        self.hello = Hello(
            **{
                "logits_width": WIDTH, "max_model_len": 256, "capacity_tokens": 4096,
                "max_running": 64, "num_blocks": 100, "block_tokens": 16, **hello,
            }
        )  # fmt: skip
        self.flow = asyncio.Event()
        self.flow.set()
        self.requests: list[EngineRequest] = []
        self.aborted: list[int] = []
        self.calls: list[Call] = []
        self.changed = asyncio.Condition()
        self.mute = False
        self.replies: dict[str, dict[str, object]] = {}
        """What calls are answered with, by operation; without a row their arguments come back."""
        self.failing: set[str] = set()
        self.refuse: WireError | None = None
        self.forgets_media = False
        """Has the content of no image that was not sent with its request."""
        self.full_for: Container[int] = ()
        """Requests that find the queue full, by their number from 1 on."""
        self._running: dict[int, tuple[EngineRequest, list[int], asyncio.StreamWriter]] = {}
        self._codec: Codec[ToCore] = Codec(ToCore)
        self._writers: list[asyncio.StreamWriter] = []

    async def __aenter__(self) -> ScriptedCore:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        Path(self.path).unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._serve, self.path)
        self._loop_task = asyncio.create_task(self._loop())

    async def stop(self) -> None:
        """Dies: every connection is cut, nothing is answered any more."""
        self._server.close()
        self._loop_task.cancel()
        for writer in self._writers:
            writer.transport.abort()
        self._running.clear()
        with contextlib.suppress(asyncio.CancelledError):
            await self._loop_task
        await self._server.wait_closed()

    def announce(self, **changes: object) -> None:
        """Says Hello again to everybody, changed."""
        self.hello = msgspec.structs.replace(self.hello, **changes)
        for writer in self._writers:
            writer.write(self._codec.frame(self.hello))

    @property
    def num_running(self) -> int:
        return len(self._running)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(300), self.changed:
            await self.changed.wait_for(condition)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        writer.write(self._codec.frame(self.hello))
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                size = HEADER.unpack(await reader.readexactly(HEADER.size))[0]
                await self._take(self._codec.decode(await reader.readexactly(size)), writer)
        writer.close()

    async def _take(self, message: ToCore, writer: asyncio.StreamWriter) -> None:
        if isinstance(message, EngineRequest):
            self.requests.append(message)
            if len(self.requests) in self.full_for:
                full = to_wire(QueueFull("the queue is full", retry_after_s=1.0))
                end = Finished(id=message.id, reason="error", error=full)
                writer.write(self._codec.frame(_batch(finished=[end])))
            elif self.forgets_media and any(one.unsent for one in message.media):
                gone = to_wire(MediaGone("send it"))
                end = Finished(id=message.id, reason="error", error=gone)
                writer.write(self._codec.frame(_batch(finished=[end])))
            elif self.refuse is not None:
                end = Finished(id=message.id, reason="error", error=self.refuse)
                writer.write(self._codec.frame(_batch(finished=[end])))
            else:
                self._running[message.id] = (message, [], writer)
        elif isinstance(message, AbortRequests):
            self.aborted += message.ids
            for request_id in message.ids:
                self._running.pop(request_id, None)
        else:
            self.calls.append(message)
            if self.mute:
                return
            if message.operation == "fail" or message.operation in self.failing:
                reply = Reply(number=message.number, error=WireError("Conflict", "not now"))
            else:
                echo: dict = {"operation": message.operation, **message.arguments}
                if message.operation == "explain":
                    echo = {str(one.id): {"asked": one.id} for one in self._named(message)}
                echo = self.replies.get(message.operation, echo)
                raw = msgspec.Raw(msgspec.msgpack.encode(echo))
                reply = Reply(number=message.number, result=raw)
            writer.write(self._codec.frame(reply))
        async with self.changed:
            self.changed.notify_all()

    def _named(self, call: Call) -> list[EngineRequest]:
        """The running requests that have one of these public ids, as the core finds them."""
        tenant, labels = call.arguments.get("tenant"), call.arguments["labels"]
        running = [request for request, _, _ in self._running.values()]
        return [
            one
            for one in running
            if tenant in (None, one.tenant) and {one.label, one.external_id} & set(labels)
        ]

    async def _loop(self) -> None:
        while True:
            await self.flow.wait()
            await asyncio.sleep(0)
            for request_id in list(self._running):
                self._advance(request_id)
            async with self.changed:
                self.changed.notify_all()

    def _advance(self, request_id: int) -> None:
        request, tokens, writer = self._running[request_id]
        prompt_scores = [] if tokens else self._score_prompt(request)
        if request.stop.max_tokens == 0:
            end = Finished(id=request_id, reason="length")
            self._running.pop(request_id)
            batch = _batch(finished=[end], prompt_logprobs=prompt_scores)
            writer.write(self._codec.frame(batch))
            return
        logprobs = self.follow(request, tokens)
        token = int(np.argmax(logprobs))
        tokens.append(token)
        end = self._end(request, tokens)
        if end is not None:
            self._running.pop(request_id)
        scored = request.sampling.logprobs is not None
        batch = _batch(
            ids=[request_id],
            tokens=[token],
            logprobs=[_scored(logprobs, token, request)] if scored else [],
            prompt_logprobs=prompt_scores,
            finished=[end] if end else [],
        )
        writer.write(self._codec.frame(batch))

    def _end(self, request: EngineRequest, tokens: list[int]) -> Finished | None:
        stop = request.stop
        if tokens[-1] in stop.stop_ids and len(tokens) > stop.min_tokens:
            return Finished(id=request.id, reason="stop", stop_id=tokens[-1], num_cached=3)
        if len(tokens) >= stop.max_tokens:
            return Finished(id=request.id, reason="length", num_cached=3)
        return None

    def _score_prompt(self, request: EngineRequest) -> list[tuple[int, PromptLogprobs]]:
        """Two pieces, as a prompt that was computed in chunks."""
        if request.sampling.prompt_logprobs is None:
            return []
        ids = request.prompt_ids()[1:, None]
        values = -ids.astype(np.float32)
        ranks = np.ones(len(ids), np.int32)
        half = len(ids) // 2
        return [
            (request.id, PromptLogprobs(1 + start, ids[a:b], values[a:b], ranks[a:b]))
            for start, a, b in ((0, 0, half), (half, half, len(ids)))
        ]


def _scored(logprobs: np.ndarray, token: int, request: EngineRequest) -> TokenLogprobs:
    count = request.sampling.logprobs or 0
    order = np.argsort(-logprobs, kind="stable")
    count = len(order) if count == -1 else count
    named = list(request.sampling.logprob_ids)
    ids = np.array([token, *order[:count], *named], np.int32)
    rank = int(np.sum(logprobs > logprobs[token])) + 1
    return TokenLogprobs(ids, logprobs[ids].astype(np.float32), rank)


def _batch(ids: list[int] = [], tokens: list[int] = [], **more: object) -> TokenBatch:  # noqa: B006 - never changed
    return TokenBatch(ids=np.array(ids, np.int64), tokens=np.array(tokens, np.int32), **more)
