"""The tokens of one step: decodes first, one token each, then prefill chunks with what is left."""

from __future__ import annotations

from headrace.core.scheduler.pace import Pace


class StepBudget:
    """The budget of one step.

    `inter_prefill`: once the step holds that many prefill tokens no further prefill joins it; the first always may,
    and may use the whole budget (ENG-01). Without `chunked` a prompt runs in one step or waits for the next. `pace`
    bounds the prefill tokens beside rows that decode.
    """

    def __init__(
        self, max_tokens: int, inter_prefill: int | None, pace: Pace, *, chunked: bool = True
    ) -> None:
        self.left = max_tokens
        self.prefill_tokens = 0
        self._inter_prefill = inter_prefill
        self._chunked = chunked
        self._pace = pace
        self._allowance = max_tokens

    def spend_decodes(self, count: int) -> None:
        """`count` rows decode."""
        assert count <= self.left, (count, self.left)
        self.left -= count
        self._allowance = self._pace.allowance(count)

    @property
    def prefill_left(self) -> int:
        """Tokens the next prefill chunk may have."""
        return min(self.left, self._allowance - self.prefill_tokens)

    def spend_prefill(self, tokens: int) -> None:
        """A prefill chunk joins."""
        assert 0 < tokens <= self.prefill_left, (tokens, self.prefill_left)
        self.left -= tokens
        self.prefill_tokens += tokens

    @property
    def prefill_may_join(self) -> bool:
        """Whether one more prefill chunk may join the step."""
        if self.prefill_left <= 0:
            return False
        bound = self._inter_prefill
        return bound is None or self.prefill_tokens == 0 or self.prefill_tokens < bound

    def holds(self, tokens: int) -> bool:
        """Whether a prompt of so many tokens may begin in this step."""
        return self._chunked or tokens <= self.prefill_left
