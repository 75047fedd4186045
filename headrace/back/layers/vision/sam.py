"""SAM's tower (Kirillov et al. 2023): layers that attend within windows of patches or over all of
them, with learned biases by how far apart rows and columns are, and convolutions that leave one row
of sixteen.

B squares of S x S patches, N = S * S, E width, H heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from headrace.back.layers.linear import WholeLinear
from headrace.back.layers.mlp import ElementwiseActivation, FeedForwardPlace, PlainMLP, PlainMLPSpec
from headrace.back.layers.norm import LAYER, BlockNorm
from headrace.back.layers.scope import Scope
from headrace.back.layers.vision.patches import PatchEmbedding, PatchSpec
from headrace.back.layers.vision.windows import in_windows, out_of_windows

QUERIES = 1024
"""Patches whose scores exist at a time: with the biases they are large."""
NECK_EPS = 1e-6


@dataclass(frozen=True, kw_only=True)
class SamNames:
    """Where tensors lie: layers and their norms, the two convolutions of the neck with a norm
    behind each, the two that halve the sides."""

    layers: str = "blocks"
    norms: tuple[str, str] = ("norm1", "norm2")
    neck: tuple[str, str, str, str] = ("neck.0", "neck.1", "neck.2", "neck.3")
    halving: tuple[str, str] = ("net_2", "net_3")


@dataclass(frozen=True, kw_only=True)
class SamSpec:
    """side: patches a side that tables are for. window: of layers but those in `full_layers`.
    middle: channels behind the layers; narrowed: of the two convolutions that halve the sides."""

    patches: PatchSpec
    width: int
    inner: int
    heads: int
    layers: int
    side: int
    window: int
    full_layers: tuple[int, ...]
    eps: float
    activation: str
    middle: int
    narrowed: tuple[int, int]
    bias: bool = True
    names: SamNames = SamNames()


class SamTower:
    """rows_NB of squares -> [B, narrowed[1], S / 4, S / 4]. `behind`: the scope of the convolutions
    that halve the sides, where it is another."""

    def __init__(self, scope: Scope, spec: SamSpec, behind: Scope | None = None) -> None:
        self._spec, self._scope = spec, scope
        self._patches = PatchEmbedding(scope, spec.width, spec.patches)
        self._positions = scope.param("pos_embed", (1, spec.side, spec.side, spec.width))
        self._layers = [
            _SamLayer(
                scope / spec.names.layers / str(i),
                spec,
                0 if i in spec.full_layers else spec.window,
            )
            for i in range(spec.layers)
        ]
        self._neck = SamNeck(scope, spec)
        self.halving = SamHalving(behind or scope, spec)
        self._table = torch.empty(0)
        scope.on_finish(self._finish)

    def forward(self, rows_NB: torch.Tensor, side: int) -> torch.Tensor:
        """See the class; patches of each square row by row."""
        *_, x = self.outputs(rows_NB, side)
        return self.halving.forward(self._neck.forward(x))

    def outputs(self, rows_NB: torch.Tensor, side: int) -> Iterator[torch.Tensor]:
        """[B, S, S, E] behind each layer."""
        x = self._patches.embed(rows_NB).view(-1, side, side, self._spec.width)
        x = x + self._places(side)
        for layer in self._layers:
            x = layer.forward(x)
            yield x

    def narrowed(self, x: torch.Tensor) -> torch.Tensor:
        """[B, middle, S, S] of what a layer gives."""
        return self._neck.forward(x)

    def _places(self, side: int) -> torch.Tensor:
        if side == self._spec.side:
            return self._table
        planes = self._table.permute(0, 3, 1, 2).float()
        sized = F.interpolate(planes, size=(side, side), mode="bicubic", antialias=True)
        return sized.permute(0, 2, 3, 1).to(self._table.dtype)

    def _finish(self) -> None:
        self._table = self._positions.take()


class SamNeck:
    """[B, S, S, E] -> [B, middle, S, S]."""

    def __init__(self, scope: Scope, spec: SamSpec) -> None:
        names, middle = spec.names.neck, spec.middle
        self._params = (
            scope.param(f"{names[0]}.weight", (middle, spec.width, 1, 1)),
            scope.param(f"{names[2]}.weight", (middle, middle, 3, 3)),
        )
        self._norms = [LAYER.build(scope / name, middle, eps=NECK_EPS) for name in names[1::2]]
        self._weights: list[torch.Tensor] = []
        scope.on_finish(self._finish)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See the class."""
        one, two = self._weights
        x = _normed(self._norms[0], F.conv2d(x.permute(0, 3, 1, 2), one))
        return _normed(self._norms[1], F.conv2d(x, two, padding=1))

    def _finish(self) -> None:
        self._weights = [one.take() for one in self._params]


class SamHalving:
    """[B, middle, S, S] -> [B, narrowed[1], S / 4, S / 4]."""

    def __init__(self, scope: Scope, spec: SamSpec) -> None:
        (first, second), names = spec.narrowed, spec.names.halving
        self._params = (
            scope.param(f"{names[0]}.weight", (first, spec.middle, 3, 3)),
            scope.param(f"{names[1]}.weight", (second, first, 3, 3)),
        )
        self._weights: list[torch.Tensor] = []
        scope.on_finish(self._finish)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See the class."""
        for weight in self._weights:
            x = F.conv2d(x, weight, stride=2, padding=1)
        return x

    def _finish(self) -> None:
        self._weights = [one.take() for one in self._params]


def _normed(norm: BlockNorm, x: torch.Tensor) -> torch.Tensor:
    """Over the channels of [B, C, S, S]."""
    rows = x.permute(0, 2, 3, 1)
    return norm.norm(rows.reshape(-1, rows.shape[3])).view(rows.shape).permute(0, 3, 1, 2)


class _SamLayer:
    """x [B, S, S, E] -> the same."""

    def __init__(self, scope: Scope, spec: SamSpec, window: int) -> None:
        self._window = window
        width = spec.width
        self._before, self._before_mlp = (
            LAYER.build(scope / name, width, eps=spec.eps) for name in spec.names.norms
        )
        self._attention = _SamAttention(scope / "attn", spec, window or spec.side)
        place = FeedForwardPlace(width=width, inner=spec.inner, activation=spec.activation)
        plain = PlainMLPSpec(up="lin1", down="lin2", bias=True)
        activation = ElementwiseActivation(scope, spec.activation)
        self._mlp = PlainMLP(scope / "mlp", plain, place, activation)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See the class."""
        flat = x.reshape(-1, x.shape[3])
        normed = self._before.norm(flat).view(x.shape)
        if self._window:
            y = self._attention.forward(in_windows(normed, self._window))
            y = out_of_windows(y, x.shape)
        else:
            y = self._attention.forward(normed)
        flat = (x + y).reshape(flat.shape)
        return (flat + self._mlp.forward(self._before_mlp.norm(flat))).view(x.shape)


class _SamAttention:
    """x [B, W, W, E] -> the same: all of a square attend to each other."""

    def __init__(self, scope: Scope, spec: SamSpec, side: int) -> None:
        self._heads, self._head_dim = spec.heads, spec.width // spec.heads
        self._qkv = WholeLinear(scope / "qkv", spec.width, 3 * spec.width, bias=spec.bias)
        self._out = WholeLinear(scope / "proj", spec.width, spec.width, bias=True)
        shape = (2 * side - 1, self._head_dim)
        self._params = [scope.param(name, shape) for name in ("rel_pos_h", "rel_pos_w")]
        self._tables: list[torch.Tensor] = []
        scope.on_finish(self._finish)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See the class."""
        squares, side, _, width = x.shape
        qkv = self._qkv.project(x.reshape(-1, width))
        qkv = qkv.view(squares, side**2, 3, self._heads, self._head_dim).permute(2, 0, 3, 1, 4)
        query, key, value = qkv
        down, across = (_between(table, side) for table in self._tables)
        parts = []
        rows = max(1, QUERIES // side)
        for top in range(0, side, rows):
            some = query[:, :, top * side : (top + rows) * side]
            at = some.unflatten(2, (-1, side))
            by_row = torch.einsum("bhrcd,rkd->bhrck", at, down[top : top + rows])
            by_column = torch.einsum("bhrcd,ckd->bhrck", at, across)
            bias = by_row[..., :, None] + by_column[..., None, :]
            bias = bias.flatten(4).flatten(2, 3)
            parts.append(F.scaled_dot_product_attention(some, key, value, attn_mask=bias))
        y = torch.cat(parts, dim=2).transpose(1, 2).reshape(-1, width)
        return self._out.project(y).view(x.shape)

    def _finish(self) -> None:
        self._tables = [one.take() for one in self._params]


def _between(table: torch.Tensor, side: int) -> torch.Tensor:
    """[side, side, D]: the table's row for each query and key, resized to the side."""
    count = 2 * side - 1
    if table.shape[0] != count:
        resized = F.interpolate(table.float().T[None], size=count, mode="linear")
        table = resized[0].T.to(table.dtype)
    at = torch.arange(side, device=table.device)
    return table[at[:, None] - at[None] + side - 1]
