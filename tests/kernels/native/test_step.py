"""The kernels that stand between a message and a decode step: the same as their definitions, and what they refuse."""

from dataclasses import replace

import pytest
import torch

from headrace.back.kernels.embedding import native as embedding
from headrace.back.kernels.embedding.op import OP as EMBEDDING
from headrace.back.kernels.embedding.op import EmbeddingProblem
from headrace.back.kernels.logit_masks import native as logit_masks
from headrace.back.kernels.logit_masks.op import OP as LOGIT_MASKS
from headrace.back.kernels.logit_masks.op import LogitMasksProblem
from headrace.back.kernels.native.library import NativeError
from headrace.back.kernels.ngram_draft import native as ngram_draft
from headrace.back.kernels.ngram_draft.op import OP as NGRAM_DRAFT
from headrace.back.kernels.ngram_draft.op import NgramDraftProblem
from headrace.back.kernels.op import Kernel
from headrace.back.kernels.qk_rope_write import native as qk_rope_write
from headrace.back.kernels.qk_rope_write.op import OP as QK_ROPE_WRITE
from headrace.back.kernels.qk_rope_write.op import QKRopeWriteProblem
from headrace.back.kernels.step_commit.op import OP as STEP_COMMIT
from headrace.back.kernels.step_inputs.native import bind_commit, bind_inputs, bind_verify
from headrace.back.kernels.step_inputs.op import HEADER, GroupBlocks, StepInputsProblem
from headrace.back.kernels.step_inputs.op import OP as STEP_INPUTS
from headrace.back.kernels.step_verify.op import OP as STEP_VERIFY

DTYPES = [torch.float32, torch.bfloat16]


def kernel_of(library, bind):
    return Kernel(
        name="native",
        supports=lambda problem: None,
        bind=lambda problem, *weights: bind(library, problem, *weights),
    )


@pytest.mark.parametrize("speculates", [False, True])
@pytest.mark.parametrize("block_tokens", [8, 16, 32])
def test_step_inputs_are_as_defined(library, block_tokens, speculates):
    problem = StepInputsProblem(
        device="cpu", block_tokens=block_tokens, max_rows=9, speculates=speculates
    )
    assert STEP_INPUTS.error(kernel_of(library, bind_inputs), problem) == 0


@pytest.mark.parametrize("speculates", [False, True])
def test_groups_of_unequal_blocks_and_cross_caches_have_slots_and_lengths_of_their_own(
    library, speculates
):
    groups = (
        GroupBlocks(tokens=32),
        GroupBlocks(tokens=16, span=40),
        GroupBlocks(tokens=16),
    )
    problem = StepInputsProblem(
        device="cpu", block_tokens=16, max_rows=9, speculates=speculates, groups=groups
    )
    assert STEP_INPUTS.error(kernel_of(library, bind_inputs), problem) == 0
    words, tables, out = STEP_INPUTS.sample(problem).arguments
    bind_inputs(library, problem)(words, tables, out)
    newest = 17 if speculates else 18
    assert out.lengths_GR.tolist() == [
        [1, newest, 37, 0, 0], [20, 0, 35, 0, 0], [1, newest, 37, 0, 0]
    ]  # fmt: skip
    assert (out.slots_GT[1] == 0).all()
    of_row = tables.blocks_GMB[:, 0].tolist()
    assert out.slots_GT[0, 1] == of_row[0][0] * 32 + newest - 1
    assert out.slots_GT[2, 1] == of_row[2][1] * 16 + newest - 17
    assert out.tables_GRB[1, 0, :2].tolist() == tables.blocks_GMB[1, 4, :2].tolist()
    words, tables, out = STEP_INPUTS.sample(problem).arguments
    tables.cross_M[7] = 49
    wide = replace(problem, groups=(*groups[:2], GroupBlocks(tokens=16, span=49)))
    with pytest.raises(NativeError):  # more than its table holds
        bind_inputs(library, wide)(words, tables, out)


@pytest.mark.parametrize("speculates", [False, True])
def test_step_commit_is_as_defined(library, speculates):
    problem = StepInputsProblem(device="cpu", block_tokens=16, max_rows=9, speculates=speculates)
    assert STEP_COMMIT.error(kernel_of(library, bind_commit), problem) == 0


def test_step_verify_is_as_defined(library):
    problem = StepInputsProblem(device="cpu", block_tokens=16, max_rows=9, speculates=True)
    assert STEP_VERIFY.error(kernel_of(library, bind_verify), problem) == 0


def test_logit_masks_are_as_defined(library):
    problem = LogitMasksProblem(device="cpu")
    assert LOGIT_MASKS.error(kernel_of(library, logit_masks.bind_with), problem) == 0


def test_rules_that_name_no_token_are_refused(library):
    problem = LogitMasksProblem(device="cpu")
    for value in (-1, 5000):
        logits, tables, *more = LOGIT_MASKS.sample(problem).arguments
        tables.rules_MW[2, 8] = value
        with pytest.raises(NativeError, match="logit_masks"):
            logit_masks.bind_with(library, problem)(logits, tables, *more)


@pytest.mark.parametrize("min_match, max_match", [(1, 1), (1, 4), (2, 3), (3, 8)])
def test_ngram_drafts_are_as_defined(library, min_match, max_match):
    problem = NgramDraftProblem(device="cpu", min_match=min_match, max_match=max_match)
    assert NGRAM_DRAFT.error(kernel_of(library, ngram_draft.bind_with), problem) == 0


@pytest.mark.parametrize("word, value", [(0, 6), (1, 13), (3, 5), (HEADER, -1), (HEADER + 18, 900)])
def test_a_message_that_makes_no_sense_is_refused(library, word, value):
    """Counts beyond the bucket, a row nobody has, a length beyond the tables: nothing outside is read or written."""
    sample = STEP_INPUTS.sample(StepInputsProblem(device="cpu", block_tokens=16, max_rows=9))
    words, tables, out = sample.arguments
    words[word] = value
    with pytest.raises(NativeError):
        bind_inputs(library, sample.problem)(words, tables, out)
    assert (out.token_ids_T == -1).all()


def test_an_update_outside_the_tables_is_refused(library):
    sample = STEP_INPUTS.sample(StepInputsProblem(device="cpu", block_tokens=16, max_rows=9))
    words, tables, out = sample.arguments
    words[sample.problem.updates_at] = tables.blocks_GMB.numel()
    with pytest.raises(NativeError):
        bind_inputs(library, sample.problem)(words, tables, out)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads, kv_heads, head_dim, rotary, layout, eps", [
    (4, 2, 128, 128, "half", 1e-6), (3, 1, 64, 64, "pairs", None), (2, 2, 80, 32, "half", 1e-5),
    (1, 1, 6, 4, "half", 1e-6), (5, 5, 96, 96, "half", None), (2, 1, 256, 0, "half", 1e-6),
])  # fmt: skip
def test_qk_rope_write_is_as_defined(
    library, dtype, heads, kv_heads, head_dim, rotary, layout, eps
):
    problem = QKRopeWriteProblem(
        device="cpu", dtype=dtype, heads=heads, kv_heads=kv_heads, head_dim=head_dim, block_tokens=16,
        rotary_dim=rotary, layout=layout, eps=eps,
    )  # fmt: skip
    error = QK_ROPE_WRITE.error(kernel_of(library, qk_rope_write.bind_with), problem)
    assert error <= QK_ROPE_WRITE.tolerance(problem), error


@pytest.mark.parametrize("dtype", DTYPES)
def test_lookup_copies_rows_and_refuses_others(library, dtype):
    problem = EmbeddingProblem(device="cpu", dtype=dtype, rows=50, width=37)
    assert EMBEDDING.error(kernel_of(library, embedding.bind_with), problem) == 0
    lookup = embedding.bind_with(library, problem, torch.ones(50, 37, dtype=dtype))
    for id in (-1, 50):
        with pytest.raises(NativeError):
            lookup(torch.tensor([0, id]))
