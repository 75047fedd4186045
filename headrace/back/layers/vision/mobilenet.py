"""MobileNet-V5, the convolutions that see for Gemma 3n (Qin et al. 2024, "MobileNetV4", and the
definition of `mobilenetv5_300m_enc` in timm 1.0): residual blocks of convolutions, then such blocks
in turns with attention of one key and value head, and a layer that joins the last two stages.

A map is [I, C, H, W] of I images; norms are over its C channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from headrace.back.layers.scope import Scope
from headrace.back.parallel.param import Param

EPS = 1e-6
FEWER = 3
"""Of the convolution that leaves fewer keys and values."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """`kind`: "edge": a convolution of `kernel` widens, one of 1 narrows; "inverted": `first`, a
    convolution of each channel, one of 1 widens, `kernel`, another of each channel, one of 1
    narrows, where 0 is none; "attention": of `heads` queries of `dim` for each place, over keys and
    values of every `stride`-th. Else `stride` is that of the block. `widens`: so many times."""

    kind: str
    outputs: int
    kernel: int = 0
    first: int = 0
    stride: int = 1
    widens: int = 1
    heads: int = 0
    dim: int = 0


def _attending(outputs: int, count: int, *, heads: int, dim: int, stride: int) -> list[Block]:
    """So many pairs of attention and what stands behind it."""
    attention = Block(kind="attention", outputs=outputs, heads=heads, dim=dim, stride=stride)
    behind = Block(kind="inverted", outputs=outputs, widens=2)
    return [attention, behind] * count


STAGES: tuple[tuple[Block, ...], ...] = (
    (
        Block(kind="edge", outputs=128, kernel=3, stride=2, widens=4),
        *[Block(kind="edge", outputs=128, kernel=3, widens=4)] * 2,
    ),
    (
        Block(kind="inverted", outputs=256, first=3, kernel=5, stride=2, widens=6),
        *[Block(kind="inverted", outputs=256, first=size, widens=4) for size in (5, 3, 5, 3)],
    ),
    (
        Block(kind="inverted", outputs=640, first=5, kernel=5, stride=2, widens=6),
        *[Block(kind="inverted", outputs=640, first=5, widens=4)] * 7,
        Block(kind="inverted", outputs=640, widens=1),
        *_attending(640, 14, heads=12, dim=64, stride=2),
    ),
    (
        Block(kind="inverted", outputs=1280, first=5, kernel=5, stride=2, widens=6),
        *_attending(1280, 19, heads=16, dim=96, stride=1),
    ),
)
"""Of mobilenetv5_300m_enc."""


@dataclass(frozen=True, kw_only=True)
class MobileNetSpec:
    """`stem`: channels behind the first convolution; `outputs`: channels in the end, of `side` x
    `side` places."""

    stages: tuple[tuple[Block, ...], ...] = STAGES
    stem: int = 64
    outputs: int = 2048
    side: int = 16


class MobileNet:
    """colors [I, 3, H, W] -> [I, outputs, side, side]. Sides that strides do not divide are filled
    up as TensorFlow does ("SAME")."""

    def __init__(self, scope: Scope, spec: MobileNetSpec) -> None:
        self._spec = spec
        self._stem = _Convolution(scope / "conv_stem", 3, spec.stem, 3, stride=2, bias=True)
        self._stages: list[list[_Edge | _Inverted | _Attention]] = []
        channels = spec.stem
        for i, blocks in enumerate(spec.stages):
            built = []
            for j, block in enumerate(blocks):
                built.append(_built(scope / "blocks" / str(i) / str(j), block, channels))
                channels = block.outputs
            self._stages.append(built)
        joined = sum(blocks[-1].outputs for blocks in spec.stages[-2:])
        block = Block(kind="inverted", outputs=spec.outputs, widens=2)
        self._join = _Inverted(scope / "msfa" / "ffn", block, joined, residual=False)
        self._norm = _Norm(scope / "msfa" / "norm", spec.outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See the class."""
        x = self._stem.apply(x, active=True)
        seen: list[torch.Tensor] = []
        for blocks in self._stages:
            for block in blocks:
                x = block.forward(x)
            seen.append(x)
        size, side = seen[-2].shape[-2:], self._spec.side
        maps = [part if part.shape[-2:] == size else _enlarged(part, size) for part in seen[-2:]]
        x = self._join.forward(torch.cat(maps, dim=1))
        strides = (size[0] // side, size[1] // side)
        if (strides[0] * side, strides[1] * side) == tuple(size):
            x = F.avg_pool2d(x, strides, strides)
        else:
            x = F.interpolate(x, (side, side), mode="bilinear")
        return self._norm.apply(x)


class _Norm:
    """Over the channels of each place, by the root mean square, in float32."""

    def __init__(self, scope: Scope, channels: int) -> None:
        self._param = scope.param("weight", (channels,), init="ones")
        self._weight_C11 = torch.empty(0)
        scope.on_finish(self._finish)

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """Of the same dtype."""
        wide = x.float()
        scale = (wide.square().mean(1, keepdim=True) + EPS).rsqrt()
        return (wide * scale).to(x.dtype) * self._weight_C11

    def _finish(self) -> None:
        self._weight_C11 = self._param.take()[:, None, None]


class _Convolution:
    """A convolution and the norm behind it; `names` of both, the norm's None: there is none.
    `single`: of each channel for itself."""

    def __init__(
        self,
        scope: Scope,
        inputs: int,
        outputs: int,
        kernel: int,
        *,
        stride: int = 1,
        single: bool = False,
        bias: bool = False,
        names: tuple[str, str | None] = ("conv", "bn"),
    ) -> None:
        name, norm = names
        shape = (outputs, 1 if single else inputs, kernel, kernel)
        self._kernel, self._stride, self._groups = kernel, stride, inputs if single else 1
        self._params: list[Param] = [(scope / name).param("weight", shape)]
        if bias:
            self._params.append((scope / name).param("bias", (outputs,), init="zeros"))
        self._norm = None if norm is None else _Norm(scope / norm, outputs)
        self._weights: list[torch.Tensor] = []
        scope.on_finish(self._finish)

    def apply(self, x: torch.Tensor, *, active: bool = False) -> torch.Tensor:
        """`active`: with GELU behind."""
        filled = F.pad(x, (*self._filling(x.shape[3]), *self._filling(x.shape[2])))
        x = F.conv2d(filled, *self._weights, stride=self._stride, groups=self._groups)
        if self._norm is not None:
            x = self._norm.apply(x)
        return F.gelu(x, approximate="tanh") if active else x

    def _filling(self, size: int) -> tuple[int, int]:
        """Before and behind a side."""
        steps = -(-size // self._stride)
        lacking = max((steps - 1) * self._stride + self._kernel - size, 0)
        return lacking // 2, lacking - lacking // 2

    def _finish(self) -> None:
        self._weights = [param.take() for param in self._params]


class _Edge:
    """See Block."""

    def __init__(self, scope: Scope, block: Block, channels: int) -> None:
        inner = channels * block.widens
        self._residual = block.stride == 1 and channels == block.outputs
        self._widen = _Convolution(
            scope,
            channels,
            inner,
            block.kernel,
            stride=block.stride,
            names=("conv_exp", "bn1"),
        )
        self._narrow = _Convolution(scope, inner, block.outputs, 1, names=("conv_pwl", "bn2"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A map behind it."""
        y = self._narrow.apply(self._widen.apply(x, active=True))
        return x + y if self._residual else y


class _Inverted:
    """See Block; `residual`: whether what goes in is added, and what is added scaled."""

    def __init__(self, scope: Scope, block: Block, channels: int, *, residual: bool = True) -> None:
        inner = channels * block.widens
        self._residual = residual and block.stride == 1 and channels == block.outputs
        self._first = self._middle = None
        if block.first:
            stride = 1 if block.kernel else block.stride
            self._first = _Convolution(
                scope / "dw_start", channels, channels, block.first, stride=stride, single=True
            )
        self._widen = _Convolution(scope / "pw_exp", channels, inner, 1)
        if block.kernel:
            self._middle = _Convolution(
                scope / "dw_mid", inner, inner, block.kernel, stride=block.stride, single=True
            )
        self._narrow = _Convolution(scope / "pw_proj", inner, block.outputs, 1)
        self._scale = _Scale(scope, block.outputs) if residual else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A map behind it."""
        y = x if self._first is None else self._first.apply(x)
        y = self._widen.apply(y, active=True)
        if self._middle is not None:
            y = self._middle.apply(y, active=True)
        y = self._narrow.apply(y)
        if self._scale is not None:
            y = self._scale.apply(y)
        return x + y if self._residual else y


class _Scale:
    """A learned factor for each channel."""

    def __init__(self, scope: Scope, channels: int) -> None:
        self._param = scope.param("layer_scale.gamma", (channels,), init="ones")
        self._factor_C11 = torch.empty(0)
        scope.on_finish(self._finish)

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """The map times it."""
        return x * self._factor_C11

    def _finish(self) -> None:
        self._factor_C11 = self._param.take()[:, None, None]


class _Attention:
    """See Block."""

    def __init__(self, scope: Scope, block: Block, channels: int) -> None:
        assert channels == block.outputs, block
        self._dim, inside = block.dim, scope / "attn"
        self._norm = _Norm(scope / "norm", channels)
        self._query, self._key, self._value = (
            _Convolution(inside / name, channels, outputs, 1, names=("proj", None))
            for name, outputs in (
                ("query", block.heads * block.dim),
                ("key", block.dim),
                ("value", block.dim),
            )
        )
        self._fewer = [
            _Convolution(
                inside / name,
                channels,
                channels,
                FEWER,
                stride=block.stride,
                single=True,
                names=("down_conv", "norm"),
            )
            for name in ("key", "value")
            if block.stride > 1
        ]
        inner = block.heads * block.dim
        self._out = _Convolution(inside / "output", inner, channels, 1, names=("proj", None))
        self._scale = _Scale(scope, channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A map behind it."""
        h = self._norm.apply(x)
        for_keys, for_values = [one.apply(h) for one in self._fewer] or (h, h)
        q_IHND = self._query.apply(h).flatten(2).unflatten(1, (-1, self._dim)).transpose(2, 3)
        k_I1MD, v_I1MD = (
            projection.apply(part).flatten(2)[:, None].transpose(2, 3)
            for projection, part in ((self._key, for_keys), (self._value, for_values))
        )
        size = q_IHND.shape[:2]
        k_IHMD, v_IHMD = (part.expand(*size, -1, -1) for part in (k_I1MD, v_I1MD))
        y_IHND = F.scaled_dot_product_attention(q_IHND, k_IHMD, v_IHMD)
        y = y_IHND.transpose(2, 3).flatten(1, 2).unflatten(2, x.shape[2:])
        return x + self._scale.apply(self._out.apply(y))


def _built(scope: Scope, block: Block, channels: int) -> _Edge | _Inverted | _Attention:
    if block.kind == "edge":
        return _Edge(scope, block, channels)
    if block.kind == "inverted":
        return _Inverted(scope, block, channels)
    return _Attention(scope, block, channels)


def _enlarged(x: torch.Tensor, size: Sequence[int]) -> torch.Tensor:
    return F.interpolate(x, tuple(size), mode="nearest")
