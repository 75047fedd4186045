"""Several models under one supervisor: the pool decides (pool.py), and here its decisions become
processes, control calls and answers to API processes.

One spare core process has its libraries imported already (prestart.py), so that loading a model
begins with its weights: of a small one on a busy machine that is 0.2 s instead of 4.5.
"""

from __future__ import annotations

import logging
import math
import queue
import selectors
import socket
import threading
import time
from collections.abc import Callable

import msgspec

from headrace.base import env
from headrace.base.errors import HeadraceError, to_wire
from headrace.base.wire.models import (
    ChangeModel,
    ExplainWait,
    LeaveModel,
    ListModels,
    ModelClosed,
    ModelGone,
    ModelPlace,
    ModelStatus,
    PoolReply,
    ReleaseModel,
    ToPool,
    WantModel,
)
from headrace.launch.children import CRASH_LIMIT, CRASH_WINDOW_S, ManagedProcess, core_starter
from headrace.launch.kv_events import remove_with
from headrace.launch.many.catalog import Catalog
from headrace.launch.many.clients import PoolClients
from headrace.launch.many.core_calls import Calls, call_core
from headrace.launch.many.pool import ModelPool
from headrace.launch.many.pooled import AT_REST, PooledModel, load_error
from headrace.launch.prestart import CORE_MODULE, import_ahead, prestart
from headrace.launch.supervisor import Supervisor
from headrace.launch.topology import Report, RuntimeFolder

NOBODY = 0
"""The client that wants pinned models: it is answered nothing."""
SLEEP: Calls = (("pause", {"mode": "wait", "clear_cache": True}), ("sleep", {"level": 1}))
WAKE: Calls = (("wake", {}), ("resume", {}))
log = logging.getLogger(__name__)


class ModelService:
    """Implements `supervisor.LoopPart`, `pool.PoolActions` and `children.ProcessOwner` (the
    processes are the cores of the models)."""

    def __init__(self, catalog: Catalog, folder: RuntimeFolder) -> None:
        self._catalog = catalog
        self._folder = folder
        self._supervisor: Supervisor | None = None
        self._clients = PoolClients(self._take, self._lost)
        self._cores: dict[int, ManagedProcess] = {}
        self._places: dict[ManagedProcess, int] = {}
        self._began: dict[int, float] = {}
        self._events: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._signal_in, self._signal_out = socket.socketpair()
        self._specs: dict[int, str] = {}
        self.places = [self._place(index) for index in range(len(catalog.models))]
        self.pool = ModelPool(
            [self._pooled(index) for index in range(len(catalog.models))],
            self,
            budget_bytes=catalog.budget_bytes,
            sleep_bytes=catalog.sleep_bytes,
            max_loaded=catalog.max_loaded,
            wait_s=catalog.wait_s,
        )

    @property
    def socket_paths(self) -> list[str]:
        """Where the cores listen, in the order of the catalog."""
        return [self._folder.socket_path(index) for index in range(len(self.places))]

    def connect(self) -> socket.socket:
        """An end of a socket for an API process that is about to be started."""
        return self._clients.connect()

    def begin(self, supervisor: Supervisor) -> None:
        """See LoopPart: pinned models are loaded first."""
        self._supervisor = supervisor
        self._clients.begin(supervisor)
        self._signal_out.setblocking(False)
        supervisor.watch(self._signal_out, selectors.EVENT_READ, self._signalled)
        for model in self.pool.models:
            if model.pinned and model.index in self._specs:
                self.pool.change(NOBODY, ChangeModel(number=0, model=model.index, load=True))
        self.pool.turn()
        self._keep_spare()

    def asked(self, message: Report) -> None:
        """See LoopPart: each model has one engine core."""
        raise AssertionError(message)

    def turn(self) -> None:
        """See LoopPart."""
        self.pool.turn()

    def due(self) -> float:
        """See LoopPart."""
        return self.pool.due()

    def close(self) -> None:
        """See LoopPart."""
        self._clients.close()
        self._signal_in.close()
        self._signal_out.close()

    def load(self, model: PooledModel) -> None:
        """See PoolActions."""
        path = self._folder.socket_path(model.index)
        starter = core_starter(self._specs[model.index], path, {})
        name = f"engine core of {model.name}"
        managed = ManagedProcess(name, starter, is_core=True, owner=self)
        self._cores[model.index], self._places[managed] = managed, model.index
        self._began[model.index] = time.monotonic()
        log.info("loading %s", model.name)
        assert self._supervisor is not None
        self._supervisor.add(managed)

    def end(self, model: PooledModel) -> None:
        """See PoolActions: a core holds no state that a kill could lose."""
        managed = self._cores[model.index]
        if managed.child is not None:
            managed.child.process.kill()
            return
        managed.restart_at = None
        del self._cores[model.index], self._places[managed]
        self._later(lambda: self.pool.ended(model.index))

    def sleep(self, model: PooledModel) -> None:
        """See PoolActions."""
        self._call(model, SLEEP, lambda: self.pool.asleep(model.index))

    def wake(self, model: PooledModel) -> None:
        """See PoolActions."""
        began = time.monotonic()

        def awake() -> None:
            load_s = time.monotonic() - began
            log.info("%s is awake after %.2f s", model.name, load_s)
            self.pool.loaded(model.index, num_bytes=model.num_bytes, load_s=load_s)

        self._call(model, WAKE, awake)

    def reply(
        self, client: int, number: int, *, result: object = None, error: HeadraceError | None = None
    ) -> None:
        """See PoolActions."""
        wire = None if error is None else to_wire(error)
        raw = msgspec.Raw(msgspec.msgpack.encode(result))
        self._clients.send(client, PoolReply(number=number, error=wire, result=raw))

    def announce_closed(self, model: PooledModel) -> None:
        """See PoolActions."""
        self._clients.send_all(ModelClosed(model.index))

    def announce_gone(self, model: PooledModel) -> None:
        """See PoolActions."""
        self._clients.send_all(ModelGone(model.index))

    def on_ready(self, managed: ManagedProcess) -> None:
        """See ProcessOwner."""
        index = self._places[managed]
        model = self._catalog.models[index]
        report = managed.report
        assert report is not None
        kinds = ("weight_bytes", "kv_bytes", "graph_bytes")
        num_bytes = model.process_bytes + sum(report.memory.get(kind, 0) for kind in kinds)
        load_s = time.monotonic() - self._began[index]
        parts = ", ".join(f"{name} {spent:.2f} s" for name, spent in report.start_s.items())
        log.info("%s is loaded after %.2f s (%s)", model.name, load_s, parts)
        if self.pool.models[index].status is ModelStatus.LOADING:
            self.pool.loaded(index, num_bytes=num_bytes, load_s=load_s)
        self._keep_spare()

    def _keep_spare(self) -> None:
        """A process for the next model, if there may be one. OpenMP's threads are not to spin, as
        those of several cores share the CPUs; this must be said before torch is loaded."""
        if not any(one.status in AT_REST for one in self.pool.models):
            return
        env.set_default("OMP_WAIT_POLICY", "passive")
        prestart(CORE_MODULE)
        if self._catalog.imports:
            import_ahead(CORE_MODULE, self._catalog.imports)

    def on_death(self, managed: ManagedProcess, status: int) -> None:
        """See ProcessOwner: a core that served is started again; one that was loading has failed;
        the others were to end, or can be loaded anew."""
        index = self._places[managed]
        model, name = self.pool.models[index], self._catalog.models[index].name
        why = f"its process ended (exit status {status})"
        if model.status is ModelStatus.LOADED:
            delay_s = managed.restart_delay_s(time.monotonic())
            if delay_s is not None:
                log.error("the engine core of %s died; starting it again in %g s", name, delay_s)
                managed.restart_at = self._began[index] = time.monotonic() + delay_s
                self.pool.restarting(index)
                return
            why = f"its process ended more than {CRASH_LIMIT} times in {CRASH_WINDOW_S:g} s"
        del self._cores[index], self._places[managed]
        if model.status in (ModelStatus.LOADING, ModelStatus.LOADED):
            broken = managed.error is not None
            reason = self._catalog.models[index].about(managed.error or why)
            log.error("%s could not be loaded: %s", name, managed.error or why)
            self.pool.failed(index, load_error(name, reason, broken=broken))
        else:
            self.pool.ended(index)

    def _take(self, client: int, message: ToPool) -> None:
        match message:
            case WantModel():
                self.pool.want(client, message)
            case ReleaseModel():
                self.pool.release(client, message)
            case LeaveModel():
                self.pool.leave(client, message.number)
            case ChangeModel():
                self.pool.change(client, message)
            case ListModels():
                self.pool.list_models(client, message)
            case ExplainWait():
                self.pool.explain(client, message)

    def _lost(self, client: int) -> None:
        self.pool.forget(client)

    def _call(self, model: PooledModel, calls: Calls, done: Callable[[], None]) -> None:
        """Makes control calls in a thread; then `done` in the loop, or the core's end."""
        path, managed = self._folder.socket_path(model.index), self._cores[model.index]

        def work() -> None:
            try:
                results = call_core(path, calls)
                keeps = all(result.get("level") != 2 for result in results)
            except HeadraceError as error:
                log.error("%s: %s failed: %s", model.name, calls[-1][0], error.message)
                keeps = False
            self._later(lambda: finish(keeps))

        def finish(keeps: bool) -> None:
            if self._cores.get(model.index) is not managed:
                return  # it has died meanwhile
            if keeps:
                done()
            elif managed.child is not None:
                managed.child.process.kill()

        threading.Thread(target=work, name=f"call-{model.index}", daemon=True).start()

    def _later(self, event: Callable[[], None]) -> None:
        """Has the loop call this; from any thread."""
        self._events.put(event)
        try:
            self._signal_in.send(b"x")
        except OSError:
            return  # the loop is over

    def _signalled(self) -> None:
        self._signal_out.recv(4096)
        while not self._events.empty():
            self._events.get()()

    def _place(self, index: int) -> ModelPlace:
        model = self._catalog.models[index]
        if model.engine is None or model.text is None:
            return ModelPlace(name=model.name, names=model.names, error=model.error)
        engine_path = self._folder.write_spec(f"core-{index}", model.engine)
        self._specs[index] = engine_path
        remove_with(self._folder, model.engine.kv, self._folder.socket_path(index))
        return ModelPlace(
            name=model.name,
            names=model.names,
            max_model_len=model.text.max_model_len,
            engine_path=engine_path,
            text_path=self._folder.write_spec(f"text-{index}", model.text),
        )

    def _pooled(self, index: int) -> PooledModel:
        model = self._catalog.models[index]
        failed = bool(model.error)
        return PooledModel(
            index=index,
            name=model.name,
            num_bytes=model.num_bytes,
            sleep_bytes=model.weight_bytes if self._catalog.sleep_bytes else None,
            pinned=model.pinned,
            priority=model.priority,
            default_keep_alive_s=model.keep_alive_s,
            status=ModelStatus.FAILED if failed else ModelStatus.UNLOADED,
            since=math.inf if failed else time.monotonic(),  # for ever: it is never tried again
            error=load_error(model.name, model.error, broken=True) if failed else None,
        )
