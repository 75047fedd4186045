"""The draft model behind masks that is trained is the one the engine runs (SPC-02): the training's forward pass against
transformers' on the text and the masks that the engine reads."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from demo.attention import Batch
from demo.block_drafter import MASK
from demo.parallel_drafter import MASKS, Pard
from demo.train_drafters import SHAPES

FOLDER = Path(__file__).parents[2] / "demo" / "drafters" / "pard"
TEXT = [3, 141, 59, 26, 535, 897, 93, 238, 462, 643, 383, 279, 502]


def test_masks_draft_in_training_what_they_draft_behind_a_text() -> None:
    head = Pard(SHAPES["pard"])
    weights = load_file(FOLDER / "model.safetensors")
    head.load_state_dict({name: x.float() for name, x in weights.items()})
    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    tokens = torch.tensor([TEXT])
    at = torch.arange(tokens.shape[1])[None]
    batch = Batch(tokens, torch.full_like(tokens, -100), at, torch.ones_like(tokens))
    anchors = torch.tensor([[4, 12, 4]])
    with torch.no_grad():
        drafts = head.drafts(batch, anchors)[0]
        for found, anchor in zip(drafts, anchors[0].tolist(), strict=True):
            read = [*TEXT[: anchor + 1], *[MASK] * MASKS]
            theirs = model(torch.tensor([read])).logits[0, anchor:]
            assert torch.allclose(found, theirs, atol=1e-4)
