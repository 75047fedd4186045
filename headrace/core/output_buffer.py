"""What the core has to say since it was last asked: tokens, ends of requests, replies."""

from __future__ import annotations

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

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
_NO_IDS = np.zeros(0, np.int64)
_NO_TOKENS = np.zeros(0, np.int32)


class CoreOutput(msgspec.Struct, frozen=True):
    """What one call of `EngineCore.step` hands out; `tokens` is None if there is nothing of the
    kind."""

    tokens: TokenBatch | None
    replies: list[Reply]


class OutputBuffer:
    """Collects between two steps, in the message that will carry it."""

    def __init__(self) -> None:
        self._batch, self._replies = _nothing(), list[Reply]()

    def __bool__(self) -> bool:
        return self._has_tokens or bool(self._replies)

    @property
    def _has_tokens(self) -> bool:
        batch = self._batch
        others = (batch.prompt_logprobs, batch.pooled, batch.captured, batch.cached, batch.finished)
        return len(batch.ids) > 0 or any(others)

    def add_tokens(self, ids: Int64, tokens: Int32, logprobs: list[TokenLogprobs | None]) -> None:
        """Tokens, behind those that are there; `logprobs` is empty or parallel to them."""
        batch = self._batch
        if len(batch.ids):
            return self._append_tokens(ids, tokens, logprobs)
        batch.ids, batch.tokens, batch.logprobs = ids, tokens, logprobs

    def _append_tokens(
        self, ids: Int64, tokens: Int32, logprobs: list[TokenLogprobs | None]
    ) -> None:
        batch = self._batch
        if batch.logprobs or logprobs:
            before = batch.logprobs or [None] * len(batch.ids)
            batch.logprobs = [*before, *(logprobs or [None] * len(ids))]
        batch.ids = np.concatenate([batch.ids, ids])
        batch.tokens = np.concatenate([batch.tokens, tokens])

    def add_prompt_logprobs(self, request_id: int, scores: PromptLogprobs) -> None:
        """Log-probabilities of a stretch of a prompt."""
        self._batch.prompt_logprobs.append((request_id, scores))

    def add_pooled(self, request_id: int, pooled: Pooled) -> None:
        """Hidden states of a request after pooling."""
        self._batch.pooled.append((request_id, pooled))

    def add_captured(self, request_id: int, captured: Captured) -> None:
        """Attention weights of a request."""
        self._batch.captured.append((request_id, captured))

    def add_cached(self, request_id: int, count: int) -> None:
        """How many of its prompt's tokens a request found in the cache."""
        self._batch.cached.append((request_id, count))

    def add_finished(self, finished: Finished) -> None:
        """The end of a request."""
        self._batch.finished.append(finished)

    def add_reply(self, reply: Reply) -> None:
        """The answer to a call that took longer than the call itself."""
        self._replies.append(reply)

    def take(self) -> CoreOutput:
        """Everything collected; the buffer is empty afterwards."""
        output = CoreOutput(self._batch if self._has_tokens else None, self._replies)
        self._batch, self._replies = _nothing(), []
        return output


def _nothing() -> TokenBatch:
    return TokenBatch(ids=_NO_IDS, tokens=_NO_TOKENS)
