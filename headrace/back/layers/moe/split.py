"""How the ranks share a mixture's experts: a part of each one's inner values (tensor parallelism),
or whole experts (expert parallelism). Either way each rank computes its share of every token, and
the shares are added up.

X experts, E hidden size, I inner size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from headrace.back.parallel.mesh import Mesh
from headrace.back.parallel.shard import Part, Shard, local_size, local_units
from headrace.base.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class LocalExperts:
    """What a rank holds: `experts` from the `first` on, each with `inner` values. `biased`: it adds
    the biases of the downs, of which the ranks' sum has each once."""

    experts: int
    first: int
    inner: int
    biased: bool

    def places(self, experts: int, device: torch.device) -> torch.Tensor:
        """int32 [X]: where each of so many experts lies here, -1: on another rank."""
        places_X = torch.full((experts,), -1, dtype=torch.int32, device=device)
        own = torch.arange(self.experts, dtype=torch.int32, device=device)
        places_X[self.first : self.first + self.experts] = own
        return places_X


@dataclass(frozen=True, kw_only=True)
class ExpertSizes:
    """Global sizes. `axis`: of the mesh, over which they are shared: "tp", a part of each expert's
    inner values for a rank, or "ep", whole experts."""

    experts: int
    width: int
    inner: int
    axis: str = "tp"

    @property
    def part(self) -> Part:
        """The inner values of an expert, where the ranks share these."""
        return Part("expert's inner values", self.inner, self.inner)

    @property
    def pairs(self) -> Part:
        """The same of a gate and an up in turn."""
        return Part("expert's inner values", 2 * self.inner, self.inner)

    def over(self, dim: int, *parts: Part) -> Shard | None:
        """The split of a tensor with the experts in dimension 0 and `parts` (one `part`, if none
        are given) in `dim`."""
        return self.split(Shard(axis="tp", dim=dim, parts=parts or (self.part,)))

    def split(self, over_inner: Shard | None, *, rows: int = 1) -> Shard | None:
        """The split of a tensor: `over_inner` where inner values are shared; else whole experts,
        which are `rows` indices each of dimension 0."""
        if self.axis == "tp":
            return over_inner
        part = Part("experts", self.experts * rows, self.experts, uneven=True)
        return Shard(axis=self.axis, dim=0, parts=(part,))

    def places(self, mesh: Mesh, device: torch.device) -> list[torch.Tensor]:
        """Where each expert lies on each rank; see LocalExperts."""
        ranks = (self.local(_of(mesh, rank)) for rank in range(mesh.ep.size))
        return [one.places(self.experts, device) for one in ranks]

    def local(self, mesh: Mesh) -> LocalExperts:
        """This rank's. Ranks may have one expert more than others; ConfigError if one has none."""
        if self.axis == "tp":
            inner = local_size(self.part, mesh.tp)
            biased = mesh.tp.rank == 0
            return LocalExperts(experts=self.experts, first=0, inner=inner, biased=biased)
        axis = mesh.axis(self.axis)
        if self.experts < axis.size:
            raise ConfigError(
                f"--enable-expert-parallel: {self.experts} experts cannot be shared out to "
                f"{axis.size} ranks; leave it out, or lower --tensor-parallel",
                field=axis.option,
            )
        whole = Part("experts", self.experts, self.experts, uneven=True)
        count, first = local_units(whole, axis), axis.rank * self.experts // axis.size
        return LocalExperts(experts=count, first=first, inner=self.inner, biased=True)


def _of(mesh: Mesh, rank: int) -> Mesh:
    """As that rank of "ep" sees it."""
    return replace(mesh, ep=replace(mesh.ep, rank=rank))


def sizes_in(mesh: Mesh, *, experts: int, width: int, inner: int) -> ExpertSizes:
    """Those of a mixture's routed experts, which lie whole on the ranks where the mesh says so."""
    axis = "ep" if mesh.ep.size > 1 else "tp"
    return ExpertSizes(experts=experts, width=width, inner=inner, axis=axis)
