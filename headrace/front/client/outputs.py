"""Tokens of one answer to its events: text, stop strings, scores, and how it ended.

Budget: a token without scores costs about 1 us here. What was produced and not yet read is kept
merged, so that a slow reader gets fewer, larger deltas; `pending_bytes` says how much waits for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import InitVar, dataclass, field
from typing import Any

import msgspec
import numpy as np

from headrace.base.errors import HeadraceError, from_wire
from headrace.base.wire.pooling import Pooled
from headrace.base.wire.request import (
    ROUTED_EXPERTS,
    Captured,
    Finished,
    PromptLogprobs,
    SamplingParams,
    StopRules,
    TokenLogprobs,
)
from headrace.base.wire.transfer import HIDDEN_STATES
from headrace.front.client.events import (
    AttentionWeights,
    Delta,
    Ended,
    Event,
    PooledPart,
    PromptScored,
    ScoredToken,
    TokenScore,
)
from headrace.front.text.stop_strings import StopMatch, StopStrings
from headrace.front.text.tokenizer import Detokenizer, Tokenizer

_COPIED = (
    "num_cached",
    "scheduled_s",
    "first_token_s",
    "total_s",
    "num_preemptions",
    "num_drafted",
    "num_accepted",
    "preempted_s",
    "hook_wait_s",
    "weights_version",
)
_SCORE_BYTES = 300
_TOKEN_BYTES = 40


@dataclass(slots=True, kw_only=True, eq=False)
class ChoiceState:
    """One answer (choice) while it is made.

    `done`: nothing more will be taken in. `queued` belongs to the stream that reads the answer.
    `num_cached`: what the core told of the prompt with the first token. `weights_version`: of the
    weights when it was asked for."""

    index: int
    tokenizer: InitVar[Tokenizer]
    params: SamplingParams
    stop: InitVar[StopRules]
    pieces: InitVar[Mapping[int, str | bytes] | None] = None
    queued: bool = field(init=False, default=False)
    done: bool = field(init=False, default=False)
    error: HeadraceError | None = field(init=False, default=None)
    num_cached: int = field(init=False, default=0)
    weights_version: str = field(init=False, default="")
    _tokenizer: Tokenizer = field(init=False)
    _detokenizer: Detokenizer = field(init=False)
    _stops: StopStrings | None = field(init=False, default=None)
    _stop_ids: frozenset[int] = field(init=False)
    _text: str = field(init=False, default="")
    _ids: list[int] = field(init=False, default_factory=list)
    _scores: list[ScoredToken] | None = field(init=False, default=None)
    _cumulative: float = field(init=False, default=0.0)
    _num_output: int = field(init=False, default=0)
    _num_scores: int = field(init=False, default=0)
    _num_masked: int = field(init=False, default=0)
    _prompt: dict[int, ScoredToken] | None = field(init=False, default=None)
    _pooled: list[Event] = field(init=False, default_factory=list)
    _captured: list[Captured] = field(init=False, default_factory=list)
    _ended: Ended | None = field(init=False, default=None)

    def __post_init__(
        self, tokenizer: Tokenizer, stop: StopRules, pieces: Mapping[int, str | bytes] | None
    ) -> None:
        params = self.params
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(
            tokenizer, skip_special_tokens=params.skip_special_tokens, pieces=pieces
        )
        if params.stop:
            self._stops = StopStrings(params.stop, include=params.include_stop_str_in_output)
        self._stop_ids = frozenset(stop.stop_ids)
        self._scores = None if params.logprobs is None else []
        self._prompt = None if params.prompt_logprobs is None else {}

    @property
    def pending_bytes(self) -> int:
        """About how much memory the unread part takes."""
        return (
            len(self._text)
            + _TOKEN_BYTES * (len(self._ids) + self._num_masked)
            + _SCORE_BYTES * self._num_scores
        )

    def add_token(self, token_id: int, scored: TokenLogprobs | None) -> bool:
        """Takes in one token. True if a stop string ended the answer, which the core does not know
        yet."""
        self._ids.append(token_id)
        self._num_output += 1
        if self._scores is not None and scored is not None:
            self._add_score(scored)
        stops = token_id in self._stop_ids and self._num_output > self.params.min_tokens
        if stops and not self.params.include_stop_str_in_output:
            return False
        text = self._detokenizer.push((token_id,))
        if self._stops is None or self._num_output <= self.params.min_tokens:
            self._text += text
            return False
        return self._watch(text)

    def add_prompt_scores(self, scored: PromptLogprobs) -> None:
        """Takes in scores of prompt tokens; those of a position that came before are replaced."""
        if self._prompt is None:
            return
        for i, (ids, values, rank) in enumerate(
            zip(scored.ids.tolist(), scored.values.tolist(), scored.ranks.tolist(), strict=True)
        ):
            self._prompt[scored.start + i] = self._scored(ids, values, rank)

    def add_pooled(self, pooled: Pooled) -> None:
        """Takes in pooled hidden states."""
        self._pooled.append(PooledPart(pooled.start, pooled.values))

    def add_captured(self, captured: Captured) -> None:
        """Takes in attention weights; those of a position that came before are replaced."""
        self._captured.append(captured)

    def _attention(self, num_prompt: int) -> AttentionWeights:
        """The pieces put together. What was computed behind the answer's end is left out."""
        size = num_prompt + max(self._num_output - 1, 0)
        layers: dict[int, np.ndarray] = {}
        routed: np.ndarray | None = None
        states_path = None
        for piece in self._captured:
            if piece.layer == HIDDEN_STATES:
                states_path = piece.values.tobytes().decode()
                continue
            if piece.layer == ROUTED_EXPERTS:
                if routed is None:
                    routed = np.full((size, *piece.values.shape[1:]), -1, np.int32)
                part = piece.values[: max(size - piece.start, 0)]
                routed[piece.start : piece.start + len(part)] = part
                continue
            _, heads, seen = piece.values.shape
            width = seen if self.params.capture_heads else size
            whole = layers.setdefault(piece.layer, np.zeros((size, heads, width), np.float32))
            part = piece.values[: max(size - piece.start, 0), :, :width]
            whole[piece.start : piece.start + len(part), :, : part.shape[2]] = part
        self._captured = []
        return AttentionWeights(num_prompt, layers, routed, states_path)

    def finish(self, finished: Finished) -> None:
        """Takes in the end that the core told."""
        if finished.error is not None:
            self.error = from_wire(finished.error)
            self.done = True
            return
        self._text += self._rest()
        if not self.done:
            self._end(finished.reason, finished.stop_id, finished)

    def take(self, num_prompt: int) -> list[Event]:
        """The events since the last call."""
        events, self._pooled = self._pooled, []
        if self._prompt is not None and (self._ids or self._ended):
            scores = [self._prompt.get(i) if i else None for i in range(num_prompt)]
            events.append(PromptScored(scores))
            self._prompt = None
        if self._ids or self._text:
            delta = Delta(
                index=self.index,
                text=self._text,
                token_ids=self._ids,
                scores=self._scores,
                last=self._ended is not None,
            )
            events.append(delta)
            self._text, self._ids = "", []
            if self._scores is not None:
                self._scores, self._num_scores, self._num_masked = [], 0, 0
        if self._ended is not None:
            if self._captured:
                events.append(self._attention(num_prompt))
            events.append(self._ended)
        return events

    def _watch(self, text: str) -> bool:
        assert self._stops is not None
        piece = self._stops.push(text)
        if isinstance(piece, StopMatch):
            self._text += piece.text
            self._end("stop", piece.stop, None)
            return True
        self._text += piece
        return False

    def _rest(self) -> str:
        """What detokenizer and stop strings held back; the last half character may complete a stop
        string."""
        rest = self._detokenizer.finish()
        if self._stops is None:
            return rest
        if rest and self._watch(rest):
            return ""
        return self._stops.finish()

    def _end(self, reason: str, stop: str | int | None, finished: Finished | None) -> None:
        self.done = True
        ending: dict[str, Any] = {
            "num_output": self._num_output,
            "num_cached": self.num_cached,
            "weights_version": self.weights_version,
        }
        if finished is not None:
            ending |= {name: getattr(finished, name) for name in _COPIED}
        if self._scores is not None:
            ending["cumulative_logprob"] = self._cumulative
        self._ended = Ended(index=self.index, reason=reason, stop=stop, **ending)

    def _add_score(self, scored: TokenLogprobs) -> None:
        assert self._scores is not None
        score = self._scored(scored.ids.tolist(), scored.values.tolist(), scored.rank)
        self._cumulative += score.token.logprob
        if scored.drawn_among is not None:
            score = msgspec.structs.replace(score, drawn_among=scored.drawn_among.tolist())
            self._num_masked += len(score.drawn_among)
        self._scores.append(score)
        self._num_scores += 1 + len(score.top) + len(score.named)

    def _scored(self, ids: list[int], values: list[float], rank: int | None) -> ScoredToken:
        """Entry 0 is the token, the last are the named ids, between them the alternatives, the
        likeliest first."""
        split = max(len(ids) - len(self.params.logprob_token_ids), 1)
        return ScoredToken(
            token=self._score(ids[0], values[0], rank),
            top=[self._score(ids[at], values[at], at) for at in range(1, split)],
            named=[self._score(ids[at], values[at]) for at in range(split, len(ids))],
        )

    def _score(self, token_id: int, value: float, rank: int | None = None) -> TokenScore:
        piece = self._tokenizer.pieces[token_id]
        if isinstance(piece, str):
            return TokenScore(token_id, value, piece, piece.encode(), rank)
        return TokenScore(token_id, value, "", piece, rank)
