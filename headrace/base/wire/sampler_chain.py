"""Steps from logits to a token beside those that every request may take, and in another order: what
turns them on (back/sampling/chains.py says what they do)."""

from __future__ import annotations

import msgspec

SAMPLERS = ("temperature", "top_n_sigma", "top_k", "typical_p", "top_p", "min_p", "xtc")
"""The steps from logits to the tokens that may be drawn, in the order in which they are taken
unless a request names another."""

CHAIN_BOUNDS = {
    "top_n_sigma": (-1.0, 100.0),
    "dynatemp_range": (0.0, 100.0),
    "dynatemp_exponent": (0.01, 100.0),
    "mirostat_tau": (0.0, 100.0),
    "mirostat_eta": (0.0, 10.0),
    "adaptive_target": (-1.0, 1.0),
    "adaptive_decay": (0.0, 0.99),
}
"""Its numbers, from the least to the greatest."""


class ChainNumbers(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What such a request names. All at their defaults: it takes the steps that others take."""

    top_n_sigma: float = 0.0
    dynatemp_range: float = 0.0
    dynatemp_exponent: float = 1.0
    mirostat: int = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    adaptive_target: float = -1.0
    adaptive_decay: float = 0.9
    samplers: tuple[str, ...] = ()

    @property
    def remembers(self) -> bool:
        """Whether a token hangs on what was chosen before it, beside the text."""
        return self.mirostat != 0 or self.adaptive_target >= 0.0

    @property
    def has_chain(self) -> bool:
        """Whether its steps are others than those that every row may take, or in another order."""
        return (
            self.samplers not in ((), SAMPLERS)
            or max(self.top_n_sigma, self.dynatemp_range, self.mirostat) > 0
            or self.adaptive_target >= 0.0
        )
