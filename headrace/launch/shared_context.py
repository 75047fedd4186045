"""Decode context parallelism in `resolve`: which ranks share out the KV of sequences. What does not
go with it: rank_modes.py."""

from __future__ import annotations

from headrace.base.config.resolved import ContextSpec
from headrace.base.config.tree import Options
from headrace.base.errors import ConfigError


def context_spec(options: Options) -> ContextSpec | None:
    """How sequences are shared out; None: they are not. ConfigError where they cannot be."""
    requested, block_tokens = options.device, options.kv.block_tokens
    size, every = requested.decode_context_parallel_size, requested.dcp_kv_cache_interleave_size
    if size == 1:
        return None
    if requested.tensor_parallel % size:
        raise ConfigError(
            f"--decode-context-parallel-size {size} does not divide --tensor-parallel "
            f"{requested.tensor_parallel}",
            field="decode_context_parallel_size",
        )
    if block_tokens % every:
        raise ConfigError(
            f"--dcp-kv-cache-interleave-size {every} does not divide --block-tokens {block_tokens}",
            field="dcp_kv_cache_interleave_size",
        )
    return ContextSpec(ranks=size, interleave=every, exchange=requested.dcp_comm_backend)
