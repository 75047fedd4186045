"""Learned queries that read all patches of an image and each other, layer by layer: so many tokens
whatever the image's size (Jaegle et al. 2021, Perceiver; Laurençon et al. 2024, Idefics 2).

N patches, E width of the tower, F of the decoder, Q queries, H heads, K of keys, D head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from headrace.back.layers.linear import WholeLinear
from headrace.back.layers.mlp import ElementwiseActivation
from headrace.back.layers.norm import RMS
from headrace.back.layers.scope import Scope
from headrace.back.layers.vision.encoder import Grid


@dataclass(frozen=True, kw_only=True)
class GatedLayerSpec:
    """down(activation(gate x) * up x), of widths that may differ."""

    inputs: int
    inner: int
    outputs: int
    activation: str

    def build(self, scope: Scope) -> GatedLayer:
        """The layer with its weights."""
        return GatedLayer(scope, self)


class GatedLayer:
    """x_NE -> y_NF by GatedLayerSpec."""

    def __init__(self, scope: Scope, spec: GatedLayerSpec) -> None:
        self._gate, self._up = (
            WholeLinear(scope / name, spec.inputs, spec.inner) for name in ("gate_proj", "up_proj")
        )
        self._down = WholeLinear(scope / "down_proj", spec.inner, spec.outputs)
        self._activation = ElementwiseActivation(scope, spec.activation)

    def forward(self, x_NE: torch.Tensor) -> torch.Tensor:
        """See the class."""
        gate_NI = self._activation.apply(self._gate.project(x_NE))
        return self._down.project(gate_NI * self._up.project(x_NE))


@dataclass(frozen=True, kw_only=True)
class PerceiverSpec:
    """`queries` tokens of an image through `layers` layers of this activation. `before`: what leads
    from the tower to the decoder's width, which the layers have. `name`: of the module of both."""

    before: GatedLayerSpec
    queries: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    activation: str
    name: str
    merge: int = 1

    @property
    def outputs(self) -> int:
        """F."""
        return self.before.outputs

    def build(self, scope: Scope) -> Perceiver:
        """See ProjectorSpec."""
        return Perceiver(scope / self.name, self)


class Perceiver:
    """x_NE -> y_MF, Q rows for each image; `GridProjector`."""

    def __init__(self, scope: Scope, spec: PerceiverSpec) -> None:
        self._spec, inside = spec, scope / "perceiver_resampler"
        self._before = spec.before.build(scope / "modality_projection")
        self._queries = inside.param("latents", (spec.queries, spec.outputs))
        self._layers = [PerceiverLayer(inside / f"layers.{i}", spec) for i in range(spec.layers)]
        self._norm = RMS.build(inside / "norm", spec.outputs, eps=spec.eps)
        self._query_QF = torch.empty(0)
        scope.on_finish(self._finish)

    def _finish(self) -> None:
        self._query_QF = self._queries.take().contiguous()

    def merge(self, x_NE: torch.Tensor) -> torch.Tensor:
        """See Projector; of one image of one row."""
        return self.merge_grids(x_NE, [(1, 1, x_NE.shape[0])])

    def merge_grids(self, x_NE: torch.Tensor, grids: Sequence[Grid]) -> torch.Tensor:
        """See GridProjector."""
        x_NF, lengths = self._before.forward(x_NE), [t * h * w for t, h, w in grids]
        y_MF = self._query_QF.repeat(len(lengths), 1)
        for layer in self._layers:
            y_MF = layer.forward(y_MF, x_NF, lengths)
        return self._norm.norm(y_MF)


class PerceiverLayer:
    """y_MF, x_NF -> y_MF: the queries of each image see its patches and themselves, then an MLP."""

    def __init__(self, scope: Scope, spec: PerceiverSpec) -> None:
        self._spec, width, inside = spec, spec.outputs, scope / "self_attn"
        self._query_norm, self._seen_norm, self._mlp_norm = (
            RMS.build(scope / name, width, eps=spec.eps)
            for name in ("input_latents_norm", "input_context_norm", "post_attention_layernorm")
        )
        self._query, self._key, self._value = (
            WholeLinear(inside / name, width, heads * spec.head_dim)
            for name, heads in (
                ("q_proj", spec.heads),
                ("k_proj", spec.kv_heads),
                ("v_proj", spec.kv_heads),
            )
        )
        self._out = WholeLinear(inside / "o_proj", spec.heads * spec.head_dim, width)
        mlp = GatedLayerSpec(
            inputs=width, inner=4 * width, outputs=width, activation=spec.activation
        )
        self._mlp = mlp.build(scope / "mlp")

    def forward(
        self, y_MF: torch.Tensor, x_NF: torch.Tensor, lengths: Sequence[int]
    ) -> torch.Tensor:
        """`lengths`: patches of each image."""
        queries = self._spec.queries
        q_MF, x_NF = self._query_norm.norm(y_MF), self._seen_norm.norm(x_NF)
        images = zip(x_NF.split(list(lengths)), q_MF.split(queries), strict=True)
        seen_SF = torch.cat([part for image in images for part in image])
        q_MHD, k_SKD, v_SKD = (
            one.unflatten(1, (-1, self._spec.head_dim))
            for one in (
                self._query.project(q_MF),
                self._key.project(seen_SF),
                self._value.project(seen_SF),
            )
        )
        spans = [length + queries for length in lengths]
        attended = [
            _attended(*image)
            for image in zip(
                q_MHD.split(queries), k_SKD.split(spans), v_SKD.split(spans), strict=True
            )
        ]
        y_MF = y_MF + self._out.project(torch.cat(attended))
        return y_MF + self._mlp.forward(self._mlp_norm.norm(y_MF))


def _attended(q_QHD: torch.Tensor, k_SKD: torch.Tensor, v_SKD: torch.Tensor) -> torch.Tensor:
    """[Q, H * D] of one image."""
    shared = q_QHD.shape[1] // k_SKD.shape[1]
    k_HSD, v_HSD = (one.repeat_interleave(shared, 1).transpose(0, 1) for one in (k_SKD, v_SKD))
    y_HQD = F.scaled_dot_product_attention(q_QHD.transpose(0, 1), k_HSD, v_HSD)
    return y_HQD.transpose(0, 1).flatten(1)
