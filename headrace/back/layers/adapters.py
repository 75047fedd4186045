"""Low-rank adapters of a model's layers: slots that hold one adapter each, and the linear layers
that add the adapter in their rows' slots to what the weight gives (op lora_linear). Tables of
tokens: adapted_table.py; experts: moe/adapted.py.

Magnitudes (Liu et al. 2024, "DoRA", equation 5) make of the sum y = m / |W + s B A| * (W + s B A)
x: a factor for each output, which is taken when an adapter is read; the bias stays as it is.

A linear layer is asked with rows alone. Which slots these have, `AdapterSlots.rows_T` says: a
decoder sets it where it takes up a batch (`take`), and where it goes on with fewer rows. None: no
row has an adapter, and nothing is computed.

T rows, I inputs, O outputs, R ranks; sizes of modules are global, sizes of tensors this rank's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import accumulate
from typing import Any, Protocol, TypeVar

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
from headrace.back.layers.adapter_shares import (
    MAGNITUDES,
    AdaptedModule,
    AdapterShare,
    LowRank,
    modules_of,
)
from headrace.back.layers.dequantized import AnyWeight, float_rows
from headrace.back.parallel.mesh import Mesh
from headrace.back.parallel.param import Copy, Param, WeightPiece, copies
from headrace.back.parallel.shard import Shard, local_size


class AdapterSlots:
    """The slots of one model. Slot 0 is none: its rows have no adapter; adapters lie in 1 ..
    `count`, of at most `max_rank` ranks. `kinds`: of KINDS, what there is room for. `elsewhere`:
    modules of the model whose layers lie on other stages of a pipeline."""

    def __init__(self, *, count: int, max_rank: int, kinds: frozenset[str] = frozenset()) -> None:
        self.count, self.max_rank, self.kinds = count, max_rank, kinds
        self.layers: list[AdaptedLayer] = []
        self.elsewhere: dict[str, AdaptedModule] = {}
        self.rows_T: torch.Tensor | None = None
        self._logits_at_N: torch.Tensor | None = None

    def take(self, batch: Batch) -> None:
        """The rows of this batch come next."""
        self.rows_T, self._logits_at_N = batch.slot_T, batch.logits_at_N

    def take_slot(self, slot: int, device: torch.device) -> None:
        """Any number of rows come next that have this slot."""
        self.rows_T = torch.full((1,), slot, dtype=torch.int32, device=device) if slot else None

    def head_rows(self, count: int) -> torch.Tensor | None:
        """The slots of the rows whose logits are wanted: those that came last, or those of them
        that the batch wants logits of."""
        rows_T = self.rows_T
        if rows_T is None or len(rows_T) == count:
            return rows_T
        if len(rows_T) == 1:
            return rows_T.expand(count).contiguous()
        assert self._logits_at_N is not None and len(self._logits_at_N) == count, count
        return rows_T.index_select(0, self._logits_at_N)

    @property
    def linears(self) -> list[AdaptedLinear]:
        """Those of its layers that are linear."""
        return [layer for layer in self.layers if isinstance(layer, AdaptedLinear)]

    @property
    def modules(self) -> dict[str, AdaptedModule]:
        """Those that its layers compute, by name."""
        return {name: module for layer in self.layers for name, module in layer.modules.items()}

    @property
    def num_bytes(self) -> int:
        """Bytes of all slots on this rank."""
        return sum(layer.num_bytes for layer in self.layers)

    def kept(self, make: Callable[[], Layer]) -> Layer:
        """A layer with slots, made now."""
        layer = make()
        self.layers.append(layer)
        return layer

    def over(
        self, weight: Param, mesh: Mesh, device: torch.device, kind: str, *, wide: bool = False
    ) -> AdaptedLinear:
        """Slots for the linear layer of a weight [outputs, inputs]; `kind` of device is what the
        kernel is chosen for. `wide`: its results are float32."""
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
            turned=MAGNITUDES in self.kinds,
            wide=wide,
        )
        modules = modules_of(weight, parts)
        return self.kept(
            lambda: AdaptedLinear(
                self, modules, mesh=mesh, shard=shard, problem=problem, device=device
            )
        )


class LentSlots(AdapterSlots):
    """The slots of one model for a second one of the same making: its layers get those of the
    first, in their order."""

    def __init__(self, slots: AdapterSlots) -> None:
        super().__init__(count=slots.count, max_rank=slots.max_rank, kinds=slots.kinds)
        self._lent = iter(slots.layers)

    def kept(self, make: Callable[[], Layer]) -> Layer:
        """See AdapterSlots."""
        layer: Any = next(self._lent)
        self.layers.append(layer)
        return layer


class AdaptedLayer(Protocol):
    """What a layer with slots is to whoever fills them. `modules`: those of the checkpoint that it
    computes, by name."""

    modules: dict[str, AdaptedModule]

    @property
    def num_bytes(self) -> int:
        """Of all slots on this rank."""
        ...

    def share(self, pairs: dict[str, LowRank]) -> Any:
        """This rank's share of the matrices of some of its modules."""
        ...

    def put(self, slot: int, share: Any | None) -> None:
        """Fills a slot that no row has; None: its adapter leaves this layer as it is."""
        ...


Layer = TypeVar("Layer", bound=AdaptedLayer)


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
        self._weight: AnyWeight | None = None
        self._bias: torch.Tensor | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of all slots on this rank."""
        weights = self.weights
        tensors = (
            weights.a_SKI,
            weights.b_SRO,
            weights.scale_SP,
            weights.rank_SP,
            weights.turn_S2O,
        )
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    @property
    def adds_up(self) -> bool:
        """Whether what it gives is a share of a sum over ranks."""
        return self._axis is not None and self._axis.size > 1 and self._by_inputs is not None

    @property
    def _by_inputs(self) -> Shard | None:
        return self._shard if self._shard is not None and self._shard.dim == 1 else None

    def add_to(
        self,
        gemm: Linear,
        bind: Callable[..., LoraLinear],
        weight: AnyWeight,
        bias_O: torch.Tensor | None,
    ) -> Linear:
        """The layer's product with the weight and the bias, and what its rows' adapters add.
        `bind`: see Scope."""
        slots, add = self._slots, self.bound(bind, weight, bias_O)

        def project(x_TI: torch.Tensor) -> torch.Tensor:
            y_TO = gemm(x_TI)
            if slots.rows_T is not None:
                add(x_TI, y_TO, slots.rows_T)
            return y_TO

        return project

    def bound(
        self, bind: Callable[..., LoraLinear], weight: AnyWeight, bias_O: torch.Tensor | None
    ) -> LoraLinear:
        """What adds to rows' products with the weight and the bias."""
        if self.problem.turned and self._weight is None:  # a second model of its making fills these
            self._weight, self._bias = weight, bias_O
        return bind(OP, self.problem, self.weights)

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
        share = AdapterShare(a_PRI=a_PRI, b_RO=b_RO, scale_P=scale_P, rank_P=rank_P)
        if all(pair.magnitude_O is None for pair in pairs.values()):
            return share
        share = replace(
            share,
            magnitude_O=self._magnitudes(pairs),
            squares_O=torch.ones(problem.outputs),
            turn_2O=torch.tensor([[1.0], [0.0]]).repeat(1, problem.outputs),
            plain_b_RO=b_RO.clone(),
        )
        self.measure(share)
        return share

    def _magnitudes(self, pairs: dict[str, LowRank]) -> torch.Tensor:
        magnitude_O = torch.full((self.problem.outputs,), -1.0)
        for name, pair in pairs.items():
            if pair.magnitude_O is not None:
                for copy in self._copies_of_b(self.modules[name], 1):
                    values_O1 = pair.magnitude_O[:, None][copy.source].float() * copy.scale
                    magnitude_O[:, None][copy.target].copy_(values_O1)
        return magnitude_O

    def measure(self, share: AdapterShare) -> None:
        """Takes the squares of outputs with magnitudes, over this rank's inputs, from the weight as
        it is now."""
        magnitude_O, squares_O, b_RO = share.magnitude_O, share.squares_O, share.plain_b_RO
        assert magnitude_O is not None and squares_O is not None and b_RO is not None
        assert self._weight is not None, "the model is used before finish_load"
        ends = list(accumulate(self.problem.parts))
        for first, chunk_NI in float_rows(self._weight):
            for part, end in enumerate(ends):
                begin = max(end - self.problem.parts[part], first)
                end = min(end, first + len(chunk_NI))
                if begin >= end or not bool((magnitude_O[begin:end] >= 0).any()):
                    continue
                new = {"device": chunk_NI.device, "dtype": torch.float32}
                whole_NI = b_RO[:, begin:end].t().to(**new) @ share.a_PRI[part].to(**new)
                whole_NI *= float(share.scale_P[part])
                whole_NI += chunk_NI[begin - first : end - first]
                squares_O[begin:end] = whole_NI.square().sum(1).cpu()

    def turn(self, share: AdapterShare) -> None:
        """Takes the factors of outputs with magnitudes from their squares, which are whole now."""
        magnitude_O, squares_O, turn_2O = share.magnitude_O, share.squares_O, share.turn_2O
        assert magnitude_O is not None and squares_O is not None and turn_2O is not None
        assert share.plain_b_RO is not None
        factor_O = torch.where(magnitude_O < 0, 1.0, magnitude_O / squares_O.sqrt())
        turn_2O[0] = factor_O
        share.b_RO.copy_(share.plain_b_RO.float() * factor_O)
        if self._bias is not None:
            turn_2O[1] = (1.0 - factor_O) * self._bias.float().cpu()

    def put(self, slot: int, share: AdapterShare | None) -> None:
        """Fills a slot that no row has; None: its adapter leaves this layer as it is."""
        weights, at, problem = self.weights, slot - 1, self.problem
        weights.rank_SP[at].zero_()
        if weights.turn_S2O is not None:
            weights.turn_S2O[at, 0], weights.turn_S2O[at, 1] = 1.0, 0.0
        if share is None:
            return
        rank, parts = share.b_RO.shape[0], len(problem.parts)
        a_PRI = weights.a_SKI[at].view(parts, problem.rank, problem.inputs)
        a_PRI[:, :rank].copy_(share.a_PRI)
        weights.b_SRO[at, :rank].copy_(share.b_RO)
        weights.scale_SP[at].copy_(share.scale_P)
        weights.rank_SP[at].copy_(share.rank_P)
        if weights.turn_S2O is not None and share.turn_2O is not None:
            weights.turn_S2O[at].copy_(share.turn_2O)

    def _copies_of_a(self, name: str, module: AdaptedModule, rank: int) -> Iterator[Copy]:
        shape = (rank, module.inputs)
        piece = WeightPiece(name=name, shape=shape)
        return copies(self._param(shape, (piece,), self._by_inputs))

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
