"""Compiles grammars off the loop, small ones first, and keeps the results, bounded in bytes.

Each thread has a sandbox process of its own: a grammar that is late or too large there is refused
and costs only that process. What has passed is compiled again here, which gives the interpreter
lock back. Nothing is kept on disk.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable
from itertools import count

import msgspec

from headrace.base.errors import HeadraceError, InvalidRequest, Unavailable, from_wire, to_wire
from headrace.base.wire.grammar import Node, Vocabulary, key_of
from headrace.core.grammar.backends import make_backend
from headrace.core.grammar.sandbox import CompileSandbox, SandboxStart
from headrace.core.grammar.vocabulary_index import VocabularyIndex
from headrace.core.ports import MAX_FORCED, Encode, GrammarBackend, Matcher

log = logging.getLogger(__name__)
END_S = 2.0
ENTRY_BYTES = 98_304
"""What the smallest grammar weighs: two matchers of llguidance 1.9 (measured: 77 KiB compiled, 81
with its first masks)."""


class CompileLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of compiling: processor time and memory of one grammar, grammars that may wait (of
    all, and of one tenant), threads, bytes kept."""

    seconds: float = 5.0
    memory_bytes: int = 512 << 20
    max_waiting: int = 1024
    max_waiting_per_tenant: int = 256
    threads: int = 3
    cache_bytes: int = 256 << 20


class GrammarEntry:
    """One tenant's grammar: on its way, compiled (`matcher`), or refused (`error`). `done` is set
    last. Without a node only the vocabulary's engine is waited for. `jumps_forward`: looking for
    forced text in it is short enough for the loop."""

    def __init__(self, tenant: str, key: bytes, node: Node | None) -> None:
        self.tenant = tenant
        self.key = key
        self.node = node
        self.matcher: Matcher | None = None
        self.jumps_forward = True
        self.error: HeadraceError | None = None
        self.cost_bytes = ENTRY_BYTES + 16 * len(key)
        self.done = False

    @property
    def is_kept(self) -> bool:
        """Whether it is worth keeping. An error is that is the grammar's own: a busy machine or a
        killed process says nothing about it."""
        return not self.done or self.error is None or isinstance(self.error, InvalidRequest)


class GrammarEngine(msgspec.Struct, frozen=True):
    """What is made of the vocabulary: once, on first use, off the loop."""

    backend: GrammarBackend
    vocabulary_index: VocabularyIndex
    vocabulary: Vocabulary


class _EngineFactory:
    """Makes the engine once; whoever asks meanwhile waits. Threads hold this, not the compiler,
    which so can go."""

    def __init__(
        self,
        load: Callable[[], Vocabulary],
        backend: str,
        encoder: Callable[[], Encode] | None,
    ) -> None:
        self.backend = backend
        self._encoder = encoder
        self.engine: GrammarEngine | None = None
        self._load = load
        self._lock = threading.Lock()

    def get(self) -> GrammarEngine:
        with self._lock:
            if self.engine is None:
                vocabulary = self._load()
                encode = self._encoder() if self._encoder is not None else None
                backend = make_backend(self.backend, vocabulary, encode)
                self.engine = GrammarEngine(backend, VocabularyIndex(vocabulary), vocabulary)
            return self.engine


class Compiler:
    """`get` is called from the loop alone; the threads only fill entries in."""

    def __init__(
        self,
        load: Callable[[], Vocabulary],
        *,
        backend: str = "llguidance",
        limits: CompileLimits | None = None,
        encoder: Callable[[], Encode] | None = None,
    ) -> None:
        self.limits = limits or CompileLimits()
        self._factory = _EngineFactory(load, backend, encoder)
        self._cache: OrderedDict[tuple[str, bytes], GrammarEntry] = OrderedDict()
        self._jobs: queue.PriorityQueue[tuple[int, int, GrammarEntry | None]] = (
            queue.PriorityQueue()
        )
        self._number = count()
        self._pending: list[GrammarEntry] = []
        self._workers: list[_Worker] = []
        weakref.finalize(self, _stop, self._jobs, self._workers)

    @property
    def engine(self) -> GrammarEngine | None:
        """The vocabulary's engine once there is one; there is when an entry has a matcher."""
        return self._factory.engine

    @property
    def num_waiting(self) -> int:
        """Grammars that wait to be compiled."""
        return self._jobs.qsize()

    def get(self, node: Node | None, *, tenant: str = "") -> GrammarEntry:
        """The entry of a tenant's grammar, new or known: nobody can tell from the time that another
        tenant has asked for the same. Unavailable if too many wait."""
        key = (tenant, b"" if node is None else key_of(node))
        entry = self._cache.get(key)
        if entry is None or not entry.is_kept:
            self._pending = [other for other in self._pending if not other.done]
            self._check_waiting(tenant)
            entry = self._cache[key] = GrammarEntry(*key, node)
            self._pending.append(entry)
            self._jobs.put((len(entry.key), next(self._number), entry))
            self._start_thread()
        self._cache.move_to_end(key)
        self.shrink()
        return entry

    def _check_waiting(self, tenant: str) -> None:
        if self.num_waiting >= self.limits.max_waiting:
            raise Unavailable(f"{self.num_waiting} grammars wait to be compiled", retry_after_s=1.0)
        own = sum(entry.tenant == tenant for entry in self._pending)
        if own >= self.limits.max_waiting_per_tenant:
            raise Unavailable(
                f"{own} grammars of this key wait to be compiled, as many as one key may have",
                retry_after_s=1.0,
            )

    def shrink(self) -> None:
        """Forgets what was not used for longest; called when one is new and when one is done, as it
        weighs more then. Requests that hold an entry keep it."""
        total = sum(entry.cost_bytes for entry in self._cache.values())
        for key in list(self._cache):
            if total <= self.limits.cache_bytes or len(self._cache) == 1:
                return
            if self._cache[key].done:
                total -= self._cache.pop(key).cost_bytes

    def _start_thread(self) -> None:
        """One more, if those there are have enough to do."""
        if len(self._workers) < min(self.limits.threads, len(self._pending)):
            worker = _Worker(self._jobs, self._factory, self.limits)
            worker.thread.name = f"grammar-{len(self._workers)}"
            self._workers.append(worker)
            worker.thread.start()


class _Worker:
    """One thread and its sandbox process."""

    def __init__(
        self,
        jobs: queue.PriorityQueue[tuple[int, int, GrammarEntry | None]],
        factory: _EngineFactory,
        limits: CompileLimits,
    ) -> None:
        self._jobs = jobs
        self._factory = factory
        self._limits = limits
        self._sandbox: CompileSandbox | None = None
        self._ended = False
        self.thread = threading.Thread(target=self._run, daemon=True)

    def end(self) -> None:
        """Nobody waits for what it compiles any more."""
        self._ended = True
        if self._sandbox is not None:
            self._sandbox.kill()

    def _run(self) -> None:
        """Compiles until the compiler is gone."""
        while (entry := self._jobs.get()[2]) is not None:
            try:
                self._compile(entry)
            except Exception as error:
                if not isinstance(error, InvalidRequest | Unavailable) and not self._ended:
                    log.exception("a grammar could not be compiled")
                entry.error = from_wire(to_wire(error))
            entry.done = True
        if self._sandbox is not None:
            self._sandbox.close()

    def _compile(self, entry: GrammarEntry) -> None:
        engine = self._factory.get()
        if entry.node is None:
            return
        if self._sandbox is None or not self._sandbox.alive:
            self._sandbox = CompileSandbox()
            if self._ended:
                self._sandbox.kill()
            memory = self._limits.memory_bytes
            self._sandbox.start(SandboxStart(self._factory.backend, engine.vocabulary, memory))
        outcome = self._sandbox.compile(entry.node, self._limits.seconds)
        entry.cost_bytes += outcome.grown_bytes
        entry.jumps_forward = outcome.num_forced < MAX_FORCED
        entry.matcher = engine.backend.compile(entry.node)


def _stop(
    jobs: queue.PriorityQueue[tuple[int, int, GrammarEntry | None]], workers: list[_Worker]
) -> None:
    """What still waits is for nobody. The threads end before the process does: what they wait for
    goes first."""
    for i in range(len(workers)):
        jobs.put((-1, i, None))
    for worker in workers:
        worker.end()
    deadline = time.monotonic() + END_S
    for worker in workers:
        if worker.thread is not threading.current_thread():
            worker.thread.join(max(0.0, deadline - time.monotonic()))
