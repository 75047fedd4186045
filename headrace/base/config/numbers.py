"""Numbers on the command line: every numeric flag states its bounds; a value outside them is
refused with the flag, the value and the limits."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.base.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class NumberType:
    """The `type` of an argparse argument: a whole number, or with `whole` off a decimal one, from
    `least` (`above`: more than `least`) to `greatest`, all finite."""

    flag: str
    least: float
    greatest: float
    whole: bool = True
    above: bool = False

    def __call__(self, text: str) -> int | float:
        """The number; ConfigError for anything else."""
        try:
            number: int | float = int(text) if self.whole else float(text)
        except ValueError:
            kind = "a whole number" if self.whole else "a number"
            raise ConfigError(f"{self.flag}: {text!r:.80} is not {kind}", field=self.flag) from None
        high_enough = number > self.least if self.above else number >= self.least
        if not (high_enough and number <= self.greatest):  # NaN is not either
            raise ConfigError(
                f"{self.flag}: {text:.80} is out of range (allowed: {self.limits})", field=self.flag
            )
        return number

    @property
    def limits(self) -> str:
        """The range in words."""
        least, greatest = (
            f"{n:,.0f}" if n == int(n) else f"{n:g}" for n in (self.least, self.greatest)
        )
        return f"{'above' if self.above else 'from'} {least} to {greatest}"
