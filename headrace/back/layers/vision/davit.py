"""DaViT (Ding et al. 2022): stages of fewer and wider patches, in each of which patches attend
within windows, then channels to each other within groups, all between convolutions of each channel
by itself.

Every rank computes the whole tower. B pictures of H x W patches, N = H * W, E width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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

EPS = 1e-5
"""No config states it."""
MLP = PlainMLPSpec(up="fc1", down="fc2", bias=True)


@dataclass(frozen=True, kw_only=True)
class DavitStage:
    """`kernel`, `stride`, `padding`: of the convolution before its blocks; `norm_first`: its norm
    stands before it, else behind it. `groups`: of channels."""

    width: int
    inner: int
    depth: int
    heads: int
    groups: int
    kernel: int
    stride: int
    padding: int
    norm_first: bool

    def side(self, pixels: int) -> int:
        """What is left of a length."""
        return (pixels + 2 * self.padding - self.kernel) // self.stride + 1


@dataclass(frozen=True, kw_only=True)
class DavitSpec:
    """`window`: patches a side. `patches`: how pixels come, in squares that become one row of the
    last stage each; mean and deviation of their colours. `table`: rows of the tables of positions
    behind the stages, `moments`: of the table of times. `outputs`: width of the decoder."""

    stages: tuple[DavitStage, ...]
    window: int
    activation: str
    bias: bool
    patches: PatchSpec
    table: int
    moments: int
    outputs: int


class DavitTower:
    """`MediaEncoder` by a DavitSpec: a row for the mean of a picture's patches, then one for each.
    `scope`: of tower and projector."""

    rope = None
    layers = 0

    def __init__(self, scope: Scope, spec: DavitSpec) -> None:
        scope = replace(scope, mesh=Mesh(), online=None, adapters=None)
        self._pictures = WholePictures(scope, spec.patches)
        tower, last = scope / "vision_tower", spec.stages[-1].width
        widths = (3, *(stage.width for stage in spec.stages))
        self._convs, self._blocks = [], []
        for i, stage in enumerate(spec.stages):
            self._convs.append(StageConv(tower / f"convs.{i}", widths[i], stage))
            self._blocks += [
                [
                    block
                    for j in range(stage.depth)
                    for block in _pair(tower / f"blocks.{i}.{j}", stage, spec)
                ]
            ]
        projector = scope / "multi_modal_projector"
        at = projector / "image_position_embed"
        self._rows = (at / "row_embeddings").param("weight", (spec.table, last // 2))
        self._columns = (at / "column_embeddings").param("weight", (spec.table, last - last // 2))
        self._times = (projector / "visual_temporal_embed").param(
            "pos_idx_to_embed", (spec.moments, last)
        )
        self._project = WholeLinear(projector / "image_projection", last, spec.outputs)
        self._norm = LAYER.build(projector / "image_proj_norm", spec.outputs, eps=EPS)
        self._row_SE, self._column_SE, self._time_E = (torch.empty(0),) * 3
        self.forms = (
            MediaForm(
                kind="image",
                row_bytes=spec.patches.row_bytes,
                patch=spec.patches.patch,
                max_rows=spec.table**2,
                max_t=1,
                extra=1,
            ),
        )
        self.width, self.dtype = spec.outputs, scope.dtype
        scope.on_finish(self._finish)

    def encode(self, kind: str, rows_NB: torch.Tensor, grids: Sequence[Grid]) -> torch.Tensor:
        """See MediaEncoder."""
        parts = rows_NB.split([h * w for _, h, w in grids])
        return torch.cat([self._picture(*each) for each in zip(parts, grids, strict=True)])

    def _picture(self, rows_NB: torch.Tensor, grid: Grid) -> torch.Tensor:
        x_BHWE = self._pictures.of(rows_NB, grid)
        for conv, blocks in zip(self._convs, self._blocks, strict=True):
            x_BHWE = conv.forward(x_BHWE)
            for block in blocks:
                x_BHWE = block.forward(x_BHWE)
        _, h, w, _ = x_BHWE.shape
        assert (h, w) == grid[1:], (h, w, grid)
        columns_HWX = self._column_SE[None, :w].expand(h, -1, -1)
        rows_HWX = self._row_SE[:h, None].expand(-1, w, -1)
        x_NE = (x_BHWE[0] + torch.cat((columns_HWX, rows_HWX), dim=2)).flatten(0, 1) + self._time_E
        return self._norm.norm(self._project.project(torch.cat((x_NE.mean(0, keepdim=True), x_NE))))

    def _finish(self) -> None:
        self._row_SE, self._column_SE = self._rows.take(), self._columns.take()
        self._time_E = self._times.take()[0]


class StageConv:
    """[B, H, W, inputs] -> [B, H / stride, W / stride, E]."""

    def __init__(self, scope: Scope, inputs: int, stage: DavitStage) -> None:
        self._stage = stage
        self._conv = Conv(
            scope / "conv", inputs, stage.width, stage.kernel, stage.padding, stride=stage.stride
        )
        self._norm = LAYER.build(
            scope / "norm", inputs if stage.norm_first else stage.width, eps=EPS
        )

    def forward(self, x_BHWE: torch.Tensor) -> torch.Tensor:
        """See the class."""
        if self._stage.norm_first:
            return self._conv.forward(_normed(self._norm, x_BHWE))
        return _normed(self._norm, self._conv.forward(x_BHWE))


class Conv:
    """A convolution over [B, H, W, E], with a bias; `alone`: each channel by itself."""

    def __init__(
        self,
        scope: Scope,
        inputs: int,
        outputs: int,
        kernel: int,
        padding: int,
        *,
        stride: int = 1,
        alone: bool = False,
    ) -> None:
        self._groups = inputs if alone else 1
        self._stride, self._padding = stride, padding
        self._params = (
            scope.param("weight", (outputs, inputs // self._groups, kernel, kernel)),
            scope.param("bias", (outputs,)),
        )
        self._weights: list[torch.Tensor] = []
        scope.on_finish(self._finish)

    def forward(self, x_BHWE: torch.Tensor) -> torch.Tensor:
        """See the class."""
        weight, bias = self._weights
        y = F.conv2d(
            x_BHWE.permute(0, 3, 1, 2), weight, bias, self._stride, self._padding, 1, self._groups
        )
        return y.permute(0, 2, 3, 1)

    def _finish(self) -> None:
        self._weights = [one.take() for one in self._params]


def _pair(scope: Scope, stage: DavitStage, spec: DavitSpec) -> list[DavitBlock]:
    """Patches within windows, then channels within groups."""
    windows, channels = scope / "spatial_block", scope / "channel_block"
    within = WindowAttention(windows / "window_attn", stage, spec)
    across = ChannelAttention(channels / "channel_attn", stage, spec)
    return [
        DavitBlock(windows, stage, spec, within.forward),
        DavitBlock(channels, stage, spec, across.forward),
    ]


class DavitBlock:
    """[B, H, W, E] -> the same: attention and an MLP, each behind a convolution of 3 x 3."""

    def __init__(
        self,
        scope: Scope,
        stage: DavitStage,
        spec: DavitSpec,
        attend: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        width = stage.width
        self._convs = [
            Conv(scope / name, width, width, 3, 1, alone=True) for name in ("conv1", "conv2")
        ]
        self._norms = [LAYER.build(scope / name, width, eps=EPS) for name in ("norm1", "norm2")]
        self._attend = attend
        place = FeedForwardPlace(width=width, inner=stage.inner, activation=spec.activation)
        self._mlp = PlainMLP(
            scope / "ffn", MLP, place, ElementwiseActivation(scope, spec.activation)
        )

    def forward(self, x_BHWE: torch.Tensor) -> torch.Tensor:
        """See the class."""
        x_BHWE = x_BHWE + self._convs[0].forward(x_BHWE)
        x_BHWE = x_BHWE + self._attend(_normed(self._norms[0], x_BHWE))
        x_BHWE = x_BHWE + self._convs[1].forward(x_BHWE)
        normed_NE = _normed(self._norms[1], x_BHWE).flatten(0, 2)
        return x_BHWE + self._mlp.forward(normed_NE).view(x_BHWE.shape)


class WindowAttention:
    """[B, H, W, E] -> the same: patches of a window attend to each other. What fills windows up at
    the edges is seen, as zeros behind the norm."""

    def __init__(self, scope: Scope, stage: DavitStage, spec: DavitSpec) -> None:
        self._heads, self._window = stage.heads, spec.window
        self._qkv = WholeLinear(scope / "qkv", stage.width, 3 * stage.width, bias=spec.bias)
        self._out = WholeLinear(scope / "proj", stage.width, stage.width, bias=True)

    def forward(self, x_BHWE: torch.Tensor) -> torch.Tensor:
        """See the class."""
        windows = in_windows(x_BHWE, self._window)
        count, side, _, width = windows.shape
        qkv = self._qkv.project(windows.reshape(-1, width))
        q, k, v = qkv.view(count, side**2, 3, self._heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v)
        y_NE = self._out.project(y.transpose(1, 2).reshape(-1, width))
        return out_of_windows(y_NE.view(windows.shape), x_BHWE.shape)


class ChannelAttention:
    """[B, H, W, E] -> the same: channels of a group attend to each other, over all patches."""

    def __init__(self, scope: Scope, stage: DavitStage, spec: DavitSpec) -> None:
        self._groups = stage.groups
        self._qkv = WholeLinear(scope / "qkv", stage.width, 3 * stage.width, bias=spec.bias)
        self._out = WholeLinear(scope / "proj", stage.width, stage.width, bias=True)

    def forward(self, x_BHWE: torch.Tensor) -> torch.Tensor:
        """See the class."""
        pictures, h, w, width = x_BHWE.shape
        qkv = self._qkv.project(x_BHWE.reshape(-1, width))
        q, k, v = qkv.view(pictures, h * w, 3, self._groups, -1).permute(2, 0, 3, 4, 1)
        y = F.scaled_dot_product_attention(q, k, v, scale=(h * w) ** -0.5)
        y_NE = y.permute(0, 3, 1, 2).reshape(-1, width)
        return self._out.project(y_NE).view(x_BHWE.shape)


def _normed(norm: BlockNorm, x_BHWE: torch.Tensor) -> torch.Tensor:
    return norm.norm(x_BHWE.reshape(-1, x_BHWE.shape[3])).view(x_BHWE.shape)
