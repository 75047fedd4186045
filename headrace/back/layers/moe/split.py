"""How the ranks share a mixture's experts: a part of each one's inner values (tensor parallelism),
or whole experts (expert parallelism). Either way each rank computes its share of every token, and
the shares are added up.

X experts, E hidden size, I inner size.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

from headrace.back.layers.moe.placement import Placement, slots_of_rank, spread
from headrace.back.parallel.mesh import Mesh
from headrace.back.parallel.shard import Part, Shard, local_size
from headrace.base.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class LocalExperts:
    """What a rank holds: so many `experts`, each with `inner` values. `biased`: it adds the biases
    of the downs, of which the ranks' sum has each once."""

    experts: int
    inner: int
    biased: bool


@dataclass(frozen=True, kw_only=True)
class ExpertSizes:
    """Global sizes. `axis`: of the mesh, over which they are shared: "tp", a part of each expert's
    inner values for a rank, or "ep", whole experts of `ranks`. `held`: those of each rank, where
    some have copies or they move (placement.py); empty: neighbours, and one more on some."""

    experts: int
    width: int
    inner: int
    axis: str = "tp"
    ranks: int = 1
    held: Placement = ()

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
        return Shard(axis=self.axis, dim=0, parts=(part,), held=self.held)

    @property
    def placement(self) -> Placement:
        """The experts of each rank, where these have whole ones."""
        ends = [rank * self.experts // self.ranks for rank in range(self.ranks + 1)]
        return self.held or tuple(tuple(range(*one)) for one in itertools.pairwise(ends))

    def local(self, mesh: Mesh) -> LocalExperts:
        """This rank's. Ranks may have one expert more than others; ConfigError if one has none."""
        if self.axis == "tp":
            inner = local_size(self.part, mesh.tp)
            biased = mesh.tp.rank == 0
            return LocalExperts(experts=self.experts, inner=inner, biased=biased)
        axis = mesh.axis(self.axis)
        if self.experts < axis.size:
            raise ConfigError(
                f"--enable-expert-parallel: {self.experts} experts cannot be shared out to "
                f"{axis.size} ranks; leave it out, or lower --tensor-parallel or "
                "--data-parallel",
                field=axis.option,
            )
        count = len(self.placement[axis.rank])
        return LocalExperts(experts=count, inner=self.inner, biased=True)


def sizes_in(mesh: Mesh, *, experts: int, width: int, inner: int) -> ExpertSizes:
    """Those of a mixture's routed experts, which lie whole on the ranks where the mesh says so."""
    ranks, redundant = mesh.ep.size, mesh.redundant_experts
    if ranks == 1:
        return ExpertSizes(experts=experts, width=width, inner=inner)
    sizes = ExpertSizes(experts=experts, width=width, inner=inner, axis="ep", ranks=ranks)
    if redundant is None and not mesh.least_ranks:
        return sizes
    slots = slots_of_rank(experts, redundant or 0, mesh.least_ranks or ranks)
    if slots > experts:
        raise ConfigError(
            f"--num-redundant-experts {redundant}: {ranks} ranks with {slots} slots each for the "
            f"{experts} experts of a layer would hold one twice; at most "
            f"{experts * (ranks - 1)}",
            field="num_redundant_experts",
        )
    if experts < ranks:
        return sizes  # `local` refuses it
    return replace(sizes, held=spread([1.0] * experts, ranks, slots))
