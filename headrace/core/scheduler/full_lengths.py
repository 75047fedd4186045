"""A request starts only when all that it may become fits beside all that those which run may become
(`--no-evict`): none ever loses its place to another."""

from __future__ import annotations

from collections.abc import Callable

from headrace.base.wire.request import EngineRequest
from headrace.core.kv.manager import KVManager
from headrace.core.ports import AdmissionHook, AdmissionVerdict, none_computed
from headrace.core.request import TOKEN_BYTES

_YES = AdmissionVerdict("yes")


class FullLengths(AdmissionHook):
    """What is promised to the requests of one core, in units of the pool. `kv`: the cache that is
    installed now; `step_tokens`: the most one request computes in a step."""

    name = "no_evict"

    def __init__(self, kv: Callable[[], KVManager], step_tokens: int) -> None:
        self._kv, self._step_tokens = kv, step_tokens
        self._waiting: dict[int, int] = {}
        self._promised: dict[int, int] = {}

    @property
    def num_held(self) -> int:
        """See AdmissionHook."""
        return len(self._waiting) + len(self._promised)

    @property
    def follows_drafts(self) -> bool:
        """See AdmissionHook."""
        return True

    def admit(self, request: EngineRequest) -> AdmissionVerdict:
        """See AdmissionHook."""
        tokens = len(request.prompt) // TOKEN_BYTES + request.stop.max_tokens
        self._waiting[request.id] = tokens
        return _YES

    def ready(
        self, request_id: int, computed: Callable[[], int] = none_computed
    ) -> AdmissionVerdict:
        """See AdmissionHook."""
        if request_id in self._promised:
            return _YES
        usable, promised = self._kv().pool.num_usable, sum(self._promised.values())
        need = min(usable, self._most_needed(self._waiting[request_id]))
        if promised + need > usable and self._promised:
            why = f"needs {need} to its end, {promised} of {usable} are promised"
            return AdmissionVerdict("not_now", f"KV {self._kv().pool.unit}: {why}")
        self._promised[request_id] = need
        del self._waiting[request_id]
        return _YES

    def payload(self, request_ids: list[int]) -> bytes | None:
        """See AdmissionHook."""
        return None

    def finish(self, request_id: int) -> None:
        """See AdmissionHook."""
        self._waiting.pop(request_id, None)
        self._promised.pop(request_id, None)

    def renew(self) -> None:
        """See AdmissionHook: nothing runs, and the pool may be another."""
        self._waiting |= dict.fromkeys(self._promised, 0)

    def _most_needed(self, tokens: int) -> int:
        kv, chunk = self._kv(), self._step_tokens
        lengths = [kv.spans.get(group, tokens) for group in range(len(kv.kinds))]
        each = zip(kv.kinds, lengths, strict=True)
        return kv.pool.units([k.most_held(n, done=0, chunk_tokens=chunk) for k, n in each])
