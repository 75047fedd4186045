"""The conformer of Granite Speech: half an MLP, attention within blocks with learned relative
places (Shaw et al. 2018), a gated depthwise convolution with a batch norm, the other half of the
MLP, a norm (Gulati et al. 2020). Half way through, what a head would say is added to the residual
(Nozaki and Komatsu 2021).

T positions of all inputs, B blocks of at most C positions, H heads, D of a head, E width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from headrace.back.kernels.upload import planned
from headrace.back.layers.linear import WholeLinear
from headrace.back.layers.norm import LAYER
from headrace.back.layers.scope import Scope

EPS = 1e-5
"""Of all norms; no config states it."""


@dataclass(frozen=True, kw_only=True)
class ShawConformerSpec:
    """inputs: of a position. block: positions that attend to each other; places: how far apart
    relative places are told apart. expansion: of the convolution's width, taps: of its kernel.
    labels: of the head half way through. shown: layers whose outputs stand before the last one's,
    0: what goes into the first."""

    inputs: int
    width: int
    inner: int
    layers: int
    heads: int
    head_dim: int
    block: int
    places: int
    taps: int
    expansion: int
    labels: int
    shown: tuple[int, ...] = ()

    @property
    def outputs(self) -> int:
        """Of a position."""
        return self.width * (len(self.shown) + 1)


@dataclass(frozen=True, slots=True)
class PositionBlocks:
    """place_BC: the positions of each block, of which `inside_BC` are there; at_T: where each
    position stands among them. sizes: positions of each input."""

    place_BC: torch.Tensor
    inside_BC: torch.Tensor
    at_T: torch.Tensor
    sizes: tuple[int, ...]


def position_blocks(sizes: Sequence[int], block: int, device: torch.device) -> PositionBlocks:
    """Of inputs of so many positions, end to end; the last block of each may be shorter."""
    starts = np.cumsum([0, *sizes[:-1]])
    first = np.concatenate(
        [start + np.arange(0, size, block) for start, size in zip(starts, sizes, strict=True)]
    )
    end = np.repeat(np.cumsum(sizes), [-(-size // block) for size in sizes])
    place = first[:, None] + np.arange(block)
    inside = place < end[:, None]
    return PositionBlocks(
        place_BC=planned(np.where(inside, place, 0), device),
        inside_BC=planned(inside, device),
        at_T=planned(np.flatnonzero(inside), device),
        sizes=tuple(sizes),
    )


class ShawConformer:
    """x_TI -> x_TE, or with `shown` several of them side by side."""

    def __init__(self, scope: Scope, spec: ShawConformerSpec) -> None:
        self._spec = spec
        self._into = WholeLinear(scope / "input_linear", spec.inputs, spec.width, bias=True)
        self._layers = [
            ShawConformerLayer(scope / "layers" / str(index), spec) for index in range(spec.layers)
        ]
        self._out = WholeLinear(scope / "out", spec.width, spec.labels, bias=True)
        self._back = WholeLinear(scope / "out_mid", spec.labels, spec.width, bias=True)

    def forward(self, x_TI: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """`sizes`: positions of each input."""
        blocks = position_blocks(sizes, self._spec.block, x_TI.device)
        x_TE = self._into.project(x_TI)
        shown = [x_TE] if 0 in self._spec.shown else []
        for number, layer in enumerate(self._layers, start=1):
            x_TE = layer.forward(x_TE, blocks)
            if number == self._spec.layers // 2:
                x_TE = x_TE + self._back.project(self._out.project(x_TE).softmax(-1))
            if number in self._spec.shown:
                shown.append(x_TE)
        return torch.cat([*shown, x_TE], dim=1) if shown else x_TE


class ShawConformerLayer:
    """x_TE -> x_TE."""

    def __init__(self, scope: Scope, spec: ShawConformerSpec) -> None:
        self._first, self._second = (HalfMLP(scope / name, spec) for name in ("ff1", "ff2"))
        self._attention = ShawAttention(scope / "attn", spec)
        self._convolution = GatedConvolution(scope / "conv", spec)
        self._norm = LAYER.build(scope / "post_norm", spec.width, eps=EPS)

    def forward(self, x_TE: torch.Tensor, blocks: PositionBlocks) -> torch.Tensor:
        """See the class."""
        x_TE = x_TE + 0.5 * self._first.forward(x_TE)
        x_TE = x_TE + self._attention.forward(x_TE, blocks)
        x_TE = x_TE + self._convolution.forward(x_TE, blocks.sizes)
        x_TE = x_TE + 0.5 * self._second.forward(x_TE)
        return self._norm.norm(x_TE)


class HalfMLP:
    """x_TE -> y_TE."""

    def __init__(self, scope: Scope, spec: ShawConformerSpec) -> None:
        self._norm = LAYER.build(scope / "pre_norm", spec.width, eps=EPS)
        self._up = WholeLinear(scope / "up_proj", spec.width, spec.inner, bias=True)
        self._down = WholeLinear(scope / "down_proj", spec.inner, spec.width, bias=True)

    def forward(self, x_TE: torch.Tensor) -> torch.Tensor:
        """See the class."""
        return self._down.project(F.silu(self._up.project(self._norm.norm(x_TE))))


class ShawAttention:
    """x_TE -> y_TE within blocks."""

    def __init__(self, scope: Scope, spec: ShawConformerSpec) -> None:
        self._spec, inner = spec, spec.heads * spec.head_dim
        self._norm = LAYER.build(scope / "pre_norm", spec.width, eps=EPS)
        self._query = WholeLinear(scope / "to_q", spec.width, inner)
        self._key_value = WholeLinear(scope / "to_kv", spec.width, 2 * inner)
        self._out = WholeLinear(scope / "to_out", inner, spec.width, bias=True)
        self._places = scope.param("rel_pos_emb.weight", (2 * spec.places + 1, spec.head_dim))
        self._place_CCD = torch.empty(0)
        self._device = scope.device
        scope.on_finish(self._finish)

    def _finish(self) -> None:
        block = torch.arange(self._spec.block, device=self._device)
        distance_CC = block[:, None] - block
        self._place_CCD = self._places.take()[distance_CC + self._spec.places]

    def forward(self, x_TE: torch.Tensor, blocks: PositionBlocks) -> torch.Tensor:
        """See the class."""
        spec = self._spec
        y_BCE = self._norm.norm(x_TE)[blocks.place_BC]
        shape = (spec.heads, spec.head_dim)
        y_NE = y_BCE.flatten(0, 1)
        q_NX, kv_NX = self._query.project(y_NE), self._key_value.project(y_NE)
        q_BHCD, k_BHCD, v_BHCD = (
            one.unflatten(0, y_BCE.shape[:2]).unflatten(-1, shape).transpose(1, 2)
            for one in (q_NX, *kv_NX.chunk(2, dim=-1))
        )
        y_BHCD = shaw_attended(q_BHCD, k_BHCD, v_BHCD, self._place_CCD, blocks.inside_BC)
        y_NX = y_BHCD.transpose(1, 2).flatten(2).flatten(0, 1)
        return self._out.project(y_NX.index_select(0, blocks.at_T))


def shaw_attended(
    q_BHCD: torch.Tensor,
    k_BHCD: torch.Tensor,
    v_BHCD: torch.Tensor,
    place_CCD: torch.Tensor,
    inside_BC: torch.Tensor,
) -> torch.Tensor:
    """y_BHCD: each block's positions over those that are there, with a row for each distance."""
    score_BHCC = q_BHCD @ k_BHCD.transpose(2, 3)
    score_BHCC = score_BHCC + torch.einsum("bhcd,crd->bhcr", q_BHCD, place_CCD)
    score_BHCC = score_BHCC.float() * q_BHCD.shape[3] ** -0.5
    score_BHCC = score_BHCC.masked_fill(~inside_BC[:, None, None], -torch.inf)
    return score_BHCC.softmax(-1).to(v_BHCD.dtype) @ v_BHCD


class GatedConvolution:
    """x_TE -> y_TE within each input."""

    def __init__(self, scope: Scope, spec: ShawConformerSpec) -> None:
        self._spec, inner = spec, spec.width * spec.expansion
        self._norm = LAYER.build(scope / "norm", spec.width, eps=EPS)
        shapes = {
            "up_conv.weight": (2 * inner, spec.width, 1),
            "up_conv.bias": (2 * inner,),
            "depth_conv.conv.weight": (inner, 1, spec.taps),
            "down_conv.weight": (spec.width, inner, 1),
            "down_conv.bias": (spec.width,),
            **{
                f"batch_norm.{name}": (inner,)
                for name in ("running_mean", "running_var", "weight", "bias")
            },
        }
        self._params = {name: scope.param(name, shape) for name, shape in shapes.items()}
        self._weights: dict[str, torch.Tensor] = {}
        scope.on_finish(self._finish)

    def _finish(self) -> None:
        self._weights = {name: param.take() for name, param in self._params.items()}

    def forward(self, x_TE: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """See the class."""
        at, taps = self._weights, self._spec.taps
        up_TX = F.linear(self._norm.norm(x_TE), at["up_conv.weight"][:, :, 0], at["up_conv.bias"])
        y_TX = F.glu(up_TX, dim=-1)
        kernel, padding = at["depth_conv.conv.weight"], (taps // 2, taps // 2 - (taps + 1) % 2)
        parts = [
            F.conv1d(F.pad(one.T, padding)[None], kernel, groups=kernel.shape[0])[0].T
            for one in y_TX.split(list(sizes))
        ]
        y_TX = F.silu(self._batch_normed(torch.cat(parts)))
        return F.linear(y_TX, at["down_conv.weight"][:, :, 0], at["down_conv.bias"])

    def _batch_normed(self, y_TX: torch.Tensor) -> torch.Tensor:
        names = ("running_mean", "running_var", "weight", "bias")
        mean, variance, weight, bias = (self._weights[f"batch_norm.{name}"] for name in names)
        return F.batch_norm(y_TX, mean, variance, weight, bias, eps=EPS)
