"""Sampling by the native kernel: the same choice as the reference, without a logarithm for most
tokens."""

from __future__ import annotations

import torch

from headrace.back.kernels.gumbel.op import Gumbel
from headrace.back.kernels.native.library import INT64, POINTER, NativeLibrary, loaded, unsupported
from headrace.back.kernels.op import Kernel


def bind_with(library: NativeLibrary) -> Gumbel:
    """The kernel of one library."""
    kernel = library.bind("gumbel", *(POINTER,) * 5, *(INT64,) * 3)

    def gumbel(
        logits_KV: torch.Tensor, temperature_K: torch.Tensor, key_K: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows, width = logits_KV.shape
        assert logits_KV.dtype == torch.float32 and logits_KV.stride(1) == 1, logits_KV.stride()
        assert temperature_K.dtype == torch.float64 and key_K.dtype == torch.int64
        assert temperature_K.shape == key_K.shape == (rows,), (temperature_K.shape, key_K.shape)
        assert temperature_K.is_contiguous() and key_K.is_contiguous()
        token_K = torch.empty(rows, dtype=torch.int64)
        z_K = torch.empty(rows, dtype=torch.float64)
        kernel(
            logits_KV.data_ptr(), temperature_K.data_ptr(), key_K.data_ptr(),
            token_K.data_ptr(), z_K.data_ptr(), rows, width, logits_KV.stride(0),
        )  # fmt: skip
        return token_K, z_K

    return gumbel


KERNEL = Kernel(
    name="native",
    supports=lambda problem: unsupported(problem.device, torch.float32),
    bind=lambda problem: bind_with(loaded()),
)
