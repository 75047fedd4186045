"""What waits for an engine core and at which measured rates it works, and the wait that follows.

The core publishes its `Load` while requests wait. Whoever refuses a request by the time it would
take predicts it here: an API process at once, by the request's headers, and the core for good.
"""

from __future__ import annotations

from bisect import bisect_right

import msgspec

MARGIN = 1.1
"""A request is taken if so many times the predicted time is within its deadline."""
ORDER_S = 10.0
"""Requests start in the order in which they are due, one without a deadline after so long: nobody
is overtaken by one that comes more than this much later."""
QUANTILES = 16


def order_s(deadline_s: float | None) -> float:
    """Seconds from its arrival by which a request's place in the queue is determined."""
    return ORDER_S if deadline_s is None else min(deadline_s, ORDER_S)


class Load(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="load"):
    """`waiting` requests with `waiting_tokens` prompt tokens wait for one of `rows` rows, of which
    `running` are taken; `rows` are those that KV blocks are there for.

    `prefill_token_s`, `decode_step_s`: measured seconds that a prompt's token and a step of decodes
    take; 0 until they are known. `prompt_tokens`, `output_tokens`: of a request lately, on average,
    the first without those found in the cache; `computed_share`: what these are of whole prompts.
    `steps_ahead`: steps that are submitted before one is done: so many pass from a request's start
    to its first step, and from its last one until its row is free.
    `dues`: quantiles of the times in seconds at which the waiting ones are due (see ORDER_S); none
    where they start in another order."""

    waiting: int = 0
    waiting_tokens: int = 0
    running: int = 0
    rows: int = 0
    prefill_token_s: float = 0.0
    decode_step_s: float = 0.0
    prompt_tokens: float = 0.0
    output_tokens: float = 0.0
    computed_share: float = 1.0
    steps_ahead: int = 0
    dues: tuple[float, ...] = ()

    @property
    def is_full(self) -> bool:
        """Whether a request that comes now has to wait."""
        return self.waiting >= self.rows - self.running

    def ahead(self, deadline_s: float) -> float:
        """How many of the waiting ones start before a request with this deadline, by `dues`."""
        return self.waiting * bisect_right(self.dues, order_s(deadline_s)) / len(self.dues)

    def wait_s(self, ahead: float) -> float:
        """Seconds until a request starts that has so many of the waiting ones before it: the rows
        become free in turn, one whenever a request's share of the engine's time has passed."""
        behind = ahead - max(self.rows - self.running, 0)
        if behind < 0:
            return 0.0
        prompt = self.prompt_tokens
        if self.waiting:
            prompt = self.computed_share * self.waiting_tokens / self.waiting
        steps = self.output_tokens + self.steps_ahead if self.output_tokens else 0.0
        decode_s = steps * self.decode_step_s / max(self.running, 1)
        return (behind + 1) * (prompt * self.prefill_token_s + decode_s)

    def service_s(self, *, num_prompt: float, output_tokens: float) -> float:
        """Seconds from its start to its end: its prompt, its steps, and the prompts of those that
        start meanwhile."""
        ahead_s = self.steps_ahead * self.decode_step_s
        prompt_s = ahead_s + self.computed_share * num_prompt * self.prefill_token_s
        if not self.output_tokens:
            return prompt_s + output_tokens * self.decode_step_s
        beside_s = self.running * self.prompt_tokens * self.prefill_token_s / self.output_tokens
        return prompt_s + output_tokens * (self.decode_step_s + beside_s)

    def output_of(self, *, min_tokens: int, max_tokens: int) -> float:
        """How many tokens such a request is expected to generate."""
        return max(min_tokens, min(max_tokens, self.output_tokens))
