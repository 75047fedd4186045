"""How long sequences may be: what the model states, and what the KV memory holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from headrace.base.config.resolved import DeviceSpec, EngineSpec
from headrace.base.config.tree import Options
from headrace.launch.model_facts import ModelFacts

LARGEST = -1
"""As --max-model-len: what both the model and the KV memory hold, as with auto."""


def states_length(options: Options) -> bool:
    """Whether the user says how long sequences may be, in tokens."""
    return options.model.max_model_len not in ("auto", LARGEST)


def block_span(options: Options, model: ModelFacts) -> int:
    """Tokens of a sequence that a KV block stands for: those on other ranks that share it out among
    them, but where windows keep caches whole."""
    shared = options.device.decode_context_parallel_size
    return options.kv.block_tokens * (shared if set(model.windows) == {None} else 1)


def tokens_of_blocks(options: Options, model: ModelFacts) -> int | None:
    """The most tokens that a stated number of KV blocks holds; None if it is not stated, or bounds
    no sequence as every layer has a window. Block 0 belongs to nobody."""
    blocks = options.kv.kv_blocks
    if blocks is None or model.encodes or None not in model.windows:
        return None
    halves = 2 if model.encoder_tokens else 1
    return max(1, (blocks - 1) // halves) * block_span(options, model)


def encoder_tokens(options: Options, model: ModelFacts, max_model_len: int) -> int:
    """The most that an encoder reads: what a stated length allows, else its own positions, if they
    are more than its decoder's, or those of an image if it reads nothing else."""
    if model.media is not None and model.media.alone:
        return model.encoder_tokens
    if model.encoder_tokens > model.max_model_len and not states_length(options):
        return model.encoder_tokens
    return min(model.encoder_tokens, max_model_len)


def with_short_tables(
    engine: EngineSpec,
    options: Options,
    model: ModelFacts,
    note: Callable[[str, Any, Any, str], None],
) -> EngineSpec:
    """Without a stated length, tables of positions are no longer than what the KV memory holds: a
    model may state millions of positions."""
    memory, longest = engine.kv.memory_bytes, engine.model.max_model_len
    if states_length(options) or memory is None:
        return engine
    held = _held_tokens(memory, model, engine.device)
    if held is None or held >= longest:
        return engine
    requested = options.model.max_model_len
    note("tables of positions", requested, held, f"the KV memory holds no more of {longest}")
    shorter = msgspec.structs.replace(engine.model, max_model_len=held)
    return msgspec.structs.replace(engine, model=shorter)


def _held_tokens(memory_bytes: int, model: ModelFacts, device_spec: DeviceSpec) -> int | None:
    """The most tokens of one sequence that so much KV memory of a worker can hold, about; None if
    it bounds none. Quantized caches hold up to four times as many as the model's dtype."""
    full = sum(window is None for window in model.windows)
    if not full or not model.kv_bytes_per_token:
        return None
    layer_bytes = model.kv_bytes_per_token / len(model.windows) / device_spec.world_size / 4
    windows = sum(window for window in model.windows if window is not None)
    return max(1, int((memory_bytes - windows * layer_bytes) / (full * layer_bytes)))
