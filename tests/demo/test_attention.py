"""The fast attention of training covers exactly the mask; the decoder is transformers' Qwen3."""

from __future__ import annotations

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from demo.attention import ATTENTIONS, Batch
from demo.decoder import Qwen3, Shape

TINY = Shape(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
             num_attention_heads=4, num_key_value_heads=2, head_dim=16)  # fmt: skip


def rows_of(lengths: list[list[int]]) -> Batch:
    document = torch.stack(
        [torch.cat([torch.full((n,), i) for i, n in enumerate(row, 1)]) for row in lengths]
    )
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    tokens = torch.randint(0, 64, document.shape, generator=torch.Generator().manual_seed(0))
    return Batch(tokens, tokens, positions, document)


def test_blocks_are_those_that_hold_an_unmasked_pair() -> None:
    batch = rows_of(
        [
            [1, 130, 253, 128],
            [
                512,
            ],
            [100, 300, 56, 56],
        ]
    )
    prepared = ATTENTIONS["flex"].prepare(batch)
    assert prepared is not None
    same = batch.document[:, :, None] == batch.document[:, None, :]
    mask = same & torch.ones(512, 512, dtype=torch.bool).tril()
    needed = mask.view(3, 4, 128, 4, 128).any(dim=4).any(dim=2)
    assert torch.equal(prepared.to_dense()[:, 0].bool(), needed)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
def test_fast_and_plain_attention_give_the_same_logits() -> None:
    torch.manual_seed(0)
    model = Qwen3(TINY)
    batch = rows_of([[10, 118, 128], [256]])
    found = []
    for name in ("dense", "flex"):
        way = ATTENTIONS[name]
        with torch.no_grad():
            attend = way.attend(batch, way.prepare(batch))
            found.append(model(batch.tokens, batch.positions, attend))
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-6)


def test_a_document_sees_nothing_of_its_neighbours() -> None:
    model = Qwen3(TINY)
    batch = rows_of([[20, 44]])
    changed = batch._replace(tokens=batch.tokens.clone())
    changed.tokens[:, :20] = 0
    way = ATTENTIONS["dense"]
    with torch.no_grad():
        first, second = (
            model(b.tokens, b.positions, way.attend(b, None)) for b in (batch, changed)
        )
    assert torch.equal(first[:, 20:], second[:, 20:])


def test_logits_are_those_of_transformers() -> None:
    torch.manual_seed(0)
    own = Qwen3(TINY)
    theirs = Qwen3ForCausalLM(Qwen3Config(**TINY.hub_config(eos=1, pad=0)))
    theirs.load_state_dict({**own.state_dict(), "lm_head.weight": own.model.embed_tokens.weight})
    batch = rows_of([[50]])
    with torch.no_grad():
        logits = own(batch.tokens, batch.positions, ATTENTIONS["dense"].attend(batch, None))
        torch.testing.assert_close(logits, theirs(batch.tokens).logits, rtol=1e-4, atol=1e-5)
