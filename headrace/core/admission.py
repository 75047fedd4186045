"""Whether a request may enter: its numbers, its size against the pool, and the room in the queue.

The front checks requests too; this is the last line: whatever would be fatal on the device is
compared here with the model's own widths, before the request touches anything. Pure checks; nothing
is changed.
"""

from __future__ import annotations

import random
import sys
from itertools import islice

import numpy as np

from headrace.base import extensions
from headrace.base.config.resolved import KVSpec, SchedulerSpec
from headrace.base.errors import (
    ConfigError,
    ContextTooLong,
    InvalidRequest,
    QueueFull,
    RateLimited,
    Unavailable,
)
from headrace.base.wire.pooling import POOLINGS
from headrace.base.wire.repetition import MAX_PATTERN_COUNT, MAX_PATTERN_TOKENS
from headrace.base.wire.request import (
    BOUNDS,
    LOGPROBS_MODES,
    MARGIN,
    QUANTILES,
    ROW_BOUNDS,
    ROW_INTEGERS,
    Bound,
    EngineRequest,
    Load,
    RowSampling,
    check_between,
    order_s,
)
from headrace.base.wire.sampler_chain import SAMPLERS
from headrace.base.wire.step import WorkerFacts
from headrace.core.blockwise import check_blockwise
from headrace.core.capture_checks import check_capture
from headrace.core.kv.manager import KVManager
from headrace.core.media_checks import check_media, check_spectrogram
from headrace.core.request import TOKEN_BYTES, Request
from headrace.core.scheduler.scheduler import Scheduler
from headrace.core.service_state import RETRY_S, Counters, ServiceState

MAX_ID = (1 << 63) - 1
MAX_PRIORITY = 1 << 31
MAX_TEXT = 128
MAX_EXTRA_KEYS = 4096
MAX_IDS = 1 << 20
MAX_RETRY_S = 120.0

_WEIGHT = Bound(0.0, sys.float_info.max, above=True)
_SECONDS = Bound(-sys.float_info.max, sys.float_info.max)


def check_request(request: EngineRequest, facts: WorkerFacts, kv: KVManager) -> int:
    """Refuses what is malformed or can never run; returns the length at which the request ends."""
    _check_scalars(request)
    _check_prompt(request.prompt, facts.logits_width)
    _check_stop(request, facts.logits_width)
    check_sampling(request.sampling, facts.logits_width)
    _check_pooling(request, facts)
    if facts.block_length:
        check_blockwise(request)
    if facts.encoder_tokens or facts.spectrogram or request.encoder:
        _check_encoder(request.encoder, facts)
    num_prompt = len(request.prompt) // TOKEN_BYTES
    length = _length_limit(num_prompt, request.stop.max_tokens, facts, kv)
    if request.sampling.capture_layers or request.sampling.control_vectors:
        check_capture(request.sampling, length, facts)
    if request.media:
        check_media(request, facts)
    return length


def _check_scalars(request: EngineRequest) -> None:
    check_between("id", request.id, 0, MAX_ID)
    check_between("priority", request.priority, -MAX_PRIORITY, MAX_PRIORITY)
    check_between("length of tenant", len(request.tenant), 0, MAX_TEXT)
    check_between("length of cache_salt", len(request.cache_salt), 0, MAX_TEXT)
    check_between("number of extra_keys", len(request.extra_keys), 0, MAX_EXTRA_KEYS)
    _WEIGHT.check("weight", request.weight)
    _SECONDS.check("deadline_s", request.deadline_s or 0.0)


def _check_prompt(prompt: bytes, width: int) -> None:
    if not prompt or len(prompt) % TOKEN_BYTES:
        raise InvalidRequest(
            f"the prompt has {len(prompt)} bytes, it needs at least one token of {TOKEN_BYTES}",
            field="prompt",
        )
    ids = np.frombuffer(prompt, "<i4")
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= width:
        raise InvalidRequest(
            f"token id {low if low < 0 else high} is outside 0 .. {width - 1}", field="prompt"
        )


def _check_encoder(encoder: bytes, facts: WorkerFacts) -> None:
    if facts.spectrogram:
        check_spectrogram(encoder, facts.spectrogram)
        return
    if not facts.encoder_tokens:
        raise InvalidRequest("the model has no encoder that reads tokens", field="prompt")
    _check_prompt(encoder, facts.encoder_vocabulary or facts.logits_width)
    num_tokens = len(encoder) // TOKEN_BYTES
    if num_tokens > facts.encoder_tokens:
        raise ContextTooLong(
            f"the prompt has {num_tokens} tokens, the model's encoder reads {facts.encoder_tokens}",
            field="prompt",
        )


def _check_stop(request: EngineRequest, width: int) -> None:
    stop = request.stop
    check_between("max_tokens", stop.max_tokens, 0, MAX_ID)
    check_between("min_tokens", stop.min_tokens, 0, stop.max_tokens)
    _check_ids("stop_ids", stop.stop_ids, width)
    if (rule := stop.repetition) is not None:
        most = rule.max_pattern_size
        check_between("repetition_detection.max_pattern_size", most, 1, MAX_PATTERN_TOKENS)
        check_between("repetition_detection.min_pattern_size", rule.min_pattern_size, 0, most)
        check_between("repetition_detection.min_count", rule.min_count, 2, MAX_PATTERN_COUNT)


def check_sampling(sampling: RowSampling, width: int) -> None:
    """Refuses what the sampler could not bear: numbers that are not finite, ids beyond the
    logits."""
    for name, bound in ROW_BOUNDS.items():
        bound.check(name, getattr(sampling, name))
    for name, least, greatest in ROW_INTEGERS:
        check_between(name, getattr(sampling, name), least, greatest)
    _all_of("logprobs_mode", (sampling.logprobs_mode,), LOGPROBS_MODES)
    _all_of("samplers", sampling.samplers, SAMPLERS)
    check_between("logprobs", sampling.logprobs or 0, -1, width)
    check_between("prompt_logprobs", sampling.prompt_logprobs or 0, -1, width)
    for name in ("suppressed_ids", "logprob_ids", "dry_breaker_ids", "logit_bias"):
        _check_ids(name, tuple(getattr(sampling, name)), width)
    for bias in sampling.logit_bias.values():
        BOUNDS["logit_bias"].check("logit_bias", bias)
    if sampling.logits_processors:
        extensions.check_processors(sampling.logits_processors)
    for words in sampling.bad_words:
        _check_ids("bad_words", words, width)
    if sampling.allowed_ids is not None:
        _check_ids("allowed_ids", sampling.allowed_ids, width)
        if not sampling.allowed_ids:
            raise InvalidRequest(
                "allowed_ids is empty: no token could be sampled", field="allowed_ids"
            )


def _all_of(field: str, values: tuple[str, ...], known: tuple[str, ...]) -> None:
    if not {*values} <= {*known}:
        raise InvalidRequest(f"{field}: {values}, not of {', '.join(known)}", field=field)


def _length_limit(num_prompt: int, max_tokens: int, facts: WorkerFacts, kv: KVManager) -> int:
    """The request's final length. Bounded by its prompt, never refused for what it might
    generate."""
    if num_prompt > facts.max_model_len:
        raise ContextTooLong(
            f"the prompt has {num_prompt} tokens, the model's context holds {facts.max_model_len}",
            field="prompt",
        )
    if num_prompt > kv.capacity_tokens:
        raise kv.never_fits(num_prompt)
    if max_tokens and num_prompt == kv.capacity_tokens:
        raise ContextTooLong(
            f"the prompt has {num_prompt} tokens and leaves no room for an answer: at most "
            f"{kv.capacity_tokens} tokens fit in all",
            field="prompt",
        )
    return min(num_prompt + max_tokens, kv.capacity_tokens)


def check_stated_length(spec: KVSpec, kv: KVManager) -> None:
    """Refuses to start where one sequence of the stated length does not fit the stated memory."""
    if spec.least_tokens is None or spec.least_tokens <= kv.capacity_tokens:
        return
    raise ConfigError(
        f"--max-model-len {spec.least_tokens}: --kv-memory {spec.memory_bytes} bytes holds sequences "
        f"of {kv.capacity_tokens} tokens at most ({kv.pool.num_usable} KV {kv.pool.unit}, "
        f"{kv.least_needed(spec.least_tokens)} are needed): raise the one or lower the other",
        field="max_model_len",
    )


def check_open(service: ServiceState, load: Load) -> None:
    """Unavailable where no request is taken: while draining, and without weights."""
    if service.lost:
        raise Unavailable(service.lost, retry_after_s=RETRY_S)
    if service.draining:
        wait_s = retry_after_s(load, ahead=load.waiting)
        raise Unavailable("the engine is draining", retry_after_s=wait_s)


def check_policy(spec: SchedulerSpec, request: EngineRequest) -> None:
    """Refuses a priority where the queue has none, rather than ignoring it."""
    if request.priority and spec.policy != "priority":
        raise InvalidRequest(
            f"priority is {request.priority}: this engine orders its queue by {spec.policy}; only "
            "with --policy priority it may be other than 0",
            field="priority",
        )


def check_share(spec: SchedulerSpec, load: Load, tokens: int, num_prompt: int) -> None:
    """Refuses a request whose key has `tokens` prompt tokens in flight and may have no more."""
    most = spec.max_prompt_tokens_per_key
    if most is not None and tokens + num_prompt > most:
        raise RateLimited(
            f"this key has {tokens} prompt tokens in flight, with these {num_prompt} more than the "
            f"{most} it may have (max_prompt_tokens_per_key); wait for a request to end",
            retry_after_s=retry_after_s(load, ahead=0),
        )


def load_of(scheduler: Scheduler, counters: Counters) -> Load:
    """What waits, and at which rates the engine works."""
    queue, prompt = scheduler.queue, counters.prompt_tokens.value
    computed = counters.computed_tokens.value
    lacks_blocks = any(request.need_blocks for request in islice(queue, QUANTILES))
    return Load(
        waiting=len(queue),
        waiting_tokens=queue.num_tokens,
        running=scheduler.num_running,
        rows=scheduler.num_running if lacks_blocks else scheduler.rows.num_rows,
        prefill_token_s=scheduler.prefill_budget.prefill_token_s,
        decode_step_s=scheduler.prefill_budget.decode_step_s,
        prompt_tokens=computed,
        output_tokens=counters.output_tokens_each.value,
        computed_share=computed / prompt if prompt else 1.0,
        steps_ahead=int(scheduler.spec.overlap),
    )


def due_times(scheduler: Scheduler, now: float) -> tuple[float, ...]:
    """The quantiles of `Load.dues`."""
    if scheduler.spec.policy != "fcfs":
        return ()
    return tuple(
        request.arrived_at + order_s(request.wire.deadline_s) - now
        for request in scheduler.queue.quantiles(QUANTILES)
    )


def check_queue(spec: SchedulerSpec, load: Load, num_tokens: int) -> None:
    """Refuses a request the queue has no room for. One that could start at once does not count as
    waiting."""
    if load.waiting >= spec.max_queued_requests + load.rows - load.running:
        raise QueueFull(
            f"{load.waiting} requests wait already, at most {spec.max_queued_requests} may",
            retry_after_s=retry_after_s(load, ahead=load.waiting),
        )
    if load.waiting and load.waiting_tokens + num_tokens > spec.max_queued_tokens:
        raise QueueFull(
            f"{load.waiting_tokens} prompt tokens wait already, with these {num_tokens} more than "
            f"the {spec.max_queued_tokens} that may",
            retry_after_s=retry_after_s(load, ahead=load.waiting),
        )


def worse_waiting(scheduler: Scheduler, wire: EngineRequest) -> Request | None:
    """Under the priority policy: the queued request that must make room for a more urgent one."""
    if scheduler.spec.policy != "priority":
        return None
    fresh = (request for request in scheduler.queue if request.scheduled_at is None)
    worst = max(fresh, key=lambda request: request.key, default=None)
    return worst if worst is not None and worst.wire.priority > wire.priority else None


def check_deadline(load: Load, request: EngineRequest, *, ahead: float) -> None:
    """Refuses a request that, with so many before it, is not expected to be done in its time. For
    those that cannot start at once: how long an answer becomes is only a guess."""
    if request.deadline_s is None:
        return
    wait_s = load.wait_s(ahead)
    expected_s = wait_s + _service_s(load, request)
    if expected_s * MARGIN > request.deadline_s:
        raise QueueFull(
            f"about {ahead:.0f} requests are before this one, which would be done in about "
            f"{expected_s:.2g} s; its time is {request.deadline_s:.3g} s (timeout_s)",
            retry_after_s=retry_after_s(load, ahead=ahead),
        )


def latest_start_s(load: Load, request: EngineRequest) -> float:
    """Seconds from now until it is too late to start a request and be done in its time."""
    deadline_s = request.deadline_s or 0.0
    latest_s = deadline_s - _service_s(load, request)
    return latest_s if latest_s > 0.0 else deadline_s


def _service_s(load: Load, request: EngineRequest) -> float:
    stop = request.stop
    output = load.output_of(min_tokens=stop.min_tokens, max_tokens=stop.max_tokens)
    num_prompt = len(request.prompt) // TOKEN_BYTES
    return load.service_s(num_prompt=num_prompt, output_tokens=output)


def retry_after_s(load: Load, *, ahead: float) -> float:
    """When to come back: the predicted wait behind so many, spread by a quarter so that not all
    come back at once; a second while no rates are known."""
    wait_s = load.wait_s(ahead) or 1.0
    return min(MAX_RETRY_S, wait_s) * random.uniform(1.0, 1.25)


def _check_pooling(request: EngineRequest, facts: WorkerFacts) -> None:
    pooling = request.pooling
    if pooling is None:
        if not facts.generates:
            raise InvalidRequest(
                "the model does not generate text: it embeds, classifies or, with --mm-encoder-only, "
                "encodes media for other servers"
            )
        return
    if request.stop.max_tokens != 0 or request.sampling.prompt_logprobs is not None:
        raise InvalidRequest("a pooled request makes no tokens: max_tokens must be 0")
    known_ways = (*POOLINGS, *extensions.allowed(extensions.POOLERS))
    if pooling.how not in known_ways:
        known = ", ".join(known_ways)
        raise InvalidRequest(f"pooling is {pooling.how!r}, not one of {known}", field="pooling")
    for name in ("second_at", "first"):
        check_between(name, getattr(pooling, name), 0, len(request.prompt) // TOKEN_BYTES)


def _check_ids(name: str, ids: tuple[int, ...], width: int) -> None:
    if not ids:
        return
    check_between(f"number of {name}", len(ids), 0, MAX_IDS)
    check_between(name, min(ids), 0, width - 1)
    check_between(name, max(ids), 0, width - 1)
