"""Attention weights of the rows that ask for them: seen in the layers' forward, a chunk at a time,
and told with the step's result. Nothing of it is there in steps without such a row. Rows are
captured from their first position on.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import torch

from headrace.back.attention.plan import AttentionPlan
from headrace.back.kernels.attention.op import AttentionProblem
from headrace.back.kernels.attention.weights import attention_weights
from headrace.back.kernels.upload import to_host
from headrace.back.models.protocol import CausalModel
from headrace.back.runner.batch import StepShape
from headrace.base.config.resolved import EngineSpec
from headrace.base.wire.request import Captured, RowSampling

HeadsOfLayers: TypeAlias = dict[int, tuple[int, ...]]
"""The heads of each layer that are told; none: all."""
LayersOfRow: TypeAlias = dict[int, HeadsOfLayers]
"""The rows that want to be captured."""


def wanted_of(sampling: RowSampling) -> HeadsOfLayers:
    """What a row asks for."""
    layers, heads = sampling.capture_layers, sampling.capture_heads
    pairs = list(zip(layers, heads, strict=True)) if heads else []
    return {layer: tuple(head for one, head in pairs if one == layer) for layer in layers}


@dataclass(frozen=True, kw_only=True)
class CapturedWeights:
    """The weights of a row's queries in one layer on their way to the host, float32 [Q, H, S]."""

    index: int
    layer: int
    start: int
    values: torch.Tensor

    def read(self) -> tuple[int, Captured]:
        """Behind the step's moment: index into the plan's rows, and what is told."""
        return self.index, Captured(self.layer, self.start, self.values.numpy())


@dataclass(eq=False)
class WeightCapture:
    """What a step's forward hands its queries to. `wanted`: layer -> indices of rows, and heads;
    `first_R`: the position of each row's first query."""

    wanted: dict[int, list[tuple[int, tuple[int, ...]]]]
    first_R: np.ndarray
    weights: list[CapturedWeights] = field(default_factory=list)

    def see(
        self,
        layer: int,
        problem: AttentionProblem,
        q_THD: torch.Tensor,
        kv: torch.Tensor,
        plan: AttentionPlan,
    ) -> None:
        """A layer has its queries, rotated, and has written its keys."""
        for index, heads in self.wanted.get(layer, ()):
            weights_QHS = attention_weights(problem, q_THD, kv, plan, index)
            if heads:
                weights_QHS = weights_QHS[:, list(heads)]
            values = to_host(weights_QHS.contiguous())
            start = int(self.first_R[index])
            self.weights.append(
                CapturedWeights(index=index, layer=layer, start=start, values=values)
            )


def num_capturable(model: CausalModel, spec: EngineSpec) -> int:
    """Layers whose attention can be told: all, or none."""
    wanted = spec.model.attention_capture or spec.model.spectrogram  # by which words get times
    alone = spec.device.tensor_parallel == 1
    return len(model.kv_forms) if wanted and alone and model.attention_heads else 0


def forget_rows(layers: LayersOfRow, rows: np.ndarray) -> None:
    """Rows were given back."""
    for row in rows.tolist():
        layers.pop(row, None)


def capture_of(layers: LayersOfRow, shape: StepShape) -> WeightCapture | None:
    """The probe of a step; None if no row of it is captured."""
    wanted: dict[int, list[tuple[int, tuple[int, ...]]]] = {}
    for index, row in enumerate(shape.rows.tolist()):
        for layer, heads in layers.get(row, {}).items():
            wanted.setdefault(layer, []).append((index, heads))
    return WeightCapture(wanted, shape.position_T[shape.query_start[:-1]]) if wanted else None
