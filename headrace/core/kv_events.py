"""What becomes findable in the prefix cache and what is forgotten, as events that routers read
(`--kv-events-path`), in the form of vLLM's: arrays that begin with their names.

    BlockStored       names, the name of the block before (None: a beginning), token ids, tokens of
                      a block, None
    BlockRemoved      names
    AllBlocksCleared

A name is the block's hash, which is of this process alone: routers follow chains by their
tokens."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import numpy as np

from headrace.base.errors import ConfigError
from headrace.base.wire.request import EngineRequest
from headrace.core.kv.manager import KVManager
from headrace.core.ports import AdmissionHook, AdmissionVerdict, none_computed
from headrace.core.reports import EngineView
from headrace.core.request import TOKEN_BYTES

Event = tuple[object, ...]
MAX_PENDING = 1 << 16
"""Blocks that have a name and are not computed yet; the oldest one is told without its tokens."""


def group_of_events(kv: KVManager) -> int:
    """The first group of caches whose blocks are those of the hash chain; ConfigError without
    any."""
    for group, (kind, ratio) in enumerate(zip(kv.kinds, kv.ratios, strict=True)):
        if kind.shares and ratio == 1 and group not in kv.snapshots:
            return group
    raise ConfigError(
        "--kv-events-path: no cache of this model has blocks that prefixes are found by",
        field="kv_events_path",
    )


def publish(kv: KVManager, tell: Callable[[Event], None]) -> None:
    """From now on `tell` gets the events of a cache. In the place of its methods, so that one that
    nobody reads does nothing for it."""
    group, pool, hasher = group_of_events(kv), kv.pool, kv.hasher
    pending: OrderedDict[bytes, tuple[bytes, bytes]] = OrderedDict()
    stored: set[bytes] = set()
    extend, tag, forget_all = hasher.extend, pool.tag, pool.forget_all

    def watched_extend(parent: bytes, token_bytes: bytes) -> bytes:
        digest = extend(parent, token_bytes)
        pending[digest] = parent, token_bytes
        if len(pending) > MAX_PENDING:
            pending.popitem(last=False)
        return digest

    def watched_tag(of: int, block: int, digest: bytes) -> None:
        tag(of, block, digest)
        if of == group and digest not in stored and pool.find(of, digest) is not None:
            stored.add(digest)
            parent, token_bytes = pending.pop(digest, (b"", b""))
            whole = token_bytes[: kv.block_tokens * TOKEN_BYTES]
            ids = np.frombuffer(whole, "<i4").tolist()
            before = parent if parent in stored else None
            tell(("BlockStored", [digest], before, ids, kv.block_tokens, None))

    def forgotten(of: int, digest: bytes) -> None:
        if of == group and digest in stored:
            stored.discard(digest)
            tell(("BlockRemoved", [digest]))

    def watched_forget_all() -> None:
        forget_all()
        stored.clear()
        tell(("AllBlocksCleared",))

    pool.on_forgotten = forgotten
    vars(hasher).update(extend=watched_extend)
    vars(pool).update(tag=watched_tag, forget_all=watched_forget_all)


class KVEvents(AdmissionHook):
    """Follows the cache that a core has, also when it gets another one."""

    name = "kv_events"

    def __init__(self, tell: Callable[[Event], None], engine: Callable[[], EngineView]) -> None:
        self._tell, self._engine = tell, engine
        self._kv: KVManager | None = None

    @property
    def follows_drafts(self) -> bool:
        """See AdmissionHook."""
        return True

    def admit(self, request: EngineRequest) -> AdmissionVerdict:
        """See AdmissionHook."""
        self.renew()
        return AdmissionVerdict("yes")

    def ready(
        self, request_id: int, computed: Callable[[], int] = none_computed
    ) -> AdmissionVerdict:
        """See AdmissionHook."""
        return AdmissionVerdict("yes")

    def payload(self, request_ids: list[int]) -> bytes | None:
        """See AdmissionHook."""
        return None

    def finish(self, request_id: int) -> None:
        """See AdmissionHook."""

    def renew(self) -> None:
        """See AdmissionHook: the cache is another one, with nothing in it."""
        kv = self._engine().kv
        if kv is not self._kv:
            self._kv = kv
            publish(kv, self._tell)
            self._tell(("AllBlocksCleared",))
