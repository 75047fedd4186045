"""A decoder layer takes any feed-forward that keeps the face: experts will be another kind."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from headrace.back.kernels.linear_fp8.op import OP as OP_FP8
from headrace.back.kernels.linear_fp8.op import bind_reference
from headrace.back.kernels.op import Kernel
from headrace.back.layers.linear import ColumnLinear
from headrace.back.layers.mlp import (
    FeedForward,
    FeedForwardPlace,
    FeedForwardSpec,
    GatedMLP,
    GatedMLPSpec,
)
from headrace.back.layers.scope import Ledger, Scope
from headrace.back.parallel.mesh import Mesh
from headrace.back.quant.gpu import OnlineFp8Weight

PLACE = FeedForwardPlace(width=8, inner=12, activation="silu", adds=True)
DEFINED = Kernel(name="defined", supports=lambda problem: None, bind=bind_reference)


def scope() -> Scope:
    return Scope(
        ledger=Ledger(), mesh=Mesh(), device=torch.device("cpu"), dtype=torch.float32,
        block_tokens=16, max_positions=8, path="model.layers.0",
    )  # fmt: skip


@dataclass(frozen=True)
class _Doubled:
    """A feed-forward that adds 2 x itself."""

    norms: bool = False

    def forward_into(self, x_TE: torch.Tensor, residual_TE: torch.Tensor) -> None:
        residual_TE += 2 * x_TE


@dataclass(frozen=True)
class _DoubledSpec:
    def build(self, scope: Scope, place: FeedForwardPlace) -> FeedForward:
        return _Doubled()


@pytest.mark.parametrize("spec", [GatedMLPSpec(), _DoubledSpec()], ids=["gated", "other"])
def test_a_layer_builds_its_feed_forward_from_the_spec(spec: FeedForwardSpec) -> None:
    here = scope()
    made = spec.build(here, PLACE)
    for param in here.ledger.params:
        assert param.tensor is not None
        param.tensor.normal_(generator=torch.Generator().manual_seed(1))
    here.ledger.finish()
    x, residual = torch.ones(3, 8), torch.ones(3, 8)
    branch = made.forward_into(x, residual)
    y = residual if branch is None else residual + branch
    assert y.shape == (3, 8) and not torch.equal(y, torch.ones(3, 8))


def test_the_specs_names_are_those_of_the_checkpoint() -> None:
    here = scope()
    spec = GatedMLPSpec(name="feed_forward", bias=True, merged="gate_up_proj")
    layer = spec.build(here, PLACE)
    assert isinstance(layer, GatedMLP)
    pieces = {piece.name for param in here.ledger.params for piece in param.pieces}
    prefix = "model.layers.0.feed_forward"
    leaves = ("gate_up_proj.weight", "gate_up_proj.bias", "down_proj.weight", "down_proj.bias")
    assert pieces == {f"{prefix}.{leaf}" for leaf in leaves}


def test_the_activation_of_many_tokens_is_left_to_the_layer_that_quantizes_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """QNT-06: the bits of two layers that do it apart. Layers of a GPU by their op's definition."""
    monkeypatch.setattr(OP_FP8, "kernels", (f"{__name__}:DEFINED",))
    monkeypatch.setattr(OP_FP8, "_choices", {})
    monkeypatch.setattr(Scope, "quantized_gemm", lambda scope, weight: OnlineFp8Weight(weight))

    def made() -> tuple[FeedForward, set[tuple[bool, str | None]]]:
        here = scope()
        layer = GatedMLPSpec().build(here, replace(PLACE, width=32, inner=48))
        for param in here.ledger.params:
            target = param.present()
            target.normal_(generator=torch.Generator().manual_seed(1))
        here.ledger.finish()
        return layer, {(c.problem.late, c.problem.gated) for c in here.ledger.choices}

    together, chosen = made()
    monkeypatch.setattr(ColumnLinear, "may_leave", None)
    apart, others = made()
    assert (True, None) in chosen and (False, "silu") in chosen and others == {(False, None)}
    for tokens in (3, 70):
        x = torch.randn(tokens, 32, generator=torch.Generator().manual_seed(2))
        found, expected = torch.ones(tokens, 32), torch.ones(tokens, 32)
        assert together.forward_into(x, found) is None
        assert apart.forward_into(x, expected) is None
        assert torch.equal(found, expected)
