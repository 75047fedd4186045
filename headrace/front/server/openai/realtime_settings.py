"""What a realtime session is told: the messages of its clients, and the settings they leave."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from headrace.base.errors import InvalidRequest, Unsupported
from headrace.front.client.speech_request import SpeechRequest, with_keywords
from headrace.front.media.log_mel import RATE
from headrace.front.media.voice import VoiceSettings
from headrace.front.server.http.limits import Name

OPENAI_RATE = 24_000
TELEPHONE_RATE = 8000
Json = dict[str, Any]


class AudioFormat(msgspec.Struct, frozen=True, kw_only=True):
    """How `audio` is encoded; `rate` in samples a second, of PCM alone."""

    type: Literal["audio/pcm", "audio/pcmu", "audio/pcma"] = "audio/pcm"
    rate: Annotated[int, Meta(ge=8000, le=48_000)] | None = None


SCORES = "item.input_audio_transcription.logprobs"


class TranscriptionFields(msgspec.Struct, frozen=True, kw_only=True):
    """The model and what it is told; `keywords`: words that may occur."""

    model: Name | None = None
    language: Name | None = None
    prompt: Annotated[str, Meta(max_length=64 << 10)] | None = None
    keywords: Annotated[tuple[Name, ...], Meta(max_length=256)] = ()


class TurnDetection(msgspec.Struct, frozen=True, kw_only=True):
    """See VoiceSettings."""

    type: Literal["server_vad", "semantic_vad"]
    threshold: Annotated[float, Meta(ge=0, le=1)] = 0.5
    prefix_padding_ms: Annotated[int, Meta(ge=0, le=5000)] = 300
    silence_duration_ms: Annotated[int, Meta(ge=20, le=10_000)] = 500


class AudioInput(msgspec.Struct, frozen=True, kw_only=True):
    """What is not given stays as it was."""

    format: AudioFormat | None = None
    transcription: TranscriptionFields | None = None
    turn_detection: TurnDetection | UnsetType | None = UNSET


class SessionAudio(msgspec.Struct, frozen=True, kw_only=True):
    """The audio of a session."""

    input: AudioInput = AudioInput()


class SessionFields(msgspec.Struct, frozen=True, kw_only=True):
    """`session` of OpenAI's session.update."""

    type: Literal["transcription", "realtime"] = "transcription"
    audio: SessionAudio = SessionAudio()
    include: tuple[Literal["item.input_audio_transcription.logprobs"], ...] | UnsetType | None = (
        UNSET
    )


class UpdateEvent(msgspec.Struct, frozen=True, kw_only=True):
    """session.update: OpenAI's clients send a `session`, vLLM's a `model`."""

    session: SessionFields | UnsetType = UNSET
    model: Name | None = None


class AppendEvent(msgspec.Struct, frozen=True, kw_only=True):
    """input_audio_buffer.append: base64."""

    audio: str


class CommitEvent(msgspec.Struct, frozen=True, kw_only=True):
    """input_audio_buffer.commit; `final` of vLLM's clients alone."""

    final: bool = False


class RealtimeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What holds in a session. `model`: "" where none has been named; `voice`: None where turns are
    committed by the client; `scores`: texts come with the log-probabilities of their tokens."""

    model: str = ""
    encoding: str = "audio/pcm"
    rate: int = OPENAI_RATE
    speech: SpeechRequest = SpeechRequest()
    voice: VoiceSettings | None = VoiceSettings()
    scores: bool = False

    def updated(self, fields: SessionFields) -> RealtimeSettings:
        """With what a client sends; InvalidRequest where that is no transcription."""
        if fields.type != "transcription":
            raise Unsupported(
                "session.type: 'realtime' given; this server transcribes and does not speak: "
                "send 'transcription'",
                field="session.type",
            )
        audio, changes = fields.audio.input, dict[str, Any]()
        if audio.format is not None:
            changes |= {"encoding": audio.format.type, "rate": _rate(audio.format)}
        if (heard := audio.transcription) is not None:
            before = with_keywords(heard.prompt or "", heard.keywords)
            speech = SpeechRequest(language=heard.language or None, prompt=before)
            changes |= {"speech": speech, "model": heard.model or self.model}
        if not isinstance(audio.turn_detection, UnsetType):
            changes["voice"] = _voice(audio.turn_detection)
        if not isinstance(fields.include, UnsetType):
            changes["scores"] = bool(fields.include)
        return msgspec.structs.replace(self, **changes)

    def of_model(self, model: str) -> RealtimeSettings:
        """Those of a client of vLLM's, which names the model alone."""
        return msgspec.structs.replace(self, model=model, rate=RATE, voice=None)

    def document(self, ident: str) -> Json:
        """The session as OpenAI's clients read it."""
        form: Json = {"type": self.encoding}
        if self.encoding == "audio/pcm":
            form["rate"] = self.rate
        heard = {
            "model": self.model,
            "language": self.speech.language,
            "prompt": self.speech.prompt,
        }
        voice = self.voice and {
            "type": "server_vad",
            "threshold": self.voice.threshold,
            "prefix_padding_ms": self.voice.prefix_ms,
            "silence_duration_ms": self.voice.silence_ms,
        }
        audio = {
            "format": form,
            "transcription": heard,
            "turn_detection": voice,
            "noise_reduction": None,  # there is none, whatever was asked for
        }
        return {
            "id": ident,
            "object": "realtime.transcription_session",
            "type": "transcription",
            "audio": {"input": audio},
            "include": [SCORES] if self.scores else None,
        }


def _rate(form: AudioFormat) -> int:
    if form.type == "audio/pcm":
        return form.rate or OPENAI_RATE
    if form.rate not in (None, TELEPHONE_RATE):
        raise InvalidRequest(
            f"session.audio.input.format.rate: {form.rate} given; {form.type} has {TELEPHONE_RATE}",
            field="session.audio.input.format.rate",
        )
    return TELEPHONE_RATE


def _voice(asked: TurnDetection | None) -> VoiceSettings | None:
    if asked is None:
        return None
    if asked.type != "server_vad":
        field = "session.audio.input.turn_detection.type"
        raise Unsupported(
            f"{field}: {asked.type!r} given; this server detects turns by 'server_vad', or null: "
            "by input_audio_buffer.commit",
            field=field,
        )
    return VoiceSettings(
        threshold=asked.threshold,
        prefix_ms=asked.prefix_padding_ms,
        silence_ms=asked.silence_duration_ms,
    )
