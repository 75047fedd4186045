"""Compiles grammars off the loop, small ones first, and keeps the results, bounded in bytes.

Each thread has a trial process of its own: a grammar that is late or too large there is refused and costs only that
process. What has passed is compiled again here, which gives the interpreter lock back. Nothing is kept on disk.
"""

from __future__ import annotations

import logging
import queue
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from itertools import count

import msgspec

from headrace.base.errors import HeadraceError, InvalidRequest, Unavailable, from_wire, to_wire
from headrace.base.wire.grammar import Node, Vocabulary, key_of
from headrace.core.grammar.backends import make_backend
from headrace.core.grammar.lexicon import Lexicon
from headrace.core.grammar.trial import Begin, Trial
from headrace.core.ports import Encode, GrammarBackend, Matcher

log = logging.getLogger(__name__)
ENTRY_BYTES = 16_384


class CompileLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of compiling: time and memory of one grammar, grammars that may wait, threads, bytes kept."""

    seconds: float = 5.0
    memory_bytes: int = 512 << 20
    max_waiting: int = 1024
    threads: int = 3
    cache_bytes: int = 256 << 20


class Entry:
    """One grammar: on its way, compiled (`matcher`), or refused (`error`). `done` is set last. Without a node only the
    vocabulary's engine is waited for."""

    def __init__(self, key: bytes, node: Node | None) -> None:
        self.key = key
        self.node = node
        self.matcher: Matcher | None = None
        self.error: HeadraceError | None = None
        self.cost_bytes = ENTRY_BYTES + 16 * len(key)
        self.done = False


class Engine(msgspec.Struct, frozen=True):
    """What is made of the vocabulary: once, on first use, off the loop."""

    backend: GrammarBackend
    lexicon: Lexicon
    vocabulary: Vocabulary


class _EngineMaker:
    """Makes the engine once; whoever asks meanwhile waits. Threads hold this, not the compiler, which so can go."""

    def __init__(
        self,
        load: Callable[[], Vocabulary],
        backend: str,
        encoder: Callable[[], Encode] | None,
    ) -> None:
        self.backend = backend
        self._encoder = encoder
        self.made: Engine | None = None
        self._load = load
        self._lock = threading.Lock()

    def get(self) -> Engine:
        with self._lock:
            if self.made is None:
                vocabulary = self._load()
                encode = self._encoder() if self._encoder is not None else None
                backend = make_backend(self.backend, vocabulary, encode)
                self.made = Engine(backend, Lexicon(vocabulary), vocabulary)
            return self.made


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
        self._maker = _EngineMaker(load, backend, encoder)
        self._cache: OrderedDict[bytes, Entry] = OrderedDict()
        self._jobs: queue.PriorityQueue[tuple[int, int, Entry | None]] = queue.PriorityQueue()
        self._number = count()
        self._pending: list[Entry] = []
        self._num_threads = 0
        weakref.finalize(self, _stop, self._jobs, self.limits.threads)

    @property
    def engine(self) -> Engine | None:
        """The vocabulary's engine once there is one; there is when an entry has a matcher."""
        return self._maker.made

    @property
    def num_waiting(self) -> int:
        """Grammars that wait to be compiled."""
        return self._jobs.qsize()

    def get(self, node: Node | None) -> Entry:
        """The entry of a grammar, new or known. Unavailable if too many wait."""
        key = b"" if node is None else key_of(node)
        entry = self._cache.get(key)
        if entry is None:
            if self.num_waiting >= self.limits.max_waiting:
                raise Unavailable(
                    f"{self.num_waiting} grammars wait to be compiled", retry_after_s=1.0
                )
            entry = self._cache[key] = Entry(key, node)
            self._pending = [*(other for other in self._pending if not other.done), entry]
            self._jobs.put((len(key), next(self._number), entry))
            self._start_thread()
        self._cache.move_to_end(key)
        self.shrink()
        return entry

    def shrink(self) -> None:
        """Forgets what was not used for longest; called when one is new and when one is done, as it weighs more then.
        Requests that hold an entry keep it."""
        total = sum(entry.cost_bytes for entry in self._cache.values())
        for key in list(self._cache):
            if total <= self.limits.cache_bytes or len(self._cache) == 1:
                return
            if self._cache[key].done:
                total -= self._cache.pop(key).cost_bytes

    def _start_thread(self) -> None:
        """One more, if those there are have enough to do."""
        if self._num_threads < min(self.limits.threads, len(self._pending)):
            name = f"grammar-{self._num_threads}"
            self._num_threads += 1
            worker = _Worker(self._jobs, self._maker, self.limits)
            threading.Thread(target=worker.run, name=name, daemon=True).start()


class _Worker:
    """One thread and its trial process."""

    def __init__(
        self,
        jobs: queue.PriorityQueue[tuple[int, int, Entry | None]],
        maker: _EngineMaker,
        limits: CompileLimits,
    ) -> None:
        self._jobs = jobs
        self._maker = maker
        self._limits = limits
        self._trial: Trial | None = None

    def run(self) -> None:
        """Compiles until the compiler is gone."""
        while (entry := self._jobs.get()[2]) is not None:
            try:
                self._compile(entry)
            except Exception as error:
                if not isinstance(error, InvalidRequest):
                    log.exception("a grammar could not be compiled")
                entry.error = from_wire(to_wire(error))
            entry.done = True
        if self._trial is not None:
            self._trial.close()

    def _compile(self, entry: Entry) -> None:
        engine = self._maker.get()
        if entry.node is None:
            return
        if self._trial is None or not self._trial.alive:
            memory = self._limits.memory_bytes
            self._trial = Trial(Begin(self._maker.backend, engine.vocabulary, memory))
        entry.cost_bytes += self._trial.compile(entry.node, self._limits.seconds)
        entry.matcher = engine.backend.compile(entry.node)


def _stop(jobs: queue.PriorityQueue[tuple[int, int, Entry | None]], threads: int) -> None:
    for i in range(threads):
        jobs.put((1 << 62, i, None))
