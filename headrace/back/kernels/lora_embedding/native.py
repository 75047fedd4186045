"""Adapters of a table of tokens by the native kernel: a token at a time."""

from __future__ import annotations

import torch

from headrace.back.kernels.lora_embedding.op import (
    LoraEmbedding,
    LoraEmbeddingProblem,
    LoraTables,
)
from headrace.back.kernels.native.library import (
    DTYPES,
    INT32,
    INT64,
    POINTER,
    NativeLibrary,
    loaded,
    unsupported,
)
from headrace.back.kernels.op import Kernel


def bind_with(
    library: NativeLibrary, problem: LoraEmbeddingProblem, tables: LoraTables
) -> LoraEmbedding:
    """The kernel of one library; keeps the tables."""
    kernel = library.bind("lora_embedding", *(POINTER,) * 7, *(INT64,) * 6, INT32)
    element = DTYPES[problem.dtype]

    def lora_embedding(ids_T: torch.Tensor, x_TE: torch.Tensor, slot_T: torch.Tensor) -> None:
        tokens = ids_T.shape[0]
        assert x_TE.shape == (tokens, problem.width) and x_TE.dtype == problem.dtype, x_TE.shape
        assert ids_T.dtype == torch.int64 and slot_T.dtype == torch.int32, ids_T.dtype
        assert slot_T.shape == (tokens,) and x_TE.stride(1) == 1, slot_T.shape
        assert ids_T.is_contiguous() and slot_T.is_contiguous()
        kernel(
            ids_T.data_ptr(), x_TE.data_ptr(), slot_T.data_ptr(), tables.a_SVR.data_ptr(),
            tables.b_SRE.data_ptr(), tables.scale_S.data_ptr(), tables.rank_S.data_ptr(), tokens,
            problem.rows, problem.width, problem.rank, problem.slots, x_TE.stride(0), element,
        )  # fmt: skip

    return lora_embedding


KERNEL = Kernel(
    name="native",
    supports=lambda problem: unsupported(problem.device, problem.dtype),
    bind=lambda problem, tables: bind_with(loaded(), problem, tables),
    invariant=True,
)
