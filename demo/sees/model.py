"""A compact Qwen3-VL for training: packed rows of patches and of tokens, weights named as in the hub format.

Shapes: B rows, P patches of a row, S = P / 4 picture tokens of a row, T tokens of a row, V the tower's width, C the
decoder's, H heads, D head size. A picture, and a conversation, never spans two rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from demo.decoder import Attend, Shape, Trunk, rotate

DECODER = Shape(
    vocab_size=272,
    hidden_size=160,
    intermediate_size=256,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=4096,
    rope_theta=10_000.0,
)
EPS = 1e-6


@dataclass(frozen=True, kw_only=True)
class TowerShape:
    """The sizes of the tower, named as in `config.json`."""

    depth: int = 5
    hidden_size: int = 128
    intermediate_size: int = 384
    num_heads: int = 4
    patch_size: int = 8
    temporal_patch_size: int = 2
    spatial_merge_size: int = 2
    num_position_embeddings: int = 256
    deepstack_visual_indexes: tuple[int, ...] = (2,)


@dataclass(frozen=True, kw_only=True)
class SeeingShape:
    """Both halves. `axes`: pairs of a head that turn by time, height and width."""

    tower: TowerShape = field(default_factory=TowerShape)
    decoder: Shape = DECODER
    axes: tuple[int, int, int] = (6, 5, 5)


class Seen(NamedTuple):
    """A batch on the device. patches_BPX: uint8, X = 3 * 2 * patch * patch. places_BP4: row and column of the patch in
    its picture, rows and columns of the picture. slots_BT: the row's picture token that stands here, or -1.
    positions_BT3: time, height, width. targets_BT: -100 is not learnt."""

    patches_BPX: Tensor
    places_BP4: Tensor
    picture_BP: Tensor
    tokens_BT: Tensor
    slots_BT: Tensor
    positions_BT3: Tensor
    targets_BT: Tensor
    document_BT: Tensor


class LayerNorm(nn.LayerNorm):
    """With the weights in fp32 under autocast."""

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.weight.to(x.dtype), self.bias.to(x.dtype)
        return F.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


class TowerAttention(nn.Module):
    """Attention of each patch to all of its picture."""

    def __init__(self, shape: TowerShape) -> None:
        super().__init__()
        self.heads = shape.num_heads
        self.qkv = nn.Linear(shape.hidden_size, 3 * shape.hidden_size)
        self.proj = nn.Linear(shape.hidden_size, shape.hidden_size)

    def forward(self, x_BPV: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        B, P, V = x_BPV.shape
        q, k, v = self.qkv(x_BPV).view(B, P, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        out = attend(rotate(q, cos, sin), rotate(k, cos, sin), v)
        return self.proj(out.transpose(1, 2).reshape(B, P, V))


class TowerMLP(nn.Module):
    """Plain feed-forward with GELU."""

    def __init__(self, shape: TowerShape) -> None:
        super().__init__()
        self.linear_fc1 = nn.Linear(shape.hidden_size, shape.intermediate_size)
        self.linear_fc2 = nn.Linear(shape.intermediate_size, shape.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_fc2(F.gelu(self.linear_fc1(x), approximate="tanh"))


class TowerLayer(nn.Module):
    """One layer of the tower, norms before each half."""

    def __init__(self, shape: TowerShape) -> None:
        super().__init__()
        self.norm1 = LayerNorm(shape.hidden_size, eps=EPS)
        self.norm2 = LayerNorm(shape.hidden_size, eps=EPS)
        self.attn = TowerAttention(shape)
        self.mlp = TowerMLP(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        x = x + self.attn(self.norm1(x), cos, sin, attend)
        return x + self.mlp(self.norm2(x))


class Merger(nn.Module):
    """Four patches to one token; behind a layer of the tower the norm comes after joining them."""

    def __init__(self, shape: TowerShape, outputs: int, *, joined: bool) -> None:
        super().__init__()
        self.inner = shape.hidden_size * shape.spatial_merge_size**2
        self.joined = joined
        self.norm = LayerNorm(self.inner if joined else shape.hidden_size, eps=EPS)
        self.linear_fc1 = nn.Linear(self.inner, self.inner)
        self.linear_fc2 = nn.Linear(self.inner, outputs)

    def forward(self, x_BPV: Tensor) -> Tensor:
        x = x_BPV if self.joined else self.norm(x_BPV)
        x = x.reshape(x.shape[0], -1, self.inner)
        x = self.norm(x) if self.joined else x
        return self.linear_fc2(F.gelu(self.linear_fc1(x)))


class PatchEmbed(nn.Module):
    """The patches' convolution as a matrix; its weight is [V, X]."""

    def __init__(self, shape: TowerShape) -> None:
        super().__init__()
        pixels = 3 * shape.temporal_patch_size * shape.patch_size**2
        self.proj = nn.Linear(pixels, shape.hidden_size)

    def forward(self, patches_BPX: Tensor) -> Tensor:
        dtype = self.proj.weight.dtype
        return self.proj(patches_BPX.to(dtype) / 127.5 - 1.0)


class Tower(nn.Module):
    """Patches to picture tokens: [B, S, C] and those of each deepstack layer."""

    def __init__(self, shape: TowerShape, outputs: int) -> None:
        super().__init__()
        self.shape = shape
        self.patch_embed = PatchEmbed(shape)
        self.pos_embed = nn.Embedding(shape.num_position_embeddings, shape.hidden_size)
        self.blocks = nn.ModuleList(TowerLayer(shape) for _ in range(shape.depth))
        self.merger = Merger(shape, outputs, joined=False)
        self.deepstack_merger_list = nn.ModuleList(
            Merger(shape, outputs, joined=True) for _ in shape.deepstack_visual_indexes
        )

    def forward(
        self, patches: Tensor, places_BP4: Tensor, attend: Attend
    ) -> tuple[Tensor, list[Tensor]]:
        x = self.patch_embed(patches) + self._positions(places_BP4)
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.bfloat16)
        cos, sin = (part.to(x.dtype) for part in self._turns(places_BP4))
        deep = []
        mergers = iter(self.deepstack_merger_list)
        for number, block in enumerate(self.blocks):
            x = block(x, cos, sin, attend)
            if number in self.shape.deepstack_visual_indexes:
                deep.append(next(mergers)(x))
        return self.merger(x), deep

    def _positions(self, places_BP4: Tensor) -> Tensor:
        """The learned grid, bilinear between its points, corners on corners."""
        side = int(self.shape.num_position_embeddings**0.5)
        at = places_BP4[..., :2].float() * (side - 1)
        at = at / (places_BP4[..., 2:].float() - 1).clamp(min=1)
        low = at.floor().long().clamp(max=side - 1)
        high, part = (low + 1).clamp(max=side - 1), at - low
        found = torch.zeros((), device=at.device)
        for rows, row_share in ((low[..., 0], 1 - part[..., 0]), (high[..., 0], part[..., 0])):
            for columns, share in ((low[..., 1], 1 - part[..., 1]), (high[..., 1], part[..., 1])):
                found = found + (row_share * share)[..., None] * self.pos_embed(
                    rows * side + columns
                )
        return found

    def _turns(self, places_BP4: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine [B, 1, P, D]: a quarter of a head turns by the row, a quarter by the column, twice."""
        size = self.shape.hidden_size // self.shape.num_heads
        steps = torch.arange(0, size // 2, 2, device=places_BP4.device) / (size // 2)
        angles = places_BP4[..., :2, None].float() * 10_000.0**-steps
        angles = angles.flatten(-2)[:, None]
        doubled = torch.cat((angles, angles), dim=-1)
        return doubled.cos(), doubled.sin()


class Inside(nn.Module):
    """Tower and decoder, as the hub names them."""

    def __init__(self, shape: SeeingShape) -> None:
        super().__init__()
        self.visual = Tower(shape.tower, shape.decoder.hidden_size)
        self.language_model = Trunk(shape.decoder)


class Qwen3VL(nn.Module):
    """The whole model; the output matrix is the embedding."""

    def __init__(self, shape: SeeingShape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Inside(shape)
        axis = torch.zeros(shape.decoder.head_dim // 2, dtype=torch.long)
        for number in (1, 2):
            axis[number : 3 * shape.axes[number] : 3] = number
        self.register_buffer("axis_of_pair", axis, persistent=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                last = name.endswith(
                    (
                        "o_proj.weight",
                        "down_proj.weight",
                        "attn.proj.weight",
                        "mlp.linear_fc2.weight",
                    )
                )
                nn.init.normal_(parameter, std=0.005 if last else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, batch: Seen, look: Attend, attend: Attend) -> Tensor:
        """Logits [B, T, vocabulary]."""
        pictures, deep = self.model.visual(batch.patches_BPX, batch.places_BP4, look)
        trunk = self.model.language_model
        seen = (batch.slots_BT >= 0)[..., None]
        at = batch.slots_BT.clamp(min=0)[..., None].expand(-1, -1, pictures.shape[-1])
        x = trunk.embed_tokens(batch.tokens_BT)
        x = torch.where(seen, pictures.gather(1, at), x.to(pictures.dtype))
        cos, sin = self._turns(batch.positions_BT3)
        cos, sin = cos.to(x.dtype), sin.to(x.dtype)
        for number, layer in enumerate(trunk.layers):
            x = layer(x, cos, sin, attend)
            if number < len(deep):
                x = x + torch.where(seen, deep[number].gather(1, at), 0.0)
        return F.linear(trunk.norm(x), trunk.embed_tokens.weight)

    def loss(self, batch: Seen, look: Attend, attend: Attend) -> Tensor:
        """Mean cross entropy over the learnt tokens."""
        logits = self(batch, look, attend)
        return F.cross_entropy(
            logits.flatten(0, 1).float(), batch.targets_BT.flatten(), ignore_index=-100
        )

    def _turns(self, positions_BT3: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine [B, 1, T, D]: pairs turn by time, height and width in turn."""
        shape = self.shape.decoder
        exponents = torch.arange(0, shape.head_dim, 2, device=positions_BT3.device) / shape.head_dim
        angles = positions_BT3[..., self.axis_of_pair].float() * shape.rope_theta**-exponents
        doubled = torch.cat((angles, angles), dim=-1)[:, None]
        return doubled.cos(), doubled.sin()
