"""The experts of a mixture that are loaded alike (the routed ones, the shared ones), as floats or
packed, and how sets of them are bound to kernels.

T tokens, X experts, S shared ones, E hidden size, I inner size of an expert, K slots of a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from headrace.back.kernels.experts.op import OP as EXPERTS
from headrace.back.kernels.experts.op import Beside, Experts, ExpertsProblem
from headrace.back.kernels.experts_bytes.layout import ByteExperts
from headrace.back.kernels.experts_bytes.op import OP as EXPERTS_BYTES
from headrace.back.kernels.experts_bytes.op import ExpertsBytesProblem
from headrace.back.kernels.experts_fp8.layout import Fp8Experts
from headrace.back.kernels.experts_fp8.op import OP as EXPERTS_FP8
from headrace.back.kernels.experts_fp8.op import ExpertsFp8Problem
from headrace.back.kernels.experts_int4.op import OP as EXPERTS_INT4
from headrace.back.kernels.experts_int4.op import ExpertsInt4Problem
from headrace.back.kernels.experts_quant.layout import PackedExperts, mixed_rows
from headrace.back.kernels.experts_quant.op import OP as EXPERTS_QUANT
from headrace.back.kernels.experts_quant.op import ExpertsQuantProblem
from headrace.back.kernels.op import Op
from headrace.back.layers.moe.balance import MovableExperts
from headrace.back.layers.moe.exchange import ALLREDUCE, exchanged, exchanged_in_rounds, slots_on
from headrace.back.layers.moe.split import ExpertSizes
from headrace.back.layers.moe.weights import Biases, ExpertWeights, LoadedExperts
from headrace.back.layers.scope import Scope
from headrace.back.parallel.mesh import Axis
from headrace.back.parallel.param import Param
from headrace.back.parallel.shard import Part, Shard, local_size
from headrace.back.quant.experts import MatricesOf
from headrace.back.quant.gpu_expert_forms import GpuExperts
from headrace.base.config.resolved import Decision

NO_BIASES: Biases = (None, None)
_DEQUANTIZED = Decision(
    "model.experts", "quantized", "dequantized", "no kernel multiplies by them as they are"
)


@dataclass(frozen=True, kw_only=True)
class TakenExperts:
    """Loaded experts: `packed`, or else `floats`."""

    packed: PackedExperts | GpuExperts | None
    floats: ExpertWeights | None
    biases: Biases = NO_BIASES

    def __len__(self) -> int:
        return len(self.packed) if self.packed is not None else len(_floats(self).up_XIE)


class ExpertSet:
    """`count` experts of this rank's `inner` size, whose parameters are `params`; `scale`: what
    each expert's downs are multiplied with."""

    def __init__(
        self,
        scope: Scope,
        loaded: LoadedExperts,
        params: Sequence[Param],
        *,
        sizes: tuple[int, int, int],
        scale: Param | None = None,
    ) -> None:
        self._loaded, self._scale = loaded, scale
        self._biases = NO_BIASES
        matrices = loaded.matrices if scale is None else None
        self._packed = scope.packed_experts(params, matrices, self._matrices, sizes=sizes)

    @property
    def is_quantized(self) -> bool:
        """Whether the weights are not floats."""
        return self._packed is not None

    def take(self) -> TakenExperts:
        """What was loaded, which the set gives up."""
        if self._packed is None:
            weights = self._weights()
            return TakenExperts(
                packed=None, floats=weights, biases=(weights.up_bias_XI, weights.down_bias_XE)
            )
        packed = self._packed.take()
        if self._biases == NO_BIASES:  # nobody took the floats
            self._biases = self._loaded.biases()
        if isinstance(packed, tuple):  # rounded, and floats all the same
            up_XIE, down_XEI = packed
            floats = ExpertWeights(up_XIE=up_XIE, down_XEI=down_XEI)
            return TakenExperts(packed=None, floats=floats, biases=self._biases)
        return TakenExperts(packed=packed, floats=None, biases=self._biases)

    def _matrices(self) -> tuple[torch.Tensor, torch.Tensor]:
        weights = self._weights()
        self._biases = weights.up_bias_XI, weights.down_bias_XE
        return weights.up_XIE, weights.down_XEI

    def _weights(self) -> ExpertWeights:
        weights = self._loaded.take()
        if self._scale is not None:
            weights.down_XEI.mul_(self._scale.take()[:, None, None])
        return weights


class SharedExperts:
    """A gated MLP as experts that every token takes: each has a part of its inner values."""

    def __init__(self, scope: Scope, *, width: int, expert: Part, count: int) -> None:
        # The ranks share each of its experts, not the whole: all have a part of every expert.
        size, parts = expert.size * count, (expert,) * count
        self._inner, self._width = local_size(expert, scope.mesh.tp), width
        rows, columns = (Shard(axis="tp", dim=dim, parts=parts) for dim in (0, 1))
        self._gate = scope.param("gate_proj.weight", (size, width), shard=rows)
        self._up = scope.param("up_proj.weight", (size, width), shard=rows)
        self._down = scope.param("down_proj.weight", (width, size), shard=columns)

    @property
    def matrices(self) -> tuple[MatricesOf, ...] | None:
        """See LoadedExperts."""
        size = self._inner
        return (
            MatricesOf(param=self._gate, names=("gate",), size=size),
            MatricesOf(param=self._up, names=("up",), size=size),
            MatricesOf(param=self._down, names=("down",), size=size, dim=1),
        )

    def biases(self) -> Biases:
        """See LoadedExperts."""
        return NO_BIASES

    def take(self) -> ExpertWeights:
        """See LoadedExperts."""
        gate_SIE, up_SIE = (
            p.take().unflatten(0, (-1, self._inner)) for p in (self._gate, self._up)
        )
        down_SEI = self._down.take().unflatten(1, (-1, self._inner)).transpose(0, 1)
        return ExpertWeights(up_XIE=torch.cat((gate_SIE, up_SIE), dim=1), down_XEI=down_SEI)


def joined(
    routed: TakenExperts, shared: TakenExperts | None
) -> tuple[TakenExperts, TakenExperts | None]:
    """Both in one set, where both are floats: to be bound more than once."""
    if shared is None or routed.floats is None or shared.floats is None:
        return routed, shared
    floats = ExpertWeights(
        up_XIE=torch.cat((routed.floats.up_XIE, shared.floats.up_XIE)),
        down_XEI=torch.cat((routed.floats.down_XEI, shared.floats.down_XEI)),
    )
    return TakenExperts(packed=None, floats=floats), None


def bind_experts(
    scope: Scope, problem: ExpertsProblem, routed: TakenExperts, shared: TakenExperts | None
) -> Experts:
    """f(x_TE, expert_TK, weight_TK) -> y_TE of all experts, the shared ones behind the others, in
    the last slots of each token. `problem` is that of all together."""
    if shared is None:
        return _in_host_memory(scope, _bind(scope, problem, (routed,)))
    assert routed.biases == shared.biases == NO_BIASES, "shared experts have no biases"
    packed = (routed.packed, shared.packed)
    if all(isinstance(one, PackedExperts) for one in packed):
        kinds = tuple(one.kind for one in packed if isinstance(one, PackedExperts))
        is_one_call = mixed_rows(kinds) is None
    else:
        is_one_call = packed == (None, None)
    if is_one_call and scope.host_experts is None:
        return _bind(scope, problem, (routed, shared))
    return _bind_apart(scope, problem, routed, shared)


def bind_adding_experts(
    scope: Scope, problem: ExpertsProblem, experts: TakenExperts
) -> Experts | None:
    """f(x_TE, expert_TK, weight_TK, residual_TE), which adds y into the residual, if a kernel does
    that; else they are still to be bound."""
    problem = replace(problem, adds=True)
    packed, biases = experts.packed, experts.biases
    if isinstance(packed, GpuExperts):
        return scope.bind_if_served(*_gpu_op(problem, packed), packed, *biases)
    if experts.floats is None:
        return None
    weights = experts.floats.up_XIE, experts.floats.down_XEI
    return scope.bind_if_served(EXPERTS, problem, *weights, *biases)


def bind_own_experts(
    scope: Scope,
    problem: ExpertsProblem,
    routed: TakenExperts,
    shared: TakenExperts | None,
    *,
    sizes: ExpertSizes,
    shared_inner: int,
) -> Experts:
    """The same where ranks have whole experts, as `sizes` says, and of each shared one so many
    inner values."""
    exchange, axis, placement = scope.mesh.token_exchange, scope.mesh.ep, sizes.placement
    if scope.mesh.alone:
        axis, placement = Axis(name=axis.name), placement[axis.rank : axis.rank + 1]
    some, count = replace(problem, absent=True), 0 if shared is None else len(shared)
    mix = _in_host_memory(scope, _bind(scope, some, (routed,)))
    movable = MovableExperts(
        mix,
        placement,
        experts=sizes.experts,
        more=problem.experts - sizes.experts,
        axis=axis,
        device=scope.device,
    )
    if exchange == ALLREDUCE:
        mix = _placed(mix, movable.slot_WXC[axis.rank :][:1])
    elif scope.mesh.rounds is None:
        mix = exchanged(mix, movable, scope.mesh)
    else:
        mix = exchanged_in_rounds(
            mix, movable, scope.mesh, problem, name=scope.path, device=scope.device
        )
    if scope.mesh.redundant_experts is not None or scope.mesh.least_ranks:
        scope.ledger.movable.append(movable)
        mix = _counted(mix, movable)
    if shared is None:
        return mix
    of_shared_X1 = movable.slot_WXC[0, :, :1].new_full((problem.experts, 1), -1)
    of_shared_X1[-count:, 0] = torch.arange(count)
    others = _bind(scope, replace(some, inner=shared_inner), (shared,))
    others = _placed(others, of_shared_X1[None])
    return lambda *arguments: mix(*arguments) + others(*arguments)


def _placed(experts: Experts, slot_1XC: torch.Tensor) -> Experts:
    """Experts that are numbered by their slots here."""

    def placed(
        x_TE: torch.Tensor, expert_TK: torch.Tensor, weight_TK: torch.Tensor
    ) -> torch.Tensor:
        return experts(x_TE, slots_on(slot_1XC, expert_TK)[0], weight_TK)

    return placed


def _counted(experts: Experts, movable: MovableExperts) -> Experts:
    """Experts whose tokens are counted."""

    def counted(
        x_TE: torch.Tensor, expert_TK: torch.Tensor, weight_TK: torch.Tensor
    ) -> torch.Tensor:
        movable.see(expert_TK)
        return experts(x_TE, expert_TK, weight_TK)

    return counted


def _bind(scope: Scope, problem: ExpertsProblem, sets: tuple[TakenExperts, ...]) -> Experts:
    problem = replace(problem, experts=sum(len(one) for one in sets))
    first = sets[0].packed
    if isinstance(first, GpuExperts):
        return _bind_on_gpu(scope, problem, first, sets[0].biases)
    parts = tuple(one.packed for one in sets if isinstance(one.packed, PackedExperts))
    if parts:
        quantized = ExpertsQuantProblem(mixture=problem, kinds=tuple(part.kind for part in parts))
        return scope.bind(EXPERTS_QUANT, quantized, parts, *sets[0].biases)
    weights = [_floats(one) for one in sets]
    up_XIE, down_XEI = (
        (weights[0].up_XIE, weights[0].down_XEI)
        if len(sets) == 1
        else (torch.cat([w.up_XIE for w in weights]), torch.cat([w.down_XEI for w in weights]))
    )
    return scope.bind(EXPERTS, problem, up_XIE, down_XEI, *sets[0].biases)


def _bind_on_gpu(
    scope: Scope, problem: ExpertsProblem, experts: GpuExperts, biases: Biases
) -> Experts:
    """By the kernels that read quantized weights; where none serves, the weights become floats."""
    bound = scope.bind_fused(*_gpu_op(problem, experts), experts, *biases)
    if bound is not None:
        return bound
    if problem.beside:
        choice = EXPERTS.choose(problem, invariant=scope.deterministic)
        scope.ledger.choices.append(choice)
        return lambda *arguments: choice.bind(*experts.floats(problem.dtype), *biases)(*arguments)
    scope.ledger.note(_DEQUANTIZED)
    return scope.bind(EXPERTS, problem, *experts.floats(problem.dtype), *biases)


def _gpu_op(problem: ExpertsProblem, experts: GpuExperts) -> tuple[Op[Any], Any]:
    """The op that reads these weights, and its problem."""
    if isinstance(experts, Fp8Experts):
        fixed = experts.inputs_2 is not None
        return EXPERTS_FP8, ExpertsFp8Problem(mixture=problem, group=experts.group, fixed=fixed)
    if isinstance(experts, ByteExperts):
        return EXPERTS_BYTES, ExpertsBytesProblem(mixture=problem, form=experts.form)
    return EXPERTS_INT4, ExpertsInt4Problem(mixture=problem, form=experts.form)


def _bind_apart(
    scope: Scope, problem: ExpertsProblem, routed: TakenExperts, shared: TakenExperts
) -> Experts:
    """Where no kernel multiplies by both in one call, or they do not lie together."""
    slots, first = problem.slots - len(shared), len(routed)
    mix = _in_host_memory(scope, _bind(scope, replace(problem, slots=slots), (routed,)))
    others = _bind(scope, replace(problem, slots=len(shared)), (shared,))

    def experts(
        x_TE: torch.Tensor,
        expert_TK: torch.Tensor,
        weight_TK: torch.Tensor,
        beside: Beside | None = None,
    ) -> torch.Tensor:
        chosen = expert_TK[:, :slots].contiguous(), weight_TK[:, :slots].contiguous()
        if beside is None:
            y_TE = mix(x_TE, *chosen)
        else:
            mine = beside[0][:, :slots].contiguous(), beside[1][:, :slots].contiguous()
            y_TE = mix(x_TE, *chosen, mine)
            beside[1][:, :slots] = mine[1]
        last = (expert_TK[:, slots:] - first).contiguous(), weight_TK[:, slots:].contiguous()
        if beside is None:
            return y_TE + others(x_TE, *last)
        mine = beside[0][:, slots:].contiguous(), beside[1][:, slots:].contiguous()
        y_TE = y_TE + others(x_TE, *last, mine)
        beside[1][:, slots:] = mine[1]
        return y_TE

    return experts


def _in_host_memory(scope: Scope, routed: Experts) -> Experts:
    """Routed experts' weights leave the device, if they are to."""
    if scope.host_experts is not None:
        scope.host_experts.keep(routed, without=scope.beside)
    return routed


def _floats(taken: TakenExperts) -> ExpertWeights:
    assert taken.floats is not None
    return taken.floats
