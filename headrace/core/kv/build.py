"""The KV manager of an engine core, as its configuration wants it."""

from __future__ import annotations

from msgspec.structs import replace

from headrace.base.config.resolved import EngineSpec
from headrace.base.wire.step import WorkerFacts
from headrace.core.kv.kinds import BLOCKWISE
from headrace.core.kv.manager import KVManager


def kv_manager_of(spec: EngineSpec, facts: WorkerFacts) -> KVManager:
    """Over the caches that the workers state."""
    return KVManager(
        _in_blocks(facts) if facts.block_length and facts.groups else facts,
        prefix_caching=spec.kv.prefix_caching,
        chunk_tokens=spec.scheduler.max_step_tokens,
        choices=spec.kv.choices,
    )


def _in_blocks(facts: WorkerFacts) -> WorkerFacts:
    """Of a text that is written in blocks, several of which make a KV block."""
    assert facts.block_tokens % facts.block_length == 0, facts
    assert {group.kind for group in facts.groups} == {"full"}, facts.groups
    return replace(facts, groups=tuple(replace(one, kind=BLOCKWISE) for one in facts.groups))
