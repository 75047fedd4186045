"""WS /v1/realtime: speech to text while it is spoken, in OpenAI's events and in vLLM's.

Sound is appended to a buffer. A turn of it, which the server's voice detection finds or the client
commits, becomes an item and is heard as a file of its samples is: the texts are equal. Items are
heard one after the other, in order; while MOST_WAITING of them wait no frame is read, so that the
client's own socket fills. vLLM's clients send no `session`: their sound is one text, which grows
window by window until the final commit.

A connection that ends ends what is heard for it.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from typing import Any

from msgspec import UnsetType
from starlette.websockets import WebSocket, WebSocketDisconnect

from headrace.base.errors import (
    EngineError,
    HeadraceError,
    InvalidRequest,
    ModelNotFound,
    OverloadError,
    RateLimited,
    Unsupported,
)
from headrace.front.client.transcription import SpeechModel, Window
from headrace.front.media.log_mel import RATE
from headrace.front.media.pcm import PcmStream
from headrace.front.media.voice import Turn
from headrace.front.server.conversation.context import RequestContext
from headrace.front.server.conversation.frames import (
    UNSUPPORTED,
    Json,
    close,
    document_of,
    next_text,
    send_event,
    while_open,
)
from headrace.front.server.conversation.own_names import base_of
from headrace.front.server.conversation.speech import asking, check_scores, duration, scores_of
from headrace.front.server.http.auth import completion_id, request_id
from headrace.front.server.http.body_budget import WAIT_S, BodyRoom
from headrace.front.server.http.failures import Failure, failure_of
from headrace.front.server.http.limits import THREAD_BYTES, typed
from headrace.front.server.openai.realtime_buffer import InputBuffer, SampleQueue, Samples
from headrace.front.server.openai.realtime_events import (
    AudioTurn,
    EmptyAudioBuffer,
    HeardItem,
    ModelNotChosen,
    error_fields,
    item_document,
    item_id,
    sound_of,
    turn_ms,
    vllm_code,
)
from headrace.front.server.openai.realtime_settings import (
    AppendEvent,
    CommitEvent,
    RealtimeSettings,
    UpdateEvent,
)

MAX_AGE_S = 3600.0
IDLE_S = 600.0
MOST_WAITING = 4
LEAST = RATE // 10
"""Samples of a turn that a client commits."""
CLIENT_GONE = 499
TRANSCRIPTION = "conversation.item.input_audio_transcription"


class RealtimeSession:
    """One connection. `_speaks_vllm`: which of the two dialects its client has shown to speak."""

    def __init__(self, context: RequestContext, socket: WebSocket, speech: SpeechModel) -> None:
        self._context, self._socket, self._speech = context, socket, speech
        self._ident = "sess_" + secrets.token_hex(16)
        self._speaks_vllm = not socket.query_params
        self._settings = RealtimeSettings()
        self._buffer = InputBuffer(self._settings)
        self._room = self._new_room()
        self._turn_id: str | None = None
        self._last_id: str | None = None
        self._items: asyncio.Queue[AudioTurn] = asyncio.Queue(MOST_WAITING)
        self._sound = SampleQueue()
        self._stream = PcmStream("audio/pcm", RATE)
        self._grows = False

    async def serve(self) -> None:
        """Until the client leaves, falls silent or the connection is too old."""
        try:
            await while_open(
                self._context,
                self._socket,
                self._run(),
                max_age_s=MAX_AGE_S,
                grow_old=self._grow_old,
            )
        finally:
            self._room.close()
            while not self._items.empty():
                if (room := self._items.get_nowait().room) is not None:
                    room.close()

    async def _grow_old(self) -> None:
        what = f"a connection may be open for {MAX_AGE_S / 60:g} minutes"
        await self._fail(RateLimited(what + "; open another one"), None)

    async def _run(self) -> None:
        """Reads and hears at the same time; the end of one is that of the other."""
        if (model := self._socket.query_params.get("model")) is not None:
            self._settings = RealtimeSettings(model=self._context.services.model_name(model))
            self._buffer = InputBuffer(self._settings)
        created = {"id": self._ident, "created": int(time.time())}
        await self._send("session.created", **created, session=self._document())
        tasks = [asyncio.ensure_future(work) for work in (self._read(), self._hear())]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self) -> None:
        while True:
            try:
                async with asyncio.timeout(IDLE_S):
                    text = await next_text(self._socket)
            except TimeoutError:
                await self._fail(RateLimited(f"nothing came for {IDLE_S:g} s"), None)
                await close(self._socket)
                return
            if text is None:
                return
            document: Json = {}
            try:
                document = await document_of(self._context, text)
                await self._take(document)
            except HeadraceError as error:
                await self._fail(error, document)

    async def _take(self, document: Json) -> None:
        """One message of the client."""
        match document.get("type"):
            case "session.update":
                await self._update(typed(document, UpdateEvent))
            case "input_audio_buffer.append":
                await self._append(sound_of(typed(document, AppendEvent).audio))
            case "input_audio_buffer.commit" if self._speaks_vllm:
                await self._commit_growing(typed(document, CommitEvent))
            case "input_audio_buffer.commit":
                await self._commit_buffer()
            case "input_audio_buffer.clear":
                self._begin_buffer()
                await self._send("input_audio_buffer.cleared")
            case kind:
                raise InvalidRequest(
                    f"type: {kind!r:.80} given; allowed: session.update, "
                    "input_audio_buffer.append, .commit, .clear",
                    field="type",
                )

    async def _update(self, asked: UpdateEvent) -> None:
        services = self._context.services
        if isinstance(asked.session, UnsetType):
            self._speaks_vllm = True
            self._settings = self._settings.of_model(services.model_name(asked.model))
            return
        self._speaks_vllm = False
        settings = self._settings.updated(asked.session)
        if settings.model:
            services.model_name(settings.model)
        self._speech.check(settings.speech)
        if settings.scores:
            check_scores(self._speech, "session.include")
        old, self._settings = self._settings, settings
        kept = ("encoding", "rate", "voice")
        if any(getattr(old, name) != getattr(settings, name) for name in kept):
            self._begin_buffer()
        await self._send("session.updated", session=self._document())

    def _begin_buffer(self) -> None:
        self._buffer = InputBuffer(self._settings, start=self._buffer.end)
        self._turn_id = None
        self._room.close()

    async def _append(self, data: bytes) -> None:
        if not self._settings.model:
            raise ModelNotChosen("send session.update with the model first", field="model")
        if self._speaks_vllm:
            if self._sound.is_full and not self._grows:
                raise InvalidRequest("audio: the buffer is full; commit it", field="audio")
            await self._sound.put(self._stream.feed(data))
            return
        await self._room.grow_to(self._buffer.num_bytes + len(data), wait_s=WAIT_S)
        append = self._buffer.append
        turns = append(data) if len(data) < THREAD_BYTES else await asyncio.to_thread(append, data)
        for turn in turns:
            await (self._begin_turn(turn) if turn.begins else self._end_turn(turn))
        if self._turn_id is not None and self._buffer.is_full:
            await self._commit(self._buffer.take())
            await self._begin_turn(Turn(begins=True, at=self._buffer.start))  # it goes on
        self._buffer.forget_silence()

    async def _begin_turn(self, turn: Turn) -> None:
        self._buffer.take(turn.at)
        self._turn_id = item_id()
        await self._send(
            "input_audio_buffer.speech_started", audio_start_ms=turn_ms(turn), item_id=self._turn_id
        )

    async def _end_turn(self, turn: Turn) -> None:
        if self._turn_id is not None:
            ended = {"audio_end_ms": turn_ms(turn), "item_id": self._turn_id}
            await self._send("input_audio_buffer.speech_stopped", **ended)
            await self._commit(self._buffer.take(turn.at))

    async def _commit_buffer(self) -> None:
        self._buffer.flush()
        if self._buffer.end - self._buffer.start < LEAST:
            raise EmptyAudioBuffer(
                f"the input audio buffer holds {self._buffer.num_bytes // 2 * 1000 // RATE} ms; "
                "at least 100 ms are committed"
            )
        await self._commit(self._buffer.take())

    async def _commit(self, samples: Samples) -> None:
        """A turn becomes an item; waits while too many do."""
        ident, previous = self._turn_id or item_id(), self._last_id
        self._turn_id, self._last_id = None, ident
        before = {"previous_item_id": previous}
        await self._send("input_audio_buffer.committed", item_id=ident, **before)
        await self._send("conversation.item.added", item=item_document(ident), **before)
        await self._send("conversation.item.done", item=item_document(ident), **before)
        room, self._room = self._room, self._new_room()
        item = AudioTurn(ident=ident, settings=self._settings, samples=samples, room=room)
        await self._items.put(item)

    async def _commit_growing(self, asked: CommitEvent) -> None:
        if not self._settings.model:
            raise ModelNotChosen("send session.update with the model first", field="model")
        sound = self._sound
        if asked.final:
            await sound.put(self._stream.finish())
            await sound.close()
            self._sound = SampleQueue()
        if not self._grows:
            await self._items.put(AudioTurn(ident=item_id(), settings=self._settings, sound=sound))
        self._grows = not asked.final

    async def _hear(self) -> None:
        """The items, one after the other."""
        while True:
            item = await self._items.get()
            first = self._context
            context = RequestContext(
                services=first.services, request_id=request_id(), tenant=first.tenant
            )
            context.begin_trace(self._socket.scope)
            status = CLIENT_GONE
            try:
                await self._answer(context, item)
                status = 200
            except (WebSocketDisconnect, asyncio.CancelledError):
                raise
            except Exception as error:
                failure = failure_of(error, request_id=context.request_id)
                status = failure.status
                await self._fail_item(failure, item)
            finally:
                context.held.close()
                context.over(status)
                if item.room is not None:
                    item.room.close()

    async def _answer(self, context: RequestContext, item: AudioTurn) -> None:
        context.hold_place()
        ask, heard = asking(context, completion_id("audio")), HeardItem()
        windows = self._windows(item)
        async with aclosing(self._speech.heard(windows, item.settings.speech, ask)) as each:
            async for one in each:
                heard.num_prompt += one.num_prompt
                heard.num_output += one.num_output
                if delta := heard.text.add(one.text):
                    scores = scores_of(one) if item.settings.scores else None
                    await self._tell(item, delta, scores)
        await self._tell_all(item, heard)

    def _windows(self, item: AudioTurn) -> AsyncGenerator[Window, None]:
        if item.samples is not None:
            return self._speech.windows(item.samples)
        assert item.sound is not None
        return self._speech.windows_as_they_come(item.sound.chunks())

    async def _tell(self, item: AudioTurn, delta: str, scores: list[Json] | None) -> None:
        if item.sound is not None:
            await send_event(self._socket, {"type": "transcription.delta", "delta": delta})
            return
        event: Json = {"item_id": item.ident, "content_index": 0, "delta": delta}
        if scores is not None:
            event["logprobs"] = scores
        await self._send(f"{TRANSCRIPTION}.delta", **event)

    async def _tell_all(self, item: AudioTurn, heard: HeardItem) -> None:
        text = heard.text.text
        if item.sound is not None:
            usage = {
                "prompt_tokens": heard.num_prompt,
                "completion_tokens": heard.num_output,
                "total_tokens": heard.num_prompt + heard.num_output,
            }
            done = {"type": "transcription.done", "text": text, "usage": usage}
            await send_event(self._socket, done)
            return
        assert item.samples is not None
        await self._send(
            f"{TRANSCRIPTION}.completed",
            item_id=item.ident,
            content_index=0,
            transcript=text,
            usage=duration(len(item.samples) / RATE),
        )

    async def _fail_item(self, failure: Failure, item: AudioTurn) -> None:
        if item.sound is not None:
            if item.sound is self._sound:  # what still comes of it goes nowhere
                await item.sound.close()
                self._sound, self._grows = SampleQueue(), False
            await self._send_error(failure, "processing_error", None)
            return
        event = {"item_id": item.ident, "content_index": 0, "error": error_fields(failure)}
        await self._send(f"{TRANSCRIPTION}.failed", **event)

    async def _fail(self, error: HeadraceError, document: Json | None) -> None:
        """Tells that a message was wrong; `document`: {} where it could not be read."""
        failure = failure_of(error, request_id=self._context.request_id)
        sent = (document or {}).get("event_id")
        await self._send_error(failure, vllm_code(error, document), sent)

    async def _send_error(self, failure: Failure, code: str, sent: object) -> None:
        if self._speaks_vllm:
            event = {"type": "error", "error": failure.message, "code": code}
            await send_event(self._socket, event)
            return
        sent = sent[:512] if isinstance(sent, str) else None
        await self._send("error", error={**error_fields(failure), "event_id": sent})

    def _document(self) -> Json:
        return self._settings.document(self._ident)

    def _new_room(self) -> BodyRoom:
        return BodyRoom(self._context.services.bodies, self._context.tenant)

    async def _send(self, kind: str, **fields: Any) -> None:
        """An event of OpenAI's."""
        event = {"type": kind, "event_id": "event_" + secrets.token_hex(16), **fields}
        await send_event(self._socket, event)


async def serve(context: RequestContext, socket: WebSocket) -> None:
    """A connection at /v1/realtime. In a server of several models its address names one, which it
    holds."""
    error: HeadraceError = Unsupported("the model does not hear: this route needs a speech model")
    try:
        named = {"model": await base_of(context, socket.query_params.get("model"))}
        await context.choose_model(named, runs=True)
        if (speech := context.services.speech) is not None:
            await RealtimeSession(context, socket, speech).serve()
            return
    except (ModelNotFound, OverloadError, EngineError) as wrong:  # the model in the address
        error = wrong
    finally:
        context.held.close()
    failure = failure_of(error, request_id=context.request_id)
    with suppress(WebSocketDisconnect):
        await send_event(socket, {"type": "error", "error": error_fields(failure)})
        await close(socket, UNSUPPORTED)
