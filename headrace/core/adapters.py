"""Low-rank adapters in the core: which are known, which of them lie in the device's slots, and the
admission hook that lets a request run once its adapter lies in one.

    known        a name and a folder; its files are read when it is loaded, into host memory
    in a slot    placed there when a request needs it; the one that was needed least lately makes
                 room. One that an admitted request waits for or runs with stays where it is

Reading and placing go on beside the steps (`AdapterWorkers`); a request whose adapter is on its way
waits in its place in the queue. If all slots are taken and stay so for DRAIN_S, the adapter with
the fewest requests gets no new ones until its slot is free.

Nothing here is entered for a request without an adapter while `--enable-lora` is off.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from headrace.base.config.resolved import AdapterSpec
from headrace.base.errors import (
    Conflict,
    HeadraceError,
    InvalidRequest,
    ModelNotFound,
    NotFound,
    from_wire,
)
from headrace.base.wire.request import EngineRequest
from headrace.base.wire.step import AdapterOrder, AdapterReply
from headrace.core.adapter_folders import FolderResolver, check_folder, check_name
from headrace.core.ports import AdmissionHook, AdmissionVerdict, PendingAdapter, none_computed

NO_ADAPTERS = "this server was started without --enable-lora: it takes no adapters"
DRAIN_S = 1.0
POLL_S = 0.002
MAX_KNOWN = 1024
_YES = AdmissionVerdict("yes")
Order = Callable[[AdapterOrder], PendingAdapter]


@dataclass(slots=True, eq=False)
class LoadedAdapter:
    """One loaded adapter. `id`: what the workers call it, never used again; `keys` keep its cached
    prefixes apart. `slot`: 0 while it lies in none. `users`: admitted requests; `pinned`: of these,
    those that have been let run. `is_owed`: it was put into its slot for a request that has not
    been let run yet. `needed_at`: when a request last asked for it."""

    name: str = ""
    folder: str = ""
    id: str = ""
    keys: tuple[bytes, ...] = ()
    slot: int = 0
    is_read: bool = False
    pending: PendingAdapter | None = None
    is_owed: bool = False
    pinned: int = 0
    users: int = 0
    needed_at: float = 0.0
    is_gone: bool = False
    error: HeadraceError | None = None
    rank: int = 0
    num_bytes: int = 0


BASE = LoadedAdapter()
"""That of a request without one."""


@dataclass(slots=True, eq=False)
class _Loading:
    """An adapter that is being read for a call, and who is told."""

    adapter: LoadedAdapter
    on_done: Callable[[HeadraceError | None], None]
    replaces: bool


@dataclass(slots=True, eq=False)
class _Use:
    """A request's adapter, and whether it keeps it in its slot."""

    adapter: LoadedAdapter
    pins: bool = field(default=False)


class Adapters(AdmissionHook):
    """The adapters of one core. See the top of the file.

    Invariants: `_slots[i]` is the adapter in slot i + 1, or None; an adapter with `pinned` > 0 has
    a slot and keeps it. `poll_at`: when `advance` is to be called although nothing else happens.
    """

    name = "adapter"

    def __init__(
        self, spec: AdapterSpec, order: Order, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._spec = spec
        self.of_kinds = spec.of_kinds
        self._order = order
        self._clock = clock
        self._roots = tuple(os.path.realpath(root) for root in spec.roots)
        self._resolver = FolderResolver(spec.resolvers, clock)
        self._known: dict[str, LoadedAdapter] = {}
        self.num_slots = spec.slots
        self._slots: list[LoadedAdapter | None] = [None] * spec.slots
        self._uses: dict[int, _Use] = {}
        self._loading: list[_Loading] = []
        self._count = 0
        self._drained: LoadedAdapter | None = None
        self._starved: LoadedAdapter | None = None
        self._starved_at = 0.0
        self.names: tuple[str, ...] = ()
        self.poll_at: float | None = None
        self.keep: Callable[[tuple[tuple[str, str], ...]], None] = lambda modules: None

    # what is known

    def named(self, name: str) -> LoadedAdapter:
        """The adapter of a request; ModelNotFound lists those there are."""
        adapter = self._known.get(name)
        if adapter is None:
            known = ", ".join(sorted(self._known)) or "none"
            raise ModelNotFound(
                f"model: adapter {name!r:.100} is not loaded; loaded are: {known}", field="model"
            )
        return adapter

    def describe(self) -> list[dict[str, object]]:
        """Each adapter that is known: name, folder, rank, slot and requests."""
        return [
            {
                "name": one.name,
                "path": one.folder,
                "rank": one.rank,
                "bytes": one.num_bytes,
                "slot": one.slot,
                "requests": one.users,
            }
            for one in self._known.values()
        ]

    def load(
        self,
        name: str,
        folder: str,
        on_done: Callable[[HeadraceError | None], None],
        *,
        replaces: bool = False,
        trusted: bool = False,
    ) -> None:
        """Reads an adapter and lets requests name it; `on_done` is called once that is done, or
        with why not. `replaces`: one of that name may be there. `trusted`: the folder need not lie
        below the allowed ones (the operator named it)."""
        check_name(name)
        taken = {loading.adapter.name for loading in self._loading}
        if name in taken or (name in self._known and not replaces):
            raise InvalidRequest(f"lora_name: {name!r} is loaded already", field="lora_name")
        if len(self._known) >= MAX_KNOWN:
            raise Conflict(f"{MAX_KNOWN} adapters are loaded, at most as many may be; unload some")
        if not trusted:
            check_folder(folder, self._roots)
        adapter = self._new(name, folder)
        adapter.pending = self._read(adapter)
        self._loading.append(_Loading(adapter, on_done, replaces))
        self.poll_at = self._clock() + POLL_S

    def know(self, name: str, folder: str) -> None:
        """Lets requests name it; it is read when one does."""
        self._known[name] = self._new(name, folder)
        self._changed()

    def load_now(self, name: str, folder: str, *, trusted: bool) -> None:
        """The same, and waits: for a core that starts. Raises what is wrong with the adapter."""
        errors: list[HeadraceError | None] = []
        self.load(name, folder, errors.append, trusted=trusted)
        while not errors:
            time.sleep(POLL_S)
            self.advance()
        if errors[0] is not None:
            raise errors[0]

    def unload(self, name: str) -> None:
        """Requests cannot name it any more; those that do go on to their end."""
        adapter = self._known.pop(name, None)
        if adapter is None:
            raise NotFound(f"lora_name: {name!r:.100} is not loaded", field="lora_name")
        self._retire(adapter)
        self._changed()

    def renew(self) -> None:
        """The workers are others now: they know no adapter, and their slots are empty."""
        self._slots = [None] * len(self._slots)
        self._drained = self._starved = None
        for adapter in {*self._known.values(), *(use.adapter for use in self._uses.values())}:
            adapter.slot, adapter.is_read, adapter.pending = 0, False, None
            adapter.pinned, adapter.error = 0, None
        for use in self._uses.values():
            use.pins = False
        for loading in self._loading:
            loading.adapter.pending = self._read(loading.adapter)

    def advance(self) -> None:
        """Tells the calls whose adapter has been read, and knows those that folders have got."""
        for loading in [one for one in self._loading if _is_done(one.adapter)]:
            self._loading.remove(loading)
            adapter = loading.adapter
            self._settle(adapter)
            if adapter.error is None:
                before = self._known.get(adapter.name)
                self._known[adapter.name] = adapter
                if before is not None:
                    self._retire(before)
                self._changed()
            loading.on_done(adapter.error)
        for module in self._resolver.fresh(self._known):
            self.know(*module)
        self.poll_at = self._clock() + POLL_S if self._loading else self._resolver.due_at

    def _new(self, name: str, folder: str) -> LoadedAdapter:
        self._count += 1
        number = str(self._count)
        return LoadedAdapter(
            name=name, folder=folder, id=number, keys=(f"adapter {number} {name}".encode(),)
        )

    def _read(self, adapter: LoadedAdapter) -> PendingAdapter:
        return self._order(AdapterOrder(action="read", name=adapter.id, folder=adapter.folder))

    def _changed(self) -> None:
        self.names = tuple(self._known)
        self.keep(tuple((one.name, one.folder) for one in self._known.values()))

    def _retire(self, adapter: LoadedAdapter) -> None:
        adapter.is_gone = True
        self._let_go(adapter)

    def _let_go(self, adapter: LoadedAdapter) -> None:
        """One that is gone leaves its slot and host memory once nobody uses it."""
        if not adapter.is_gone or adapter.users:
            return
        if adapter.slot:
            self._slots[adapter.slot - 1] = None
            adapter.slot = 0
        self._order(AdapterOrder(action="drop", name=adapter.id))

    # the hook

    def admit(self, request: EngineRequest) -> AdmissionVerdict:
        """See AdmissionHook."""
        if request.adapter:
            adapter = self.named(request.adapter)
            adapter.users += 1
            self._uses[request.id] = _Use(adapter)
        return _YES

    def ready(
        self, request_id: int, computed: Callable[[], int] = none_computed
    ) -> AdmissionVerdict:
        """See AdmissionHook."""
        use = self._uses.get(request_id)
        if use is None or use.pins:
            return _YES
        adapter = use.adapter
        adapter.needed_at = self._clock()
        if adapter.pending is not None:
            if not adapter.pending.done():
                return _not_now(f"{adapter.name} is being loaded")
            self._settle(adapter)
        if adapter.error is not None:
            error, adapter.error = adapter.error, None  # the next request has it tried again
            raise error
        if not adapter.slot or not adapter.is_read:
            return self._bring(adapter)
        starved = self._starved is not None and self._starved.users
        if adapter is self._drained and starved and not adapter.is_owed:
            return _not_now(f"{adapter.name} leaves its slot for an adapter that has waited longer")
        use.pins, adapter.is_owed = True, False
        adapter.pinned += 1
        return _YES

    def payload(self, request_ids: list[int]) -> bytes | None:
        """See AdmissionHook: a row's slot is part of its start."""
        return None

    def finish(self, request_id: int) -> None:
        """See AdmissionHook."""
        use = self._uses.pop(request_id, None)
        if use is None:
            return
        use.adapter.users -= 1
        use.adapter.pinned -= use.pins
        self._let_go(use.adapter)

    @property
    def num_held(self) -> int:
        """See AdmissionHook."""
        return len(self._uses)

    # slots

    def _bring(self, adapter: LoadedAdapter) -> AdmissionVerdict:
        """Has it read again, or placed, whichever is next."""
        if not adapter.is_read:
            adapter.pending = self._read(adapter)
            return _not_now(f"{adapter.name} is being read")
        slot = self._free_slot(adapter)
        if slot is None:
            self._drain(adapter)
            return _not_now(f"all {len(self._slots)} adapter slots are in use (--max-loras)")
        if adapter is self._starved:
            self._starved = self._drained = None
        self._slots[slot - 1] = adapter
        adapter.slot, adapter.is_owed = slot, True
        adapter.pending = self._order(AdapterOrder(action="place", name=adapter.id, slot=slot))
        return _not_now(f"{adapter.name} is being put into a slot")

    def _free_slot(self, wanting: LoadedAdapter) -> int | None:
        """An empty slot, else that of the adapter nobody runs with that was needed least lately."""
        if None in self._slots:
            return 1 + self._slots.index(None)
        for one in self._slots:
            if one is not None and _is_done(one):
                self._settle(one)
        idle = [one for one in self._slots if one is not None and _may_leave(one)]
        if self._drained in idle:
            idle = [one for one in idle if (one is self._drained) == (wanting is self._starved)]
        if not idle:
            return None
        least = min(idle, key=lambda one: one.needed_at)
        slot, least.slot = least.slot, 0
        return slot

    def _drain(self, wanting: LoadedAdapter) -> None:
        """Remembers who waits longest, and in the end who makes room for it."""
        now = self._clock()
        if self._starved is None or not self._starved.users:
            self._starved, self._starved_at, self._drained = wanting, now, None
        if self._drained is None and now - self._starved_at > DRAIN_S:
            held = [one for one in self._slots if one is not None]
            self._drained = min(held, key=lambda one: one.pinned)

    def _settle(self, adapter: LoadedAdapter) -> None:
        """Takes in what became of its last order."""
        pending, adapter.pending = adapter.pending, None
        assert pending is not None
        try:
            reply = pending.result()
            adapter.error = None if reply.error is None else _as_request(reply)
        except HeadraceError as error:
            adapter.error = error
            return
        if adapter.error is not None:
            if adapter.slot:
                self._slots[adapter.slot - 1] = None
                adapter.slot = 0
        elif not adapter.is_read:
            adapter.is_read = True
            adapter.rank, adapter.num_bytes = reply.rank, reply.num_bytes
            self._trim(adapter)

    def _trim(self, newest: LoadedAdapter) -> None:
        """Host memory keeps so many; of others only name and folder stay."""
        held = [one for one in self._known.values() if one.is_read and one is not newest]
        free = [one for one in held if not (one.slot or one.users or one.pending)]
        free.sort(key=lambda one: one.needed_at)
        for one in free[: max(0, 1 + len(held) - self._spec.kept)]:
            one.is_read = False
            self._order(AdapterOrder(action="drop", name=one.id))


def _is_done(adapter: LoadedAdapter) -> bool:
    return adapter.pending is not None and adapter.pending.done()


def _may_leave(adapter: LoadedAdapter) -> bool:
    """Whether another one may take its slot."""
    owed = adapter.is_owed and adapter.users > 0
    return not adapter.pinned and not owed and adapter.pending is None


def _not_now(reason: str) -> AdmissionVerdict:
    return AdmissionVerdict("not_now", reason)


def _as_request(reply: AdapterReply) -> HeadraceError:
    """What is wrong with an adapter is the caller's to mend, not a failed start."""
    assert reply.error is not None
    error = from_wire(msgspec.structs.replace(reply.error))
    if reply.error.kind == "CheckpointError":
        return InvalidRequest(f"lora_path: {error.message}", field="lora_path")
    return error
