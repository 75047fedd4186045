"""What a worker does, in its own process or in a thread of the core's: threads, mesh, model,
runner.

As a process (`python -m headrace.back.executor.worker FD RANK LOG_LEVEL`) it takes its orders from
the socket it inherited as FD. It ends as soon as its parent is gone or a step fails: other ranks
may wait in a collective for ever, and are ended by the parent.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from headrace.back.executor.channel import (
    TO_CORE,
    TO_WORKER,
    Channel,
    ParkReply,
    ParkWeights,
    ProfileReply,
    ProfileSteps,
    SetLogLevel,
    StartWorker,
    WorkerFailed,
    WorkerReady,
)
from headrace.back.executor.profiler import Profiler
from headrace.back.executor.resident import Resident
from headrace.back.kernels.all_reduce.op import with_sums
from headrace.back.kernels.native.library import use_threads
from headrace.back.kernels.op import DeferredChecks, SelfCheckFailed
from headrace.back.models.registry import DTYPES
from headrace.back.parallel.mesh import Mesh, tensor_parallel_mesh
from headrace.back.platforms import code_pages
from headrace.back.platforms.detect import detect
from headrace.back.platforms.facts import freest
from headrace.back.platforms.placement import interleave
from headrace.back.runner.results import LaunchedStep
from headrace.back.runner.runner import Runner
from headrace.back.sampling.sampler import choose_kernels
from headrace.base.affinity import set_affinity
from headrace.base.config.resolved import DeviceSpec, EngineSpec
from headrace.base.errors import ConfigError, HeadraceError, StartError, WireError, to_wire
from headrace.base.registry import Registry
from headrace.base.telemetry import log as logs
from headrace.base.wire.step import DeferredInputs, StepPlan, WorkerFacts

log = logging.getLogger(__name__)

T = TypeVar("T")
DEFAULT_LOADER = "headrace.back.models.load:load_model"


def set_threads(device: DeviceSpec) -> None:
    """Gives torch, for work started from the calling thread, and this process's native kernels
    their threads; the calling thread and those keep to the CPUs they are given, and take memory
    from all NUMA nodes they are given."""
    set_affinity(device.cpus)
    if device.nodes:
        interleave(device.nodes)
    torch.set_num_threads(device.threads)
    use_threads(device.threads, device.cpus or None)


class StepThreads:
    """How many threads torch's own ops get in a step.

    Where the matrix products are native, what is left to torch is small, and OpenMP's barrier waits
    for every thread: with one core taken by another process a copy of 37k logits took 12 ms on two
    threads and 0.02 ms on one. Torch gets its threads back for steps whose logits are so many that
    they pay (penalties, sorts and the like).
    """

    LARGE = 1 << 22

    def __init__(self, threads: int, facts: WorkerFacts) -> None:
        chosen_kernels = [
            chosen for field, _, chosen, _ in facts.decisions if "kernel.linear" in field
        ]
        self._native = bool(chosen_kernels) and set(chosen_kernels) == {"native"}
        self._width = facts.logits_width
        self._threads = threads
        self._now: int | None = None

    def fit(self, plan: StepPlan) -> None:
        """Before each step, on the thread that runs it."""
        large = np.count_nonzero(plan.sample) * self._width >= self.LARGE
        wanted = self._threads if large or not self._native else 1
        if wanted != self._now:
            self._now = wanted
            torch.set_num_threads(wanted)


def build_resident(
    spec: EngineSpec, loader: str = DEFAULT_LOADER, mesh: Mesh | None = None
) -> Resident:
    """Loads the model and builds the runner on this rank's device.

    `loader` is "module:attribute" of a function with the signature of
    `back.models.load.load_model`.
    """
    load_model: Any = Registry("model loader", {"model": loader}).load("model")
    mesh = mesh or Mesh()
    began = time.perf_counter()
    device = choose_device(spec.device.device, mesh)
    mesh, summing = with_sums(mesh, device, DTYPES[spec.model.dtype])
    ready_s = time.perf_counter() - began
    try:

        def build(checks: DeferredChecks | None = None) -> Resident:
            model, report = load_model(
                spec.model, mesh=mesh, device=device, block_tokens=spec.kv.block_tokens
            )
            if checks is not None:
                choose_kernels(device)
            load_s = time.perf_counter() - began - ready_s
            again = partial(
                Runner,
                spec,
                model,
                device=device,
                weight_bytes=report.weight_bytes,
                decisions=(*report.decisions, *summing),
            )
            runner = again(start_s={"device": ready_s, "load": load_s}, checks=checks)
            return Resident(model, device, runner, again)

        resident = checked(build) if device.type == "cuda" else build()
        if device.type == "cpu":
            code_pages.let_go("libtorch")
        return resident
    except torch.OutOfMemoryError as error:
        raise _too_small(error, device) from error


MOST_DEFERRED_BUILDS = 3


def checked(build: Callable[[DeferredChecks | None], T]) -> T:
    """Builds on a GPU, with all self-checks deferred until their kernels have been compiled, beside
    each other and beside those of the steps, and before any step runs. If one fails, or if building
    ends early because of a kernel that the checks find, it builds again without that kernel, at
    last with each check made at once: then every choice is of what was left, the reference at the
    least."""
    for _ in range(MOST_DEFERRED_BUILDS):
        checks = DeferredChecks()
        try:
            with checks:
                return build(checks)
        except SelfCheckFailed:
            log.warning("a kernel's self-check failed: the model is loaded again without it")
        except (StartError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            try:
                checks.run()
            except SelfCheckFailed:
                log.warning("%s: the model is loaded again without a kernel that fails", error)
            else:
                raise
    return build(None)


def choose_device(kind: str, mesh: Mesh) -> torch.device:
    """This rank's device, ready for use: of several GPUs a lone worker takes the one with the most
    free memory."""
    if kind != "cuda":
        return torch.device(kind)
    index = mesh.tp.rank
    if mesh.tp.size == 1:
        count = torch.cuda.device_count()
        uuids = [str(torch.cuda.get_device_properties(i).uuid) for i in range(count)]
        index = freest(detect(), uuids)
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    torch.cuda.synchronize(device)
    return device


def _too_small(error: torch.OutOfMemoryError, device: torch.device) -> ConfigError:
    free, total = torch.cuda.mem_get_info(device)
    return ConfigError(
        f"{device} is too small: of {total / 2**30:.1f} GiB {free / 2**30:.1f} GiB are left ({error}). Lower "
        "--max-step-tokens or --max-model-len, or use --tensor-parallel 2",
        field="gpu_memory",
    )


def join_mesh(begin: StartWorker) -> Mesh:
    """Meets the other ranks and returns the mesh; a lone rank meets nobody."""
    if begin.world_size == 1:
        return Mesh()
    dist.init_process_group(
        "gloo" if begin.spec.device.device == "cpu" else "nccl",
        init_method=f"file://{begin.rendezvous}",
        rank=begin.rank,
        world_size=begin.world_size,
    )
    return tensor_parallel_mesh(ordered=begin.spec.model.deterministic)


def serve(channel: Channel) -> None:
    """Loads the model, then runs plans in order until the parent hangs up or a step fails."""
    begin = TO_WORKER.decode(channel.receive() or b"")
    assert isinstance(begin, StartWorker), begin
    try:
        set_threads(begin.spec.device)
        resident = build_resident(begin.spec, begin.loader, join_mesh(begin))
    except Exception as error:
        log.exception("rank %d could not start", begin.rank)
        return channel.send(TO_CORE.frame(WorkerFailed(None, _start_error(error))))
    plans: SimpleQueue[StepPlan | ProfileSteps | ParkWeights] = SimpleQueue()
    profiler = Profiler(begin.rank)
    deferred_inputs: SimpleQueue[DeferredInputs] = SimpleQueue()
    launched_steps: SimpleQueue[LaunchedStep] = SimpleQueue()

    def await_deferred(step: int) -> dict[str, memoryview]:
        deferred = deferred_inputs.get()
        assert deferred.step == step, (deferred.step, step)
        return deferred.payloads

    channel.send(TO_CORE.frame(WorkerReady(resident.runner.facts)))
    for work in (
        (_read_plans, channel, plans, deferred_inputs),
        (_send_results, channel, launched_steps, begin.rank),
    ):
        threading.Thread(target=work[0], args=work[1:], daemon=True).start()
    threads = StepThreads(begin.spec.device.threads, resident.runner.facts)
    while True:
        plan = plans.get()
        if isinstance(plan, ProfileSteps):
            channel.send(TO_CORE.frame(_profiled(profiler, plan)))
            continue
        if isinstance(plan, ParkWeights):
            channel.send(TO_CORE.frame(_parked(resident, plan)))
            continue
        try:
            threads.fit(plan)
            launched_steps.put(resident.runner.launch(plan, await_deferred))
        except Exception as error:
            return _fail(channel, begin.rank, plan.step, error)


def _profiled(profiler: Profiler, request: ProfileSteps) -> ProfileReply:
    try:
        return ProfileReply(profiler.turn(request.folder))
    except Exception as error:
        return ProfileReply(error=to_wire(error))


def _parked(resident: Resident, request: ParkWeights) -> ParkReply:
    try:
        if request.back:
            return ParkReply(resident.unpark().facts)
        resident.park()
    except Exception as error:
        log.exception("the weights could not be moved")
        return ParkReply(error=to_wire(error))
    return ParkReply()


def _send_results(channel: Channel, launched_steps: SimpleQueue[LaunchedStep], rank: int) -> None:
    """Waits for the device, step by step, while the next ones are launched; rank 0 tells. Every
    rank reads its results: a row that failed must be cleaned up on all of them."""
    while True:
        step = launched_steps.get()
        try:
            result = step.result()
        except Exception as error:
            _fail(channel, rank, step.plan.step, error)
            os._exit(1)
        if rank == 0:
            channel.send(TO_CORE.frame(result))


def _fail(channel: Channel, rank: int, step: int, error: Exception) -> None:
    log.error("rank %d failed in step %d", rank, step, exc_info=error)
    channel.send(TO_CORE.frame(WorkerFailed(step, to_wire(error))))


def _read_plans(
    channel: Channel,
    plans: SimpleQueue[StepPlan | ProfileSteps | ParkWeights],
    deferred_inputs: SimpleQueue[DeferredInputs],
) -> None:
    """Reads ahead, so that the parent never waits to send; ends the process when the parent is
    gone."""
    while (body := channel.receive()) is not None:
        message = TO_WORKER.decode(body)
        if isinstance(message, DeferredInputs):
            deferred_inputs.put(message)
        elif isinstance(message, SetLogLevel):
            logs.set_level(message.level)
        else:
            assert isinstance(message, StepPlan | ProfileSteps | ParkWeights), message
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


if __name__ == "__main__":
    main()
