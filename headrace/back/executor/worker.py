"""A worker in a process of its own, one of the ranks of a model.

The process (worker_entry.py) takes its orders from the socket it inherited as FD. It ends as soon
as its parent is gone or a step fails: other ranks may wait in a collective for ever, and are ended
by the parent.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
from dataclasses import replace
from queue import SimpleQueue
from typing import TypeAlias

import torch
import torch.distributed as dist

from headrace.back.executor.channel import (
    TO_CORE,
    TO_WORKER,
    Channel,
    GraphReply,
    ParkReply,
    ParkWeights,
    ProfileReply,
    ProfileSteps,
    RecordGraph,
    SetLogLevel,
    SharedReply,
    ShareExperts,
    StartWorker,
    WorkerFailed,
    WorkerReady,
)
from headrace.back.executor.inline import StepThreads
from headrace.back.executor.profiler import Profiler
from headrace.back.executor.resident import Resident, build_resident, set_threads
from headrace.back.parallel.expert_group import ExpertGroup, join_experts
from headrace.back.parallel.mesh import (
    SEQUENCE_ROWS,
    Mesh,
    staged_mesh,
    with_shared_context,
    with_whole_experts,
)
from headrace.back.parallel.rounds import Ring
from headrace.back.runner.results import LaunchedStep
from headrace.base import extensions
from headrace.base.config.resolved import DeviceSpec
from headrace.base.errors import ConfigError, HeadraceError, StartError, WireError, to_wire
from headrace.base.telemetry import log as logs
from headrace.base.wire.slots import KVOrder
from headrace.base.wire.step import AdapterOrder, DeferredInputs, StepPlan
from headrace.base.wire.weights import BESIDE_STEPS, WeightOrder

log = logging.getLogger(__name__)

Order: TypeAlias = (
    StepPlan | ProfileSteps | ParkWeights | RecordGraph | ShareExperts | WeightOrder | KVOrder
)
"""What is done in the order in which it comes."""


def join_all(begin: StartWorker) -> tuple[Mesh, ExpertGroup | None]:
    """The mesh, and the ranks of other engine cores with which this one shares out experts, if it
    does."""
    mesh, device = join_mesh(begin), begin.spec.device
    spec = device.expert_group
    if spec is None:
        return mesh, None
    group = join_experts(
        mesh,
        cores=spec.cores,
        core=spec.core,
        folder=spec.folder,
        least=spec.least,
        device=device.device,
        exchange=device.token_exchange,
        redundant=_redundant(device),
    )
    return group.mesh, group


def join_mesh(begin: StartWorker) -> Mesh:
    """Meets the other ranks of this core and returns the mesh; a lone rank meets nobody."""
    if begin.world_size == 1:
        return Mesh()
    dist.init_process_group(
        "gloo" if begin.spec.device.device == "cpu" else "nccl",
        init_method=f"file://{begin.rendezvous}",
        rank=begin.rank,
        world_size=begin.world_size,
    )
    spec = begin.spec
    stages, layers = spec.device.pipeline_parallel, spec.device.pipeline_layers
    mesh = staged_mesh(stages, layers, ordered=spec.model.deterministic)
    context = spec.device.context
    if context is not None:
        mesh = with_shared_context(
            mesh, context.ranks, interleave=context.interleave, exchange=context.exchange
        )
    if spec.device.sequence_parallel:
        mesh = replace(mesh, sequence_rows=SEQUENCE_ROWS)
    if not spec.device.expert_parallel:
        return mesh
    return with_whole_experts(mesh, spec.device.token_exchange, _redundant(spec.device))


def _redundant(device: DeviceSpec) -> int | None:
    return None if device.expert_balance is None else device.expert_balance.redundant


def serve(channel: Channel) -> None:
    """Loads the model, then runs plans in order until the parent hangs up or a step fails."""
    begin = TO_WORKER.decode(channel.receive() or b"")
    assert isinstance(begin, StartWorker), begin
    try:
        extensions.allow(begin.spec.extensions)
        set_threads(begin.spec.device)
        mesh, group = join_all(begin)
        resident = build_resident(begin.spec, begin.loader, mesh)
    except Exception as error:
        # A user's mistake is told in words; of ours the place is wanted too.
        trace = not isinstance(error, ConfigError)
        log.error("rank %d could not start: %s", begin.rank, error, exc_info=trace)
        return channel.send(TO_CORE.frame(WorkerFailed(None, _start_error(error))))
    plans: SimpleQueue[Order | Ring] = SimpleQueue()
    profiler = Profiler(begin.rank)
    deferred_inputs: SimpleQueue[DeferredInputs] = SimpleQueue()
    adapter_orders: SimpleQueue[AdapterOrder] = SimpleQueue()
    launched_steps: SimpleQueue[LaunchedStep] = SimpleQueue()

    def await_deferred(step: int) -> dict[str, memoryview]:
        deferred = deferred_inputs.get()
        assert deferred.step == step, (deferred.step, step)
        return deferred.payloads

    channel.send(TO_CORE.frame(WorkerReady(resident.facts)))
    for work in (
        (_read_plans, channel, resident, plans, deferred_inputs, adapter_orders),
        (_adapt, channel, resident, adapter_orders),
        (_send_results, channel, launched_steps, begin.rank, mesh.answers),
    ):
        threading.Thread(target=work[0], args=work[1:], daemon=True).start()
    threads = StepThreads(begin.spec.device.threads, resident.facts)
    if group is not None:
        group.listen(plans.put)
    while True:
        try:
            plan = plans.get() if group is None else group.rounds.next(plans, joint=StepPlan)
        except Exception as error:
            return _fail(channel, begin.rank, None, error)
        assert not isinstance(plan, Ring), "rings are the rounds' own"
        if isinstance(plan, ShareExperts):
            assert group is not None, "no core shares out experts"
            channel.send(TO_CORE.frame(_shared(group, resident, plan)))
            continue
        if not isinstance(plan, StepPlan):
            _carry_out(channel, resident, profiler, plan)
            continue
        try:
            threads.fit(plan)
            resident.balancer.step()
            launched_steps.put(resident.runner.launch(plan, await_deferred))
        except Exception as error:
            return _fail(channel, begin.rank, plan.step, error)


def _carry_out(channel: Channel, resident: Resident, profiler: Profiler, order: Order) -> None:
    """What comes in the order of the plans and is none."""
    if isinstance(order, ProfileSteps):
        channel.send(TO_CORE.frame(_profiled(profiler, order)))
    elif isinstance(order, ParkWeights):
        channel.send(TO_CORE.frame(_parked(resident, order)))
    elif isinstance(order, WeightOrder):
        _weigh(channel, resident, order)
    elif isinstance(order, KVOrder):
        moving = (channel, resident, order, resident.behind_steps())
        threading.Thread(target=_move, args=moving, daemon=True).start()
    else:
        assert isinstance(order, RecordGraph), order
        channel.send(TO_CORE.frame(_recorded(resident)))


def _profiled(profiler: Profiler, request: ProfileSteps) -> ProfileReply:
    try:
        return ProfileReply(profiler.turn(request.folder))
    except Exception as error:
        return ProfileReply(error=to_wire(error))


def _parked(resident: Resident, request: ParkWeights) -> ParkReply:
    try:
        if request.back:
            resident.unpark()
            return ParkReply(resident.facts)
        resident.park()
    except Exception as error:
        log.exception("the weights could not be moved")
        return ParkReply(error=to_wire(error))
    return ParkReply()


def _shared(group: ExpertGroup, resident: Resident, order: ShareExperts) -> SharedReply:
    try:
        with torch.inference_mode():
            group.become(order.cores, order.folder, resident.movable)
        if group.device == "cuda":  # steps run on a stream of their own
            torch.cuda.synchronize()
    except Exception as error:
        log.exception("the experts could not be shared out anew")
        return SharedReply(error=to_wire(error))
    return SharedReply()


def _recorded(resident: Resident) -> GraphReply:
    try:
        return GraphReply(resident.runner.record_next())
    except Exception as error:
        log.exception("a graph could not be recorded")
        return GraphReply(error=to_wire(error))


def _weigh(channel: Channel, resident: Resident, order: WeightOrder) -> None:
    channel.send(TO_CORE.frame(resident.weigh(order)))


def _move(
    channel: Channel, resident: Resident, order: KVOrder, behind: torch.cuda.Event | None
) -> None:
    channel.send(TO_CORE.frame(resident.move(order, behind)))


def _adapt(channel: Channel, resident: Resident, orders: SimpleQueue[AdapterOrder]) -> None:
    """Reads and places adapters beside the steps."""
    while True:
        channel.send(TO_CORE.frame(resident.adapt(orders.get())))


def _send_results(
    channel: Channel, launched_steps: SimpleQueue[LaunchedStep], rank: int, answers: bool
) -> None:
    """Waits for the device, step by step, while the next ones are launched; one rank `answers`.
    Every rank reads its results: a row that failed must be cleaned up on all of them."""
    while True:
        step = launched_steps.get()
        try:
            result = step.result()
        except Exception as error:
            _fail(channel, rank, step.plan.step, error)
            os._exit(1)
        if answers:
            channel.send(TO_CORE.frame(result))


def _fail(channel: Channel, rank: int, step: int | None, error: Exception) -> None:
    where = "between steps" if step is None else f"in step {step}"
    log.error("rank %d failed %s", rank, where, exc_info=error)
    channel.send(TO_CORE.frame(WorkerFailed(step, to_wire(error))))


def _read_plans(
    channel: Channel,
    resident: Resident,
    plans: SimpleQueue[Order | Ring],
    deferred_inputs: SimpleQueue[DeferredInputs],
    adapter_orders: SimpleQueue[AdapterOrder],
) -> None:
    """Reads ahead, so that the parent never waits to send; ends the process when the parent is
    gone."""
    while (body := channel.receive()) is not None:
        message = TO_WORKER.decode(body)
        if isinstance(message, DeferredInputs):
            deferred_inputs.put(message)
        elif isinstance(message, AdapterOrder):
            adapter_orders.put(message)
        elif isinstance(message, WeightOrder) and message.action in BESIDE_STEPS:
            meeting = (channel, resident, message)
            threading.Thread(target=_weigh, args=meeting, daemon=True).start()
        elif isinstance(message, SetLogLevel):
            logs.set_level(message.level)
        else:
            assert isinstance(message, Order), message
            plans.put(message)
    os._exit(0)


def _start_error(error: Exception) -> WireError:
    if isinstance(error, HeadraceError):
        return to_wire(error)
    return WireError(StartError.__name__, f"the worker could not start: {error!r}")


def main() -> None:
    """The process: never returns to Python's own shutdown, which would wait for collectives."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logs.configure(f"worker {sys.argv[2]}", sys.argv[3])
    try:
        serve(Channel(socket.socket(fileno=int(sys.argv[1])), send_timeout_s=60.0))
    except Exception:
        log.exception("the worker failed")
    finally:
        logging.shutdown()
        os._exit(1)
