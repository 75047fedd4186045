"""Latent attention absorbs no query that nobody reads."""

from __future__ import annotations

from pathlib import Path

import torch

from headrace.back.models.blocks import Decoder
from tests.models.oracle import BLOCK_TOKENS, load_ours, model_spec, save_oracle
from tests.models.paged import PagedRun, random_rows
from tests.models.test_parity import SIZES, tiny_config


def test_only_the_last_layer_absorbs_the_last_tokens_alone(tmp_path: Path) -> None:
    save_oracle(tiny_config("deepseek-v3"), tmp_path)
    model = load_ours(model_spec(tmp_path))
    assert isinstance(model, Decoder)
    absorbed: list[int] = []

    for layer in model._layers:
        absorb = layer.attention._absorb

        def counting(q_THN, q_THC, absorb=absorb):
            absorbed.append(len(q_THN))
            absorb(q_THN, q_THC)

        layer.attention._absorb = counting
    rows = random_rows(SIZES["vocab_size"], (9, 5))
    whole = PagedRun(model, rows, block_tokens=BLOCK_TOKENS, dtype=torch.float32)
    logits = whole.step([(0, 9), (1, 5)])
    assert absorbed == [14] * 3
    absorbed.clear()
    ends = PagedRun(model, rows, block_tokens=BLOCK_TOKENS, dtype=torch.float32)
    last = ends.step([(0, 9), (1, 5)], last=True)
    assert absorbed == [14, 14, 2]
    for one, all_tokens in zip(last, logits, strict=True):
        torch.testing.assert_close(one[0], all_tokens[-1])
