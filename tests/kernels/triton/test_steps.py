"""The step's own Triton kernels in the interpreter (test_interpreter.py), against their references."""

from __future__ import annotations

import pytest
import torch

triton = pytest.importorskip("triton")

from headrace.back.kernels.ngram_draft import op as ngram
from headrace.back.kernels.ngram_draft import triton_ngram
from headrace.back.kernels.nucleus import op as nucleus
from headrace.back.kernels.nucleus import triton_nucleus
from headrace.back.kernels.step_commit import op as commit
from headrace.back.kernels.step_commit import triton_commit
from headrace.back.kernels.step_inputs import op as inputs
from headrace.back.kernels.step_inputs import triton_step
from headrace.back.kernels.step_verify import op as verify
from headrace.back.kernels.step_verify import triton_verify
from headrace.back.kernels.triton.wrap import interpreted

pytestmark = pytest.mark.skipif(
    not interpreted(), reason="test_interpreter.py runs these tests in the interpreter"
)


def test_inputs_commit_and_nucleus_equal_their_references() -> None:
    """ENG-21; KRN-02: ties, rows that truncation has emptied, rows narrower and wider than they need."""
    unequal = (
        inputs.GroupBlocks(tokens=32),
        inputs.GroupBlocks(tokens=16, span=40),
        inputs.GroupBlocks(tokens=16),
    )
    for speculates, groups in ((False, ()), (True, ()), (False, unequal), (True, unequal)):
        problem = inputs.StepInputsProblem(
            device="cpu", block_tokens=16, max_rows=9, speculates=speculates, groups=groups
        )
        assert inputs.OP.error(triton_step.KERNEL, problem) == 0.0
        assert commit.OP.error(triton_commit.KERNEL, problem) == 0.0
    assert verify.OP.error(triton_verify.KERNEL, problem) == 0.0
    for least, most in ((1, 1), (2, 3), (1, 5)):
        lookup = ngram.NgramDraftProblem(device="cpu", min_match=least, max_match=most)
        assert ngram.OP.error(triton_ngram.KERNEL, lookup) == 0.0
    here = nucleus.NucleusProblem(device="cpu")
    assert nucleus.OP.error(triton_nucleus.KERNEL, here) == 0.0
    ours, theirs = triton_nucleus.bind(here), nucleus.bind_reference(here)
    g = torch.Generator().manual_seed(0)
    for turn in range(40):
        width = int(torch.randint(1, 300, (1,), generator=g))
        logits = torch.randn(4, width, generator=g, dtype=torch.float64) * [0.1, 1, 5, 30][turn % 4]
        if turn % 3 == 0:
            logits = logits.round()
        if turn % 5 == 0:
            logits[:, width // 2 + 1 :] = -torch.inf
        probs = logits.softmax(1)
        p = torch.rand(4, 1, generator=g, dtype=torch.float64).clamp(1e-9, 1)
        assert torch.equal(ours(probs, p), theirs(probs, p)), (turn, width)
