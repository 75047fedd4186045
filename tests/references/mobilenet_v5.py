"""MobileNet-V5's encoder as timm 1.0 defines `mobilenetv5_300m_enc`: from its table of blocks, with its names of
parameters. Written apart from the engine's, from what timm's files say."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

PAIR_OF_640 = ["mqa_h12_v2_d64_c640", "uir_a0_k0_s1_e2_c640"]
PAIR_OF_1280 = ["mqa_h16_v1_d96_c1280", "uir_a0_k0_s1_e2_c1280"]
TABLE = [
    ["er_k3_s2_e4_c128", "er_k3_s1_e4_c128", "er_k3_s1_e4_c128"],
    [
        *["uir_a3_k5_s2_e6_c256", "uir_a5_k0_s1_e4_c256", "uir_a3_k0_s1_e4_c256"],
        *["uir_a5_k0_s1_e4_c256", "uir_a3_k0_s1_e4_c256"],
    ],
    [
        *["uir_a5_k5_s2_e6_c640", *["uir_a5_k0_s1_e4_c640"] * 7, "uir_a0_k0_s1_e1_c640"],
        *PAIR_OF_640 * 14,
    ],
    ["uir_a5_k5_s2_e6_c1280", *PAIR_OF_1280 * 19],
]
"""a, k: kernels that go over each channel, at the start and in the middle; v: stride of keys and values."""


def divisible(value: float) -> int:
    new = max(8, int(value + 4) // 8 * 8)
    return new + 8 if new < 0.9 * value else new


class SameConv(nn.Conv2d):
    """TensorFlow's filling."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sides = []
        for size, kernel, stride in zip(
            x.shape[:1:-1], self.kernel_size[::-1], self.stride[::-1], strict=True
        ):
            total = max((-(-size // stride) - 1) * stride + kernel - size, 0)
            sides += [total // 2, total - total // 2]
        return F.conv2d(F.pad(x, sides), self.weight, self.bias, self.stride, 0, 1, self.groups)


class RmsNorm2d(nn.Module):
    def __init__(self, channels: int, *, act: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.act = act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.rms_norm(x.permute(0, 2, 3, 1), self.weight.shape, self.weight, 1e-6)
        x = x.permute(0, 3, 1, 2)
        return F.gelu(x, approximate="tanh") if self.act else x


class ConvNormAct(nn.Module):
    def __init__(
        self,
        cin: int,
        cout: int,
        k: int,
        s: int = 1,
        *,
        act: bool = True,
        dw: bool = False,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.conv = SameConv(cin, cout, k, s, groups=cin if dw else 1, bias=bias)
        self.bn = RmsNorm2d(cout, act=act)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.bn(self.conv(x))


class EdgeResidual(nn.Module):
    def __init__(self, cin: int, c: int, k: int, s: int, e: int) -> None:
        super().__init__()
        self.skip = s == 1 and cin == c
        self.conv_exp, self.bn1 = (
            SameConv(cin, cin * e, k, s, bias=False),
            RmsNorm2d(cin * e, act=True),
        )
        self.conv_pwl, self.bn2 = SameConv(cin * e, c, 1, bias=False), RmsNorm2d(c)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.bn2(self.conv_pwl(self.bn1(self.conv_exp(x))))
        return x + y if self.skip else y


class LayerScale(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.gamma.view(1, -1, 1, 1)


class UniversalInvertedResidual(nn.Module):
    def __init__(
        self, cin: int, c: int, a: int, k: int, s: int, e: int, *, bare: bool = False
    ) -> None:
        super().__init__()
        mid = cin * e
        self.skip = not bare and s == 1 and cin == c
        start = ConvNormAct(cin, cin, a, 1 if k else s, act=False, dw=True) if a else nn.Identity()
        self.dw_start = start
        self.pw_exp = ConvNormAct(cin, mid, 1)
        self.dw_mid = ConvNormAct(mid, mid, k, s, dw=True) if k else nn.Identity()
        self.pw_proj = ConvNormAct(mid, c, 1, act=False)
        self.layer_scale = nn.Identity() if bare else LayerScale(c)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.pw_proj(self.dw_mid(self.pw_exp(self.dw_start(x))))
        y = self.layer_scale(y)
        return x + y if self.skip else y


class MultiQueryAttention(nn.Module):
    def __init__(self, c: int, h: int, d: int, v: int) -> None:
        super().__init__()
        self.h, self.d = h, d

        def side(*, fewer: bool, width: int) -> nn.Sequential:
            parts: list[tuple[str, nn.Module]] = []
            if fewer and v > 1:
                parts.append(("down_conv", SameConv(c, c, 3, v, groups=c, bias=False)))
                parts.append(("norm", RmsNorm2d(c)))
            parts.append(("proj", nn.Conv2d(c, width, 1, bias=False)))
            whole = nn.Sequential()
            for name, part in parts:
                whole.add_module(name, part)
            return whole

        self.query = side(fewer=False, width=h * d)
        self.key, self.value = side(fewer=True, width=d), side(fewer=True, width=d)
        self.output = nn.Sequential()
        self.output.add_module("proj", nn.Conv2d(h * d, c, 1, bias=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, _, height, width = x.shape
        q = self.query(x).reshape(b, self.h, self.d, height * width)
        k, v = self.key(x).flatten(2), self.value(x).flatten(2)
        weights = torch.einsum("bhdn,bdm->bhnm", q, k).mul(self.d**-0.5).softmax(-1)
        o = torch.einsum("bhnm,bdm->bhdn", weights, v).reshape(b, self.h * self.d, height, width)
        return self.output(o)


class MobileAttention(nn.Module):
    def __init__(self, c: int, h: int, d: int, v: int) -> None:
        super().__init__()
        self.norm, self.attn = RmsNorm2d(c), MultiQueryAttention(c, h, d, v)
        self.layer_scale = LayerScale(c)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layer_scale(self.attn(self.norm(x)))


class MultiScaleFusion(nn.Module):
    def __init__(self, cin: int, c: int, resolution: int) -> None:
        super().__init__()
        self.ffn = UniversalInvertedResidual(cin, c, 0, 0, 1, 2, bare=True)
        self.norm, self.resolution = RmsNorm2d(c), resolution

    def forward(self, maps: Sequence[torch.Tensor]) -> torch.Tensor:
        size = maps[0].shape[-2:]
        x = torch.cat([F.interpolate(one, size, mode="nearest") for one in maps], 1)
        x, to = self.ffn(x), self.resolution
        if size[0] % to or size[1] % to:
            x = F.interpolate(x, (to, to), mode="bilinear")
        else:
            x = F.avg_pool2d(x, (size[0] // to, size[1] // to))
        return self.norm(x)


class MobileNetV5Encoder(nn.Module):
    def __init__(self, channel_multiplier: float = 1.0, table: Any = TABLE) -> None:
        super().__init__()
        c = divisible(64 * max(1.0, channel_multiplier))
        self.conv_stem = ConvNormAct(3, c, 3, 2, bias=True)
        stages = []
        for names in table:
            blocks: list[nn.Module] = []
            for name in names:
                cin, of = c, {k: int(n) for k, n in re.findall(r"([a-z])(\d+)", name)}
                c = divisible(of["c"] * channel_multiplier)
                if name.startswith("er"):
                    blocks.append(EdgeResidual(cin, c, of["k"], of["s"], of["e"]))
                elif name.startswith("uir"):
                    sizes = (of["a"], of["k"], of["s"], of["e"])
                    blocks.append(UniversalInvertedResidual(cin, c, *sizes))
                else:
                    blocks.append(MobileAttention(c, of["h"], of["d"], of["v"]))
            stages.append(nn.Sequential(*blocks))
        self.blocks = nn.Sequential(*stages)
        ends = [divisible(width * channel_multiplier) for width in (640, 1280)]
        self.msfa = MultiScaleFusion(sum(ends), 2048, 16)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        x, maps = self.conv_stem(pixels), []
        for stage in self.blocks:
            x = stage(x)
            maps.append(x)
        return self.msfa(maps[-2:])
