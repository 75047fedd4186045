"""Priorities that requests give to the KV of parts of their prompts (`kv_retention`): when a
request has ended, the blocks of its prompt that are still cached get them (kv/eviction.py)."""

from __future__ import annotations

from collections.abc import Callable

from headrace.base.errors import Unsupported
from headrace.base.wire.request import EngineRequest
from headrace.base.wire.retention import RETENTION, KVRetention, unpack_retention
from headrace.core.kv.eviction import RankedBlockPool
from headrace.core.kv_files import prompt_of
from headrace.core.ports import AdmissionHook, AdmissionVerdict, none_computed
from headrace.core.reports import EngineView
from headrace.core.request import Request

_YES = AdmissionVerdict("yes")


class KVRetentions(AdmissionHook):
    """The priorities of one core's requests. `engine`: the core, which is made with this hook."""

    name = RETENTION

    def __init__(self, engine: Callable[[], EngineView]) -> None:
        self._engine = engine
        self._held: dict[int, tuple[EngineRequest, list[KVRetention]]] = {}

    @property
    def num_held(self) -> int:
        """See AdmissionHook."""
        return len(self._held)

    @property
    def follows_drafts(self) -> bool:
        """See AdmissionHook: it acts when the request has ended."""
        return True

    def admit(self, request: EngineRequest) -> AdmissionVerdict:
        """See AdmissionHook."""
        if (raw := request.hook_payloads.get(RETENTION)) is not None:
            if request.adapter:
                why = f"{RETENTION}: not with an adapter, whose KV is of its own"
                raise Unsupported(why, field=RETENTION)
            self._held[request.id] = request, unpack_retention(raw)
        return _YES

    def ready(
        self, request_id: int, computed: Callable[[], int] = none_computed
    ) -> AdmissionVerdict:
        """See AdmissionHook."""
        return _YES

    def payload(self, request_ids: list[int]) -> bytes | None:
        """See AdmissionHook."""
        return None

    def finish(self, request_id: int) -> None:
        """See AdmissionHook: what is cached of the prompt gets its priorities."""
        held = self._held.pop(request_id, None)
        if held is None:
            return
        request = prompt_of(self._engine(), held[0])
        for part in held[1]:
            self._retain(request, part)

    def renew(self) -> None:
        """See AdmissionHook: nothing that is held is about workers."""

    def _retain(self, request: Request, part: KVRetention) -> None:
        kv = self._engine().kv
        assert isinstance(kv.pool, RankedBlockPool)
        end = request.num_prompt if part.end is None else min(part.end, request.num_prompt)
        for group, (kind, ratio) in enumerate(zip(kv.kinds, kv.ratios, strict=True)):
            if not kind.shares or group in kv.snapshots:
                continue
            size = ratio * kv.block_tokens
            for index in range(
                part.start // size, min(-(-end // size), request.num_prompt // size)
            ):
                block = kv.pool.find(group, kv.digest(request, (index + 1) * ratio - 1))
                if block is not None:
                    kv.pool.retain(block, part.priority, part.duration_s)
