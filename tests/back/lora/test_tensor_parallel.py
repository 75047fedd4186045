"""Adapters on two ranks over gloo give the logits of one: merged projections, replicated KV heads, weights stored as
[inputs, outputs], magnitudes, tables, heads and experts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from headrace.back.lora.store import AdapterStore
from tests.back.lora.adapters import module_sizes, write_adapter, write_kinds
from tests.back.lora.tensor_parallel_rank import SLOTS, kinds_of
from tests.back.lora.test_applied import CPU, LENGTHS, spec_of
from tests.models.oracle import BLOCK_TOKENS, load_ours, save_oracle
from tests.models.paged import random_rows, teacher_forced
from tests.models.test_parity import compare, tiny_config
from tests.rank_processes import run_ranks

NAMES = ("qwen2", "phi3", "gpt2", "one-kv-head", "qwen2-moe+kinds", "qwen2+kinds")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_ranks_give_the_logits_of_one(tmp_path: Path) -> None:
    alone = {}
    for name in NAMES:
        folder = tmp_path / name
        config = tiny_config("olmo2" if name == "one-kv-head" else name.partition("+")[0])
        if name == "one-kv-head":
            config.num_key_value_heads = 1
        save_oracle(config, folder)
        model = load_ours(spec_of(folder, kinds=kinds_of(str(folder))))
        if kinds_of(str(folder)):
            write_kinds(folder / "one", model, seed=1)
            write_kinds(folder / "two", model, seed=2, rank=6)
        else:
            sizes = module_sizes(model)
            write_adapter(folder / "one", sizes)
            write_adapter(folder / "two", sizes, rank=6, seed=1)
        adapters = AdapterStore(model.adapters, CPU)
        for slot, one in enumerate(("one", "two"), start=1):
            adapters.read(one, str(folder / one))
            adapters.place(one, slot)
        rows = random_rows(spec_of(folder).logits_width, LENGTHS)
        how = {"block_tokens": BLOCK_TOKENS, "dtype": torch.float32, "slots": SLOTS}
        alone[name] = teacher_forced(model, rows, **how)
    folders = [tmp_path / name for name in NAMES]
    run_ranks("tests.back.lora.tensor_parallel_rank", 2, tmp_path / "store", *folders)
    for name in NAMES:
        for rank in range(2):
            compare(torch.load(tmp_path / name / f"rank{rank}.pt"), alone[name], 2e-5)
