"""KV write by the native kernel: one copy per token, head and half, or one-byte values and a
scale."""

from __future__ import annotations

import torch

from headrace.back.kernels.kv_write.op import KVWrite, KVWriteProblem
from headrace.back.kernels.kv_write.quantized import SCALE_BYTES, unfit, value_bytes
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

MAX_QUANTIZED_HEAD = 256
QUANTIZATION_IDS = {
    None: 0,
    "int8": 1,
    "fp8": 2,
    "fp8_e5m2": 3,
    "int4": 4,
    "nvfp4": 5,
    "int4-rotated": 6,
    "int3-rotated": 7,
    "turboquant-4bit": 8,
    "turboquant-3bit": 9,
    "nvfp4-4over6": 5,  # as it is read
}
"""How the native library numbers the forms of a cache."""
_ARGUMENTS = (*(POINTER,) * 4, *(INT64,) * 12)


def bind_with(
    library: NativeLibrary, problem: KVWriteProblem, scales_2K: torch.Tensor | None = None
) -> KVWrite:
    """The kernel of one library; keeps the scales."""
    if problem.quantized:
        return _bind_quantized(library, problem, scales_2K)
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


def _bind_quantized(
    library: NativeLibrary, problem: KVWriteProblem, scales_2K: torch.Tensor | None
) -> KVWrite:
    assert problem.quantized is not None and (scales_2K is not None) == problem.fixed, problem
    fixed = None
    if scales_2K is not None:
        assert scales_2K.shape == (2, problem.kv_heads) and scales_2K.dtype == torch.float32
        scales_2K = scales_2K.contiguous()
        fixed = scales_2K.data_ptr()
    width = value_bytes(problem.head_dim, problem.quantized) + SCALE_BYTES
    kernel = library.bind("kv_write_quantized", POINTER, *_ARGUMENTS, INT32, INT32)
    head_dim, block_tokens, element = problem.head_dim, problem.block_tokens, DTYPES[problem.dtype]

    def kv_write(
        k_TKD: torch.Tensor, v_TKD: torch.Tensor, kv: torch.Tensor, slot_T: torch.Tensor
    ) -> None:
        assert k_TKD.dtype == v_TKD.dtype == problem.dtype and kv.dtype == torch.int8, kv.dtype
        assert k_TKD.shape == v_TKD.shape and slot_T.shape[0] == k_TKD.shape[0], (
            k_TKD.shape,
            slot_T.shape,
        )
        assert k_TKD.stride(2) == v_TKD.stride(2) == 1
        assert slot_T.dtype == torch.int64 and slot_T.is_contiguous()
        assert kv.shape[3:] == (block_tokens, width) and kv.stride()[3:] == (width, 1), kv.stride()
        kernel(
            k_TKD.data_ptr(), v_TKD.data_ptr(), kv.data_ptr(), slot_T.data_ptr(), fixed,
            k_TKD.shape[0], k_TKD.shape[1], head_dim, block_tokens, kv.shape[0],
            k_TKD.stride(0), k_TKD.stride(1), v_TKD.stride(0), v_TKD.stride(1),
            kv.stride(0), kv.stride(1), kv.stride(2), element, QUANTIZATION_IDS[problem.quantized],
        )  # fmt: skip

    kv_write.__dict__["kept"] = scales_2K  # the kernel holds its address
    return kv_write


def _supports(problem: KVWriteProblem) -> str | None:
    if problem.quantized and problem.head_dim > MAX_QUANTIZED_HEAD:
        return f"quantizes heads of at most {MAX_QUANTIZED_HEAD}, not {problem.head_dim}"
    if reason := unfit(problem.quantized, problem.head_dim):
        return reason
    if problem.quantized == "nvfp4-4over6":
        return "writes nvfp4 whose groups end at 6"
    return unsupported(problem.device, problem.dtype)


KERNEL = Kernel(
    name="native",
    supports=_supports,
    bind=lambda problem, *scales: bind_with(loaded(), problem, *scales),
    invariant=True,
)
