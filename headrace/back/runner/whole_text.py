"""Runs whole texts through a model, a text at a time, without a runner: what calibration and the
comparison of modules need.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from headrace.back.attention.plan import AttentionPlan, Batch
from headrace.back.models.protocol import CausalModel


class WholeTexts:
    """A cache for one text of at most `most` tokens."""

    def __init__(
        self, model: CausalModel, *, most: int, block_tokens: int, dtype: torch.dtype
    ) -> None:
        self._model, self._block_tokens = model, block_tokens
        self._blocks = -(-most // block_tokens)
        kinds = [(form.kind, form.span) for form in model.kv_forms]
        self._group_of_layer = tuple(kinds.index(kind) for kind in kinds)
        self._groups = len(kinds)
        self._kv = tuple(
            torch.zeros(
                (2 if form.kind == "state" else self._blocks + 1, *form.shape_beside(block_tokens)),
                dtype=form.storage_dtype(dtype),
            )
            for form in model.kv_forms
        )

    @torch.inference_mode()
    def forward(self, ids: Sequence[int]) -> torch.Tensor:
        """The normed hidden states [T, E] of a text's tokens."""
        for form, kv in zip(self._model.kv_forms, self._kv, strict=True):
            if form.kind == "state":
                kv.zero_()
        count = len(ids)
        lengths, starts = np.array([count], np.int32), np.array([0, count], np.int32)
        plan = AttentionPlan(
            query_start_R1=torch.from_numpy(starts),
            kv_len_R=torch.from_numpy(lengths),
            block_table_RB=torch.arange(1, self._blocks + 1, dtype=torch.int32)[None],
            slot_T=torch.arange(count) + self._block_tokens,
            host_query_start=starts,
            host_kv_len=lengths,
            num_decodes=int(count == 1),
            max_query_len=count,
            max_kv_len=count,
        )
        batch = Batch(
            token_ids_T=torch.tensor(ids),
            positions_T=torch.arange(count),
            plans=(plan,) * self._groups,
            group_of_layer=self._group_of_layer,
            kv=self._kv,
            logits_at_N=torch.arange(count),
            row_R=torch.tensor([0]),
        )
        return self._model.forward(batch)
