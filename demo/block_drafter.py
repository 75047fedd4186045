"""A block drafter (DFlash, arXiv 2602.06036) for the bundled model, and its loss.

At training places ("anchors") stand blocks as the engine drafts them: the anchor's token and a mask for each
place behind it, which see all of the block and, of what is in front of the anchor, keys made of the model's
hidden states. Each masked place learns the model's distribution of the token that stands there.

B rows, T tokens, C hidden, N anchors of a row, Q places of a block, H heads, D head size.
"""

from __future__ import annotations

from random import Random

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from demo.attention import Batch
from demo.decoder import MLP, Norm, Shape, rope, rotate

ANCHORS = 160
PLACES = 5
"""Of a block: a token and four drafts."""
SHORTER = 0.3
"""Share of the steps whose blocks have fewer places: the engine drafts fewer tokens where these pay."""
MASK = 4087


class BlockAttention(nn.Module):
    """Queries of blocks over keys of the context and of their own block."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        size, wide, self.heads = shape.head_dim, shape.hidden_size, shape.num_attention_heads
        self.q_proj = nn.Linear(wide, self.heads * size, bias=False)
        self.k_proj = nn.Linear(wide, shape.num_key_value_heads * size, bias=False)
        self.v_proj = nn.Linear(wide, shape.num_key_value_heads * size, bias=False)
        self.o_proj = nn.Linear(self.heads * size, wide, bias=False)
        self.q_norm, self.k_norm = (Norm(size, shape.rms_norm_eps) for _ in range(2))
        self.size = size

    def pair(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Keys and values [B, H, T, D] of [B, T, C]."""
        B, T, _ = x.shape
        k = self.k_norm(self.k_proj(x).view(B, T, -1, self.size)).transpose(1, 2)
        v = self.v_proj(x).view(B, T, -1, self.size).transpose(1, 2)
        k = rotate(k, *angles)
        return (
            k.repeat_interleave(self.heads // k.shape[1], dim=1),
            v.repeat_interleave(self.heads // v.shape[1], dim=1),
        )

    def forward(
        self,
        x_BPC: Tensor,
        angles: tuple[Tensor, Tensor],
        context: tuple[Tensor, Tensor],
        seen_BNT: Tensor,
    ) -> Tensor:
        """x: the places of all blocks, P = N * Q; seen: what of the context an anchor sees."""
        (B, P, _), N, T = x_BPC.shape, seen_BNT.shape[1], seen_BNT.shape[2]
        Q, H, D = P // N, self.heads, self.size
        q = self.q_norm(self.q_proj(x_BPC).view(B, P, H, D)).transpose(1, 2)
        q = rotate(q, *angles) / D**0.5
        k, v = (y.reshape(B, H, N, Q, D) for y in self.pair(x_BPC, angles))
        there = (q @ context[0].mT).view(B, H, N, Q, T)
        there = there.masked_fill(~seen_BNT[:, None, :, None], float("-inf"))
        here = q.view(B, H, N, Q, D) @ k.mT
        weights = torch.cat([there, here], dim=-1).float().softmax(-1).to(v.dtype)
        out = (weights[..., :T].reshape(B, H, P, T) @ context[1]).view(B, H, N, Q, D)
        out = (out + weights[..., T:] @ v).reshape(B, H, P, D)
        return self.o_proj(out.transpose(1, 2).reshape(B, P, -1))


class BlockLayer(nn.Module):
    """A plain layer around it."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        wide, eps = shape.hidden_size, shape.rms_norm_eps
        self.input_layernorm, self.post_attention_layernorm = (Norm(wide, eps) for _ in range(2))
        self.self_attn = BlockAttention(shape)
        self.mlp = MLP(shape)


class DFlash(nn.Module):
    """Named as published checkpoints are. `taps`: in front of which layers the model is seen."""

    def __init__(self, shape: Shape, taps: tuple[int, ...]) -> None:
        super().__init__()
        wide, eps = shape.hidden_size, shape.rms_norm_eps
        self.fc = nn.Linear(len(taps) * wide, wide, bias=False)
        self.hidden_norm, self.norm = (Norm(wide, eps) for _ in range(2))
        self.layers = nn.ModuleList(BlockLayer(shape) for _ in range(shape.num_hidden_layers))
        self.shape, self.taps = shape, taps

    def forward(
        self, seen_BTX: Tensor, x_BPC: Tensor, batch: Batch, at_BP: Tensor, seen_BNT: Tensor
    ) -> Tensor:
        """Behind the last norm; at: the positions of the places."""
        angles, own = rope(batch.positions, self.shape), rope(at_BP, self.shape)
        context = self.hidden_norm(self.fc(seen_BTX))
        for layer in self.layers:
            keys = layer.self_attn.pair(context, angles)
            x = layer.input_layernorm(x_BPC)
            x_BPC = x_BPC + layer.self_attn(x, own, keys, seen_BNT)
            x_BPC = x_BPC + layer.mlp(layer.post_attention_layernorm(x_BPC))
        return self.norm(x_BPC)


def block_loss(
    head: DFlash, states: tuple[Tensor, Tensor], table: Tensor, batch: Batch, rng: Random
) -> tuple[Tensor, Tensor]:
    """The loss, and right [B, N, 4] of the drafts (the first wrong one, and all behind it, false) with
    -1 where no block stands. `states`: what the head sees, and the model's last hidden state."""
    seen, last = states
    places = rng.randint(3, PLACES - 1) if rng.random() < SHORTER else PLACES
    document = batch.document
    usable = (document > 0) & (document == torch.roll(document, 1 - places, 1))
    usable[:, 1 - places :] = False
    chance = usable * torch.where(batch.targets >= 0, 1.0, 0.03) + 1e-9
    anchor_BN = torch.multinomial(chance, ANCHORS, replacement=True)
    B, N, T = *anchor_BN.shape, document.shape[1]
    of_BNQ = (anchor_BN[..., None] + torch.arange(places, device=seen.device)).clamp(max=T - 1)
    at_BP = batch.positions.gather(1, anchor_BN).repeat_interleave(places, 1)
    at_BP = at_BP + torch.arange(places, device=seen.device).repeat(N)
    masks = torch.full_like(of_BNQ, MASK)
    masks[..., 0] = batch.tokens.gather(1, anchor_BN)
    before = torch.arange(T, device=seen.device) < anchor_BN[..., None]
    same = document[:, None] == document.gather(1, anchor_BN)[..., None]
    x = F.embedding(masks.view(B, N * places), table)
    hidden = head(seen, x, batch, at_BP, before & same).view(B, N, places, -1)[:, :, 1:]
    scores = F.linear(hidden, table).float().log_softmax(-1)
    in_front = of_BNQ[..., :-1].reshape(B, -1, 1).expand(-1, -1, last.shape[-1])
    wanted = F.linear(last.gather(1, in_front), table).float().log_softmax(-1)
    wanted = wanted.view(B, N, places - 1, -1)
    divergence = (wanted.exp() * (wanted - scores)).sum(-1)
    counts = usable.gather(1, anchor_BN)[..., None]
    fading = 0.85 ** torch.arange(places - 1, device=seen.device)
    loss = (divergence * counts * fading).sum() / counts.sum().clamp(min=1)
    right = (scores.argmax(-1) == wanted.argmax(-1)).cumprod(-1)
    return loss, torch.where(counts, right, -1)
