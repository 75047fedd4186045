"""A mixture of experts in place of a layer's MLP: a router chooses a few of many gated MLPs for
each token (Shazeer et al. 2017; Fedus et al. 2021).

Shared experts, which every token takes, are experts like the others in slots of their own: one
kernel computes all. A shared MLP that is n times as wide as an expert is n of them, cut along its
inner dimension.

T tokens, E hidden size, X experts, S shared ones, I inner size of an expert, K slots of a token.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from headrace.back.kernels.experts.op import Experts, ExpertsProblem
from headrace.back.kernels.fused_route.op import FusedRoute
from headrace.back.kernels.route.op import OP as ROUTE
from headrace.back.layers.adapter_shares import EXPERTS
from headrace.back.layers.gated_residual import ScaledBefore, ScaledBeforeSpec
from headrace.back.layers.gemms import bind_linear
from headrace.back.layers.mlp import FeedForward, FeedForwardPlace
from headrace.back.layers.moe.adapted import AdaptedExperts
from headrace.back.layers.moe.experts import (
    ExpertSet,
    SharedExperts,
    bind_adding_experts,
    bind_experts,
    bind_own_experts,
    joined,
)
from headrace.back.layers.moe.router import (
    RouterSpec,
    bind_fused_route,
    choice_bias,
    route_problem,
)
from headrace.back.layers.moe.split import ExpertSizes, sizes_in
from headrace.back.layers.moe.weights import ExpertLayout, LoadedExperts, SeparateExperts
from headrace.back.layers.norm import RMSNorm
from headrace.back.layers.scope import Scope, not_loaded
from headrace.back.parallel.collectives import Partial
from headrace.back.parallel.param import WeightPiece
from headrace.back.parallel.shard import local_size
from headrace.base.config.resolved import Decision
from headrace.base.errors import ConfigError

__all__ = ["Mixture", "MixtureSpec", "RouterSpec", "SharedSpec"]

SEPARATE = SeparateExperts()
_PLAIN = Decision("model.experts", "auto", "not quantized", "no kernel takes their sizes")


@dataclass(frozen=True, kw_only=True)
class SharedSpec:
    """Experts that every token takes. `inner`: of all together; `name`: the MLP in the module;
    `gate`: the linear layer whose sigmoid weighs them, None: weight 1. `joint`: the router scores
    each of them behind the routed ones, and the sigmoids of all that a token takes share its scale
    (Inkling). `layout`: how the checkpoint holds each of them, None: as one MLP."""

    inner: int
    name: str = "shared_experts"
    gate: str | None = None
    joint: bool = False
    layout: ExpertLayout | None = None


@dataclass(frozen=True, kw_only=True)
class MixtureSpec:
    """A mixture as a layer's feed-forward. `inner`: of an expert; `name`: the module in the layer.
    `slot_norm`: the name in the module and the kind of a norm of what each expert gives, before its
    weight (Muse Spark)."""

    router: RouterSpec
    inner: int
    layout: ExpertLayout = SEPARATE
    shared: SharedSpec | None = None
    name: str = "mlp"
    activation: str | None = None
    clamp: float = 0.0
    slot_norm: tuple[str, ScaledBeforeSpec] | None = None

    def build(self, scope: Scope, place: FeedForwardPlace) -> FeedForward:
        """See FeedForwardSpec; the place's `inner` is that of dense layers."""
        activation = self.activation or place.activation
        return Mixture(
            scope / self.name,
            self,
            place.width,
            activation=activation,
            adds=place.adds,
            norm=place.norm,
        )


class Mixture:
    """x_TE -> y_TE: see MixtureSpec. `adds`: y goes into the residual as it is; `routed_width`: of
    what the router reads, where it is not that of the experts. `norm` stands before it: with the
    router in one, where a kernel does both, and then whoever calls takes y in the residual too."""

    def __init__(
        self,
        scope: Scope,
        spec: MixtureSpec,
        width: int,
        *,
        activation: str,
        adds: bool = True,
        routed_width: int | None = None,
        norm: RMSNorm | None = None,
    ) -> None:
        fuses = scope.mesh.tp.size == 1 and "linear" not in scope.unfused
        self._norm = norm if fuses else None
        self._fused_route: FusedRoute | None = None
        self._adding: Experts | None = None
        self._adds, self._routed_width = adds, routed_width or width
        self._scope, self._spec, self._width, self._activation = scope, spec, width, activation
        router, shared = spec.router, spec.shared
        assert shared is None or shared.inner % spec.inner == 0, (shared, spec.inner)
        self._num_shared = 0 if shared is None else shared.inner // spec.inner
        assert not self._num_joint or (router.score == "sigmoid" and router.groups == 1), router
        self._router = scope.param(
            f"{router.name}.{router.weight}",
            (router.experts + self._num_joint + self._is_gated, self._routed_width),
            pieces=self._router_pieces(scope),
        )
        self._router_bias = (
            scope.param(f"{router.name}.bias", (router.experts,), init="zeros")
            if router.linear_bias
            else None
        )
        self._choice_bias = choice_bias(scope, router)
        count, mesh, ledger = router.experts - router.idle, scope.mesh, scope.ledger
        sizes = sizes_in(mesh, experts=count, width=width, inner=spec.inner)
        self._expert_scale = None
        if router.expert_scale:
            self._expert_scale = scope.param(
                router.expert_scale, (count,), shard=sizes.split(None), init="ones"
            )
        self._sizes, self._inner, self._local = sizes, sizes.part, sizes.local(mesh)
        first = len(ledger.params) - (router.expert_scale is not None)
        loaded = spec.layout.params(scope.of_experts, sizes)
        params, local = ledger.params[first:], self._local
        each = (local.experts, width, local.inner)
        for param in params:
            param.routed = count, min(router.top_k, count)
        there = scope.of_experts
        self._routed = ExpertSet(there, loaded, params, sizes=each, scale=self._expert_scale)
        self._shared = None if shared is None else self._shared_set(scope, shared)
        self._slot_norm = None
        if spec.slot_norm is not None:
            slot_norm, kind = spec.slot_norm
            self._slot_norm = kind.build(scope / slot_norm, width)
        self._by_slots = router.weighs_inputs or self._slot_norm is not None
        self._adapted = self._slots_of_experts(sizes)
        self._logits = self._route = self._experts = not_loaded
        if scope.makes_experts(params) and not self._routed.is_quantized:
            scope.ledger.note(_PLAIN)
        scope.on_finish(self._finish)

    @property
    def norms(self) -> bool:
        """Whether the norm before is part of it."""
        return self._fused_route is not None

    def forward_into(
        self, x_TE: torch.Tensor, residual_TE: torch.Tensor
    ) -> torch.Tensor | Partial | None:
        """y_TE, to be added to the residual; None if that was done."""
        x_TE, expert_TK, weight_TK = self._routed_rows(x_TE)
        if self._adding is not None:
            self._adding(x_TE, expert_TK, weight_TK, residual_TE)
            return None
        y_TE, axis = self.of_chosen(x_TE, expert_TK, weight_TK), self._scope.mesh.tp
        if axis.size == 1:
            return y_TE
        share = Partial(y_TE, axis)
        return share if self._adds else share.total()

    def mixed(
        self, x_TE: torch.Tensor, routed_TE: torch.Tensor, stated_TX: torch.Tensor | None = None
    ) -> torch.Tensor:
        """This rank's share of y_TE; the router reads `routed_TE`, and chooses among `stated_TX`,
        if they are stated."""
        return self.of_chosen(x_TE, *self.routes(routed_TE, stated_TX))

    def _routed_rows(self, x_TE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What the experts read, and `routes` of it."""
        if self._fused_route is None or self._norm is None:
            return x_TE, *self.routes(x_TE)
        if len(x_TE) != 1:
            x_TE = self._norm.norm(x_TE)
            return x_TE, *self.routes(x_TE)
        x_TE, expert_TK, weight_TK = self._fused_route(x_TE)
        self._scope.ledger.routing.see(expert_TK[:, : self._spec.router.top_k])
        return x_TE, expert_TK, weight_TK

    def routes(
        self, routed_TE: torch.Tensor, stated_TX: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """expert_TK and weight_TK: see `mixed`."""
        logits_TG, cap = self._logits(routed_TE), self._spec.router.softcap
        if self._spec.router.logit_scale != 1.0:
            logits_TG = logits_TG.mul_(self._spec.router.logit_scale)
        if cap:
            logits_TG = logits_TG.div_(cap).tanh_().mul_(cap)
        if stated_TX is not None:
            logits_TG = logits_TG.masked_fill(~stated_TX, float("-inf"))
        if self._num_joint:
            expert_TK, weight_TK = self._jointly(logits_TG)
        else:
            expert_TK, weight_TK = self._route(logits_TG)
        self._scope.ledger.routing.see(expert_TK[:, : self._spec.router.top_k])
        return expert_TK, weight_TK

    def of_chosen(
        self, x_TE: torch.Tensor, expert_TK: torch.Tensor, weight_TK: torch.Tensor
    ) -> torch.Tensor:
        """This rank's share of what the chosen experts make of x."""
        if self._spec.router.idle:
            return self._beside_idle(x_TE, expert_TK, weight_TK)
        if self._by_slots:
            return self._of_slots(x_TE, expert_TK, weight_TK)
        return self._experts(x_TE, expert_TK, weight_TK)

    def _jointly(self, logits_TG: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Chosen and shared experts with their weights: the scale, shared out by their sigmoids."""
        routed = self._spec.router.experts
        expert_TK, score_TK = self._route(logits_TG[:, :routed].contiguous())
        score_TK = torch.cat((score_TK, logits_TG[:, routed:].sigmoid()), dim=1)
        shared_TS = expert_TK.new_tensor(range(routed, routed + self._num_joint))
        expert_TK = torch.cat((expert_TK, shared_TS.expand(len(expert_TK), -1)), dim=1)
        share_TK = score_TK / score_TK.sum(1, keepdim=True)
        return expert_TK, share_TK * self._spec.router.scale

    def _beside_idle(
        self, x_TE: torch.Tensor, expert_TK: torch.Tensor, weight_TK: torch.Tensor
    ) -> torch.Tensor:
        """A slot of an idle expert counts another of the token's experts, whose weights are read
        anyway, with weight 0. One rank adds what idle experts give back."""
        working = self._spec.router.experts - self._spec.router.idle
        is_idle_TK = expert_TK >= working
        other_T1 = expert_TK.amin(1, keepdim=True).clamp_(max=working - 1)
        kept_TK = weight_TK.masked_fill(is_idle_TK, 0.0)
        y_TE = self._experts(x_TE, torch.where(is_idle_TK, other_T1, expert_TK), kept_TK)
        if self._scope.mesh.tp.rank or self._spec.router.idle_drops:
            return y_TE
        idle_T1 = (weight_TK - kept_TK).sum(1, keepdim=True)
        return y_TE + (x_TE.float() * idle_T1).to(y_TE.dtype)

    def _of_slots(
        self, x_TE: torch.Tensor, expert_TK: torch.Tensor, weight_TK: torch.Tensor
    ) -> torch.Tensor:
        """Each slot of a token is a row of its own."""
        weight_TK1, x_T1E = weight_TK[..., None].to(x_TE.dtype), x_TE[:, None]
        weighs = self._spec.router.weighs_inputs
        x_TKE = x_T1E * weight_TK1 if weighs else x_T1E.expand(-1, weight_TK.shape[1], -1)
        expert_P1 = expert_TK.reshape(-1, 1)
        weight_P1 = weight_TK.new_ones(expert_P1.shape)
        y_PE = self._experts(x_TKE.flatten(0, 1).contiguous(), expert_P1, weight_P1)
        if self._slot_norm is not None:
            y_PE = self._normed(self._slot_norm, y_PE)
        y_TKE = y_PE.view(x_TKE.shape)
        return (y_TKE if weighs else y_TKE * weight_TK1).sum(1)

    def _normed(self, norm: ScaledBefore, y_PE: torch.Tensor) -> torch.Tensor:
        """Of the ranks' sum; one rank has the result, since the ranks' results are added up."""
        axis = self._scope.mesh.tp
        if axis.size == 1:
            return norm.norm(y_PE)
        y_PE = norm.norm(Partial(y_PE, axis).total())
        return y_PE.zero_() if axis.rank else y_PE

    def _shared_set(self, scope: Scope, shared: SharedSpec) -> ExpertSet:
        first = len(scope.ledger.params)
        mlp = self._shared_experts(scope / shared.name, shared)
        sizes = (self._num_shared, self._width, self._shared_inner)
        return ExpertSet(scope, mlp, scope.ledger.params[first:], sizes=sizes)

    def _shared_experts(self, inside: Scope, shared: SharedSpec) -> LoadedExperts:
        if shared.layout is None:
            return SharedExperts(
                inside, width=self._width, expert=self._inner, count=self._num_shared
            )
        sizes = ExpertSizes(experts=self._num_shared, width=self._width, inner=self._spec.inner)
        return shared.layout.params(inside, sizes)

    @property
    def _shared_inner(self) -> int:
        """Inner values of a shared expert on this rank; 0: there are none."""
        return local_size(self._inner, self._scope.mesh.tp) if self._num_shared else 0

    @property
    def _num_joint(self) -> int:
        """Shared experts that the router scores."""
        joint = self._spec.shared is not None and self._spec.shared.joint
        return self._num_shared if joint else 0

    @property
    def _is_gated(self) -> bool:
        return self._spec.shared is not None and self._spec.shared.gate is not None

    def _router_pieces(self, scope: Scope) -> tuple[WeightPiece, ...]:
        router = self._spec.router
        shape = (router.experts + self._num_joint, self._routed_width)
        name = scope.name(f"{router.name}.{router.weight}")
        stored = shape[::-1] if router.transposed else shape
        pieces = [WeightPiece(name=name, shape=stored, transposed=router.transposed)]
        if self._spec.shared is not None and self._spec.shared.gate is not None:
            gate = scope.name(f"{self._spec.shared.gate}.weight")
            pieces.append(WeightPiece(name=gate, shape=(1, self._width), offset=router.experts))
        return tuple(pieces)

    def _finish(self) -> None:
        spec, scope, router = self._spec, self._scope, self._spec.router
        scope.ledger.routing.top_k.append(router.top_k)
        bias = self._router_bias.take() if self._router_bias else None
        weight_GE = self._router.take()
        self._logits = bind_linear(scope, weight_GE, bias, wide=True)
        problem = route_problem(
            router,
            scope.kind,
            shared=self._num_shared - self._num_joint,
            shared_gate=self._is_gated,
            joint=self._num_joint > 0,
        )
        chooses_X = self._choice_bias.take_float().flatten() if self._choice_bias else None
        self._route = scope.bind(ROUTE, problem, chooses_X)
        if self._norm is not None and not self._num_joint:
            self._fused_route = bind_fused_route(
                scope, router, problem, self._norm, weight_GE, bias, chooses_X
            )
        if scope.host_experts is not None:
            scope.host_experts.bring(self._routed, without=scope.beside)
        routed = self._routed.take()
        shared = None if self._shared is None else self._shared.take()
        experts = ExpertsProblem(
            device=scope.kind,
            dtype=scope.dtype,
            experts=router.experts + self._num_shared,
            slots=1 if self._by_slots else problem.slots + self._num_joint,
            width=self._width,
            inner=self._local.inner,
            activation=self._activation,
            clamp=spec.clamp,
            bias=spec.layout.biased,
        )
        if self._sizes.axis == "ep":
            self._experts = bind_own_experts(
                scope, experts, routed, shared, sizes=self._sizes, shared_inner=self._shared_inner
            )
            return
        if self._adapted is None and scope.host_experts is not None:
            self._experts = bind_experts(scope, experts, routed, shared)
            return
        routed, shared = joined(routed, shared)
        if self._adapted is None:
            is_whole = shared is None and not (self._by_slots or router.idle)
            if is_whole and self._adds and self._norm is not None:
                self._adding = bind_adding_experts(scope, experts, routed)
            if self._adding is None:
                self._experts = bind_experts(scope, experts, routed, shared)
            return
        beside = replace(experts, beside=True)
        adapted = bind_experts(scope, beside, routed, shared)
        plain = adapted if scope.kind == "cpu" else bind_experts(scope, experts, routed, shared)
        self._experts = self._adapted.add_to(plain, adapted, beside, scope.bind)

    def _slots_of_experts(self, sizes: ExpertSizes) -> AdaptedExperts | None:
        """Those of adapters, where there are any and these experts take them."""
        scope, spec, slots = self._scope, self._spec, self._scope.adapters
        router, names = spec.router, spec.layout.adapted
        if slots is None or EXPERTS not in slots.kinds or names is None:
            return None
        if scope.mesh.ep.size > 1:
            raise ConfigError(
                f"--enable-expert-parallel: adapters of experts are cut along their inner values, "
                f"and {scope.path} has whole experts; leave it out, or serve adapters without "
                "experts",
                field=scope.mesh.ep.option,
            )
        if self._by_slots or router.expert_scale or router.idle or self._num_joint:
            return None
        return slots.kept(
            lambda: AdaptedExperts(
                slots,
                names,
                sizes,
                path=scope.path,
                shared_name="" if spec.shared is None else spec.shared.name,
                shared=self._num_shared,
                axis=scope.mesh.tp,
                kind=scope.kind,
                dtype=scope.dtype,
                device=scope.device,
            )
        )
