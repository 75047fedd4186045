"""What is drawn from the best tokens of a row is what is drawn from its logits, whatever ties there are (KRN-02)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.back.kernels.linear_top.op import NUM_CANDIDATES
from headrace.back.sampling.features import failures
from headrace.back.sampling.sampler import Sampler
from headrace.base.wire.request import RowSampling
from headrace.base.wire.step import RowStart

CPU = torch.device("cpu")

SAMPLED_BY_OP = st.fixed_dictionaries(
    {"top_k": st.integers(1, NUM_CANDIDATES - 1), "temperature": st.sampled_from([0.3, 1.0, 4.0])},
    optional={
        "top_p": st.sampled_from([0.5, 0.9, 0.75, 1e-9]),
        "min_p": st.sampled_from([0.05, 0.5, 1.0]),
    },
)
ROWS = st.lists(st.just({"temperature": 0.0}) | SAMPLED_BY_OP, min_size=1, max_size=6)
SPREADS = {"flat": 0.0, "ties": 1.5, "wide ties": 12.0, "usual": 3.0}
BROKEN = {"nan": torch.nan, "inf": torch.inf, "-inf": -torch.inf}


def started(asked: list[dict[str, float]], width: int, seed: int) -> Sampler:
    sampler = Sampler(max_rows=8, logits_width=width, device=CPU)
    for row, more in enumerate(asked):
        sampling = RowSampling(seed=seed + row, **more)
        tokens = np.zeros(1, np.int32)
        sampler.start(
            RowStart(row=row, request=row, tokens=tokens, num_prompt=1, num_computed=0, sampling=sampling)
        )  # fmt: skip
    return sampler


def logits_of(rows: int, width: int, seed: int, kinds: list[str]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    found = torch.randn(rows, width, generator=generator)
    for row, kind in zip(found, kinds, strict=False):
        row *= SPREADS.get(kind, 1.0)
        if kind != "usual":
            row.round_()
        if kind in BROKEN:
            row[torch.randint(width, (width // 3,), generator=generator)] = BROKEN[kind]
        if kind == "all -inf":
            row.fill_(-torch.inf)
    return found


@settings(max_examples=400, deadline=None)
@given(
    asked=ROWS,
    width=st.sampled_from([64, 65, 100, 2003]),
    seed=st.integers(0, 1 << 40),
    kinds=st.lists(
        st.sampled_from([*SPREADS, *BROKEN, "all -inf"]), min_size=6, max_size=6
    ),
)  # fmt: skip
def test_tokens_and_failures_are_those_of_whole_logits(
    asked: list[dict[str, float]], width: int, seed: int, kinds: list[str]
) -> None:
    count = len(asked)
    sampler, logits = started(asked, width, seed), logits_of(count, width, seed, kinds)
    row_N, where = np.arange(count), np.arange(7, 7 + count)
    given = {"rows": row_N, "positions": where, "tokens": torch.zeros(8, 16, dtype=torch.int32)}
    if any(more["temperature"] for more in asked):
        assert sampler.needs(row_N) == "top_candidates"
    value, id = logits.sort(dim=1, descending=True, stable=True)
    fell_back: list[int] = []

    def whole(at: np.ndarray) -> torch.Tensor:
        fell_back.extend(at.tolist())
        return logits[at]

    top_candidates = id[:, :NUM_CANDIDATES].contiguous(), value[:, :NUM_CANDIDATES].contiguous()
    found = sampler.sample_candidates(top_candidates, whole, **given)
    wanted = sampler.sample(logits.clone(), sampler.greedy(logits), **given)
    chosen_logit = None if wanted.chosen_logit_N is None else wanted.chosen_logit_N.numpy()
    failed = failures(wanted.max_logit_N.numpy(), chosen_logit)
    logprobs = failures(found.max_logit_N.numpy(), None)
    assert {i: str(e) for i, e in logprobs.items()} == {i: str(e) for i, e in failed.items()}
    fine = [i for i in range(count) if i not in failed]
    assert found.token_N[fine].tolist() == wanted.token_N[fine].tolist()
    assert bool(((found.token_N >= 0) & (found.token_N < width)).all())
    assert sorted(fell_back) == [
        i
        for i, more in enumerate(asked)
        if more["temperature"]
        and (
            i in failed
            or int((logits[i] >= value[i, int(more["top_k"]) - 1]).sum()) >= NUM_CANDIDATES
        )
    ]


@pytest.mark.parametrize(
    ("more", "needs"),
    [
        ({"temperature": 0.0}, "argmax"),
        ({"top_k": 23, "top_p": 0.9, "min_p": 0.1, "temperature": 0.5}, "top_candidates"),
        ({"top_k": 1}, "top_candidates"),
        ({"top_k": 24}, "logits"),
        ({}, "logits"),
        ({"top_p": 0.5}, "logits"),
        ({"top_k": 20, "typical_p": 0.9}, "logits"),
        ({"top_k": 20, "xtc_probability": 0.5}, "logits"),
        ({"top_k": 20, "logprobs": 0}, "logits"),
        ({"top_k": 20, "logit_bias": {3: 1.0}}, "logits"),
        ({"top_k": 20, "repetition_penalty": 1.1}, "logits"),
        ({"top_k": 20, "dry_multiplier": 0.5}, "logits"),
        ({"top_k": 20, "allowed_ids": (1, 2)}, "logits"),
        ({"top_k": 20, "bad_words": ((7,),)}, "logits"),
        ({"top_k": 20, "min_tokens": 3, "suppressed_ids": (1,)}, "logits"),
        ({"temperature": 0.0, "logprobs": 1}, "logits"),
    ],
)
def test_a_step_leaves_no_more_than_its_rows_need(more: dict[str, float], needs: str) -> None:
    """Alone, and beside a greedy row and one that is drawn from its tops."""
    sampler = started([more, {"temperature": 0.0}, {"top_k": 5}], 500, 1)
    assert sampler.needs(np.array([0])) == needs
    assert sampler.needs(np.array([1, 0])) == needs
    assert sampler.needs(np.array([2, 0, 1])) == ("top_candidates" if needs == "argmax" else needs)
