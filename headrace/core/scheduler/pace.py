"""How many prefill tokens may join rows that decode, so that a long prompt does not stall running streams.

Measured, not configured: what a step of decodes alone takes, and what a prefill token adds to it. The allowance is what
stretches a step to `stretch` times the first. Prefill never starves (at least one block joins every step but the
probes), and a step without decodes is not bounded at all.
"""

from __future__ import annotations

PROBE_STEPS = (
    32  # after so many mixed steps one is left to the decodes, so that their own time stays known
)
FORGET = 0.9  # share of its weight that a measurement keeps at the next one
OUTLIER = 3.0  # a step this many times as long as expected was held up by something else
FIRST_SHARE = 8  # before anything is measured: this part of the step's budget


class _Mean:
    """Seconds per unit, the newest measurements weighing most."""

    def __init__(self) -> None:
        self._seconds = self._units = 0.0

    def add(self, seconds: float, units: float) -> None:
        """A measurement; one that is far off counts no more than the bound of what is credible."""
        if self._units:
            seconds = min(seconds, OUTLIER * self.value * units)
        self._seconds = FORGET * self._seconds + seconds
        self._units = FORGET * self._units + units

    @property
    def value(self) -> float:
        """Seconds per unit; 0 while nothing is known."""
        return self._seconds / self._units if self._units else 0.0


class Pace:
    """Learns from every step that has landed. `stretch` None: prefill is never bounded."""

    def __init__(self, stretch: float | None, *, max_tokens: int, block_tokens: int) -> None:
        assert stretch is None or stretch > 1.0, stretch
        self._stretch = stretch
        self._max_tokens = max_tokens
        self._least = block_tokens
        self._decode_step = _Mean()
        self._prefill_token = _Mean()
        self._mixed_steps = 0
        self._landed_at = 0.0

    def allowance(self, decodes: int) -> int:
        """Prefill tokens that may join a step with so many rows that decode."""
        if self._stretch is None or not decodes:
            return self._max_tokens
        if self._mixed_steps >= PROBE_STEPS:
            return 0
        decode_s, token_s = self._decode_step.value, self._prefill_token.value
        if decode_s <= 0.0 or token_s <= 0.0:
            return max(self._least, self._max_tokens // FIRST_SHARE)
        tokens = min((self._stretch - 1.0) * decode_s / token_s, self._max_tokens)
        return max(self._least, int(tokens) // self._least * self._least)

    def landed(self, submitted_at: float, now: float, *, decodes: int, prefill_tokens: int) -> None:
        """A step is done. Steps run one after another: it began when it was submitted, or when the one before ended."""
        seconds = now - max(submitted_at, self._landed_at)
        self._landed_at = now
        if not prefill_tokens:
            self._mixed_steps = 0
            self._decode_step.add(seconds, 1.0)
        elif not decodes:
            self._prefill_token.add(seconds, prefill_tokens)
        else:
            self._mixed_steps += 1
            added = seconds - self._decode_step.value
            self._prefill_token.add(max(added, 0.0), prefill_tokens)
