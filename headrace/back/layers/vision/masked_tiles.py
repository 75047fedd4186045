"""The tower of Phi-4 multimodal: SigLIP's layers over tiles of one size, of which what only fills
them up is not seen; the means of windows of 2 x 2 patches, with a learned row behind each row of
windows and one behind the last tile's, through two layers (Abouelenin et al. 2025; transformers
5.23, modeling_phi4_multimodal.py).

A row of pixels has one more byte: whether the patch shows anything. T tiles of S x S patches, N of
all, E width of the tower, H heads, F width of the decoder.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from headrace.back.kernels.patch_places.op import coordinates
from headrace.back.kernels.upload import planned
from headrace.back.layers.linear import WholeLinear
from headrace.back.layers.norm import LAYER
from headrace.back.layers.scope import Scope
from headrace.back.layers.vision.encoder import Grid
from headrace.back.layers.vision.patches import PatchEmbedding, PatchSpec
from headrace.back.parallel.mesh import Mesh
from headrace.base.wire.media import MediaForm, Packing

MERGE = 2
EDGE = 1e-6
"""Of the last share of a tile."""


@dataclass(frozen=True, kw_only=True)
class MaskedTilesSpec:
    """side: patches of a tile and of the table of places."""

    patches: PatchSpec
    width: int
    inner: int
    heads: int
    layers: int
    eps: float
    side: int
    outputs: int


class MaskedTiles:
    """`MediaEncoder`; `scope` is that of the tower and of what is behind it."""

    rope = None
    layers = 0

    def __init__(self, scope: Scope, spec: MaskedTilesSpec) -> None:
        scope = replace(scope, mesh=Mesh(), online=None, adapters=None)
        tower, width = scope / "img_processor", spec.width
        self._spec = spec
        self._patches = PatchEmbedding(tower, width, spec.patches)
        shape = (spec.side**2, width)
        self._places = tower.param("embeddings.position_embedding.weight", shape)
        self._layers = [
            MaskedLayer(tower / "encoder.layers" / str(i), spec) for i in range(spec.layers)
        ]
        self._up = WholeLinear(scope / "img_projection_up", width, spec.outputs, bias=True)
        self._down = WholeLinear(
            scope / "img_projection_down", spec.outputs, spec.outputs, bias=True
        )
        self._ends = [
            scope.param("sub_img_feature_extensor", (1, 1, 1, width)),
            scope.param("global_img_feature_extensor", (1, 1, width)),
        ]
        self._learned_KE, self._table_PE = torch.empty(0), torch.empty(0)
        self.width, self.dtype = spec.outputs, scope.dtype
        self.forms = (
            MediaForm(
                kind="image",
                row_bytes=spec.patches.row_bytes + 1,
                patch=spec.patches.patch,
                merge=MERGE,
                sides=((spec.side, spec.side),),
                packing=Packing(newline=True, tails=True),
            ),
        )
        scope.on_finish(self._finish)

    def _finish(self) -> None:
        self._learned_KE = torch.stack([one.take().flatten() for one in self._ends])
        self._table_PE = self._places.take()

    def encode(self, kind: str, rows_NB: torch.Tensor, grids: Sequence[Grid]) -> torch.Tensor:
        """See MediaEncoder."""
        spec, side = self._spec, self._spec.side
        x_TNE = self._patches.embed(rows_NB[:, :-1]).unflatten(0, (-1, side**2))
        at_2N = planned(coordinates((1, side, side), MERGE), x_TNE.device)
        shown_TN = rows_NB[:, -1].bool().view(-1, side**2)
        x_TNE = x_TNE + self._table_PE[self._places_of(at_2N, shown_TN)]
        seen_TN = shown_TN | ~shown_TN.any(1, keepdim=True)
        for layer in self._layers:
            x_TNE = layer.forward(x_TNE, seen_TN)
        mean_ME = x_TNE.reshape(-1, MERGE**2, spec.width).mean(1)
        x_ME = torch.cat((mean_ME, self._learned_KE))
        return self._down.project(F.gelu(self._up.project(x_ME)))

    def _places_of(self, at_2N: torch.Tensor, shown_TN: torch.Tensor) -> torch.Tensor:
        """[T, N]: where a patch's share of what its tile shows falls into the table; the first
        place, for what shows nothing."""
        side = self._spec.side
        bounds = torch.arange(1 / side, 1.0, 1 / side, device=at_2N.device)
        places = torch.zeros_like(shown_TN, dtype=torch.int64)
        for axis, other in ((0, 1), (1, 0)):
            first_N = at_2N[other] == 0
            count_T = (shown_TN & first_N).sum(1).clamp_min(1)
            share_TN = (at_2N[axis].float() * (1.0 / count_T)[:, None]).clamp_max(1.0 - EDGE)
            places = places * side + torch.bucketize(share_TN, bounds, right=True)
        return torch.where(shown_TN, places, 0)


class MaskedLayer:
    """x_TNE -> x_TNE."""

    def __init__(self, scope: Scope, spec: MaskedTilesSpec) -> None:
        self._heads, width, attention = spec.heads, spec.width, scope / "self_attn"
        self._query, self._key, self._value, self._out = (
            WholeLinear(attention / name, width, width, bias=True)
            for name in ("q_proj", "k_proj", "v_proj", "out_proj")
        )
        self._up = WholeLinear(scope / "mlp.fc1", width, spec.inner, bias=True)
        self._down = WholeLinear(scope / "mlp.fc2", spec.inner, width, bias=True)
        self._norms = [
            LAYER.build(scope / name, width, eps=spec.eps)
            for name in ("layer_norm1", "layer_norm2")
        ]

    def forward(self, x_TNE: torch.Tensor, seen_TN: torch.Tensor) -> torch.Tensor:
        """See the class."""
        before, middle = self._norms
        tiles, x_NE = x_TNE.shape[0], x_TNE.flatten(0, 1)
        y_NE = before.norm(x_NE)
        q, k, v = (
            one.project(y_NE).unflatten(0, (tiles, -1)).unflatten(2, (self._heads, -1))
            for one in (self._query, self._key, self._value)
        )
        q, k, v = (one.transpose(1, 2) for one in (q, k, v))
        y_THND = F.scaled_dot_product_attention(q, k, v, attn_mask=seen_TN[:, None, None])
        x_NE = x_NE + self._out.project(y_THND.transpose(1, 2).flatten(2).flatten(0, 1))
        up_NI = F.gelu(self._up.project(middle.norm(x_NE)), approximate="tanh")
        return (x_NE + self._down.project(up_NI)).view(x_TNE.shape)
