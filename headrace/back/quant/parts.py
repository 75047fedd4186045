"""The schemes in which the parts of a model are made while it loads."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from headrace.back.parallel.param import Param
from headrace.back.quant.scheme import ONLINE_SCHEMES, Scheme
from headrace.base.config.quantization import module_pattern
from headrace.base.config.quantization_options import QuantizationParts
from headrace.base.errors import ConfigError


@dataclass(frozen=True)
class PartSchemes:
    """`rest`: of all parts that `parts` does not tell apart; None: they stay plain. By name."""

    rest: str | None
    parts: QuantizationParts = field(default_factory=QuantizationParts)

    def of(self, part: str, weights: Iterable[Param]) -> Scheme | None:
        """Of weights that lie together in a "linear", "moe", "head" or "embedding"."""
        stated = self.parts.of(part)
        if stated is None:  # an embedding gains nothing but where it is asked for
            stated = None if part == "embedding" else self.rest
        if stated is None or stated == "none" or self._ignored(weights):
            return None
        return ONLINE_SCHEMES[stated]

    def asked(self, part: str) -> bool:
        """Whether the part is named, with a scheme."""
        return self.parts.of(part) not in (None, "none")

    def _ignored(self, weights: Iterable[Param]) -> bool:
        names = [piece.name for weight in weights for piece in weight.pieces]
        if not self.parts.ignore:
            return False
        plain = [any(_fits(one, name) for one in self.parts.ignore) for name in names]
        if any(plain) and not all(plain):
            apart = names[plain.index(True)], names[plain.index(False)]
            raise ConfigError(
                f"--quantization-config: ignore leaves {apart[0]} plain but not {apart[1]}, which it is "
                "multiplied with as one matrix: ignore both or neither",
                field="quantization_config",
            )
        return any(plain)

    def check(self, params: Iterable[Param]) -> None:
        """ConfigError if a name to ignore fits no weight, or there are no experts to be told
        apart."""
        params = tuple(params)
        if self.asked("moe") and not any(param.routed for param in params):
            raise ConfigError(
                f"--quantization-config: moe is {self.parts.moe}, but the model has no routed experts",
                field="quantization_config",
            )
        names = [piece.name for param in params for piece in param.pieces]
        for one in self.parts.ignore:
            if not any(_fits(one, name) for name in names):
                raise ConfigError(
                    f"--quantization-config: ignore has {one!r}, which no weight of the model fits "
                    f"(such as {names[-1]})",
                    field="quantization_config",
                )


def _fits(module: str, weight: str) -> bool:
    return re.match(module_pattern(module), weight) is not None
