"""The cache of keys and values by heads, as the layers that fill and read it bind its kernels."""

from __future__ import annotations

from typing import Any

import torch

from headrace.back.kernels.kv_write.op import OP as KV_WRITE
from headrace.back.kernels.kv_write.op import KVWrite, KVWriteProblem
from headrace.back.layers.scope import Scope


def cached_heads(scope: Scope, *, kv_heads: int, head_dim: int) -> dict[str, Any]:
    """What problems of ops over the cache have in common; with this rank's heads."""
    return {
        "device": scope.kind,
        "dtype": scope.dtype,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "block_tokens": scope.block_tokens,
        "quantized": scope.kv_quantized,
    }


def bind_kv_write(
    scope: Scope, *, kv_heads: int, head_dim: int, scales: tuple[torch.Tensor, ...] = ()
) -> KVWrite:
    """Op kv_write. `scales`: those of a quantized cache, if they are fixed."""
    problem = KVWriteProblem(
        **cached_heads(scope, kv_heads=kv_heads, head_dim=head_dim), fixed=bool(scales)
    )
    write: KVWrite = scope.bind(KV_WRITE, problem, *scales)
    return write
