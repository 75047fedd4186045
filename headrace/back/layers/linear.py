"""Linear layers split over the tensor-parallel axis (Shoeybi et al. 2019), and what those that end
a layer's branch leave to be added to the residual.

A column-parallel layer, split by outputs, may merge several checkpoint tensors into one GEMM, or
take them from one that the checkpoint has merged itself. T tokens, E hidden size, I inputs, O
outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch

from headrace.back.kernels.fused_linear.op import FusedLinear
from headrace.back.kernels.linear.op import Linear
from headrace.back.kernels.linear_fp8.layout import Fp8Weight
from headrace.back.layers.gemms import Weight, bind_adapted, bind_fused, bind_gemm
from headrace.back.layers.norm import BlockNorm, RMSNorm
from headrace.back.layers.scope import Scope, not_loaded
from headrace.back.parallel.collectives import Partial, all_reduce
from headrace.back.parallel.param import Param, WeightPiece
from headrace.back.parallel.shard import Part, Shard, divided, local_size

Branch = torch.Tensor | Partial | None
"""What a layer leaves to be added to the residual: nothing, a tensor, or this rank's share of a
sum."""


@dataclass(frozen=True, kw_only=True)
class MergedTensor:
    """A checkpoint tensor that holds several parts of a ColumnLinear, by their places there: one
    after the other, or, with `groups`, the first group's share of each, then the next group's.
    `tiles`: of one part, which lies there in so many rounds over its groups; see tiled_rows."""

    name: str
    parts: tuple[int, ...]
    groups: int = 1
    tiles: int = 1


def tiled_rows(size: int, groups: int, tiles: int) -> Iterator[tuple[int, int, int]]:
    """Where a checkpoint has `tiles` rounds of one head for each of `groups`, and we have each
    group's heads one after the other: (its first row, our first row, rows) of each head."""
    rows = size // (groups * tiles)
    for tile in range(tiles):
        for group in range(groups):
            yield (tile * groups + group) * rows, (group * tiles + tile) * rows, rows


class QKVProjection(Protocol):
    """What stands in front of an attention: see ColumnLinear."""

    project: Linear
    sizes: list[int]
    norms: bool


class ColumnLinear:
    """x_TI -> y_TO with the outputs of all `parts` side by side, each split over the ranks.

    `scope` is that of the layer around it: a part is the checkpoint tensor `scope / part.name`,
    unless one of `tensors` holds it, or `merged` names the one that holds all parts (in `groups`).
    `transposed`: the checkpoint holds weights as [inputs, outputs]. `sizes` are the local widths of
    the parts. `project` is the GEMM.

    `norm` and `activation` are what the layer around it puts before and behind the GEMM. Where a
    kernel does all in one, `project` does: `activates` and `norms` tell, and if it `norms`, x is
    what goes into the norm. Between ranks the norm belongs to the sum before it (RowLinear).
    """

    def __init__(
        self,
        scope: Scope,
        inputs: int,
        parts: tuple[Part, ...],
        *,
        bias: bool = False,
        merged: str | None = None,
        groups: int = 1,
        tensors: tuple[MergedTensor, ...] = (),
        transposed: bool = False,
        norm: RMSNorm | None = None,
        activation: str | None = None,
    ) -> None:
        if merged is not None:
            places = tuple(range(len(parts)))
            tensors = (MergedTensor(name=merged, parts=places, groups=groups),)
        shard = Shard(axis="tp", dim=0, parts=parts)
        self.sizes = [local_size(part, scope.mesh.tp) for part in parts]
        self.project: Linear = not_loaded
        self.norms = self.activates = False
        self._left: Callable[[], FusedLinear | None] | None = None
        self._scope = scope
        self._norm = norm if scope.mesh.tp.size == 1 else None
        self._activation = activation
        self._inputs = inputs
        self._parts = parts
        self._tensors = _all_tensors(parts, tensors)
        self._transposed = transposed
        weight = self._param("weight", (inputs,), shard)
        self._weight, self._adapted = scope.quantized_gemm(weight), scope.adapted(weight)
        self._bias = self._param("bias", (), shard) if bias else None
        scope.on_finish(self._finish)

    def _param(self, leaf: str, rest: tuple[int, ...], shard: Shard) -> Param:
        outputs = sum(part.size for part in self._parts)
        named = "+".join(tensor.name for tensor in self._tensors)
        return self._scope.param(
            f"{named}.{leaf}",
            (outputs, *rest),
            pieces=tuple(self._pieces(leaf, rest, outputs)),
            shard=shard,
            init="normal" if leaf == "weight" else "zeros",
        )

    def _pieces(self, leaf: str, rest: tuple[int, ...], outputs: int) -> Iterator[WeightPiece]:
        turned = self._transposed and leaf == "weight"

        def piece(
            tensor: MergedTensor, size: int, *, offset: int, rows: tuple[int, int] | None = None
        ) -> WeightPiece:
            return WeightPiece(
                name=self._scope.name(f"{tensor.name}.{leaf}"),
                shape=(*rest, size) if turned else (size, *rest),
                offset=offset,
                rows=rows,
                transposed=turned,
                scale=self._parts[place].scale,
            )

        sizes = [part.size for part in self._parts]
        for tensor in self._tensors:
            place, *more = tensor.parts
            if tensor.tiles > 1:
                size = sizes[place]
                for theirs, ours, count in tiled_rows(size, tensor.groups, tensor.tiles):
                    offset = sum(sizes[:place]) + ours
                    yield piece(tensor, size, offset=offset, rows=(theirs, count))
                continue
            whole = sum(sizes[place] for place in tensor.parts)
            in_order = tensor.parts == tuple(range(place, place + len(tensor.parts)))
            alike = len({self._parts[part].scale for part in tensor.parts}) == 1
            if not more or (tensor.groups == 1 and in_order and alike):
                yield piece(tensor, whole, offset=sum(sizes[:place]))
                continue
            before = 0
            for place in tensor.parts:
                share, group = sizes[place] // tensor.groups, whole // tensor.groups
                offset = sum(sizes[:place])
                for i in range(tensor.groups):
                    rows = (i * group + before, share)
                    yield piece(tensor, whole, offset=offset + i * share, rows=rows)
                before += share

    def _finish(self) -> None:
        bias, weight = self._bias.take() if self._bias else None, self._weight.take()
        if self._adapted is not None:  # reads what the norm gives, adds before the activation
            self.project = bind_adapted(self._scope, weight, bias, self._adapted)
            return
        fused = None
        if self._norm is not None or self._activation is not None:
            scope, norm, act = self._scope, self._norm, self._activation
            fused = bind_fused(scope, weight, bias, norm=norm, activation=act)
            if fused is not None and act is not None and isinstance(weight, Fp8Weight):
                late = partial(bind_fused, scope, weight, bias, norm=norm, activation=act)
                self._left = partial(late, late=True)
        self.norms = fused is not None and self._norm is not None
        gemm, self.activates = fused, fused is not None and self._activation is not None
        for activation in dict.fromkeys((self._activation, None)) if gemm is None else ():
            gemm = bind_gemm(self._scope, weight, bias, activation, norm=self._norm)
            if gemm is not None:
                self.activates = activation is not None
                break
        assert gemm is not None
        self.project = gemm

    @property
    def may_leave(self) -> str | None:
        """The activation that `leave_activation` may leave; None: there is none."""
        return None if self._left is None else self._activation

    def leave_activation(self) -> bool:
        """Has `project` leave the activation of many tokens to the layer behind, the one that reads
        it (linear_fp8/op.py). False if no kernel does."""
        left = None if self._left is None else self._left()
        self.project = left or self.project
        return left is not None


def _all_tensors(
    parts: tuple[Part, ...], merged: tuple[MergedTensor, ...]
) -> tuple[MergedTensor, ...]:
    """Those that are merged, and one for each other part, in the order of their first parts."""
    held = {place for tensor in merged for place in tensor.parts}
    alone = [
        MergedTensor(name=part.name, parts=(place,))
        for place, part in enumerate(parts)
        if place not in held
    ]
    return tuple(sorted((*merged, *alone), key=lambda tensor: tensor.parts[0]))


class RowLinear:
    """x_TI -> y_TO where each rank holds a share of the inputs and the GEMMs are summed.

    `scope` is the layer's own; `part` describes the split of the inputs. The bias is added once,
    after the sum. `adds`: the result goes into the residual as it is; then the sum over the ranks
    is left to whoever adds it. `scale`: what the checkpoint's weight is multiplied with. `gates`:
    the layer whose activation stands between the two, which may be left to this one. `tiled`:
    groups and rounds of the inputs in the checkpoint, where these are not 1 (tiled_rows).
    """

    def __init__(
        self,
        scope: Scope,
        part: Part,
        outputs: int,
        *,
        bias: bool = False,
        adds: bool = False,
        transposed: bool = False,
        scale: float = 1.0,
        gates: ColumnLinear | None = None,
        tiled: tuple[int, int] = (1, 1),
    ) -> None:
        self.project: Linear = not_loaded
        self._gates = gates
        self._into: FusedLinear | None = None
        self._share: Linear | None = None
        self._adds = adds
        self._scope = scope
        shard = Shard(axis="tp", dim=1, parts=(divided(part, scope.mesh.tp),))
        shape = (part.size, outputs) if transposed else (outputs, part.size)
        whole = WeightPiece(
            name=scope.name("weight"), shape=shape, transposed=transposed, scale=scale
        )
        pieces = [whole]
        if tiled != (1, 1):
            rows = tiled_rows(part.size, *tiled)
            pieces = [replace(whole, dim=1, rows=(at, n), offset=to) for at, to, n in rows]
        weight = scope.param("weight", (outputs, part.size), shard=shard, pieces=tuple(pieces))
        self._weight, self._adapted = scope.quantized_gemm(weight), scope.adapted(weight)
        self._bias = scope.param("bias", (outputs,), init="zeros") if bias else None
        scope.on_finish(self._finish)

    def project_into(self, x_TI: torch.Tensor, residual_TO: torch.Tensor) -> Branch:
        """The GEMM, to be added to the residual; None if that was done, by a kernel that does
        both."""
        if self._into is not None:
            self._into(x_TI, residual_TO)
            return None
        if self._share is not None:
            return Partial(self._share(x_TI), self._scope.mesh.tp)
        return self.project(x_TI)

    def _finish(self) -> None:
        bias = self._bias.take() if self._bias else None
        weight, axis = self._weight.take(), self._scope.mesh.tp
        if axis.size == 1 and self._adds and self._adapted is None:
            self._into = self._bind_into(weight, bias)
        if self._into is not None:
            return
        if axis.size == 1:
            self.project = bind_adapted(self._scope, weight, bias, self._adapted)
            return
        share = bind_adapted(self._scope, weight, None, self._adapted)
        if self._adds and bias is None:
            self._share = share

        def project(x_TI: torch.Tensor) -> torch.Tensor:
            y_TO = all_reduce(share(x_TI), axis)
            return y_TO if bias is None else y_TO.add_(bias)

        self.project = project

    def _bind_into(self, weight: Weight, bias_O: torch.Tensor | None) -> FusedLinear | None:
        gates = self._gates
        if gates is not None and gates.may_leave and isinstance(weight, Fp8Weight):
            taken = bind_fused(self._scope, weight, bias_O, add=True, gated=gates.may_leave)
            if taken is not None and gates.leave_activation():
                return taken
        return bind_fused(self._scope, weight, bias_O, add=True)


class WholeLinear:
    """x_TI -> y_TO that every rank computes whole. `scope` is the layer's own."""

    def __init__(self, scope: Scope, inputs: int, outputs: int, *, bias: bool = False) -> None:
        self.project: Linear = not_loaded
        self._scope = scope
        weight = scope.param("weight", (outputs, inputs))
        self._weight, self._adapted = scope.quantized_gemm(weight), scope.adapted(weight)
        self._bias = scope.param("bias", (outputs,), init="zeros") if bias else None
        scope.on_finish(self._finish)

    def _finish(self) -> None:
        weight_OI, bias_O = self._weight.take(), self._bias and self._bias.take()
        self.project = bind_adapted(self._scope, weight_OI, bias_O, self._adapted)


def sum_branches(one_TE: Branch, other_TE: Branch) -> Branch:
    """Two branches as one; the ranks' shares of both are summed together."""
    if one_TE is None or other_TE is None:
        return other_TE if one_TE is None else one_TE
    if isinstance(one_TE, Partial) and isinstance(other_TE, Partial):
        return Partial(one_TE.share + other_TE.share, one_TE.axis)
    first_TE, second_TE = (
        branch_TE.total() if isinstance(branch_TE, Partial) else branch_TE
        for branch_TE in (one_TE, other_TE)
    )
    return first_TE + second_TE


def total(branch_TE: Branch) -> torch.Tensor | None:
    """The branch, with the shares of all ranks."""
    return branch_TE.total() if isinstance(branch_TE, Partial) else branch_TE


def add_norm(norm: BlockNorm | None, branch_TE: Branch, residual_TE: torch.Tensor) -> torch.Tensor:
    """Adds a branch to the residual, in place, and norms that, if there is a norm."""
    if branch_TE is None:
        return residual_TE if norm is None else norm.norm(residual_TE)
    if isinstance(branch_TE, Partial):
        if norm is not None:
            return norm.sum_norm(branch_TE, residual_TE)
        branch_TE = branch_TE.total()
    if norm is None:
        return residual_TE.add_(branch_TE)
    return norm.add_norm(branch_TE, residual_TE)
