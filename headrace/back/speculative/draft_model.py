"""A small model of the same vocabulary as a drafter (Leviathan et al. 2023, "Fast Inference from
Transformers via Speculative Decoding"): a `DraftNetwork` that sees nothing of the model. One that
was trained for it drafts all tokens in one pass, behind masks (An et al. 2025, "PARD")."""

from __future__ import annotations

import torch

from headrace.back.attention.plan import Batch
from headrace.back.kernels.greedy.op import OP as GREEDY
from headrace.back.kernels.greedy.op import GreedyProblem
from headrace.back.models.blocks import Decoder
from headrace.back.speculative.network import BlockDrafts


class DraftModel:
    """See the top of the file. `model` is loaded."""

    shift = 0
    chained = True
    taps: tuple[int, ...] = ()
    offset_D = None

    def __init__(
        self,
        model: Decoder,
        device: torch.device,
        dtype: torch.dtype,
        block: BlockDrafts | None = None,
    ) -> None:
        self._model = model
        self.block = block
        self.kv_forms = model.kv_forms
        self.width = self.kept = model.spec.sizes.width
        self.dtype = dtype
        self._greedy = GREEDY.choose(GreedyProblem(device=device.type)).bind()

    def follow(
        self, token_T: torch.Tensor, seen_TX: torch.Tensor | None, batch: Batch
    ) -> torch.Tensor:
        """See DraftNetwork."""
        return self._model.forward(batch)

    def draft(
        self, token_R: torch.Tensor, hidden_RE: torch.Tensor | None, batch: Batch, number: int
    ) -> torch.Tensor:
        """See DraftNetwork."""
        return self._model.forward(batch)

    def top(self, hidden_RE: torch.Tensor, draft: int) -> torch.Tensor:
        """See DraftNetwork."""
        if self._model.argmax is not None:
            return self._model.argmax(hidden_RE)[0]
        return self._greedy(self._model.logits(hidden_RE))[0]

    def logits(self, hidden_RE: torch.Tensor, draft: int) -> torch.Tensor:
        """See DraftNetwork."""
        return self._model.logits(hidden_RE)
