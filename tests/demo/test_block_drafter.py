"""The block drafter that is trained is the one the engine runs (SPC-01): the training's forward pass against
the formula that tests/back/speculative holds the engine to, on the same weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import torch

from demo import block_drafter
from demo.attention import Batch
from demo.block_drafter import DFlash, block_loss
from demo.train_drafters import SHAPE, Teacher
from tests.back.speculative.checkpoints import HEADS, KV_HEADS, MASK, save_head
from tests.back.speculative.test_blocks import dflash
from tests.back.speculative.test_heads import model

__all__ = ["model"]
TEXT = [3, 141, 59, 26, 535, 897, 93, 238, 462, 643, 383, 279, 502]


def test_a_block_drafts_in_training_what_the_formula_says(
    model: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(block_drafter, "SHORTER", 0.0)
    monkeypatch.setattr(block_drafter, "MASK", MASK)
    tensors = save_head(tmp_path, "dflash")
    inner = tensors["layers.0.mlp.gate_proj.weight"].shape[0]
    shape = replace(
        SHAPE,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        intermediate_size=inner,
    )
    head = DFlash(shape, (2, 5))
    head.load_state_dict({name: x.float() for name, x in tensors.items()})
    # one place can be an anchor: behind it stands, as text, what the formula drafts
    drafts = dflash({name: x.float() for name, x in tensors.items()}, model, TEXT, 4)
    tokens = torch.tensor([[*TEXT, *drafts]])
    targets = torch.full_like(tokens, -100)
    documents = torch.ones_like(tokens)
    batch = Batch(tokens, targets, torch.arange(tokens.shape[1])[None], documents)
    teacher = Teacher(torch.device("cpu"))
    seen, _ = teacher.states(batch, head.taps)
    wanted = one_hot_states(teacher.table, tokens)
    with torch.no_grad():
        loss, right = block_loss(head, (seen, wanted), teacher.table, batch, Random(0))
    anchored = right[0][right[0][:, 0] >= 0]
    assert loss.isfinite()
    assert (anchored.sum(-1) == 4).any(), "the drafts behind TEXT are not the formula's"


def one_hot_states(table: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Hidden states [1, T, C] whose best token is the next one of the text."""
    following = torch.roll(tokens, -1, 1)
    return torch.linalg.lstsq(table.T @ table, table[following[0]].T).solution.T[None] * 1e3
