"""The process of one engine core (`python -m headrace.launch.core_process`).

The main thread runs `EngineCore.step`; an IO thread (`FrontendConnections`) accepts the API
processes on a 0600 Unix socket, reads their frames and writes what their sockets did not take at
once. A watchdog thread ends the process when a step takes longer than `step_timeout_s`: stacks are
dumped, the frontends see the end of file and fail their requests, the supervisor restarts the core.
"""

from __future__ import annotations

import argparse
import faulthandler
import logging
import os
import socket
import sys
import time
from functools import partial
from pathlib import Path
from typing import NoReturn

import msgspec
import numpy as np

from headrace.back.executor.choose import make_executor
from headrace.base import extensions, heap
from headrace.base.affinity import set_affinity
from headrace.base.config.resolved import EngineSpec
from headrace.base.errors import ConfigError, EngineError, StartError
from headrace.base.process_age import process_age_s
from headrace.base.telemetry import log as logs
from headrace.base.wire.control import Call, Hello, Reply
from headrace.base.wire.request import AbortRequests, EngineRequest, TokenBatch
from headrace.base.wire.step import WorkerFacts
from headrace.core.absent import AbsentExecutor
from headrace.core.admission import check_stated_length, due_times, load_of
from headrace.core.core import EngineCore
from headrace.core.encoder_cache import encoder_cache_hooks
from headrace.core.grammar.hook import GrammarHook
from headrace.core.kv_store import KVStore, check_store
from headrace.core.lifecycle import record_graph
from headrace.core.output_processor import CoreOutput
from headrace.core.ports import AdmissionHook
from headrace.core.service_state import ServiceState
from headrace.launch.adapters import adapters_of, load_adapters
from headrace.launch.core_extensions import chosen_hooks, extension_hooks, stats_of
from headrace.launch.expert_group import in_group, is_alone, replacing
from headrace.launch.frontend_connections import FrontendConnections, FrontendGone, Incoming
from headrace.launch.kv_push import transfers_of
from headrace.launch.topology import Report, report, tie_to_parent
from headrace.launch.vocabulary import encoder_of, vocabulary_of
from headrace.launch.watchdog import Watchdog
from headrace.launch.weights_source import WeightsSource, weights_of

log = logging.getLogger(__name__)
FLUSH_S = 1.0
RECORD_AFTER_S = 0.2
"""So long nothing must have come before a graph is recorded that nobody waits for."""
LOAD_PERIOD_S = 0.05
FAILED_EXIT = 71


class CoreLoop:
    """Carries messages between the frontends and the core.

    Invariants: `_owner` holds exactly the requests whose end has not been sent yet; a request
    belongs to the frontend that added it, and only that one can abort it or sees its tokens.
    """

    def __init__(
        self, core: EngineCore, frontends: FrontendConnections, watchdog: Watchdog
    ) -> None:
        self._core = core
        self._frontends = frontends
        self._watchdog = watchdog
        self._owner: dict[int, int] = {}
        self._calls: dict[int, tuple[int, int]] = {}
        self._call_number = 0
        self._unhandled: list[Incoming] = []
        self._announced = core.hello()
        self._may_record = True
        self._num_waiting = 0
        self._published_at = 0.0

    def run(self) -> None:
        """Serves until the process ends."""
        while True:
            self.turn()

    def turn(self) -> None:
        """Takes what has arrived (waits if there is nothing to compute), runs one step, sends its
        results."""
        core = self._core
        idle = not (self._unhandled or core.has_work)
        messages = self._unhandled + self._frontends.take(block=idle, at_most_s=self._wait_s())
        self._unhandled = []
        for message in messages:
            self._handle(message)
        if core.output_buffer.has_ended:
            self._send(core.output_buffer.take())  # who is refused does not wait for a step
        self._publish_load()
        if not core.has_work:
            if idle and self._may_record and not messages:
                self._record_graph()
            return
        self._may_record = True
        self._watchdog.since = time.monotonic()
        try:
            output = core.step(wait=True, before_update=self._abort_early)
        except EngineError as error:
            self._fail(error)
        self._watchdog.since = None
        before = self._announced
        announced = before.failing or before.stalled, before.held, before.weights_version
        if (core.failing, core.service.held, core.weights.versions.now) != announced or (
            core.adapters is not None and core.adapters.names != before.adapters
        ):
            self._announce(core.hello())
        self._send(output)
        if not core.scheduler.queue:
            self._publish_load()

    def _publish_load(self) -> None:
        """Tells the frontends what waits: every LOAD_PERIOD_S, and when nothing does any more.

        While something does this is done when all that has come is in the queue, before the step:
        after it the requests that came meanwhile would be missing, and frontends take it that those
        they have sent before are counted."""
        num_waiting = len(self._core.scheduler.queue)
        due = time.monotonic() >= self._published_at + LOAD_PERIOD_S
        if (num_waiting and due) or (self._num_waiting and not num_waiting):
            self._num_waiting, self._published_at = num_waiting, time.monotonic()
            load = load_of(self._core.scheduler, self._core.counters)
            dues = due_times(self._core.scheduler, self._core.clock())
            self._frontends.send_all(msgspec.structs.replace(load, dues=dues))

    def _wait_s(self) -> float | None:
        """How long an idle core waits for a message: until a timer, or until it may record."""
        due = self._core.idle_s
        if not self._may_record:
            return due
        return RECORD_AFTER_S if due is None else min(due, RECORD_AFTER_S)

    def _record_graph(self) -> None:
        """One at a time: a request that comes meanwhile waits for one at most."""
        self._watchdog.since = time.monotonic()
        try:
            self._may_record = record_graph(self._core)
        except EngineError as error:
            self._fail(error)
        self._watchdog.since = None

    def _fail(self, error: EngineError) -> NoReturn:
        """A step failed as a whole: fails all requests and ends this process for a restart."""
        log.critical("the engine failed: %s", error.message, exc_info=error)
        faulthandler.dump_traceback(sys.stderr)
        self._send(self._core.fail_all(error))
        self._frontends.flush(FLUSH_S)
        os._exit(FAILED_EXIT)

    def _handle(self, incoming: Incoming) -> None:
        frontend, message = incoming
        match message:
            case EngineRequest():
                self._add(frontend, message)
            case AbortRequests():
                self._abort(frontend, message)
            case Call():
                self._call(frontend, message)
            case FrontendGone():
                self._forget(frontend)

    def _abort_early(self) -> None:
        """Aborts that arrived while a step ran take effect before its tokens count. All messages
        are handled in their order in the next turn, where an id aborted here is unknown."""
        arrived = self._frontends.take(block=False, at_most_s=None)
        self._unhandled += arrived
        for frontend, message in arrived:
            if isinstance(message, AbortRequests):
                self._abort(frontend, message)

    def _abort(self, frontend: int, message: AbortRequests) -> None:
        self._core.abort([i for i in message.ids if self._owner.get(i) == frontend])

    def _add(self, frontend: int, request: EngineRequest) -> None:
        if request.id in self._owner:
            self._frontends.drop(frontend, "it used a request id that is taken")
            return
        self._owner[request.id] = frontend
        self._core.add(request)

    def _call(self, frontend: int, call: Call) -> None:
        """Numbers of different frontends may be equal: the core gets numbers of this loop's own."""
        self._call_number += 1
        self._calls[self._call_number] = (frontend, call.number)
        before = self._rest()
        reply = self._core.call(msgspec.structs.replace(call, number=self._call_number))
        if (rest := self._rest()) != before:
            self._watchdog.report(rest)
        if (hello := self._core.hello()) != self._announced:
            if hello.log_level != self._announced.log_level:
                self._watchdog.report(Report(log_level=hello.log_level))
            self._announce(hello)
        if reply is not None:
            self._reply(reply)

    def _announce(self, hello: Hello) -> None:
        self._announced = hello
        self._frontends.announce(hello)

    def _rest(self) -> Report:
        """Whether the core is paused or asleep, for the process that replaces it after a crash."""
        service = self._core.service
        return Report(paused=service.mode or "", asleep=service.asleep)

    def _reply(self, reply: Reply) -> None:
        frontend, number = self._calls.pop(reply.number)
        self._frontends.send(frontend, msgspec.structs.replace(reply, number=number))

    def _forget(self, frontend: int) -> None:
        """Aborts the requests of a frontend that is gone."""
        self._core.abort([i for i, owner in self._owner.items() if owner == frontend])

    def _send(self, output: CoreOutput) -> None:
        if output.tokens is not None:
            for frontend, batch in split(output.tokens, self._owner).items():
                self._frontends.send(frontend, batch)
            for end in output.tokens.finished:
                self._owner.pop(end.id, None)
        for reply in output.replies:
            self._reply(reply)


def split(batch: TokenBatch, owner: dict[int, int]) -> dict[int, TokenBatch]:
    """The batch by owning frontend; requests without an owner are left out. With one frontend it is
    the batch itself, uncopied."""
    frontends = np.fromiter(
        (owner.get(i, -1) for i in batch.ids.tolist()), np.int64, len(batch.ids)
    )
    records = (*batch.prompt_logprobs, *batch.pooled, *batch.captured, *batch.cached)
    ended = (end.id for end in batch.finished)
    concerned = [*(i for i, _ in records), *batch.queued, *ended]
    present = {*np.unique(frontends).tolist(), *(owner.get(i, -1) for i in concerned)}
    if len(present) == 1 and -1 not in present:
        return {present.pop(): batch}
    return {
        frontend: TokenBatch(
            ids=batch.ids[frontends == frontend],
            tokens=batch.tokens[frontends == frontend],
            logprobs=[
                entry
                for entry, at in zip(batch.logprobs, frontends.tolist(), strict=False)
                if at == frontend
            ],
            prompt_logprobs=[
                entry for entry in batch.prompt_logprobs if owner.get(entry[0]) == frontend
            ],
            pooled=[entry for entry in batch.pooled if owner.get(entry[0]) == frontend],
            captured=[entry for entry in batch.captured if owner.get(entry[0]) == frontend],
            cached=[entry for entry in batch.cached if owner.get(entry[0]) == frontend],
            queued=[i for i in batch.queued if owner.get(i) == frontend],
            finished=[end for end in batch.finished if owner.get(end.id) == frontend],
        )
        for frontend in sorted(present - {-1})
    }


def main() -> int:
    """Runs the process; 2 if it cannot start."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--spec", required=True)
    parser.add_argument("--socket", required=True)
    parser.add_argument("--status-fd", type=int, required=True)
    parser.add_argument("--parent", type=int)
    parser.add_argument("--log-level", default="info")
    parser.add_argument("--paused", default="")
    parser.add_argument("--asleep", action="store_true")
    parser.add_argument("--group-folder", default="")
    parser.add_argument("--group-core", type=int, default=0)
    arguments = parser.parse_args()
    tie_to_parent(arguments.parent)
    faulthandler.enable()
    logs.configure("core", arguments.log_level)
    status = socket.socket(fileno=arguments.status_fd)
    try:
        loop = _start(arguments, status)
    except StartError as error:
        report(status, Report(error=error.message))
        return 2
    try:
        loop.run()
    except Exception as error:
        log.critical("the engine loop failed: %s", error, exc_info=error)
        os._exit(FAILED_EXIT)
    return 0


def _prepare(spec: EngineSpec) -> None:
    """What holds for this process from now on."""
    extensions.allow(spec.extensions)
    if spec.device.device == "cpu":  # a GPU's core compiles kernels in many threads
        heap.share_heaps()


def _start(arguments: argparse.Namespace, status: socket.socket) -> CoreLoop:
    socket_path: str = arguments.socket
    rest = Report(paused=arguments.paused, asleep=arguments.asleep)
    parts = {"process": process_age_s()}
    began = time.monotonic()
    spec = _spec_of(arguments)
    _prepare(spec)
    source = WeightsSource(spec, Path(arguments.spec))
    executor = AbsentExecutor(source.resting()) if rest.asleep else make_executor(spec)
    set_affinity(spec.device.other_cpus)  # the loop leaves the kernels' cores alone
    parts |= executor.facts.start_s
    parts["imports"] = time.monotonic() - began - sum(executor.facts.start_s.values())
    # as the core before it was when it died: whoever paused it has not resumed it
    service = ServiceState.resumed(paused=rest.paused, asleep=rest.asleep)
    service.draining = is_alone(spec)
    adapters = adapters_of(spec, lambda: core.executor)
    hooks = admission_hooks_of(spec, executor.facts)
    hooks += chosen_hooks(spec, lambda: core, core_socket=socket_path)
    if adapters is not None:
        hooks.append(adapters)
    ranks = spec.device.world_size
    if (transfer := spec.kv.transfer) is not None:
        hooks.append(transfers_of(transfer, ranks, lambda: core, socket_path))
    if (store := spec.kv.store) is not None:
        hooks.append(KVStore(store, ranks, lambda: core))
    hooks += extension_hooks(spec, hooks, lambda: core)
    core = EngineCore(
        spec,
        executor,
        hooks=hooks,
        stats=stats_of(spec, hooks),
        source=replacing(spec, source),
        adapters=adapters,
        weights=weights_of(spec, lambda: core.executor),
        service=service,
    )
    if adapters is not None:
        load_adapters(spec, adapters, source, asleep=rest.asleep)
    check_stated_length(spec.kv, core.kv)
    if store is not None:
        check_store(core.kv)
    frontends = FrontendConnections(socket_path, core.hello(), status)
    facts = executor.facts
    memory = {
        "weight_bytes": facts.weight_bytes,
        "kv_bytes": facts.kv_bytes,
        "graph_bytes": facts.graphs.num_bytes,
        "kv_blocks": facts.num_blocks,
        "kv_tokens": facts.num_blocks * facts.block_tokens,
        "snapshots": sum(max(0, group.num_slots - 1) for group in facts.groups),
        "snapshot_bytes": sum(group.num_slots * group.block_bytes for group in facts.groups),
    }
    report(status, Report(ready=True, memory=memory, start_s=parts, decisions=facts.decisions))
    watchdog = Watchdog(
        spec.scheduler.step_timeout_s,
        status,
        slow_after_s=lambda: core.slow_step_s,
        on_slow=partial(_announce_slow, core, frontends),
    )
    return CoreLoop(core, frontends, watchdog)


def _spec_of(arguments: argparse.Namespace) -> EngineSpec:
    try:
        spec = msgspec.json.decode(Path(arguments.spec).read_bytes(), type=EngineSpec)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"the engine's specification cannot be read: {error}") from None
    return in_group(spec, folder=arguments.group_folder, core=arguments.group_core)


def _announce_slow(core: EngineCore, frontends: FrontendConnections, seconds: float | None) -> None:
    """From the watchdog's thread: a step has taken so long and is not done; None: it is."""
    hello = core.hello()
    if seconds is not None:
        why = f"a step has taken {seconds:.0f} s and is not done"
        hello = msgspec.structs.replace(hello, failing=why)
    frontends.announce(hello)


def admission_hooks_of(spec: EngineSpec, facts: WorkerFacts) -> list[AdmissionHook]:
    """The admission hooks of an engine. Nothing is loaded before a request needs it."""
    hooks: list[AdmissionHook] = [
        *encoder_cache_hooks(facts.media_tokens, spec.scheduler.max_step_tokens, facts.media_rows)
    ]
    if spec.grammar is None:
        return hooks
    load = partial(vocabulary_of, spec.grammar.tokenizer_path, spec.model)
    encoder = partial(encoder_of, spec.grammar.tokenizer_path)
    return [*hooks, GrammarHook(load, backend=spec.grammar.backend, encoder=encoder)]


if __name__ == "__main__":
    raise SystemExit(main())
