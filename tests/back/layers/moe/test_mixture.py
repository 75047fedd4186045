"""What stands around a mixture's experts, where kernels do it in one: the norm and the router before them, the sum into
the residual behind them. Kernels of GPUs by their ops' definitions."""

from __future__ import annotations

import pytest
import torch

from headrace.back.kernels.experts import op as experts
from headrace.back.kernels.fused_route import op as fused_route
from headrace.back.kernels.op import Kernel
from headrace.back.layers.linear import add_norm
from headrace.back.layers.mlp import FeedForwardPlace, FeedForwardSpec
from headrace.back.layers.moe.biased import BiasedMixtureSpec
from headrace.back.layers.moe.mixture import MixtureSpec, RouterSpec, SharedSpec
from headrace.back.layers.norm import RMS
from headrace.back.layers.scope import Ledger, Scope
from headrace.back.parallel.mesh import Mesh

WIDTH, INNER = 32, 16
ROUTE = Kernel(name="defined", supports=lambda problem: None, bind=fused_route.bind_reference)
INTO = Kernel(
    name="defined",
    supports=lambda problem: None if problem.adds else "adds",
    bind=experts.bind_reference,
)
ROUTER = RouterSpec(experts=5, top_k=2, renormalize=True)
SPECS = {
    "routed": MixtureSpec(router=ROUTER, inner=INNER),
    "shared": MixtureSpec(router=ROUTER, inner=INNER, shared=SharedSpec(inner=2 * INNER)),
    "scaled": MixtureSpec(
        router=RouterSpec(experts=5, top_k=2, logit_scale=0.5, linear_bias=True), inner=INNER
    ),
    "weighs inputs": MixtureSpec(
        router=RouterSpec(experts=5, top_k=1, score="sigmoid", weighs_inputs=True), inner=INNER
    ),
    "idle": MixtureSpec(router=RouterSpec(experts=5, top_k=2, idle=2), inner=INNER),
    "biased": BiasedMixtureSpec(mixture=MixtureSpec(router=ROUTER, inner=INNER)),
}
FUSED = {
    "routed": {"fused_route", "experts"},
    "shared": {"fused_route", "experts"},
    "scaled": {"experts"},
    "weighs inputs": {"fused_route"},
    "idle": {"fused_route"},
    "biased": set(),
}


def answers(spec: FeedForwardSpec, *, fuses: bool) -> tuple[list[torch.Tensor], set[str]]:
    """The residual behind a layer's second half, of one token and of three, and which of the kernels above were
    taken."""
    here = Scope(
        ledger=Ledger(), mesh=Mesh(), device=torch.device("cpu"), dtype=torch.float32,
        block_tokens=16, max_positions=8, path="model.layers.0",
    )  # fmt: skip
    norm = RMS.build(here / "norm", WIDTH, eps=1e-6)
    place = FeedForwardPlace(
        width=WIDTH, inner=INNER, activation="silu", norm=norm if fuses else None, adds=True
    )
    layer = spec.build(here, place)
    generator = torch.Generator().manual_seed(1)
    for param in here.ledger.params:
        param.present().normal_(std=0.3, generator=generator)
    here.ledger.finish()
    behind = []
    for tokens in (1, 3):
        residual = torch.randn(tokens, WIDTH, generator=torch.Generator().manual_seed(tokens))
        x = add_norm(None if layer.norms else norm, None, residual)
        behind.append(add_norm(None, layer.forward_into(x, residual), residual))
    taken = {one.op for one in here.ledger.choices if one.kernel in (ROUTE, INTO)}
    return behind, taken


@pytest.mark.parametrize("name", SPECS)
def test_norm_router_and_sum_in_fewer_kernels_give_the_same(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """KRN-26: and what they cannot do, or a layer around the mixture does, stays apart."""
    for op, kernel in ((fused_route.OP, "ROUTE"), (experts.OP, "INTO")):
        monkeypatch.setattr(op, "kernels", (f"{__name__}:{kernel}",))
        monkeypatch.setattr(op, "_choices", {})
    found, taken = answers(SPECS[name], fuses=True)
    expected, none = answers(SPECS[name], fuses=False)
    assert taken == FUSED[name] and not none
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5), (ours - theirs).abs().max()
