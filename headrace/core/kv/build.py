"""The KV manager of an engine core, as its configuration wants it."""

from __future__ import annotations

from headrace.base.config.resolved import EngineSpec
from headrace.base.wire.step import WorkerFacts
from headrace.core.kv.manager import KVManager


def kv_manager_of(spec: EngineSpec, facts: WorkerFacts) -> KVManager:
    """Over the caches that the workers state."""
    return KVManager(
        facts,
        prefix_caching=spec.kv.prefix_caching,
        chunk_tokens=spec.scheduler.max_step_tokens,
        choices=spec.kv.choices,
    )
