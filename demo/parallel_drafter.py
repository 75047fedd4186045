"""A small draft model that drafts all tokens in one pass behind masks (An et al. 2025, "PARD"), for the bundled
model, and its loss.

Behind training places ("anchors") of a text stand masks, as the engine drafts them: a mask sees the text up to
its anchor and the masks before it, at the positions of the tokens that it is to say. The anchor and its masks learn
the bundled model's distributions of these tokens. The table of tokens begins as the best of so few dimensions of the
bundled model's, which is most of what so small a model knows.

B rows, T tokens, C hidden, N anchors of a row, M masks of an anchor, P = N * M.
"""

from __future__ import annotations

from random import Random

import torch
import torch.nn.functional as F
from torch import Tensor

from demo.attention import Batch
from demo.block_drafter import MASK
from demo.decoder import Qwen3, Shape, rope

ANCHORS = 128
MASKS = 3
"""Behind an anchor: it drafts one token itself, four in all."""


class Pard(Qwen3):
    """Named as Qwen3's checkpoints are."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.taps: tuple[int, ...] = (0,)

    @torch.no_grad()
    def begin(self, table_VC: Tensor) -> None:
        """The table becomes the best of its rank to the bundled model's."""
        u, s, _ = torch.linalg.svd(table_VC.float(), full_matrices=False)
        wide = self.shape.hidden_size
        best = u[:, :wide] * s[:wide]
        self.model.embed_tokens.weight.copy_(best / best.std() * 0.1)

    def drafts(self, batch: Batch, anchor_BN: Tensor) -> Tensor:
        """Scores [B, N, 1 + M, V] of the tokens behind each anchor."""
        (B, N), T = anchor_BN.shape, batch.tokens.shape[1]
        steps = torch.arange(1, MASKS + 1, device=anchor_BN.device)
        at = batch.positions.gather(1, anchor_BN)[..., None] + steps
        tokens = torch.cat((batch.tokens, torch.full_like(at.view(B, -1), MASK)), dim=1)
        positions = torch.cat((batch.positions, at.view(B, -1)), dim=1)
        seen = self._seen(batch.document, anchor_BN)[:, None]

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(
                q.to(v.dtype), k.to(v.dtype), v, attn_mask=seen, enable_gqa=True
            )

        x = self.model.embed_tokens(tokens)
        cos, sin = (part.to(x.dtype) for part in rope(positions, self.shape))
        for layer in self.model.layers:
            x = layer(x, cos, sin, attend)
        x = self.model.norm(x)
        own = x.gather(1, anchor_BN[..., None].expand(-1, -1, x.shape[-1]))[:, :, None]
        both = torch.cat((own, x[:, T:].view(B, N, MASKS, -1)), dim=2)
        return F.linear(both, self.model.embed_tokens.weight)

    def _seen(self, document_BT: Tensor, anchor_BN: Tensor) -> Tensor:
        """Whether a place sees another, bool [B, T + P, T + P]."""
        B, T, P = len(anchor_BN), document_BT.shape[1], anchor_BN.shape[1] * MASKS
        new = {"dtype": torch.bool, "device": document_BT.device}
        seen = torch.zeros(B, T + P, T + P, **new)
        same = document_BT[:, :, None] == document_BT[:, None]
        seen[:, :T, :T] = same & torch.ones(T, T, **new).tril()
        before = torch.arange(T, device=anchor_BN.device) <= anchor_BN[..., None]
        mine = document_BT[:, None] == document_BT.gather(1, anchor_BN)[..., None]
        seen[:, T:, :T] = (before & mine).repeat_interleave(MASKS, 1)
        of = torch.arange(P, device=anchor_BN.device)
        seen[:, T:, T:] = (of[:, None] // MASKS == of // MASKS) & (of[:, None] >= of)
        return seen


def parallel_loss(
    head: Pard, last_BTC: Tensor, table: Tensor, batch: Batch, rng: Random
) -> tuple[Tensor, Tensor]:
    """The loss, and right [B, N, 1 + M] of the drafts (the first wrong one, and all behind it, false) with -1
    where no anchor stands. `last`: the bundled model's last hidden states, `table` its table."""
    document, T = batch.document, batch.tokens.shape[1]
    usable = (document > 0) & (document == torch.roll(document, -1 - MASKS, 1))
    usable[:, -1 - MASKS :] = False
    chance = usable * torch.where(batch.targets >= 0, 1.0, 0.03) + 1e-9
    anchor_BN = torch.multinomial(chance, min(ANCHORS, T), replacement=True)
    places = torch.arange(1 + MASKS, device=document.device)
    of_BNQ = (anchor_BN[..., None] + places).clamp(max=T - 1)
    scores = head.drafts(batch, anchor_BN).float().log_softmax(-1)
    of = of_BNQ.flatten(1)[..., None].expand(-1, -1, last_BTC.shape[-1])
    wanted = F.linear(last_BTC.gather(1, of), table).float().log_softmax(-1).view(scores.shape)
    divergence = (wanted.exp() * (wanted - scores)).sum(-1)
    counts = usable.gather(1, anchor_BN)[..., None]
    fading = 0.85**places
    loss = (divergence * counts * fading).sum() / counts.sum().clamp(min=1)
    right = (scores.argmax(-1) == wanted.argmax(-1)).cumprod(-1)
    return loss, torch.where(counts, right, -1)
