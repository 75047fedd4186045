"""The draw in Triton against its definition: what is kept, which token comes, how often (in the interpreter and on a
GPU, as test_kernels.py; larger there)."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import numpy as np
import pytest
import torch

triton = pytest.importorskip("triton")

from headrace.back.kernels.draft_sample import triton_draft_sample
from headrace.back.kernels.draft_sample.op import OP as DRAFT_SAMPLE
from headrace.back.kernels.draft_sample.op import DraftSampleProblem
from headrace.back.kernels.sample import op, triton_sample, triton_truncate
from headrace.back.kernels.triton.wrap import interpreted

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (interpreted() or torch.cuda.is_available()),
        reason="no CUDA device here; test_interpreter.py runs these tests in the interpreter",
    ),
]
DEVICE = "cpu" if interpreted() else "cuda"
PROBLEM = op.SampleProblem(device=DEVICE)
WIDTHS = [1, 2500] if interpreted() else [1, 31, 4099, 151936]
COPIES = 1 if interpreted() else 40
ROOMS = [64] if interpreted() else [16, 64, 512]
LOGITS = {
    "usual": lambda rng, shape: rng.standard_normal(shape) * 3,
    "peaked": lambda rng, shape: rng.standard_normal(shape) * 40,
    "flat": lambda rng, shape: np.zeros(shape),
    "ties": lambda rng, shape: np.round(rng.standard_normal(shape)),
    "few": lambda rng, shape: np.where(rng.random(shape) < 0.01, 1.0, -np.inf),
    "tiny": lambda rng, shape: rng.standard_normal(shape) * 1e-42,
    "huge": lambda rng, shape: rng.standard_normal(shape) * 1e37,
}


def slow_in_the_interpreter(values: Iterable[Any], kept: Container[Any]) -> list[Any]:
    """As parameters: there all but those that are kept are slow, each takes a second."""
    slow = pytest.mark.slow if interpreted() else ()
    return [pytest.param(value, marks=() if value in kept else slow) for value in values]


# temperature, top_k, top_p, min_p
SETTINGS = [
    (0.0, 0, 1.0, 0.0),
    (1.0, 0, 1.0, 0.0),
    (1e-3, 0, 1.0, 0.0),
    (0.7, 1, 1.0, 0.0),
    (0.7, 40, 0.9, 0.0),
    (1.0, 1 << 30, 0.95, 0.0),
    (1.5, 0, 0.3, 0.02),
    (1.0, 0, 1.0, 0.1),
    (50.0, 20, 0.999, 0.0),
    (1.0, 0, 1e-9, 0.0),
]


def case(
    kind: str, width: int
) -> tuple[torch.Tensor, tuple, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The op's arguments: every setting COPIES times, rows of the table in any order, rows of logits with a gap."""
    rng = np.random.default_rng(width)
    heat, top_k, top_p, min_p = (
        np.array(column * COPIES) for column in zip(*SETTINGS, strict=True)
    )
    count = len(heat)
    logits = np.full((count, width + 3), np.nan, np.float32)
    logits[:, :width] = LOGITS[kind](rng, (count, width))
    logits[:, 0] = np.where(np.isfinite(logits[:, :width]).any(1), logits[:, 0], 0.0)
    rows = op.numbers(
        heat=heat,
        seed=rng.integers(0, 1 << 63, count).astype(np.uint64),
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
    )
    row = rng.permutation(count).astype(np.int32)
    position = rng.integers(1, 100_000, count).astype(np.int32)
    logits_KV = torch.from_numpy(logits).to(DEVICE)[:, :width]
    value, token = logits_KV.max(dim=1)
    on = [torch.from_numpy(array).to(DEVICE) for array in (rows, row, position)]
    return logits_KV, (token, value), *on


def undecided(logits_KV: torch.Tensor, rows: torch.Tensor, row_K: torch.Tensor) -> torch.Tensor:
    """bool [K]: whether the sum of some most likely tokens lies within 1e-6 of top_p: either side of it is right."""
    of_K5 = rows[row_K.long()]
    heat_K1, _, _, p_K1, _ = of_K5.view(torch.float64).split(1, dim=1)
    z_KV = (
        (logits_KV.double() / heat_K1.masked_fill(heat_K1 == 0, 1.0))
        .sort(1, descending=True)
        .values
    )
    k_K1 = of_K5[:, op.TOP_K : op.TOP_K + 1]
    kth_K1 = z_KV.gather(
        1, torch.where((k_K1 <= 0) | (k_K1 > z_KV.shape[1]), z_KV.shape[1], k_K1) - 1
    )
    sums_KV = z_KV.masked_fill(z_KV < kth_K1, -torch.inf).softmax(1).cumsum(1)
    border = torch.cat((z_KV[:, :-1] > z_KV[:, 1:], torch.ones_like(p_K1, dtype=torch.bool)), 1)
    near = ((sums_KV - p_K1).abs() < 1e-6) & border & (p_K1 < 1.0)
    return near.any(1)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("kind", LOGITS)
def test_every_row_keeps_and_draws_what_the_sort_does(kind: str, width: int) -> None:
    """KRN-02, REG-032: ties, masks, k of 1 and beyond the width, p of almost 0 and 1, subnormal and huge logits."""
    logits, argmax, rows, row, position = case(kind, width)
    token, z = triton_sample.bind(PROBLEM)(logits, argmax, rows, row, position)
    wanted, wanted_z = op.bind_reference(PROBLEM)(logits, argmax, rows, row, position)
    clear = ~undecided(logits, rows, row)
    assert clear.sum() >= 0.8 * len(clear) and token.min() >= 0 and token.max() < width
    assert token[clear].tolist() == wanted[clear].tolist()
    torch.testing.assert_close(z[clear], wanted_z[clear], rtol=1e-12, atol=0.0)


def test_the_draws_of_one_row_follow_its_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chi-squared over what top_k and top_p leave, renormalised: position by position the noise is another."""
    if interpreted():
        small(monkeypatch, room=16)
    count, kept = (60 if interpreted() else 40_000), 5
    logits = torch.tensor([[2.0, 1.5, 1.0, 0.5, 0.0, -0.1, -3.0]], device=DEVICE).repeat(count, 1)
    one = np.ones(count)
    numbers = op.numbers(
        heat=0.8 * one,
        seed=np.full(count, 11, np.uint64),
        top_k=6 * one,
        top_p=0.95 * one,
        min_p=0 * one,
    )
    value, token = logits.max(dim=1)
    row = torch.arange(count, device=DEVICE)
    found, _ = triton_sample.bind(PROBLEM)(
        logits, (token, value), torch.from_numpy(numbers).to(DEVICE), row, row + 1
    )
    counts = found.bincount(minlength=7).cpu().double()
    probs = (logits[0, :6].cpu().double() / 0.8).softmax(0)
    assert (probs.cumsum(0) < 0.95).sum() == kept - 1, "the test means to cut off the sixth token"
    probs = probs[:kept] / probs[:kept].sum()
    assert counts[kept:].sum() == 0
    assert (((counts[:kept] - count * probs) ** 2) / (count * probs)).sum() < 23.5, (
        counts
    )  # p = 1e-4, 4 degrees


def test_rows_that_are_not_finite_end_and_touch_no_other() -> None:
    """KRN-02: a NaN must not hang the search."""
    logits, argmax, rows, row, position = case("usual", 31)
    clean, _ = triton_sample.bind(PROBLEM)(logits, argmax, rows, row, position)
    logits, bad = logits.clone(), [1, 4, 5]
    logits[bad[0], 3], logits[bad[1]], logits[bad[2], 7] = float("nan"), -torch.inf, torch.inf
    value, token = logits.max(dim=1)
    found, _ = triton_sample.bind(PROBLEM)(logits, (token, value), rows, row, position)
    others = [i for i in range(len(found)) if i not in bad]
    assert found[others].tolist() == clean[others].tolist()
    assert found.min() >= 0 and found.max() < logits.shape[1]


def small(monkeypatch: pytest.MonkeyPatch, *, room: int, sample: int = 64) -> None:
    """Makes short rows long ones: many pieces, a sample of few, room for few."""
    for owner, name, value in (
        (triton_truncate, "MOST_KEPT", room),
        (triton_truncate, "SAMPLE", sample),
        (triton_truncate, "PIECE", 256),
        (triton_truncate, "SETTLE", 64),
        (triton_sample, "TILE", 128),
    ):
        monkeypatch.setattr(owner, name, value)


def agree(
    logits: torch.Tensor,
    argmax: tuple,
    rows: torch.Tensor,
    row: torch.Tensor,
    position: torch.Tensor,
) -> None:
    """The kernel's tokens are those of the reference, wherever top_p's border is clear; twice the same."""
    sample = triton_sample.bind(PROBLEM)
    found, z = sample(logits, argmax, rows, row, position)
    wanted, wanted_z = op.bind_reference(PROBLEM)(logits, argmax, rows, row, position)
    clear = ~undecided(logits, rows, row)
    assert clear.sum() >= 0.5 * len(clear)
    assert found[clear].tolist() == wanted[clear].tolist()
    torch.testing.assert_close(z[clear], wanted_z[clear], rtol=1e-12, atol=0.0)
    if not interpreted():
        again, _ = sample(logits, argmax, rows, row, position)
        assert again.tolist() == found.tolist()


@pytest.mark.parametrize("room", ROOMS)
@pytest.mark.parametrize("kind", slow_in_the_interpreter(LOGITS, kept=("usual", "ties", "few")))
def test_rows_longer_than_the_room_are_narrowed_down(
    kind: str, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """top_k and top_p by sample, by pivots, in the room and beyond it; top_p behind a top_k that leaves few tokens,
    many, and ties without end; several tiles in a program."""
    small(monkeypatch, room=room)
    agree(*case(kind, 1203 if interpreted() else 30011))


@pytest.mark.parametrize("room", [256, 1024])
@pytest.mark.parametrize("of_sample", [-9.0, 9.0])
def test_a_sample_that_misleads_costs_time_only(
    of_sample: float, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the sample is taken, logits are far lower or higher than everywhere else: fewer than top_k gathered, or
    more than there is room for."""
    small(monkeypatch, room=room)
    logits, _, *rest = case("usual", 1203)
    logits = logits.clone()
    logits[:, :: 1203 // triton_truncate.SAMPLE] += of_sample
    value, token = logits.max(dim=1)
    agree(logits, (token, value), *rest)


def one_setting(
    setting: tuple, logits: torch.Tensor
) -> tuple[torch.Tensor, tuple, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The op's arguments: all rows with one setting, noise of their own."""
    count = len(logits)
    heat, top_k, top_p, min_p = (np.full(count, number) for number in setting)
    seed = np.arange(count, dtype=np.uint64)
    rows = op.numbers(heat=heat, seed=seed, top_k=top_k, top_p=top_p, min_p=min_p)
    value, token = logits.max(dim=1)
    row = torch.arange(count, dtype=torch.int32, device=DEVICE)
    return logits, (token, value), torch.from_numpy(rows).to(DEVICE), row, row + 5


TIED = [
    (1.0, 3, 1.0, 0.0),
    (1.0, 300, 1.0, 0.0),
    (1.0, 299, 0.9, 0.0),
    (0.5, 0, 0.9, 0.0),
    (1e3, 0, 0.5, 0.0),
    (1e-4, 0, 0.99, 0.0),
    (2.0, 900, 0.4, 0.3),
]


@pytest.mark.parametrize("setting", slow_in_the_interpreter(TIED, kept=(TIED[2], *TIED[4:7:2])))
def test_ties_at_the_border_stay(setting: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    """Levels of many equal logits, -Inf among them: the level in which the cut lies stays whole."""
    small(monkeypatch, room=128)
    rng = np.random.default_rng(3)
    levels = np.array([4.0, 3.0, 0.5, -0.0, 0.0, -2.0, -np.inf], np.float32)
    shares = [0.002, 0.003, 0.2, 0.1, 0.1, 0.3, 0.295]
    count = 3 if interpreted() else 256
    logits = torch.from_numpy(rng.choice(levels, (count, 1203), p=shares)).to(DEVICE)
    logits[:, 5] = 4.0
    agree(*one_setting(setting, logits))


def test_a_top_p_of_almost_one_keeps_all_that_can_be_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    small(monkeypatch, room=128)
    logits = torch.full((4, 1203), 0.5, device=DEVICE)
    logits[:, 100:], logits[:, 7] = 0.25, -torch.inf
    sample = triton_sample.bind(PROBLEM)
    found, _ = sample(*one_setting((1.0, 0, 1 - 1e-9, 0.0), logits))
    wanted, _ = sample(*one_setting((1.0, 0, 1.0, 0.0), logits))
    assert found.tolist() == wanted.tolist()


def test_noise_decides_among_tokens_that_are_nearly_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many rows of flat logits: places of a tile that hold two of the first, tokens kept whose noise is small."""
    monkeypatch.setattr(triton_sample, "TILE", 16)
    count = 12 if interpreted() else 2000
    logits = torch.zeros((count, 201), device=DEVICE)
    logits[:, 3] = 1e-6
    for setting in ((1.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.99999999)):
        agree(*one_setting(setting, logits))


def test_a_place_that_holds_the_two_first_is_looked_at_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two tokens with large noise in one place of two tiles of one program: bounds put them in the wrong order."""
    monkeypatch.setattr(triton_sample, "TILE", 16)
    count = 24 if interpreted() else 4000
    logits = torch.full((count, 32), -torch.inf, device=DEVICE)
    logits[:, 3], logits[:, 19] = 0.0, -0.5
    agree(*one_setting((1.0, 0, 1.0, 0.0), logits))


def test_a_row_draws_the_same_alone_and_among_others() -> None:
    """ENG-25: nothing of the batch is part of a row's sums."""
    logits, argmax, rows, row, position = case("usual", WIDTHS[-1])
    sample = triton_sample.bind(PROBLEM)
    found, _ = sample(logits, argmax, rows, row, position)
    for i in range(0, len(found), max(2, len(found) // 20)):
        one = slice(i, i + 1)
        of_one = (argmax[0][one], argmax[1][one])
        alone, _ = sample(logits[one], of_one, rows, row[one], position[one])
        assert alone.tolist() == found[one].tolist()


@pytest.mark.parametrize("vocabulary", [1003, 2600])
def test_drafts_are_sampled_as_the_reference_does(vocabulary: int) -> None:
    """Of a vocabulary of the drafter's own, and of the model's (SPC-06)."""
    problem = DraftSampleProblem(device=DEVICE, vocabulary=vocabulary)
    assert DRAFT_SAMPLE.error(triton_draft_sample.KERNEL, problem) == 0.0
