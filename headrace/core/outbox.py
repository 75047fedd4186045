"""What the core has to say since it was last asked: tokens, ends of requests, replies."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
import numpy as np
import numpy.typing as npt

from headrace.base.wire.request import (
    Captured,
    Finished,
    Pooled,
    PromptLogprobs,
    Reply,
    TokenBatch,
    TokenLogprobs,
)

_NO_IDS = np.zeros(0, np.int64)
_NO_TOKENS = np.zeros(0, np.int32)


class StepOutput(msgspec.Struct, frozen=True):
    """What one call of `EngineCore.step` hands out; `tokens` is None if there is nothing of the kind."""

    tokens: TokenBatch | None
    replies: list[Reply]


@dataclass(eq=False)
class Outbox:
    """Collects between two steps."""

    _ids: npt.NDArray[np.int64] = field(default_factory=lambda: _NO_IDS)
    _tokens: npt.NDArray[np.int32] = field(default_factory=lambda: _NO_TOKENS)
    _logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    _prompt_logprobs: list[tuple[int, PromptLogprobs]] = field(default_factory=list)
    _pooled: list[tuple[int, Pooled]] = field(default_factory=list)
    _captured: list[tuple[int, Captured]] = field(default_factory=list)
    _finished: list[Finished] = field(default_factory=list)
    _replies: list[Reply] = field(default_factory=list)

    def __bool__(self) -> bool:
        return self._has_tokens or bool(self._replies)

    @property
    def _has_tokens(self) -> bool:
        told = (self._prompt_logprobs, self._pooled, self._captured, self._finished)
        return len(self._ids) > 0 or any(told)

    def add_tokens(
        self,
        ids: npt.NDArray[np.int64],
        tokens: npt.NDArray[np.int32],
        logprobs: list[TokenLogprobs | None],
    ) -> None:
        """Tokens, behind those that are there; `logprobs` is empty or parallel to them."""
        if len(self._ids):
            return self._append_tokens(ids, tokens, logprobs)
        self._ids, self._tokens, self._logprobs = ids, tokens, logprobs

    def _append_tokens(
        self,
        ids: npt.NDArray[np.int64],
        tokens: npt.NDArray[np.int32],
        logprobs: list[TokenLogprobs | None],
    ) -> None:
        if self._logprobs or logprobs:
            before = self._logprobs or [None] * len(self._ids)
            self._logprobs = [*before, *(logprobs or [None] * len(ids))]
        self._ids = np.concatenate([self._ids, ids])
        self._tokens = np.concatenate([self._tokens, tokens])

    def add_prompt_logprobs(self, request_id: int, scores: PromptLogprobs) -> None:
        """Log-probabilities of a stretch of a prompt."""
        self._prompt_logprobs.append((request_id, scores))

    def add_pooled(self, request_id: int, pooled: Pooled) -> None:
        """Hidden states of a request after pooling."""
        self._pooled.append((request_id, pooled))

    def add_captured(self, request_id: int, captured: Captured) -> None:
        """Attention weights of a request."""
        self._captured.append((request_id, captured))

    def add_finished(self, finished: Finished) -> None:
        """The end of a request."""
        self._finished.append(finished)

    def add_reply(self, reply: Reply) -> None:
        """The late answer to a call."""
        self._replies.append(reply)

    def take(self) -> StepOutput:
        """Everything collected; the outbox is empty afterwards."""
        if not self:
            return StepOutput(None, [])
        tokens = None
        if self._has_tokens:
            tokens = TokenBatch(
                ids=self._ids,
                tokens=self._tokens,
                logprobs=self._logprobs,
                prompt_logprobs=self._prompt_logprobs,
                pooled=self._pooled,
                captured=self._captured,
                finished=self._finished,
            )
        output = StepOutput(tokens, self._replies)
        self.__init__()  # type: ignore[misc]
        return output
