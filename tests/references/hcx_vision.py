"""HyperCLOVA X SEED Vision between its tower and its decoder, which are transformers': the C-Abstractor and what
becomes of tiles, written from Cha et al. 2024 (Honeybee), RegNet's and Squeeze-and-Excitation's blocks and the
published configuration and tensor names, without the model files of the package. The blocks gave timm 1.0.31's results
(RegStage with LayerNorm2d and SiLU) to 1e-6.

T squares, S patches a side, E width of the tower, F of the decoder.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class NormedConv(nn.Module):
    def __init__(self, width: int, size: int, groups: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, size, padding=size // 2, groups=groups, bias=False)
        self.bn = nn.LayerNorm(width, eps=1e-5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.bn(self.conv(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = NormedConv(width, 1, 1), NormedConv(width, 3, width)
        self.conv3, few = NormedConv(width, 1, 1), round(width / 4)
        self.se = nn.ModuleDict({"fc1": nn.Conv2d(width, few, 1), "fc2": nn.Conv2d(few, width, 1)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.silu(self.conv2(F.silu(self.conv1(x))))
        weight = self.se["fc2"](F.silu(self.se["fc1"](y.mean((2, 3), keepdim=True)))).sigmoid()
        return F.silu(self.conv3(y * weight) + x)


class Stage(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.b1, self.b2, self.b3 = (Block(width) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b3(self.b2(self.b1(x)))


class Between(nn.Module):
    """mm_projector and image_newline."""

    def __init__(self, width: int, outputs: int, side: int, half: int) -> None:
        super().__init__()
        self.side, self.half = side, half
        net = [Stage(width), nn.AdaptiveAvgPool2d((half, half)), Stage(width)]
        readout = [nn.Linear(width, outputs), nn.SiLU(), nn.Linear(outputs, outputs)]
        self.mm_projector = nn.ModuleDict(
            {"net": nn.Sequential(*net), "readout": nn.Sequential(*readout)}
        )
        table = nn.Parameter(torch.randn(1, side**2, width))
        self.mm_projector.register_parameter("pos_emb", table)
        self.image_newline = nn.Parameter(torch.randn(outputs))

    def windows(self, x_TNE: torch.Tensor) -> torch.Tensor:
        """[T, half, half, F]."""
        x = (x_TNE + self.mm_projector.pos_emb).transpose(1, 2).unflatten(2, (self.side,) * 2)
        return self.mm_projector["readout"](self.mm_projector["net"](x).permute(0, 2, 3, 1))

    def forward(
        self, whole_NE: torch.Tensor, tiles: torch.Tensor, size: tuple[int, int]
    ) -> torch.Tensor:
        """`tiles` [down, across, N, E], of a picture of `size` (width, height) -> rows [tokens, F]."""
        down, across = tiles.shape[:2]
        x = self.windows(tiles.flatten(0, 1)).unflatten(0, (down, across))
        x = x.transpose(1, 2).flatten(2, 3).flatten(0, 1)
        width, height = size
        rows, columns = x.shape[:2]
        if width / height > columns / rows:
            spare = (rows - int(height * (columns / width))) // 2
            x = x[spare : rows - spare]
        else:
            spare = (columns - int(width * (rows / height))) // 2
            x = x[:, spare : columns - spare]
        ends = self.image_newline.expand(len(x), 1, -1)
        return torch.cat(
            (self.windows(whole_NE[None]).flatten(0, 2), torch.cat((x, ends), 1).flatten(0, 1))
        )
