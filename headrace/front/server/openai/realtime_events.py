"""The items of a realtime session, and how its events are written."""

from __future__ import annotations

import base64
import binascii
import secrets
from dataclasses import dataclass, field

from headrace.base.errors import HeadraceError, InvalidRequest, ModelNotFound, TooLarge
from headrace.front.media.log_mel import RATE
from headrace.front.media.voice import Turn
from headrace.front.server.conversation.frames import Json
from headrace.front.server.http.body_budget import BodyRoom
from headrace.front.server.http.failures import Failure
from headrace.front.server.openai.realtime_buffer import SampleQueue, Samples
from headrace.front.server.openai.realtime_settings import RealtimeSettings
from headrace.front.text.transcript import JoinedText

MOST_APPENDED = 15 << 20
"""Bytes of sound in one message."""


class EmptyAudioBuffer(InvalidRequest):
    """A commit of less than LEAST samples."""


class ModelNotChosen(InvalidRequest):
    """Sound before the model that hears it."""


@dataclass(frozen=True, kw_only=True)
class AudioTurn:
    """A turn, or with `sound` a text that grows."""

    ident: str
    settings: RealtimeSettings
    samples: Samples | None = None
    sound: SampleQueue | None = None
    room: BodyRoom | None = None


@dataclass(kw_only=True)
class HeardItem:
    """What has been heard of an item."""

    text: JoinedText = field(default_factory=JoinedText)
    num_prompt: int = 0
    num_output: int = 0


def sound_of(text: str) -> bytes:
    """The bytes of an `audio`; InvalidRequest, TooLarge."""
    if len(text) > MOST_APPENDED * 4 // 3 + 4:
        raise TooLarge(f"audio: more than {MOST_APPENDED} bytes in one message", field="audio")
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidRequest("audio: is not valid base64", field="audio") from None


def item_id() -> str:
    """A new one."""
    return "item_" + secrets.token_hex(16)


def item_document(ident: str) -> Json:
    """A turn as an item of the conversation."""
    content = [{"type": "input_audio", "transcript": None}]
    return {
        "id": ident,
        "object": "realtime.item",
        "type": "message",
        "status": "completed",
        "role": "user",
        "content": content,
    }


def turn_ms(turn: Turn) -> int:
    """Milliseconds from the beginning of the session."""
    return turn.at * 1000 // RATE


def error_fields(failure: Failure) -> Json:
    """A failure in OpenAI's words."""
    return {
        "type": failure.type,
        "code": failure.code,
        "message": failure.openai_message,
        "param": failure.field,
    }


def vllm_code(error: HeadraceError, document: Json | None) -> str:
    """The code of an error in vLLM's words; `document`: the message, {} where it was none."""
    if document == {}:
        return "invalid_json"
    if isinstance(error, ModelNotChosen):
        return "model_not_validated"
    if isinstance(error, ModelNotFound):
        return "model_not_found"
    by_field = {"audio": "invalid_audio", "type": "unknown_event"}
    return by_field.get(error.field or "", "processing_error")
