"""Masks and biases by the native kernel."""

from __future__ import annotations

import torch

from headrace.back.kernels.logit_masks.op import WORDS, LogitMasks, LogitMasksProblem, MaskTables
from headrace.back.kernels.native.library import INT64, POINTER, NativeLibrary, loaded, unsupported
from headrace.back.kernels.op import Kernel


def bind_with(library: NativeLibrary, problem: LogitMasksProblem) -> LogitMasks:
    """The kernel of one library."""
    kernel = library.bind("logit_masks", *(POINTER,) * 8, *(INT64,) * 8)

    def logit_masks(
        logits_KV: torch.Tensor,
        tables: MaskTables,
        tokens_MC: torch.Tensor,
        row_K: torch.Tensor,
        position_K: torch.Tensor,
        grammar: bool,
    ) -> None:
        (count, width), (rows, num_words) = logits_KV.shape, tables.allowed_MB.shape
        assert logits_KV.dtype == torch.float32 and logits_KV.stride(1) == 1, logits_KV.stride()
        assert row_K.dtype == position_K.dtype == torch.int32, (row_K.dtype, position_K.dtype)
        assert tables.rules_MW.shape == (rows, WORDS) and num_words * 32 >= width, num_words
        assert len(tables.grammar_at_P) >= count, (len(tables.grammar_at_P), count)
        assert row_K.is_contiguous() and position_K.is_contiguous() and tokens_MC.is_contiguous()
        kernel(
            logits_KV.data_ptr(), tables.rules_MW.data_ptr(), tables.allowed_MB.data_ptr(),
            tables.grammar_GB.data_ptr(), tables.grammar_at_P.data_ptr() if grammar else None,
            tokens_MC.data_ptr(), row_K.data_ptr(), position_K.data_ptr(),
            count, width, logits_KV.stride(0), rows, len(tables.grammar_GB), num_words, WORDS,
            tokens_MC.shape[1],
        )  # fmt: skip

    return logit_masks


KERNEL = Kernel(
    name="native",
    supports=lambda problem: unsupported(problem.device, torch.float32),
    bind=lambda problem: bind_with(loaded(), problem),
    invariant=True,
)
