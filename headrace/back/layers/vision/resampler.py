"""Learned queries that attend to all patches of an image, whose keys know their row and column: so
many tokens whatever the image's size (Bai et al. 2023, Qwen-VL, section 2.1; Yao et al. 2024,
MiniCPM-V).

N patches, E width of the tower, F of the decoder, Q queries, H heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from headrace.back.kernels.linear.op import Linear
from headrace.back.layers.gemms import bind_linear
from headrace.back.layers.linear import WholeLinear
from headrace.back.layers.norm import LAYER
from headrace.back.layers.scope import Scope, not_loaded
from headrace.back.layers.vision.encoder import Grid

THETA = 10_000.0


@dataclass(frozen=True, kw_only=True)
class ResamplerSpec:
    """`queries` tokens of an image, by `heads` heads. `name`: where it lies in the checkpoint."""

    width: int
    outputs: int
    queries: int
    heads: int
    eps: float = 1e-6
    name: str = "resampler"
    merge: int = 1

    def build(self, scope: Scope) -> Resampler:
        """See ProjectorSpec."""
        return Resampler(scope / self.name, self)


class Resampler:
    """x_NE -> y_MF, Q rows for each image; `GridProjector`."""

    def __init__(self, scope: Scope, spec: ResamplerSpec) -> None:
        self._scope, self._spec = scope, spec
        width = spec.outputs
        self._queries = scope.param("query", (spec.queries, width))
        self._narrow = None
        if spec.width != width:
            self._narrow = WholeLinear(scope / "kv_proj", spec.width, width)
        inside = scope / "attn"
        self._weight = inside.param("in_proj_weight", (3 * width, width))
        self._bias = inside.param("in_proj_bias", (3 * width,), init="zeros")
        self._out = WholeLinear(inside / "out_proj", width, width, bias=True)
        self._query_norm, self._norm, self._behind = (
            LAYER.build(scope / name, width, eps=spec.eps) for name in ("ln_q", "ln_kv", "ln_post")
        )
        self._last = scope.param("proj", (width, width))
        self._query_HQD = torch.empty(0)
        self._keys: Linear = not_loaded
        self._values: Linear = not_loaded
        self._project: Linear = not_loaded
        scope.on_finish(self._finish)

    def merge(self, x_NE: torch.Tensor) -> torch.Tensor:
        """See Projector; of one image of one row."""
        return self.merge_grids(x_NE, [(1, 1, x_NE.shape[0])])

    def merge_grids(self, x_NE: torch.Tensor, grids: Sequence[Grid]) -> torch.Tensor:
        """See GridProjector."""
        spec = self._spec
        if self._narrow is not None:
            x_NE = self._narrow.project(x_NE)
        x_NF = self._norm.norm(x_NE)
        places = [row_and_column_sines(h, w, spec.outputs, x_NF.device) for _, h, w in grids]
        key_NF = self._keys(x_NF + torch.cat(places).to(x_NF.dtype))
        value_NF = self._values(x_NF)
        lengths = [h * w for _, h, w in grids]
        rows = []
        for key, value in zip(key_NF.split(lengths), value_NF.split(lengths), strict=True):
            key, value = (
                one.unflatten(1, (spec.heads, -1)).transpose(0, 1) for one in (key, value)
            )
            y_HQD = F.scaled_dot_product_attention(self._query_HQD, key, value)
            rows.append(y_HQD.transpose(0, 1).flatten(1))
        projected: torch.Tensor = self._project(
            self._behind.norm(self._out.project(torch.cat(rows)))
        )
        return projected

    def _finish(self) -> None:
        spec, width = self._spec, self._spec.outputs
        weight, bias = self._weight.take(), self._bias.take()
        query_QF = self._query_norm.norm(self._queries.take().contiguous())
        query_QF = F.linear(query_QF, weight[:width], bias[:width])
        self._query_HQD = query_QF.unflatten(1, (spec.heads, -1)).transpose(0, 1).contiguous()
        self._keys, self._values = (
            bind_linear(self._scope, one.contiguous(), part.contiguous())
            for one, part in zip(weight[width:].chunk(2), bias[width:].chunk(2), strict=True)
        )
        self._project = bind_linear(self._scope, self._last.take().T.contiguous(), None)


def row_and_column_sines(h: int, w: int, width: int, device: torch.device) -> torch.Tensor:
    """float32 [h * w, F]: sines and cosines of the column, then of the row (He et al. 2021,
    MAE)."""
    quarter = width // 4
    exponents = torch.arange(quarter, dtype=torch.float64, device=device) / quarter
    frequencies = THETA**-exponents
    sines = []
    for count in (w, h):
        angles = torch.arange(count, dtype=torch.float64, device=device)[:, None] * frequencies
        sines.append(torch.cat((angles.sin(), angles.cos()), dim=1))
    columns_WX, rows_HX = sines
    both = (columns_WX.repeat(h, 1), rows_HX.repeat_interleave(w, dim=0))
    return torch.cat(both, dim=1).float()
