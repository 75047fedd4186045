"""What both OpenAI routes make of events: the fold of a stream into choices, the usage, the
log-probabilities.

A full answer is the fold of its stream: the streaming and the plain route run the same `Fold` over
the same events, so that texts, finish reasons and usage cannot differ between them."""

from __future__ import annotations

import base64
import codecs
import gzip
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from headrace.front.client.events import (
    AttentionWeights,
    Delta,
    Ended,
    Event,
    PromptScored,
    ScoredToken,
    Started,
    TokenScore,
)
from headrace.front.server.conversation.calls import CustomBegin, FunctionBegin, FunctionEnded
from headrace.front.server.conversation.stages import ParsedDelta, ParsedEnded
from headrace.front.text.parsing.engine import CallArguments, CallBegin, Content, Part, Reasoning


class Spans(Protocol):
    """[begin, end) of each token in the text of all, as prompts.spans gives it."""

    def __call__(self, ids: list[int], /, *, continues: bool) -> list[tuple[int, int]]: ...


LOWEST = -9999.0
"""Stands for minus infinity and NaN, which JSON does not have."""


class Tally:
    """What the usage of one request is made of: all that a stream must keep of what went by."""

    num_prompt = 0
    num_hit = 0
    num_drafted = 0
    num_accepted = 0
    num_media = num_audio = 0
    weights_version = ""
    first_ended: Ended | None = None

    def __init__(self, num_choices: int) -> None:
        self.num_choices = num_choices
        self.output = [0] * num_choices
        self.reasoning = [0] * num_choices

    def take(self, event: Event) -> None:
        """Adds one event."""
        match event:
            case Delta():
                self.output[event.index] += len(event.token_ids)
                if isinstance(event, ParsedDelta):
                    self.reasoning[event.index] = event.num_reasoning
            case Ended():  # the engine's own count
                self.output[event.index] = event.num_output
                self.num_hit = max(self.num_hit, event.num_cached)
                self.num_drafted += event.num_drafted
                self.num_accepted += event.num_accepted
                self.weights_version = event.weights_version
                if event.index == 0:
                    self.first_ended = event
            case Started():
                self.num_prompt, self.num_hit = event.num_prompt, event.num_cached
                self.num_media, self.num_audio = event.num_media, event.num_audio

    @property
    def num_cached(self) -> int:
        """Prompt tokens found in the cache, counted once like the prompt itself."""
        return min(self.num_hit, self.num_prompt)


@dataclass
class FoldedCall:
    """One tool call as far as it has come. `legacy`: it is told as a `function_call`."""

    id: str
    name: str
    custom: bool = False
    legacy: bool = False
    arguments: list[str] = field(default_factory=list)


@dataclass
class FoldedChoice:
    """One answer as far as it has come; `text` is its content, all of the text where nothing is
    parsed."""

    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[FoldedCall] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    scores: list[ScoredToken] = field(default_factory=list)
    ended: Ended | None = None

    def add(self, part: Part) -> None:
        """Adds one parsed part."""
        match part:
            case Content():
                self.text.append(part.text)
            case Reasoning():
                self.reasoning.append(part.text)
            case CallBegin():
                assert part.index == len(self.calls), "calls have contiguous indices"
                custom, legacy = isinstance(part, CustomBegin), isinstance(part, FunctionBegin)
                self.calls.append(FoldedCall(part.id, part.name, custom, legacy))
            case CallArguments():
                self.calls[part.index].arguments.append(part.text)


class Fold(Tally):
    """The whole of one request's answers. `choices` is indexed by the events' `index` and made up
    front."""

    prompt_scores: list[ScoredToken | None] | None = None
    attention: AttentionWeights | None = None

    def __init__(self, num_choices: int) -> None:
        super().__init__(num_choices)
        self.choices = [FoldedChoice() for _ in range(num_choices)]

    def take(self, event: Event) -> None:
        """Adds one event."""
        super().take(event)
        match event:
            case Delta():
                choice = self.choices[event.index]
                if isinstance(event, ParsedDelta):
                    for part in event.parts:
                        choice.add(part)
                else:
                    choice.text.append(event.text)
                choice.token_ids += event.token_ids
                choice.scores += event.scores or []
            case Ended():
                self.choices[event.index].ended = event
            case PromptScored():
                self.prompt_scores = event.scores
            case AttentionWeights():
                self.attention = event


def usage(folds: Sequence[Tally]) -> dict[str, object]:
    """Usage over the prompts of a request: prompt + completion == total, cached <= prompt; of media
    where there are any, and the weights' version where they have one."""
    prompt = sum(fold.num_prompt for fold in folds)
    completion = sum(sum(fold.output) for fold in folds)
    reasoning = sum(sum(fold.reasoning) for fold in folds)
    details = {"reasoning_tokens": reasoning}
    if any(fold.num_drafted for fold in folds):
        accepted = sum(fold.num_accepted for fold in folds)
        rejected = sum(fold.num_drafted for fold in folds) - accepted
        details["accepted_prediction_tokens"] = accepted
        details["rejected_prediction_tokens"] = rejected
    prompt_details = {"cached_tokens": sum(fold.num_cached for fold in folds)}
    audio = sum(fold.num_audio for fold in folds)
    if seen := sum(fold.num_media for fold in folds) - audio:
        prompt_details["image_tokens"] = seen
    if audio:
        prompt_details["audio_tokens"] = audio
    version = folds[-1].weights_version if folds else ""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": prompt_details,
        "completion_tokens_details": details,
        **({"weights_version": version} if version else {}),
    }


def request_metrics(ended: Ended | None) -> dict[str, float | None]:
    """The `metrics` extension: where the time of a request with one choice went. Null where a stop
    string ended it before the engine's times were known."""
    ttft = queue = generation = itl = rate = None
    if ended is not None and ended.total_s is not None and ended.first_token_s is not None:
        queue = ended.scheduled_s or 0.0
        ttft, generation = ended.first_token_s - queue, ended.total_s - ended.first_token_s
        itl = generation / (ended.num_output - 1) if ended.num_output > 1 else None
        rate = ended.num_output / max(ended.total_s - queue, 1e-9)
    return {
        "time_to_first_token_ms": _milliseconds(ttft),
        "generation_time_ms": _milliseconds(generation),
        "queue_time_ms": _milliseconds(queue),
        "mean_itl_ms": _milliseconds(itl),
        "tokens_per_second": None if rate is None else round(rate, 3),
    }


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(1e3 * seconds, 3)


def finish_reason(ended: Ended) -> str:
    """OpenAI's name of the reason, which knows neither "abort" (an administrator ended it) nor
    "repetition".

    Calls are only named where a client may run them: one that a stop string or the model's own end
    cut off is "stop"."""
    if isinstance(ended, ParsedEnded) and ended.called and ended.reason == "stop":
        return "function_call" if isinstance(ended, FunctionEnded) else "tool_calls"
    return ended.reason


def stop_reason(ended: Ended) -> str | int | None:
    """What ended the choice, beyond the reason's name."""
    return "repetition_detected" if ended.reason == "repetition" else ended.stop


def logprob(value: float) -> float:
    """A log-probability JSON can hold."""
    return value if value > LOWEST else LOWEST


def token_name(score: TokenScore, *, as_id: bool) -> str:
    """A token's text; its id where that was asked for, its bytes where it ends inside a
    character."""
    if as_id:
        return f"token_id:{score.id}"
    if score.text or not score.data:
        return score.text
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in score.data)


def alternatives(scored: ScoredToken, *, sampled_first: bool) -> list[TokenScore]:
    """The candidates shown beside a token: those asked for by id, else the likeliest ones.
    `sampled_first`: the token itself leads them, in the place of the least likely if need be."""
    others = scored.named or scored.top
    if not sampled_first or not others:
        return others
    led = [scored.token, *(score for score in others if score.id != scored.token.id)]
    return led if scored.named else led[: len(others)]


def chat_logprobs(
    scores: list[ScoredToken], *, as_id: bool, sampled_first: bool = False
) -> dict[str, object]:
    """The `logprobs` object of a chat choice."""

    def entry(score: TokenScore) -> dict[str, object]:
        return {
            "token": f"token_id:{score.id}" if as_id else score.text,
            "logprob": logprob(score.logprob),
            "bytes": list(score.data),
        }

    content = [
        {
            **entry(scored.token),
            "top_logprobs": [entry(s) for s in alternatives(scored, sampled_first=sampled_first)],
        }
        for scored in scores
    ]
    return {"content": content, "refusal": None}


class TextOffsets:
    """Where tokens begin in a choice's text, in characters: counted on the bytes, so that a
    character of several tokens belongs to its last one, however the stream was cut."""

    def __init__(self) -> None:
        self.at = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def place(self, data: bytes) -> int:
        """The offset of the next token, whose bytes are `data`."""
        at = self.at
        self.at += len(self._decoder.decode(data))
        return at


def completion_logprobs(
    scores: list[ScoredToken | None],
    *,
    first: str,
    offsets: TextOffsets,
    as_id: bool,
    sampled_first: bool = False,
) -> dict[str, object]:
    """The `logprobs` object of a completion choice. `first`: the text of a token without a score (a
    prompt's first)."""
    return {
        "tokens": [first if s is None else token_name(s.token, as_id=as_id) for s in scores],
        "token_logprobs": [None if s is None else logprob(s.token.logprob) for s in scores],
        "top_logprobs": [
            None if s is None else _top(s, as_id=as_id, sampled_first=sampled_first) for s in scores
        ],
        "text_offset": [
            offsets.place(first.encode() if s is None else s.token.data) for s in scores
        ],
    }


def _top(scored: ScoredToken, *, as_id: bool, sampled_first: bool) -> dict[str, float]:
    """The candidates and the token itself, which comes last where it is none of them."""
    others = alternatives(scored, sampled_first=False)
    shown = [scored.token, *others] if sampled_first else [*others, scored.token]
    logprobs: dict[str, float] = {}
    for score in shown:
        logprobs.setdefault(token_name(score, as_id=as_id), logprob(score.logprob))
    return logprobs


def scores_by_id(scores: list[ScoredToken | None]) -> list[dict[str, object] | None]:
    """The `prompt_logprobs` extension: per prompt token {id: {logprob, rank, decoded_token}}, null
    for the first."""
    return [
        None
        if scored is None
        else {
            str(s.id): {"logprob": logprob(s.logprob), "rank": s.rank, "decoded_token": s.text}
            for s in (scored.token, *scored.top, *scored.named)
        }
        for scored in scores
    ]


def captured_documents(captured: AttentionWeights, dtype: str | None) -> dict[str, object]:
    """What an answer tells of attention and routers, by the names of its fields."""
    documents: dict[str, object] = {}
    if captured.layers:
        documents["attn_capture_data"] = attention_document(captured, dtype)
    if captured.states_path is not None:
        documents["kv_transfer_params"] = {"hidden_states_path": captured.states_path or None}
    if captured.routed is not None:
        experts = np.ascontiguousarray(captured.routed, np.dtype("<i4"))
        data = base64.b64encode(experts.tobytes()).decode()
        documents["routed_experts"] = {
            "data": data,
            "encoding": "base64",
            "dtype": "int32",
            "shape": list(experts.shape),
        }
    return documents


def attention_document(captured: AttentionWeights, dtype: str | None) -> list[dict[str, object]]:
    """`attn_capture_data`: per layer base64(gzip(weights)), little-endian, of shape [T, heads,
    T]."""
    wanted = np.dtype(dtype or "float16").newbyteorder("<")
    entries: list[dict[str, object]] = []
    for layer, weights in sorted(captured.layers.items()):
        data = gzip.compress(weights.astype(wanted).tobytes(), compresslevel=1)
        total = weights.shape[0]
        entries.append(
            {
                "layer_idx": layer,
                "data": base64.b64encode(data).decode(),
                "encoding": "base64(gzip)",
                "dtype": dtype or "float16",
                "shape": list(weights.shape),
                "token_meta": {
                    "prompt_len": captured.num_prompt,
                    "total_len": total,
                    "vision_ranges": [],
                    "lang_ranges": [[0, total]],
                },
            }
        )
    return entries
