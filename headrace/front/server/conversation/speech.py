"""How routes that hear ask the engine, and what they tell of the sound that was heard."""

from __future__ import annotations

import math
from typing import Any

from headrace.base.errors import InvalidRequest
from headrace.base.wire.request import SamplingParams
from headrace.front.client.events import Events
from headrace.front.client.transcription import Ask, Heard, PooledSound, Sound, SpeechModel
from headrace.front.server.conversation.context import RequestContext
from headrace.front.server.conversation.fold import logprob
from headrace.front.server.conversation.pipeline import generate
from headrace.front.server.conversation.pooling import pooled_sound
from headrace.front.server.conversation.resolved import RunOptions


def asking(context: RequestContext, label: str) -> Ask:
    """Runs a speech model's decoder for this request."""

    def ask(ids: list[int], params: SamplingParams, sound: Sound) -> Events:
        run = RunOptions()
        if isinstance(sound, bytes):
            return generate(context, ids, params, run, label=label, encoder=sound)
        if isinstance(sound, PooledSound):
            return pooled_sound(context, ids, sound, label=label)
        return generate(context, ids, params, run, label=label, media=sound)

    return ask


def check_scores(speech: SpeechModel, field: str) -> None:
    """InvalidRequest where the model does not tell how likely tokens of its text are."""
    if not speech.tells_scores:
        raise InvalidRequest(f"{field}: this model tells no logprobs of tokens", field=field)


def scores_of(heard: Heard) -> list[dict[str, Any]]:
    """The tokens of a window's text with their log-probabilities."""
    tokens = [scored.token for scored in heard.scores]
    return [
        {"token": one.text, "logprob": logprob(one.logprob), "bytes": list(one.data)}
        for one in tokens
    ]


def duration(seconds: float) -> dict[str, Any]:
    """The usage of a model that is paid for by time."""
    return {"type": "duration", "seconds": math.ceil(seconds)}
