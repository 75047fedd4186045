"""Norm, rotation and write of latents by the native kernel."""

from __future__ import annotations

import torch

from headrace.back.kernels.latent_write.op import LatentWrite, LatentWriteProblem, check_operands
from headrace.back.kernels.native.library import (
    DTYPES,
    FLOAT,
    INT32,
    INT64,
    POINTER,
    NativeLibrary,
    loaded,
    unsupported,
)
from headrace.back.kernels.op import Kernel

MAX_WIDTH = 1024
_ARGUMENTS = (*(POINTER,) * 8, *(INT64,) * 12, FLOAT, INT32, INT32)


def bind_with(
    library: NativeLibrary, problem: LatentWriteProblem, weight_C: torch.Tensor
) -> LatentWrite:
    """The kernel of one library; keeps the weight."""
    kernel = library.bind("latent_write", *_ARGUMENTS)
    weight_C, element = weight_C.float().contiguous(), DTYPES[problem.dtype]
    pairs = problem.layout == "pairs"

    def latent_write(
        q_THD: torch.Tensor,
        latent_TW: torch.Tensor,
        positions_T: torch.Tensor,
        table_PR: torch.Tensor,
        kv: torch.Tensor,
        slot_T: torch.Tensor,
        q_THW: torch.Tensor,
    ) -> None:
        check_operands(problem, q_THD, latent_TW, kv, q_THW)
        assert positions_T.dtype == slot_T.dtype == torch.int64
        assert positions_T.is_contiguous() and slot_T.is_contiguous() and table_PR.is_contiguous()
        assert table_PR.shape[1] == problem.rotary and table_PR.dtype == torch.float32
        tensors = (q_THD, latent_TW, positions_T, table_PR, kv, slot_T, q_THW, weight_C)
        kernel(
            *(tensor.data_ptr() for tensor in tensors), q_THD.shape[0], problem.heads,
            problem.nope, problem.rank, problem.rotary, *q_THD.stride()[:2], latent_TW.stride(0),
            table_PR.shape[0], problem.block_tokens, kv.shape[0], kv.stride(0), problem.eps,
            int(pairs), element,
        )  # fmt: skip

    return latent_write


def _supports(problem: LatentWriteProblem) -> str | None:
    if problem.rank + problem.rotary > MAX_WIDTH:
        return f"latents of {problem.rank + problem.rotary} are above {MAX_WIDTH}"
    if problem.quantized:
        return f"writes no quantized latents ({problem.quantized})"
    return unsupported(problem.device, problem.dtype)


KERNEL = Kernel(
    name="native",
    supports=_supports,
    bind=lambda problem, weight: bind_with(loaded(), problem, weight),
    invariant=True,
)
