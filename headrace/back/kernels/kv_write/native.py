"""KV write by the native kernel: one copy per token, head and half."""

from __future__ import annotations

import torch

from headrace.back.kernels.kv_write.op import KVWrite, KVWriteProblem
from headrace.back.kernels.native.library import INT64, POINTER, NativeLibrary
from headrace.back.kernels.native.wrap import loaded, unsupported
from headrace.back.kernels.op import Kernel

_ARGUMENTS = (*(POINTER,) * 4, *(INT64,) * 12)


def bind_with(library: NativeLibrary, problem: KVWriteProblem) -> KVWrite:
    """The kernel of one library."""
    kernel = library.bind("kv_write", *_ARGUMENTS)
    size = problem.dtype.itemsize
    head_bytes, block_tokens = problem.head_dim * size, problem.block_tokens

    def kv_write(
        k_TKD: torch.Tensor, v_TKD: torch.Tensor, kv: torch.Tensor, slot_T: torch.Tensor
    ) -> None:
        assert k_TKD.dtype == v_TKD.dtype == kv.dtype == problem.dtype, (k_TKD.dtype, kv.dtype)
        assert k_TKD.shape == v_TKD.shape and slot_T.shape[0] == k_TKD.shape[0], (
            k_TKD.shape,
            slot_T.shape,
        )
        assert k_TKD.stride(2) == v_TKD.stride(2) == 1
        assert slot_T.dtype == torch.int64 and slot_T.is_contiguous()
        assert kv.shape[3] == block_tokens and kv.stride()[3:] == (problem.head_dim, 1), kv.stride()
        kernel(
            k_TKD.data_ptr(), v_TKD.data_ptr(), kv.data_ptr(), slot_T.data_ptr(),
            k_TKD.shape[0], k_TKD.shape[1], head_bytes, block_tokens, kv.shape[0],
            k_TKD.stride(0) * size, k_TKD.stride(1) * size,
            v_TKD.stride(0) * size, v_TKD.stride(1) * size,
            kv.stride(0) * size, kv.stride(1) * size, kv.stride(2) * size,
        )  # fmt: skip

    return kv_write


KERNEL = Kernel(
    name="native",
    supports=lambda problem: unsupported(problem.device, problem.dtype),
    bind=lambda problem: bind_with(loaded(), problem),
)
