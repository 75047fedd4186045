"""Attention weights and chosen experts of the rows that ask for them: seen in the layers'
forward, a chunk at a time, and told with the step's result. Nothing of it is there in steps
without such a row. Rows are captured from their first position on.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import torch
import torch.nn.functional as F

from headrace.back.attention.plan import AttentionPlan
from headrace.back.kernels.attention.op import AttentionProblem
from headrace.back.kernels.attention.weights import attention_weights
from headrace.back.kernels.upload import to_host
from headrace.back.layers.moe.routing_tap import RoutingTap
from headrace.back.models.protocol import CausalModel
from headrace.back.runner.batch import StepShape
from headrace.base.config.resolved import EngineSpec
from headrace.base.wire.request import ROUTED_EXPERTS, Captured, RowSampling

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
    """The weights of a row's queries in one layer on their way to the host, float32 [Q, H, S]; or
    the experts of its tokens: see Captured."""

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
    `first_R`: the position of each row's first query; `start_R1`: where its tokens begin."""

    wanted: dict[int, list[tuple[int, tuple[int, ...]]]]
    first_R: np.ndarray
    start_R1: np.ndarray
    routing: RoutingTap | None = None
    weights: list[CapturedWeights] = field(default_factory=list)

    def begin(self) -> None:
        """See AttentionProbe."""
        if self.routing is not None and ROUTED_EXPERTS in self.wanted:
            self.routing.seen = []

    def end(self) -> None:
        """See AttentionProbe."""
        if self.routing is None or self.routing.seen is None:
            return
        seen, self.routing.seen = self.routing.seen, None
        most = max(expert_TK.shape[1] for expert_TK in seen)
        padded = [F.pad(x_TK.int(), (0, most - x_TK.shape[1]), value=-1) for x_TK in seen]
        expert_TLK = torch.stack(padded, dim=1)
        for index, _ in self.wanted[ROUTED_EXPERTS]:
            first, last = self.start_R1[index : index + 2].tolist()
            values = to_host(expert_TLK[first:last].contiguous())
            start = int(self.first_R[index])
            self.weights.append(
                CapturedWeights(index=index, layer=ROUTED_EXPERTS, start=start, values=values)
            )

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
    wanted = (
        spec.model.attention_capture or len(spec.model.spectrogram) == 2
    )  # by which words get times
    alone = spec.device.tensor_parallel == 1
    return len(model.kv_forms) if wanted and alone and model.attention_heads else 0


def forget_rows(layers: LayersOfRow, rows: np.ndarray) -> None:
    """Rows were given back."""
    for row in rows.tolist():
        layers.pop(row, None)


def capture_of(
    layers: LayersOfRow, shape: StepShape, routing: RoutingTap | None
) -> WeightCapture | None:
    """The probe of a step; None if no row of it is captured."""
    wanted: dict[int, list[tuple[int, tuple[int, ...]]]] = {}
    for index, row in enumerate(shape.rows.tolist()):
        for layer, heads in layers.get(row, {}).items():
            wanted.setdefault(layer, []).append((index, heads))
    first_R = shape.position_T[shape.query_start[:-1]]
    return WeightCapture(wanted, first_R, shape.query_start, routing) if wanted else None


def routed_of(spec: EngineSpec, routing: RoutingTap | None) -> tuple[int, ...]:
    """Layers whose chosen experts can be told, and the most of a token; () where none are."""
    if routing is None or not routing.top_k or not spec.model.routed_experts:
        return ()
    return len(routing.top_k), max(routing.top_k)
