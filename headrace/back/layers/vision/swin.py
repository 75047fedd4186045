"""Swin (Liu et al. 2021; as Donut has it, Kim et al. 2022): stages whose patches attend within
windows, in every other layer within windows shifted by half; four patches become one between
stages.

Every rank computes the whole tower. B pictures of H x W patches, V windows of S x S, E width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from headrace.back.layers.linear import WholeLinear
from headrace.back.layers.mlp import ElementwiseActivation, FeedForwardPlace, PlainMLP, PlainMLPSpec
from headrace.back.layers.norm import LAYER, BlockNorm
from headrace.back.layers.scope import Scope
from headrace.back.layers.vision.encoder import Grid
from headrace.back.layers.vision.patches import PatchSpec, WholePictures
from headrace.back.layers.vision.windows import in_windows, out_of_windows
from headrace.back.parallel.mesh import Mesh
from headrace.base.wire.media import MediaForm

PLAIN_EPS = 1e-5
"""Of the norms that no config states."""
MLP = PlainMLPSpec(up="intermediate.dense", down="output.dense", bias=True)
WINDOWS = 256
"""Whose scores are biased and masked at a time."""
UNSEEN = -100.0
"""What is added to scores of patches that were not beside each other before the shift."""


@dataclass(frozen=True, kw_only=True)
class SwinSpec:
    """`width`: of the first stage, twice that in each further one. `patch`: pixels a side.
    `squares`: how pixels come, in squares that become one row each; mean and deviation of their
    colours. `grid`: rows and columns of these."""

    width: int
    ratio: float
    patch: int
    depths: tuple[int, ...]
    heads: tuple[int, ...]
    window: int
    eps: float
    activation: str
    bias: bool
    squares: PatchSpec
    grid: tuple[int, int]

    @property
    def outputs(self) -> int:
        """Width of the last stage."""
        return self.width * 2 ** (len(self.depths) - 1)


class SwinTower:
    """`MediaEncoder` by a SwinSpec."""

    rope = None
    layers = 0

    def __init__(self, scope: Scope, spec: SwinSpec) -> None:
        scope = replace(scope, mesh=Mesh(), online=None, adapters=None)
        self._pictures = WholePictures(scope, spec.squares)
        self._stride = spec.patch
        at = scope / "embeddings"
        projection = at / "patch_embeddings.projection"
        self._params = (
            projection.param("weight", (spec.width, 3, spec.patch, spec.patch)),
            projection.param("bias", (spec.width,)),
        )
        self._weights: list[torch.Tensor] = []
        self._norm = LAYER.build(at / "norm", spec.width, eps=PLAIN_EPS)
        self._stages = [
            SwinStage(scope / f"encoder.layers.{i}", spec, i) for i in range(len(spec.depths))
        ]
        self.forms = (
            MediaForm(
                kind="image",
                row_bytes=spec.squares.row_bytes,
                patch=spec.squares.patch,
                sides=(spec.grid,),
                max_t=1,
            ),
        )
        self.width, self.dtype = spec.outputs, scope.dtype
        scope.on_finish(self._finish)

    def encode(self, kind: str, rows_NB: torch.Tensor, grids: Sequence[Grid]) -> torch.Tensor:
        """See MediaEncoder."""
        parts = rows_NB.split([h * w for _, h, w in grids])
        return torch.cat([self._picture(*each) for each in zip(parts, grids, strict=True)])

    def _picture(self, rows_NB: torch.Tensor, grid: Grid) -> torch.Tensor:
        pixels = self._pictures.of(rows_NB, grid).permute(0, 3, 1, 2)
        x_BHWE = F.conv2d(pixels, *self._weights, stride=self._stride).permute(0, 2, 3, 1)
        x_BHWE = _normed(self._norm, x_BHWE)
        for stage in self._stages:
            x_BHWE = stage.forward(x_BHWE)
        return x_BHWE.flatten(0, 2)

    def _finish(self) -> None:
        self._weights = [one.take() for one in self._params]


class SwinStage:
    """[B, H, W, E] -> [B, H / 2, W / 2, 2 E], of the last stage [B, H, W, E]."""

    def __init__(self, scope: Scope, spec: SwinSpec, number: int) -> None:
        width = spec.width * 2**number
        self._layers = [
            SwinLayer(scope / f"blocks.{i}", spec, number, shift=(i % 2) * (spec.window // 2))
            for i in range(spec.depths[number])
        ]
        self._joins = number < len(spec.depths) - 1
        if self._joins:
            at = scope / "downsample"
            self._norm = LAYER.build(at / "norm", 4 * width, eps=PLAIN_EPS)
            self._reduction = WholeLinear(at / "reduction", 4 * width, 2 * width)

    def forward(self, x_BHWE: torch.Tensor) -> torch.Tensor:
        """See the class."""
        for layer in self._layers:
            x_BHWE = layer.forward(x_BHWE)
        if not self._joins:
            return x_BHWE
        _, h, w, _ = x_BHWE.shape
        x_BHWE = F.pad(x_BHWE, (0, 0, 0, w % 2, 0, h % 2))
        quarters = [x_BHWE[:, row::2, column::2] for column in (0, 1) for row in (0, 1)]
        joined = _normed(self._norm, torch.cat(quarters, dim=3))
        return self._reduction.project(joined.flatten(0, 2)).view(*joined.shape[:3], -1)


class SwinLayer:
    """[B, H, W, E] -> the same. What fills windows up at the edges is seen, as zeros."""

    def __init__(self, scope: Scope, spec: SwinSpec, stage: int, *, shift: int) -> None:
        width = spec.width * 2**stage
        self._window, self._shift, self._heads = spec.window, shift, spec.heads[stage]
        self._before, self._before_mlp = (
            LAYER.build(scope / name, width, eps=spec.eps)
            for name in ("layernorm_before", "layernorm_after")
        )
        inside = scope / "attention.self"
        self._qkv = [
            WholeLinear(inside / name, width, width, bias=spec.bias)
            for name in ("query", "key", "value")
        ]
        rows = (2 * spec.window - 1) ** 2
        self._table = inside.param("relative_position_bias_table", (rows, self._heads))
        self._bias_1HXX = torch.empty(0)
        self._out = WholeLinear(scope / "attention.output.dense", width, width, bias=True)
        place = FeedForwardPlace(
            width=width, inner=int(width * spec.ratio), activation=spec.activation
        )
        self._mlp = PlainMLP(scope, MLP, place, ElementwiseActivation(scope, spec.activation))
        scope.on_finish(self._finish)

    def forward(self, x_BHWE: torch.Tensor) -> torch.Tensor:
        """See the class."""
        x_BHWE = x_BHWE + self._attended(_normed(self._before, x_BHWE))
        normed_NE = _normed(self._before_mlp, x_BHWE).flatten(0, 2)
        return x_BHWE + self._mlp.forward(normed_NE).view(x_BHWE.shape)

    def _attended(self, x_BHWE: torch.Tensor) -> torch.Tensor:
        window, shift = self._window, self._shift
        _, h, w, width = x_BHWE.shape
        filled = F.pad(x_BHWE, (0, 0, 0, -w % window, 0, -h % window))
        rolled = torch.roll(filled, (-shift, -shift), (1, 2)) if shift else filled
        windows = in_windows(rolled, window)
        rows_NE = windows.reshape(-1, width)
        q, k, v = (
            one.project(rows_NE).view(len(windows), window**2, self._heads, -1).transpose(1, 2)
            for one in self._qkv
        )
        if shift:
            y = self._masked(q, k, v, _regions(filled.shape, window, shift, q.device))
        else:
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=self._bias_1HXX)
        y_NE = self._out.project(y.transpose(1, 2).reshape(-1, width))
        joined = out_of_windows(y_NE.view(windows.shape), filled.shape)
        joined = torch.roll(joined, (shift, shift), (1, 2)) if shift else joined
        return joined[:, :h, :w]

    def _masked(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, region_VX: torch.Tensor
    ) -> torch.Tensor:
        """A run of windows at a time: each has a mask of its own."""
        parts = []
        for at in range(0, len(q), WINDOWS):
            some = slice(at, at + WINDOWS)
            apart_VXX = region_VX[some, :, None] != region_VX[some, None]
            mask = self._bias_1HXX + (apart_VXX * UNSEEN).to(q.dtype)[:, None]
            parts.append(F.scaled_dot_product_attention(q[some], k[some], v[some], attn_mask=mask))
        return torch.cat(parts)

    def _finish(self) -> None:
        side = self._window
        place = torch.arange(side)
        row, column = (one.flatten() for one in torch.meshgrid(place, place, indexing="ij"))
        rows = row[:, None] - row[None] + side - 1
        columns = column[:, None] - column[None] + side - 1
        table = self._table.take()
        at_XX = (rows * (2 * side - 1) + columns).to(table.device)
        self._bias_1HXX = table[at_XX].permute(2, 0, 1)[None].contiguous()


def _regions(size: Sequence[int], window: int, shift: int, device: torch.device) -> torch.Tensor:
    """int [V, S * S]: which part of the picture each patch of shifted windows comes from, of those
    that the shift brings together."""
    parts = []
    for length in size[1:3]:
        place = torch.arange(length, device=device)
        parts.append((place >= length - window).int() + (place >= length - shift).int())
    region_HW = 3 * parts[0][:, None] + parts[1][None]
    return in_windows(region_HW[None, :, :, None], window).flatten(1)


def _normed(norm: BlockNorm, x_BHWE: torch.Tensor) -> torch.Tensor:
    return norm.norm(x_BHWE.reshape(-1, x_BHWE.shape[3])).view(x_BHWE.shape)
