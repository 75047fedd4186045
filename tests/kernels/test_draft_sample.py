"""Drafts are sampled as the tokens in their places will be (SPC-06)."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from headrace.back.kernels.draft_sample import op as draft_sample
from headrace.back.kernels.draft_sample.op import DraftSampleProblem
from headrace.back.kernels.gumbel import noise
from headrace.back.kernels.native.library import NativeLibrary, load
from headrace.back.kernels.op import load_kernel
from headrace.back.kernels.sample.op import SampleProblem, numbers
from headrace.back.kernels.sample.op import bind_reference as bind_sample

native = pytest.mark.skipif(
    not isinstance(load(), NativeLibrary), reason="the native kernels are not built"
)
ROWS, TOKENS = 400, 50


def table(heat: float, **changes: float) -> torch.Tensor:
    """The numbers of rows that differ in their seeds alone."""
    values = {"top_k": 0.0, "top_p": 1.0, "min_p": 0.0, **changes}
    columns = {name: np.full(ROWS, value) for name, value in values.items()}
    seed = np.arange(ROWS, dtype=np.uint64)
    return torch.from_numpy(numbers(heat=np.full(ROWS, heat), seed=seed, **columns))


@native
@pytest.mark.parametrize("vocabulary", [5, 1003, 4096, 150_000])
def test_the_native_kernel_does_what_the_reference_does(vocabulary: int) -> None:
    """With a vocabulary of the drafter's own, and without."""
    kernel = load_kernel(draft_sample.OP.kernels[0])
    assert not isinstance(kernel, str), kernel
    problem = DraftSampleProblem(device="cpu", vocabulary=vocabulary)
    assert draft_sample.OP.error(kernel, problem) == 0.0


@native
@pytest.mark.parametrize(
    "cut", [{}, {"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.2}, {"top_k": 9, "top_p": 0.7}]
)
@pytest.mark.parametrize("rounded", [False, True])
def test_it_keeps_what_sampling_keeps(cut: dict[str, float], rounded: bool) -> None:
    """Among equal logits too: what a drafter that is always right drafts is what the row says."""
    logits = 2 * torch.randn(ROWS, TOKENS, generator=torch.Generator().manual_seed(1))
    logits = logits.round() if rounded else logits
    row_R, length_M = torch.arange(ROWS, dtype=torch.int32), torch.arange(ROWS, dtype=torch.int32)
    rows_M = table(0.8, **cut)
    kernel = load_kernel(draft_sample.OP.kernels[0])
    assert not isinstance(kernel, str), kernel
    bound = kernel.bind(DraftSampleProblem(device="cpu", vocabulary=TOKENS), None)
    drafts = bound(logits, rows_M, row_R, length_M, 3)
    value, best = logits.max(dim=1)
    said = bind_sample(SampleProblem(device="cpu"))(
        logits, (best, value), rows_M, row_R, length_M + 3
    )[0]
    assert drafts.tolist() == said.tolist()


def test_drafts_stand_as_often_as_the_noise_they_share_promises() -> None:
    """At least (1 - d) / (1 + d) of them, and 1 - d at most, d the total variation; each is of its drafter's
    distribution."""
    generator = torch.Generator().manual_seed(2)
    p = torch.randn(TOKENS, generator=generator)
    q = p + 0.7 * torch.randn(TOKENS, generator=generator)
    row_R, length_M = torch.arange(ROWS, dtype=torch.int32), torch.zeros(ROWS, dtype=torch.int32)
    bound = draft_sample.bind_reference(DraftSampleProblem(device="cpu", vocabulary=TOKENS), None)
    said, drafted = (
        torch.cat(
            [
                bound(logits.expand(ROWS, -1).contiguous(), table(1.0), row_R, length_M, draft)
                for draft in range(20)
            ]
        )
        for logits in (p, q)
    )
    apart = float((p.softmax(0) - q.softmax(0)).abs().sum()) / 2
    stood = float((said == drafted).float().mean())
    room = 3 * (0.25 / len(said)) ** 0.5
    assert 0.15 < apart < 0.5
    assert (1 - apart) / (1 + apart) - room < stood < 1 - apart + room
    share = torch.bincount(drafted, minlength=TOKENS) / len(drafted)
    assert float((share - q.softmax(0)).abs().max()) < 0.02


def test_a_token_of_the_drafters_own_vocabulary_has_the_noise_of_the_models() -> None:
    """Two tokens alike, which stand for 7 and 40: the one with the greater noise."""
    offset_D, rows_M = torch.tensor([7, 39]), table(1.0)
    row_R, length_M = torch.arange(ROWS, dtype=torch.int32), torch.full((ROWS,), 11)
    bound = draft_sample.bind_reference(
        DraftSampleProblem(device="cpu", vocabulary=TOKENS), offset_D
    )
    drafts = bound(torch.zeros(ROWS, 2), rows_M, row_R, length_M.int(), 2)
    keys = noise.keys(np.arange(ROWS, dtype=np.uint64), np.full(ROWS, 13))
    late = [noise.exponential_host(keys, np.full(ROWS, token)) for token in (7, 40)]
    assert drafts.tolist() == np.where(late[0] < late[1], 7, 40).tolist()
    assert {7, 40} == set(drafts.tolist())
