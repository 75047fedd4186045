"""What a worker does, in its own process or in a thread of the core's: threads, mesh, model, runner.

As a process (`python -m headrace.back.executor.worker FD RANK LOG_LEVEL`) it takes its orders from the socket it
inherited as FD. It ends as soon as its parent is gone or a step fails: other ranks may wait in a collective for ever,
and are ended by the parent (ENG-14).
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
    Begin,
    Channel,
    Failed,
    LogLevel,
    Park,
    Parked,
    Profile,
    Profiled,
    Ready,
)
from headrace.back.executor.profiler import Profiler
from headrace.back.executor.resident import Resident
from headrace.back.kernels.all_reduce.op import with_sums
from headrace.back.kernels.native.library import use_threads
from headrace.back.kernels.op import PutOff, SelfCheckFailed
from headrace.back.models.registry import DTYPES
from headrace.back.parallel.mesh import Mesh, tensor_parallel_mesh
from headrace.back.platforms import code_pages
from headrace.back.platforms.detect import detect
from headrace.back.platforms.placement import interleave
from headrace.back.runner.results import Launched
from headrace.back.runner.runner import Runner
from headrace.back.sampling.sampler import choose_kernels
from headrace.base.affinity import keep_to
from headrace.base.config.resolved import DeviceSpec, EngineSpec
from headrace.base.errors import ConfigError, HeadraceError, StartError, WireError, to_wire
from headrace.base.registry import Registry
from headrace.base.telemetry import log as logs
from headrace.base.wire.step import StepPlan, Supply, WorkerFacts

log = logging.getLogger(__name__)

T = TypeVar("T")
DEFAULT_LOADER = "headrace.back.models.load:load_model"


def set_threads(device: DeviceSpec) -> None:
    """Gives torch, for work started from the calling thread, and this process's native kernels their threads; the
    calling thread and those keep to the CPUs they are given, and take memory from all NUMA nodes they are given."""
    keep_to(device.cpus)
    if device.nodes:
        interleave(device.nodes)
    torch.set_num_threads(device.threads)
    use_threads(device.threads, device.cpus or None)


class StepThreads:
    """How many threads torch's own ops get in a step.

    Where the matrix products are native, what is left to torch is small, and OpenMP's barrier waits for every thread:
    with one core taken by another process a copy of 37k logits took 12 ms on two threads and 0.02 ms on one. Torch gets
    its threads back for steps whose logits are so many that they pay (penalties, sorts and the like).
    """

    LARGE = 1 << 22

    def __init__(self, threads: int, facts: WorkerFacts) -> None:
        products = [chosen for field, _, chosen, _ in facts.decisions if "kernel.linear" in field]
        self._native = bool(products) and set(products) == {"native"}
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

    `loader` is "module:attribute" of a function with the signature of `back.models.load.load_model`.
    """
    load_model: Any = Registry("model loader", {"model": loader}).load("model")
    mesh = mesh or Mesh()
    began = time.perf_counter()
    device = choose_device(spec.device.device, mesh)
    mesh, summing = with_sums(mesh, device, DTYPES[spec.model.dtype])
    ready_s = time.perf_counter() - began
    try:

        def build(checks: PutOff | None = None) -> Resident:
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


def checked(build: Callable[[PutOff | None], T]) -> T:
    """Builds on a GPU, with all self-checks put off until their kernels have been compiled, beside each other and
    beside those of the steps, and before any step runs; if one fails, builds again, so that another kernel is
    chosen."""
    try:
        with PutOff() as checks:
            return build(checks)
    except SelfCheckFailed:
        log.warning("a kernel's self-check failed: the model is loaded again, with other kernels")
    return build(None)


def choose_device(kind: str, mesh: Mesh) -> torch.device:
    """This rank's device, ready for use: of several GPUs a lone worker takes the one with the most free memory."""
    if kind != "cuda":
        return torch.device(kind)
    index = mesh.tp.rank
    if mesh.tp.size == 1:
        free = [one.free_bytes for one in detect() if one.kind == "cuda"]
        index = free.index(max(free)) if len(free) == torch.cuda.device_count() else 0
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


def join_mesh(begin: Begin) -> Mesh:
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
    assert isinstance(begin, Begin), begin
    try:
        set_threads(begin.spec.device)
        resident = build_resident(begin.spec, begin.loader, join_mesh(begin))
    except Exception as error:
        log.exception("rank %d could not start", begin.rank)
        return channel.send(TO_CORE.frame(Failed(None, _start_error(error))))
    plans: SimpleQueue[StepPlan | Profile | Park] = SimpleQueue()
    profiler = Profiler(begin.rank)
    supplies: SimpleQueue[Supply] = SimpleQueue()
    launched: SimpleQueue[Launched] = SimpleQueue()

    def supplied(step: int) -> dict[str, memoryview]:
        supply = supplies.get()
        assert supply.step == step, (supply.step, step)
        return supply.gates

    channel.send(TO_CORE.frame(Ready(resident.runner.facts)))
    for work in (
        (_read_plans, channel, plans, supplies),
        (_send_results, channel, launched, begin.rank),
    ):
        threading.Thread(target=work[0], args=work[1:], daemon=True).start()
    threads = StepThreads(begin.spec.device.threads, resident.runner.facts)
    while True:
        plan = plans.get()
        if isinstance(plan, Profile):
            channel.send(TO_CORE.frame(_profiled(profiler, plan)))
            continue
        if isinstance(plan, Park):
            channel.send(TO_CORE.frame(_parked(resident, plan)))
            continue
        try:
            threads.fit(plan)
            launched.put(resident.runner.launch(plan, supplied))
        except Exception as error:
            return _fail(channel, begin.rank, plan.step, error)


def _profiled(profiler: Profiler, wish: Profile) -> Profiled:
    try:
        return Profiled(profiler.turn(wish.folder))
    except Exception as error:
        return Profiled(error=to_wire(error))


def _parked(resident: Resident, wish: Park) -> Parked:
    try:
        if wish.back:
            return Parked(resident.unpark().facts)
        resident.park()
    except Exception as error:
        log.exception("the weights could not be moved")
        return Parked(error=to_wire(error))
    return Parked()


def _send_results(channel: Channel, launched: SimpleQueue[Launched], rank: int) -> None:
    """Waits for the device, step by step, while the next ones are launched; rank 0 tells. Every rank reads its results:
    a row that failed must be cleaned up on all of them."""
    while True:
        step = launched.get()
        try:
            result = step.result()
        except Exception as error:
            _fail(channel, rank, step.plan.step, error)
            os._exit(1)
        if rank == 0:
            channel.send(TO_CORE.frame(result))


def _fail(channel: Channel, rank: int, step: int, error: Exception) -> None:
    log.error("rank %d failed in step %d", rank, step, exc_info=error)
    channel.send(TO_CORE.frame(Failed(step, to_wire(error))))


def _read_plans(
    channel: Channel, plans: SimpleQueue[StepPlan | Profile | Park], supplies: SimpleQueue[Supply]
) -> None:
    """Reads ahead, so that the parent never waits to send; ends the process when the parent is gone."""
    while (body := channel.receive()) is not None:
        message = TO_WORKER.decode(body)
        if isinstance(message, Supply):
            supplies.put(message)
        elif isinstance(message, LogLevel):
            logs.set_level(message.level)
        else:
            assert isinstance(message, StepPlan | Profile | Park), message
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
