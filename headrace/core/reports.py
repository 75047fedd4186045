"""What the engine core reports about itself: status, metrics, and where a request is and why it
waits. Reads only; control.py answers calls with it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Protocol

from headrace.base.config.resolved import SchedulerSpec
from headrace.base.process_memory import descendants, resident_bytes
from headrace.base.wire.control import Hello
from headrace.base.wire.step import RecordedGraphs
from headrace.core.adapters import Adapters
from headrace.core.admission import load_of
from headrace.core.kv.manager import KVManager
from headrace.core.ports import Executor
from headrace.core.request import NOT_LOOKED_AT, Request, RowTable
from headrace.core.scheduler.queue import AdmissionHooks
from headrace.core.scheduler.scheduler import Scheduler
from headrace.core.service_state import STEP_TOKENS, Counters, ServiceState
from headrace.core.stall import StallWatch
from headrace.core.weights import Weights

Document = dict[str, object]


class EngineView(Protocol):
    """What reports read of the engine core."""

    graphs: RecordedGraphs
    spec: SchedulerSpec
    adapters: Adapters | None
    weights: Weights
    stall: StallWatch

    @property
    def executor(self) -> Executor:
        """The executor installed now."""
        ...

    @property
    def failing(self) -> str:
        """Why answers are not to be expected although requests are there, or ""."""
        ...

    @property
    def service(self) -> ServiceState:
        """Pause, drain and sleep."""
        ...

    @property
    def scheduler(self) -> Scheduler:
        """The scheduler and its queue."""
        ...

    @property
    def kv(self) -> KVManager:
        """The KV blocks."""
        ...

    @property
    def rows(self) -> RowTable:
        """The running requests."""
        ...

    @property
    def hooks(self) -> AdmissionHooks:
        """The admission hooks."""
        ...

    @property
    def counters(self) -> Counters:
        """Totals since start."""
        ...

    @property
    def clock(self) -> Callable[[], float]:
        """Monotonic seconds."""
        ...

    @property
    def num_in_flight(self) -> int:
        """Steps submitted and not yet taken in."""
        ...


def explain(engine: EngineView, request: Request) -> Document:
    """Where a request is, and why it waits."""
    now = engine.clock()
    waits = request.row < 0
    return {
        "label": request.wire.label,
        "external_id": request.wire.external_id,
        "state": request.state.value,
        "reason": reason_of(engine, request),
        "position": engine.scheduler.queue.position(request) if waits else None,
        "since_s": now - request.since,
        "age_s": now - request.arrived_at,
        "num_prompt": request.num_prompt,
        "num_output": engine.rows.count_known(request) - request.num_prompt,
        "num_cached": request.num_cached,
        "num_preemptions": request.num_preemptions,
        "steps_passed_over": request.passed_over,
        "kv_blocks": sum(block != 0 for blocks in request.blocks for block in blocks),
    }


def slots(engine: EngineView, *, tenant: str | None) -> list[Document]:
    """Every row, as llama.cpp's server lists its slots. Which request has a row, only its own
    tenant is told (None: anybody)."""
    length = engine.executor.facts.max_model_len
    rows: list[Document] = [
        {"id": row, "n_ctx": length, "is_processing": False} for row in range(engine.rows.num_rows)
    ]
    for request in engine.scheduler.running():
        is_own = tenant in (None, request.wire.tenant)
        rows[request.row] |= {
            "is_processing": True,
            "id_task": request.wire.label if is_own else None,
            "n_prompt": request.num_prompt,
            "n_cached": request.num_cached,
            "n_decoded": engine.rows.count_known(request) - request.num_prompt,
        }
    return rows


def hello_of(engine: EngineView) -> Hello:
    """What fronts must know to check requests."""
    facts, spec, service = engine.executor.facts, engine.spec, engine.service
    rows = engine.rows.num_rows
    bounded, stall = spec.policy != "priority", engine.stall.now
    return Hello(
        logits_width=facts.logits_width,
        max_model_len=facts.max_model_len,
        capacity_tokens=engine.kv.capacity_tokens,
        max_running=rows,
        step_tokens=spec.max_step_tokens,
        max_in_flight=rows + spec.max_queued_requests if bounded else None,
        num_blocks=facts.num_blocks,
        block_tokens=facts.block_tokens,
        cached_block_tokens=facts.block_tokens if engine.kv.prefix_caching else 0,
        trouble=service.trouble,
        failing="" if stall is not None and not stall.is_lost else engine.failing,
        stalled=engine.stall.text,
        held=service.held,
        adapters=() if engine.adapters is None else engine.adapters.names,
        log_level=service.log_level,
        weights_version=engine.weights.versions.now,
        start_s=facts.start_s,
        decisions=facts.decisions,
        media=facts.media,
        media_tokens=facts.media_tokens,
    )


def reason_of(engine: EngineView, request: Request) -> str:
    """Why a request waits, or what it does. The scheduler notes what it saw of this one; what
    holds for all is said here."""
    service = engine.service
    if service.lost:
        return f"no weights: {service.lost}"
    if service.asleep:
        return "asleep: the engine sleeps until it is woken"
    if service.frozen:
        return "paused: keep"
    if request.row >= 0:
        return request.reason
    if not service.admits and request.scheduled_at is None:
        return f"paused: {service.mode}"
    if not engine.rows.num_free:
        return f"rows: all {engine.rows.num_rows} are taken (max_running)"
    if request.reason == NOT_LOOKED_AT:
        return "budget: the step had no tokens left for its prompt"
    return request.reason


def waiting_by_reason(engine: EngineView) -> dict[str, int]:
    """Waiting requests by the first words of their reasons."""
    queue = engine.scheduler.queue
    return dict(Counter(reason_of(engine, request).partition(":")[0] for request in queue))


def waiting_by_tenant(engine: EngineView) -> dict[str, int]:
    """Waiting requests by the beginning of the tenant's digest: enough to tell them apart."""
    return dict(Counter(request.wire.tenant[:8] or "no key" for request in engine.scheduler.queue))


def adapter_requests(engine: EngineView) -> Document | None:
    """Adapters of the requests in flight by state, and the slots; None of an engine without."""
    if engine.adapters is None:
        return None
    running, waiting = engine.scheduler.running(), engine.scheduler.queue
    return {
        "slots": engine.adapters.num_slots,
        "running": sorted({one.wire.adapter for one in running if one.wire.adapter}),
        "waiting": sorted({one.wire.adapter for one in waiting if one.wire.adapter}),
    }


def _predicted_wait_s(engine: EngineView) -> float:
    """How long a request that came now would wait; 0 while no rates are known."""
    load = load_of(engine.scheduler, engine.counters)
    return load.wait_s(load.waiting) or 0.0


def status(engine: EngineView) -> Document:
    """The ledger of a server at rest: everything that could leak, in numbers."""
    pool, scheduler, service = engine.kv.pool, engine.scheduler, engine.service
    return {
        "running": scheduler.num_running,
        "waiting": len(scheduler.queue),
        "waiting_tokens": scheduler.queue.num_tokens,
        "waiting_by_reason": waiting_by_reason(engine),
        "waiting_by_tenant": waiting_by_tenant(engine),
        "in_flight_steps": engine.num_in_flight,
        "free_blocks": pool.num_free,
        "cached_blocks": pool.num_cached,
        "total_blocks": pool.num_usable,
        "block_tokens": engine.kv.block_tokens,
        "held_blocks": pool.num_usable - pool.num_free,
        "refcount_sum": pool.refcount_sum() + engine.kv.snapshots.num_held,
        "cached_snapshots": engine.kv.snapshots.num_cached,
        "total_snapshots": engine.kv.snapshots.num_usable,
        "free_rows": engine.rows.num_free,
        "total_rows": engine.rows.num_rows,
        "capacity_tokens": engine.kv.capacity_tokens,
        "paused": service.mode,
        "draining": service.draining,
        "asleep": service.asleep,
        "sleep_level": service.sleep_level,
        "weights_version": engine.weights.versions.now,
        "weights_mixed": engine.weights.mixed,
        "tokens_per_s": engine.counters.rate,
        "predicted_wait_s": _predicted_wait_s(engine),
        "stalled_s": engine.stall.seconds,
        "stalled": engine.stall.text,
        "adapter_requests": adapter_requests(engine),
        "rss_bytes": resident_bytes(),
        "workers_rss_bytes": sum(map(resident_bytes, descendants())),
        **({} if engine.kv.ages is None else engine.kv.ages.report()),
        **metrics(engine),
    }


def metrics(engine: EngineView) -> Document:
    """Totals since start."""
    counters, kv, stats = engine.counters, engine.kv, engine.scheduler.speculation.stats
    return {
        "steps": counters.steps,
        "rows": counters.rows,
        "tokens": counters.tokens,
        "output_tokens": counters.output_tokens,
        "jump_forward_tokens": counters.jump_forward_tokens,
        "failed_steps": counters.failed_steps,
        "drafts": stats.num_drafts,
        "draft_tokens": stats.num_draft_tokens,
        "accepted_draft_tokens": stats.num_accepted_tokens,
        "accepted_draft_tokens_by_position": stats.per_position.tolist(),
        "preemptions": engine.scheduler.num_preemptions,
        "prefix_query_tokens": kv.num_queries,
        "prefix_hit_tokens": kv.num_hits,
        "evictions": kv.pool.num_evictions,
        "refused": counters.refused,
        "stalls": engine.stall.count,
        "graphs": engine.graphs.count,
        "graph_bytes": engine.graphs.num_bytes,
        "weight_bytes": engine.executor.facts.weight_bytes,
        "held_by_hooks": engine.hooks.num_held,
        "kv_sent": counters.transfers.sent,
        "kv_sent_tokens": counters.transfers.sent_tokens,
        "kv_received": counters.transfers.received,
        "kv_received_tokens": counters.transfers.received_tokens,
        "kv_transfers_failed": counters.transfers.failed,
        "kv_stored_tokens": counters.transfers.stored_tokens,
        "kv_restored_tokens": counters.transfers.restored_tokens,
        **engine.hooks.figures(),
        "finished": dict(counters.finished),
        "step_tokens": _by_bound(counters.step_tokens),
        "plan_s": counters.plan_s,
        "update_s": counters.update_s,
    }


def _by_bound(counts: list[int]) -> dict[str, int]:
    """Greatest value of a bucket -> count."""
    return dict(zip([*map(str, STEP_TOKENS), "inf"], counts, strict=True))
