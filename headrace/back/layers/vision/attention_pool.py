"""All patches of an image to one vector: a learned query attends to them, then an MLP with a norm
before it (Zhai et al. 2023, SigLIP; Lee et al. 2019).

N patches, E width, H heads, D head_dim, M images.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from headrace.back.layers.gemms import bind_linear
from headrace.back.layers.linear import WholeLinear
from headrace.back.layers.mlp import ElementwiseActivation, FeedForwardPlace, PlainMLP, PlainMLPSpec
from headrace.back.layers.scope import Scope, not_loaded
from headrace.back.layers.vision.encoder import Grid
from headrace.back.layers.vision.layer import VisionLayerSpec


@dataclass(frozen=True, kw_only=True)
class AttentionPoolSpec:
    """Sizes are those of the tower's layers. `name`: where it lies in the checkpoint."""

    layer: VisionLayerSpec
    name: str
    merge: int = 1

    @property
    def outputs(self) -> int:
        """See ProjectorSpec."""
        return self.layer.width

    def build(self, scope: Scope) -> AttentionPool:
        """See ProjectorSpec."""
        return AttentionPool(scope / self.name, self.layer)


class AttentionPool:
    """x_NE -> y_ME, a row for each image; `GridProjector`."""

    def __init__(self, scope: Scope, spec: VisionLayerSpec) -> None:
        self._scope, self._spec = scope, spec
        width = spec.width
        self._probe = scope.param("probe", (1, 1, width))
        within = scope / "attention"
        self._weight = (within / "qkv").param("weight", (3 * width, width))
        self._bias = (within / "qkv").param("bias", (3 * width,), init="zeros")
        self._out = WholeLinear(within / "out_proj", width, width, bias=True)
        self._norm = spec.norm.build(scope / "layernorm", width, eps=spec.eps)
        place = FeedForwardPlace(width=width, inner=spec.inner, activation=spec.activation)
        plain = PlainMLPSpec(up="fc1", down="fc2", bias=True)
        activation = ElementwiseActivation(scope, spec.activation)
        self._mlp = PlainMLP(scope / "mlp", plain, place, activation)
        self._query_HD = torch.empty(0)
        self._kv = not_loaded
        scope.on_finish(self._finish)

    def merge(self, x_NE: torch.Tensor) -> torch.Tensor:
        """See Projector; of one image."""
        return self.merge_grids(x_NE, [(1, 1, x_NE.shape[0])])

    def merge_grids(self, x_NE: torch.Tensor, grids: Sequence[Grid]) -> torch.Tensor:
        """See GridProjector."""
        heads, width = self._spec.heads, self._spec.width
        kv_NHD = self._kv(x_NE).view(x_NE.shape[0], 2, heads, width // heads)
        query = self._query_HD[None, :, None]
        pooled = []
        for part in kv_NHD.split([t * h * w for t, h, w in grids]):
            key, value = part.permute(1, 2, 0, 3)[:, None]
            pooled.append(F.scaled_dot_product_attention(query, key, value).reshape(1, width))
        y_ME = self._out.project(torch.cat(pooled))
        return y_ME + self._mlp.forward(self._norm.norm(y_ME))

    def _finish(self) -> None:
        width, heads = self._spec.width, self._spec.heads
        weight, bias = self._weight.take(), self._bias.take()
        query_E = F.linear(self._probe.take().view(width), weight[:width], bias[:width])
        self._query_HD = query_E.view(heads, width // heads)
        kv_weight, kv_bias = weight[width:].contiguous(), bias[width:].contiguous()
        self._kv = bind_linear(self._scope, kv_weight, kv_bias)
