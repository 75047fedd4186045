"""Attention weights, chosen experts and hidden states of the rows that ask for them: seen in the
layers' forward, a chunk at a time, and told with the step's result (of hidden states the file they
are in: hidden_states.py). Nothing of it is there in steps without such a row. Rows are captured
from their first position on.
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
from headrace.back.runner.batch import Rows, StepShape
from headrace.back.runner.hidden_states import HiddenStateFiles, LayerStates, StatesPiece
from headrace.base.config.resolved import EngineSpec
from headrace.base.wire.request import ROUTED_EXPERTS, Captured, RowSampling
from headrace.base.wire.step import RowStart
from headrace.base.wire.transfer import HIDDEN_STATES

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


CapturedPiece: TypeAlias = CapturedWeights | StatesPiece
"""What a step tells of a row, on its way to the host."""


@dataclass(eq=False)
class WeightCapture:
    """What a step's forward hands its queries to. `wanted`: layer -> indices of rows, and heads;
    `first_R`: the position of each row's first query; `start_R1`: where its tokens begin."""

    wanted: dict[int, list[tuple[int, tuple[int, ...]]]]
    first_R: np.ndarray
    start_R1: np.ndarray
    routing: RoutingTap | None = None
    taps: LayerStates | None = None
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


class RowCaptures:
    """What the rows of a runner ask for: `of_row`. `files`: for the hidden states of all rows;
    None: of none."""

    def __init__(self, routing: RoutingTap | None, files: HiddenStateFiles | None) -> None:
        self.of_row: LayersOfRow = {}
        self.files = files
        self._routing = routing

    def start(self, start: RowStart) -> None:
        """A request takes a row."""
        wanted = wanted_of(start.sampling)
        wanted.pop(HIDDEN_STATES, None)
        if self.files is not None and self.files.start(start):
            wanted[HIDDEN_STATES] = ()
        if wanted:
            self.of_row[start.row] = wanted

    def end(self, rows: np.ndarray) -> None:
        """Rows were given back."""
        for row in rows.tolist():
            self.of_row.pop(row, None)
        if self.files is not None:
            self.files.end(rows)

    def probe(self, shape: StepShape) -> WeightCapture | None:
        """That of a step; None if no row of it is captured."""
        wanted: dict[int, list[tuple[int, tuple[int, ...]]]] = {}
        for index, row in enumerate(shape.rows.tolist()):
            for layer, heads in self.of_row.get(row, {}).items():
                wanted.setdefault(layer, []).append((index, heads))
        if not wanted:
            return None
        first_R = shape.position_T[shape.query_start[:-1]]
        taps = None if self.files is None else self.files.taps()
        return WeightCapture(wanted, first_R, shape.query_start, self._routing, taps)

    def pieces(self, probe: WeightCapture, shape: StepShape, rows: Rows) -> list[CapturedPiece]:
        """What a step's probe has seen. Rows whose hidden states are all there are looked into no
        more."""
        captured: list[CapturedPiece] = [*probe.weights]
        if probe.taps is None or self.files is None or HIDDEN_STATES not in probe.wanted:
            return captured
        token_T = rows.tokens.take(shape.row_T, shape.position_T).to(torch.int64)
        states_TLE = probe.taps.stacked()
        for index, _ in probe.wanted[HIDDEN_STATES]:
            first, last = shape.query_start[index : index + 2].tolist()
            row, start = int(shape.rows[index]), int(shape.position_T[first])
            piece = self.files.piece(row, index, start, token_T[first:last], states_TLE[first:last])
            if piece is None:
                self.of_row.pop(row, None)
            else:
                captured.append(piece)
        return captured


def routed_of(spec: EngineSpec, routing: RoutingTap | None) -> tuple[int, ...]:
    """Layers whose chosen experts can be told, and the most of a token; () where none are."""
    if routing is None or not routing.top_k or not spec.model.routed_experts:
        return ()
    return len(routing.top_k), max(routing.top_k)
