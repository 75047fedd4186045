"""The weights of a layer's experts, as checkpoints hold them: a tensor for each expert, one for
all, or one for all with inputs first and gates and ups in turn.

X experts, E hidden size, I inner size; what of them a rank holds, split.py says.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from headrace.back.layers.moe.split import ExpertSizes
from headrace.back.layers.scope import Scope
from headrace.back.parallel.param import Param, WeightPiece
from headrace.back.parallel.shard import Shard
from headrace.back.quant.experts import MatricesOf


@dataclass(frozen=True, kw_only=True)
class ExpertWeights:
    """What op `experts` is bound with: up [X, 2I, E] (gates, then ups), down [X, E, I], and biases
    [X, 2I] and [X, E] or None."""

    up_XIE: torch.Tensor
    down_XEI: torch.Tensor
    up_bias_XI: torch.Tensor | None = None
    down_bias_XE: torch.Tensor | None = None


Biases = tuple[torch.Tensor | None, torch.Tensor | None]
"""[X, 2I] and [X, E]."""


class LoadedExperts(Protocol):
    """Parameters that are asked for; `take` gives the weights once they are loaded, unless they
    were packed as the parameters' `matrices`: then `biases` gives what is left."""

    def take(self) -> ExpertWeights: ...

    def biases(self) -> Biases: ...

    @property
    def matrices(self) -> tuple[MatricesOf, ...] | None:
        """Where the matrices lie; None: in a way that no packed weights are filled from."""
        ...


@dataclass(frozen=True)
class Unbiased:
    """Experts without biases, of which `arranged` makes [X, 2I, E] and [X, E, I]; no packed weights
    are filled from their parameters."""

    arranged: Callable[[], tuple[torch.Tensor, torch.Tensor]]
    matrices = None

    def biases(self) -> Biases:
        """See LoadedExperts."""
        return None, None

    def take(self) -> ExpertWeights:
        """See LoadedExperts."""
        up_XIE, down_XEI = self.arranged()
        return ExpertWeights(up_XIE=up_XIE, down_XEI=down_XEI)


@dataclass(frozen=True, kw_only=True)
class ExpertNames:
    """What adapters call experts, within their module: `each` gate, up and down with {} for the
    expert's number; `fused`: the parameters of all gates and ups, and of all downs, as transformers
    has them."""

    each: tuple[str, str, str]
    fused: tuple[str, str] = ("experts.gate_up_proj", "experts.down_proj")


class ExpertLayout(Protocol):
    """How the checkpoint names the experts' tensors, within their module. `adapted`: what adapters
    call them; None: they take none."""

    @property
    def adapted(self) -> ExpertNames | None: ...

    @property
    def biased(self) -> bool:
        """Whether there are biases."""
        ...

    def params(self, scope: Scope, sizes: ExpertSizes) -> LoadedExperts:
        """Asks for the parameters."""
        ...


@dataclass(frozen=True, kw_only=True)
class SeparateExperts:
    """A gate, an up and a down tensor for each expert, {} for its number, counted from `first` on.
    `bias_names`: their biases, each a tensor of all experts."""

    gate: str = "experts.{}.gate_proj.weight"
    up: str = "experts.{}.up_proj.weight"
    down: str = "experts.{}.down_proj.weight"
    bias_names: tuple[str, str, str] | None = None
    first: int = 0

    @property
    def biased(self) -> bool:
        """See ExpertLayout."""
        return self.bias_names is not None

    @property
    def adapted(self) -> ExpertNames | None:
        """See ExpertLayout; not of experts with biases, which transformers stores transposed, nor
        of those without gates."""
        if self.biased or self.gate == self.up or self.first:
            return None
        gate, up, down = (name.removesuffix(".weight") for name in (self.gate, self.up, self.down))
        return ExpertNames(each=(gate, up, down))

    def params(self, scope: Scope, sizes: ExpertSizes) -> LoadedExperts:
        """See ExpertLayout. One parameter for all gates and ups, one for all downs."""
        width, inner, count = sizes.width, sizes.inner, sizes.experts
        numbers = range(self.first, self.first + count)
        names = [name.format(i) for i in numbers for name in (self.gate, self.up)]
        up = tuple(
            WeightPiece(name=scope.name(name), shape=(inner, width), offset=i * inner)
            for i, name in enumerate(names)
        )
        down = tuple(
            WeightPiece(
                name=scope.name(self.down.format(number)), shape=(width, inner), offset=i * width
            )
            for i, number in enumerate(numbers)
        )
        rows = Shard(axis="tp", dim=0, parts=(sizes.part,) * (2 * count))
        columns = Shard(axis="tp", dim=1, parts=(sizes.part,))
        return _Separate(
            scope,
            sizes,
            up=up,
            down=down,
            rows=sizes.split(rows, rows=2 * inner),
            columns=sizes.split(columns, rows=width),
            biases=self.bias_names,
        )


class _Separate:
    def __init__(
        self,
        scope: Scope,
        sizes: ExpertSizes,
        *,
        up: tuple[WeightPiece, ...],
        down: tuple[WeightPiece, ...],
        rows: Shard | None,
        columns: Shard | None,
        biases: tuple[str, str, str] | None,
    ) -> None:
        self._sizes, self._local = sizes, sizes.local(scope.mesh)
        shape = (2 * sizes.experts * sizes.inner, sizes.width)
        self._up = scope.param("experts.up", shape, pieces=up, shard=rows)
        shape = (sizes.experts * sizes.width, sizes.inner)
        self._down = scope.param("experts.down", shape, pieces=down, shard=columns)
        self._biases: tuple[Param, Param, Param] | None = None
        if biases is not None:
            gate, up_name, down_name = biases
            each = sizes.over(1)
            all_of, downs = (sizes.experts, sizes.inner), (sizes.experts, sizes.width)
            self._biases = (
                scope.param(gate, all_of, shard=each, init="zeros"),
                scope.param(up_name, all_of, shard=each, init="zeros"),
                scope.param(down_name, downs, shard=sizes.split(None), init="zeros"),
            )

    @property
    def matrices(self) -> tuple[MatricesOf, ...] | None:
        """See LoadedExperts."""
        return (
            MatricesOf(param=self._up, names=("gate", "up"), size=self._local.inner),
            MatricesOf(param=self._down, names=("down",), size=self._sizes.width),
        )

    def biases(self) -> Biases:
        """See LoadedExperts. The ranks' results are added up: one of them has the last bias."""
        if self._biases is None:
            return None, None
        gate_XI, up_XI, down_XE = (bias.take() for bias in self._biases)
        down_XE = down_XE if self._local.biased else torch.zeros_like(down_XE)
        return torch.cat((gate_XI, up_XI), 1), down_XE

    def take(self) -> ExpertWeights:
        """See LoadedExperts."""
        local, width = self._local, self._sizes.width
        up_bias_XI, down_bias_XE = self.biases()
        return ExpertWeights(
            up_XIE=self._up.take().view(local.experts, 2 * local.inner, width),
            down_XEI=self._down.take().view(local.experts, width, local.inner),
            up_bias_XI=up_bias_XI,
            down_bias_XE=down_bias_XE,
        )


@dataclass(frozen=True, kw_only=True)
class MergedExperts:
    """One tensor [X, 2I, E], gates first, and one [X, E, I]."""

    up: str
    down: str
    biased = False

    @property
    def adapted(self) -> ExpertNames | None:
        """See ExpertLayout."""
        if self.up != "experts.gate_up_proj":
            return None
        each = tuple(f"experts.{{}}.{name}_proj" for name in ("gate", "up", "down"))
        return ExpertNames(each=(each[0], each[1], each[2]))

    def params(self, scope: Scope, sizes: ExpertSizes) -> LoadedExperts:
        """See ExpertLayout."""
        count, width, inner = sizes.experts, sizes.width, sizes.inner
        rows = sizes.over(1, sizes.part, sizes.part)
        up = scope.param(self.up, (count, 2 * inner, width), shard=rows)
        down = scope.param(self.down, (count, width, inner), shard=sizes.over(2))
        return Unbiased(lambda: (up.take(), down.take()))


@dataclass(frozen=True, kw_only=True)
class StackedExperts:
    """Gates [X, I, E], ups [X, I, E] and downs [X, E, I] in a tensor each (Step-3.5)."""

    gate: str = "gate_proj.weight"
    up: str = "up_proj.weight"
    down: str = "down_proj.weight"
    biased = False
    adapted = None

    def params(self, scope: Scope, sizes: ExpertSizes) -> LoadedExperts:
        """See ExpertLayout."""
        count, width, inner = sizes.experts, sizes.width, sizes.inner
        gate = scope.param(self.gate, (count, inner, width), shard=sizes.over(1))
        up = scope.param(self.up, (count, inner, width), shard=sizes.over(1))
        down = scope.param(self.down, (count, width, inner), shard=sizes.over(2))
        return Unbiased(lambda: (torch.cat((gate.take(), up.take()), dim=1), down.take()))


@dataclass(frozen=True, kw_only=True)
class TransposedExperts:
    """One tensor [X, E, 2I], gates first, and one [X, I, E] (Llama 4)."""

    up: str = "experts.gate_up_proj"
    down: str = "experts.down_proj"
    biased = False
    adapted = None

    def params(self, scope: Scope, sizes: ExpertSizes) -> LoadedExperts:
        """See ExpertLayout."""
        count, width, inner = sizes.experts, sizes.width, sizes.inner
        columns = sizes.over(2, sizes.part, sizes.part)
        up = scope.param(self.up, (count, width, 2 * inner), shard=columns)
        down = scope.param(self.down, (count, inner, width), shard=sizes.over(1))
        return Unbiased(lambda: (turned(up.take()), turned(down.take())))


@dataclass(frozen=True, kw_only=True)
class InterleavedExperts:
    """One tensor [X, E, 2I] of gates and ups, `in_turn` (gpt-oss) or gates first, and one
    [X, I, E], with biases of the names and `_bias`."""

    up: str = "experts.gate_up_proj"
    down: str = "experts.down_proj"
    in_turn: bool = True
    biased = True
    adapted = None

    def params(self, scope: Scope, sizes: ExpertSizes) -> LoadedExperts:
        """See ExpertLayout."""
        return _Interleaved(scope, sizes, self)


class _Interleaved:
    def __init__(self, scope: Scope, sizes: ExpertSizes, names: InterleavedExperts) -> None:
        count, width, inner = sizes.experts, sizes.width, sizes.inner
        self._local, self._width, self._in_turn = sizes.local(scope.mesh), width, names.in_turn
        parts = (sizes.pairs,) if names.in_turn else (sizes.part, sizes.part)
        columns, rows = sizes.over(2, *parts), sizes.over(1)
        self._up = scope.param(names.up, (count, width, 2 * inner), shard=columns)
        self._up_bias = scope.param(
            f"{names.up}_bias", (count, 2 * inner), shard=sizes.over(1, *parts), init="zeros"
        )
        self._down = scope.param(names.down, (count, inner, width), shard=rows)
        self._down_bias = scope.param(
            f"{names.down}_bias", (count, width), shard=sizes.split(None), init="zeros"
        )

    @property
    def matrices(self) -> tuple[MatricesOf, ...] | None:
        """See LoadedExperts."""
        if not self._in_turn:
            return None
        up, down = self._local.inner, self._width
        return (
            MatricesOf(param=self._up, names=("gate", "up"), size=up, in_turn=True),
            MatricesOf(param=self._down, names=("down",), size=down, in_turn=True),
        )

    def biases(self) -> Biases:
        """See LoadedExperts. The ranks' results are added up: one of them has the last bias."""
        up_bias_XI, down_bias_XE = self._up_bias.take(), self._down_bias.take()
        return (
            self._gates_first(up_bias_XI),
            down_bias_XE if self._local.biased else torch.zeros_like(down_bias_XE),
        )

    def take(self) -> ExpertWeights:
        """See LoadedExperts."""
        up_bias_XI, down_bias_XE = self.biases()
        return ExpertWeights(
            up_XIE=self._gates_first(self._up.take().transpose(1, 2)).contiguous(),
            down_XEI=turned(self._down.take()),
            up_bias_XI=up_bias_XI,
            down_bias_XE=down_bias_XE,
        )

    def _gates_first(self, up_XI: torch.Tensor) -> torch.Tensor:
        return gates_first(up_XI) if self._in_turn else up_XI


def gates_first(up_XI: torch.Tensor) -> torch.Tensor:
    """[X, 2I, ...]: gates, then ups, which took turns."""
    return torch.cat((up_XI[:, 0::2], up_XI[:, 1::2]), dim=1)


def turned(values_XIE: torch.Tensor) -> torch.Tensor:
    return values_XIE.transpose(1, 2).contiguous()
