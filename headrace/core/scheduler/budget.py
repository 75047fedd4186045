"""The tokens of one step: decodes first, one token each, then prefill chunks with what is left."""

from __future__ import annotations


class StepBudget:
    """The budget of one step.

    `inter_prefill`: once the step holds that many prefill tokens no further prefill joins it; the first always may,
    and may use the whole budget (ENG-01). Without `chunked` a prompt runs in one step or waits for the next.
    """

    def __init__(self, max_tokens: int, inter_prefill: int | None, *, chunked: bool = True) -> None:
        self.left = max_tokens
        self.prefill_tokens = 0
        self._inter_prefill = inter_prefill
        self._chunked = chunked

    def spend_decodes(self, count: int) -> None:
        """`count` rows decode."""
        assert count <= self.left, (count, self.left)
        self.left -= count

    def spend_prefill(self, tokens: int) -> None:
        """A prefill chunk joins."""
        assert 0 < tokens <= self.left, (tokens, self.left)
        self.left -= tokens
        self.prefill_tokens += tokens

    @property
    def prefill_may_join(self) -> bool:
        """Whether one more prefill chunk may join the step."""
        if self.left == 0:
            return False
        bound = self._inter_prefill
        return bound is None or self.prefill_tokens == 0 or self.prefill_tokens < bound

    def holds(self, tokens: int) -> bool:
        """Whether a prompt of so many tokens may begin in this step."""
        return self._chunked or tokens <= self.left
