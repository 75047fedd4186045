"""Low-rank adapters of a model's linear layers: slots that hold one adapter each, and the linear
layers that add the adapter in their rows' slots to what the weight gives (op lora_linear).

A linear layer is asked with rows alone. Which slots these have, `AdapterSlots.rows_T` says: a
decoder sets it where it takes up a batch (`take`), and where it goes on with fewer rows. None: no
row has an adapter, and nothing is computed.

T rows, I inputs, O outputs, R ranks; sizes of modules are global, sizes of tensors this rank's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate

import torch

from headrace.back.attention.plan import Batch
from headrace.back.kernels.linear.op import Linear
from headrace.back.kernels.lora_linear.op import (
    OP,
    LoraLinear,
    LoraLinearProblem,
    LoraWeights,
    empty_weights,
)
from headrace.back.parallel.mesh import Mesh
from headrace.back.parallel.param import Copy, Param, WeightPiece, copies
from headrace.back.parallel.shard import Shard, local_size


class AdapterSlots:
    """The slots of one model. Slot 0 is none: its rows have no adapter; adapters lie in 1 ..
    `count`, of at most `max_rank` ranks."""

    def __init__(self, *, count: int, max_rank: int) -> None:
        self.count, self.max_rank = count, max_rank
        self.linears: list[AdaptedLinear] = []
        self.rows_T: torch.Tensor | None = None

    def take(self, batch: Batch) -> None:
        """The rows of this batch come next."""
        self.rows_T = batch.slot_T

    @property
    def num_bytes(self) -> int:
        """Bytes of all slots on this rank."""
        return sum(linear.num_bytes for linear in self.linears)

    def over(self, weight: Param, mesh: Mesh, device: torch.device, kind: str) -> AdaptedLinear:
        """Slots for the linear layer of a weight [outputs, inputs]; `kind` of device is what the
        kernel is chosen for."""
        shard, (outputs, inputs) = weight.shard, weight.shape
        parts = (outputs,)
        sizes = parts
        if shard is not None:
            axis = mesh.axis(shard.axis)
            if shard.dim == 0:
                parts = tuple(part.size for part in shard.parts)
                sizes = tuple(local_size(part, axis) for part in shard.parts)
            else:
                inputs = shard.local_size(axis)
        problem = LoraLinearProblem(
            device=kind,
            dtype=weight.dtype,
            inputs=inputs,
            parts=sizes,
            rank=self.max_rank,
            slots=self.count,
        )
        modules = _modules(weight, parts)
        return AdaptedLinear(self, modules, mesh=mesh, shard=shard, problem=problem, device=device)


class LentSlots(AdapterSlots):
    """The slots of one model for a second one of the same making: its layers get those of the
    first, in their order."""

    def __init__(self, slots: AdapterSlots) -> None:
        super().__init__(count=slots.count, max_rank=slots.max_rank)
        self._lent = iter(slots.linears)

    def over(self, weight: Param, mesh: Mesh, device: torch.device, kind: str) -> AdaptedLinear:
        """See AdapterSlots."""
        linear = next(self._lent)
        self.linears.append(linear)
        return linear


@dataclass(frozen=True, kw_only=True)
class AdaptedModule:
    """A linear layer of the checkpoint, all of which or a part of which an `AdaptedLinear` is.
    `parts`: those of its parts that the module's outputs fill; `pieces`: where in them."""

    inputs: int
    outputs: int
    parts: tuple[int, ...]
    pieces: tuple[WeightPiece, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class AdapterShare:
    """What one adapter holds for one linear layer, on this rank, in host memory: a [P, R, I] and b
    [R, O] in the model's dtype, R the most of its parts' ranks; scale float32 [P], rank int32 [P].
    """

    a_PRI: torch.Tensor
    b_RO: torch.Tensor
    scale_P: torch.Tensor
    rank_P: torch.Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class LowRank:
    """An adapter's two matrices of one module, as stored: a [R, I], b [O, R], any float dtype."""

    a_RI: torch.Tensor
    b_OR: torch.Tensor
    scale: float


class AdaptedLinear:
    """The slots of one linear layer. `modules`: by their checkpoint names.

    `shard`: the split of the weight [outputs, inputs], None: every rank holds all of it. By outputs
    each rank has all of A and its outputs of B; by inputs its inputs of A and all of B, and what it
    adds is a share of the sum over the ranks, as the weight's product is.
    """

    def __init__(
        self,
        slots: AdapterSlots,
        modules: dict[str, AdaptedModule],
        *,
        mesh: Mesh,
        shard: Shard | None,
        problem: LoraLinearProblem,
        device: torch.device,
    ) -> None:
        self.modules = modules
        self.problem = problem
        self.weights: LoraWeights = empty_weights(problem, device)
        self._slots = slots
        self._shard = shard
        self._axis = mesh.axis(shard.axis) if shard else None
        slots.linears.append(self)

    @property
    def num_bytes(self) -> int:
        """Bytes of all slots on this rank."""
        weights = self.weights
        tensors = (weights.a_SKI, weights.b_SRO, weights.scale_SP, weights.rank_SP)
        return sum(tensor.nbytes for tensor in tensors)

    def add_to(self, gemm: Linear, bind: Callable[..., LoraLinear]) -> Linear:
        """The layer's product, and what its rows' adapters add. `bind`: see Scope."""
        slots, add = self._slots, bind(OP, self.problem, self.weights)

        def project(x_TI: torch.Tensor) -> torch.Tensor:
            y_TO = gemm(x_TI)
            if slots.rows_T is not None:
                add(x_TI, y_TO, slots.rows_T)
            return y_TO

        return project

    def share(self, pairs: dict[str, LowRank]) -> AdapterShare:
        """This rank's share of the matrices of some of its modules."""
        problem = self.problem
        ranks = {name: len(pair.a_RI) for name, pair in pairs.items()}
        most, parts = max(ranks.values()), len(problem.parts)
        a_PRI = torch.zeros((parts, most, problem.inputs), dtype=problem.dtype)
        b_RO = torch.zeros((most, problem.outputs), dtype=problem.dtype)
        scale_P, rank_P = torch.zeros(parts), torch.zeros(parts, dtype=torch.int32)
        for name, pair in pairs.items():
            module, rank = self.modules[name], ranks[name]
            for part in module.parts:
                for copy in self._copies_of_a(name, module, rank):
                    a_PRI[part][copy.target].copy_(pair.a_RI[copy.source])
                scale_P[part], rank_P[part] = pair.scale, rank
            for copy in self._copies_of_b(module, rank):
                values_OR = pair.b_OR[copy.source]
                scaled = values_OR if copy.scale == 1.0 else values_OR.float() * copy.scale
                b_RO[:rank].t()[copy.target].copy_(scaled)
        return AdapterShare(a_PRI=a_PRI, b_RO=b_RO, scale_P=scale_P, rank_P=rank_P)

    def put(self, slot: int, share: AdapterShare | None) -> None:
        """Fills a slot that no row has; None: its adapter leaves this layer as it is."""
        weights, at, problem = self.weights, slot - 1, self.problem
        weights.rank_SP[at].zero_()
        if share is None:
            return
        rank, parts = share.b_RO.shape[0], len(problem.parts)
        a_PRI = weights.a_SKI[at].view(parts, problem.rank, problem.inputs)
        a_PRI[:, :rank].copy_(share.a_PRI)
        weights.b_SRO[at, :rank].copy_(share.b_RO)
        weights.scale_SP[at].copy_(share.scale_P)
        weights.rank_SP[at].copy_(share.rank_P)

    def _copies_of_a(self, name: str, module: AdaptedModule, rank: int) -> Iterator[Copy]:
        by_inputs = self._shard if self._shard is not None and self._shard.dim == 1 else None
        shape = (rank, module.inputs)
        piece = WeightPiece(name=name, shape=shape)
        return copies(self._param(shape, (piece,), by_inputs))

    def _copies_of_b(self, module: AdaptedModule, rank: int) -> Iterator[Copy]:
        by_outputs = self._shard if self._shard is not None and self._shard.dim == 0 else None
        outputs = sum(part.size for part in by_outputs.parts) if by_outputs else module.outputs
        pieces = tuple(
            WeightPiece(
                name=piece.name,
                shape=(module.outputs, rank),
                offset=piece.offset,
                rows=piece.rows,
                scale=piece.scale,
            )
            for piece in module.pieces
        )
        return copies(self._param((outputs, rank), pieces, by_outputs))

    def _param(
        self, shape: tuple[int, ...], pieces: tuple[WeightPiece, ...], shard: Shard | None
    ) -> Param:
        spans = () if shard is None or self._axis is None else shard.spans(self._axis)
        return Param(
            name="adapter",
            shape=shape,
            dtype=self.problem.dtype,
            pieces=pieces,
            tensor=None,
            shard=shard if spans else None,
            spans=spans,
        )


def _modules(weight: Param, parts: tuple[int, ...]) -> dict[str, AdaptedModule]:
    """The checkpoint's linear layers that a weight is put together from; `parts`: its outputs."""
    modules: dict[str, AdaptedModule] = {}
    ends = list(accumulate(parts))
    by_name: dict[str, list[WeightPiece]] = {}
    for piece in weight.pieces:
        by_name.setdefault(piece.name.removesuffix(".weight"), []).append(piece)
    for name, pieces in by_name.items():
        outputs, inputs = reversed(pieces[0].shape) if pieces[0].transposed else pieces[0].shape
        spans = [(one.offset, one.offset + _rows(one, outputs)) for one in pieces]
        covered = tuple(
            part
            for part, end in enumerate(ends)
            if any(first < end and last > end - parts[part] for first, last in spans)
        )
        modules[name] = AdaptedModule(
            inputs=inputs, outputs=outputs, parts=covered, pieces=tuple(pieces)
        )
    return modules


def _rows(piece: WeightPiece, outputs: int) -> int:
    return outputs if piece.rows is None else piece.rows[1]
