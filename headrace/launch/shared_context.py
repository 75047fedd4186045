"""Decode context parallelism in `resolve`: which ranks share out the KV of sequences. What does not
go with it: rank_modes.py."""

from __future__ import annotations

from headrace.base.config.resolved import ContextSpec
from headrace.base.config.tree import Options
from headrace.base.errors import ConfigError
from headrace.launch.model_facts import ModelFacts


def context_spec(options: Options, model: ModelFacts) -> ContextSpec | None:
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
    for kv_heads in model.cache_heads:
        _check_heads(size, requested.tensor_parallel, kv_heads)
    return ContextSpec(ranks=size, interleave=every, exchange=requested.dcp_comm_backend)


def _check_heads(size: int, ranks: int, kv_heads: int) -> None:
    """ConfigError unless so many ranks hold each of a layer's KV heads a multiple of `size` times:
    what several ranks hold is all they can share out."""
    if ranks % (kv_heads * size):
        fitting = [str(n) for n in range(2, ranks + 1) if ranks % (kv_heads * n) == 0]
        allowed = f"allowed: {', '.join(fitting)}" if fitting else "allowed: 1"
        raise ConfigError(
            f"--decode-context-parallel-size {size}: the {ranks} devices of --tensor-parallel do "
            f"not hold each of the {kv_heads} KV heads of a layer a multiple of {size} times; "
            f"{allowed}, or raise --tensor-parallel to a multiple of {kv_heads * size}",
            field="decode_context_parallel_size",
        )
