"""Latent attention absorbs no query that nobody reads, and gives the same over expanded latents."""

from __future__ import annotations

from dataclasses import replace as evolve
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from headrace.back.attention.plan import AttentionPlan
from headrace.back.kernels.expanded_attention import op as expanded_attention
from headrace.back.kernels.op import Op
from headrace.back.layers import latent_attention, latent_expansion
from headrace.back.layers.latent_expansion import ExpandedRows
from headrace.back.layers.scope import Scope
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
        absorb = layer.mixer._absorb

        def counting(q_THN, q_THC, absorb=absorb):
            absorbed.append(len(q_THN))
            absorb(q_THN, q_THC)

        layer.mixer._absorb = counting
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


def as_in_a_bucket(plan: AttentionPlan, *others: Any) -> ExpandedRows | None:
    """The expanded rows of a step with prompts when nothing of its sizes is known; the references want to know all."""
    if plan.max_query_len == 1:
        return None
    rows = latent_expansion.expanded_rows(evolve(plan, whole_prompts=True), *others)
    assert rows is not None and rows.decodes is not None and rows.first == len(plan.kv_len_R)
    starts, lengths = (x.numpy() for x in (rows.decodes.query_start_R1, rows.decodes.kv_len_R))
    return evolve(rows, decodes=evolve(rows.decodes, host_query_start=starts, host_kv_len=lengths))


def test_positions_behind_the_last_row_are_a_token_s() -> None:
    """Padding writes to slot 0, where what it left need not be a number."""
    kv = torch.full((9, 4, 6), float("nan"))
    slots = torch.tensor([17, 20, 21, 22, 0, 0])
    plan = AttentionPlan(
        query_start_R1=torch.tensor([0, 1, 4, 4], dtype=torch.int32),
        kv_len_R=torch.tensor([6, 3, 0], dtype=torch.int32),
        block_table_RB=torch.tensor([[3, 4], [5, 0], [0, 0]], dtype=torch.int32),
        slot_T=slots,
        host_query_start=None,
        host_kv_len=None,
        num_decodes=0,
        max_query_len=6,
        max_kv_len=8,
        whole_prompts=True,
    )
    kv.view(-1, 6)[slots[:4]] = torch.arange(24.0).view(4, 6)
    rows = latent_expansion.expanded_rows(plan, kv, object(), 1)
    assert rows is not None and rows.decodes is not None and rows.decode_T11 is not None
    latent_SW = latent_expansion.latents_of(rows, kv, 4, None, torch.float32)
    assert latent_SW[:, 0].tolist() == [0, 6, 12, 18, 0, 0]
    assert rows.begin_R.tolist() == [0, 1, 4]
    assert rows.decodes.query_start_R1.tolist() == [0, 1, 1, 1]
    assert rows.decodes.kv_len_R.tolist() == [6, 0, 0]
    assert rows.decode_T11.flatten().tolist() == [True, False, False]


PREFIXES = [[(0, 9), (1, 1)], [(1, 1), (0, 20), (2, 40)], [(0, 1), (1, 1), (2, 5)]]
WHOLE = [[(1, 10)], [(1, 1), (0, 20), (2, 40)], [(1, 1), (0, 1), (2, 1)]]


@pytest.mark.parametrize(
    ("steps", "most", "form"),
    [
        (PREFIXES, 1, None),
        (PREFIXES, 1 << 30, None),
        (PREFIXES, 1 << 30, "fp8"),
        (WHOLE, 1 << 30, None),
        (WHOLE, 1 << 30, "fp8"),
    ],
)
def test_prompts_over_expanded_latents_are_the_same(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    steps: list[list[tuple[int, int]]],
    most: int,
    form: str | None,
) -> None:
    """KRN-06, KRN-07, REG-034: whole, behind a prefix, beside decodes, which read the latents that such prompts left;
    where there are too many positions; over quantized ones; and whole as steps of a bucket have them."""
    save_oracle(tiny_config("deepseek-v3"), tmp_path)
    rows = random_rows(SIZES["vocab_size"], (30, 12, 45))

    def logits() -> list[torch.Tensor]:
        model = load_ours(replace(model_spec(tmp_path), kv_dtype=form))
        run = PagedRun(model, rows, block_tokens=BLOCK_TOKENS, dtype=torch.float32)
        return [row for step in steps for row in run.step(step)]

    absorbed = logits()
    monkeypatch.setitem(latent_expansion.LEAST_QUERIES, "cpu", 1)
    monkeypatch.setattr(latent_expansion, "MOST_BYTES", most)
    calls: list[int] = []

    def served(scope: Scope, op: Op[Any], problem: Any, *weights: Any) -> Any:
        if op is not expanded_attention.OP:
            return bind_if_served(scope, op, problem, *weights)
        reference = expanded_attention.bind_reference(problem)

        def counting(q_THN: torch.Tensor, *others: Any) -> torch.Tensor:
            calls.append(len(q_THN))
            return reference(q_THN, *others)

        return counting

    bind_if_served = Scope.bind_if_served
    monkeypatch.setattr(Scope, "bind_if_served", served)
    if steps is WHOLE:
        monkeypatch.setattr(latent_attention, "expanded_rows", as_in_a_bucket)
    for one, other in zip(logits(), absorbed, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    expected = [10] * 3 + [61] * 3 + ([] if steps is WHOLE else [7] * 3)
    assert calls == ([] if most == 1 else expected)
