"""Scales of inputs, folded into what makes these inputs: the norm before a projection, or the
outputs of another projection. The model computes the same.

By the names that layers of the usual families have; where a layer has others, its projections keep
their inputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from headrace.back.quant.awq import SharedInputs

_ATTENTION = {"q_proj", "k_proj", "v_proj"}
_MLP = {"gate_proj", "up_proj"}


@dataclass(frozen=True)
class InputSource:
    """The tensor that a projection's inputs come from, all of it (a norm), or its outputs."""

    name: str
    shared: SharedInputs | None = None


@dataclass
class Folds:
    """What is multiplied onto tensors: `columns` onto inputs of weights, `rows` onto their outputs
    (of a norm: onto it)."""

    columns: dict[str, torch.Tensor] = field(default_factory=dict)
    rows: dict[str, torch.Tensor] = field(default_factory=dict)

    def add(self, names: Sequence[str], source: InputSource, scales_I: torch.Tensor) -> None:
        """Scales of the inputs of all these weights."""
        self.columns |= dict.fromkeys(names, scales_I)
        rows = scales_I
        if source.shared is not None:
            rows = scales_I.view(-1, source.shared.repeats, source.shared.size)[:, 0].reshape(-1)
        self.rows[source.name] = 1 / rows

    def apply(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor with what is folded into it, float32; a bias goes with its rows."""
        rows = self.rows.get(name)
        if rows is None and name.endswith(".bias"):
            rows = self.rows.get(f"{name.removesuffix('.bias')}.weight")
        columns = self.columns.get(name)
        if rows is None and columns is None:
            return tensor
        wide = tensor.float()
        if columns is not None:
            wide = wide * columns
        if rows is None:
            return wide
        return wide * (rows[:, None] if wide.dim() == 2 else rows)


def source_of(
    names: Sequence[str], shapes: Mapping[str, tuple[int, ...]], *, head_dim: int
) -> InputSource | None:
    """Where the inputs come from that these weights share; None: nowhere that is known."""
    parents = {name.removesuffix(".weight").rpartition(".")[0] for name in names}
    projections = {name.removesuffix(".weight").rpartition(".")[2] for name in names}
    parent = parents.pop()
    if parents:
        return None
    layer = parent.rpartition(".")[0]
    if projections == _ATTENTION:
        return _norm(f"{layer}.input_layernorm.weight", shapes)
    if projections == _MLP and not any(name.startswith(f"{parent}.experts.") for name in shapes):
        return _norm(f"{layer}.post_attention_layernorm.weight", shapes)
    if projections == {"down_proj"}:
        up = f"{parent}.up_proj.weight"
        return InputSource(up) if up in shapes else None
    if projections == {"o_proj"}:
        return _values(f"{parent}.v_proj.weight", shapes[names[0]][1], shapes, head_dim)
    return None


def _norm(name: str, shapes: Mapping[str, tuple[int, ...]]) -> InputSource | None:
    return InputSource(name) if name in shapes else None


def _values(
    name: str, inputs: int, shapes: Mapping[str, tuple[int, ...]], head_dim: int
) -> InputSource | None:
    if name not in shapes or inputs % shapes[name][0] or shapes[name][0] % head_dim:
        return None
    repeats = inputs // shapes[name][0]
    return InputSource(name, SharedInputs(repeats=repeats, size=head_dim) if repeats > 1 else None)
