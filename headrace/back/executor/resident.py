"""One rank's loaded model and the runner over it: how they are built on its device, and how they
are given up and made again without a load."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import msgspec
import torch

from headrace.back.executor.host_copy import HostCopy
from headrace.back.kernels.all_reduce.op import with_sums
from headrace.back.kernels.native.library import use_threads
from headrace.back.kernels.op import MORE_KERNELS, DeferredChecks, SelfCheckFailed
from headrace.back.layers.moe.balance import Balancer, MovableExperts
from headrace.back.lora.store import AdapterStore
from headrace.back.models.blocks import Decoder
from headrace.back.models.load import LoadReport, Origin
from headrace.back.models.protocol import CausalModel
from headrace.back.models.registry import DTYPES
from headrace.back.parallel.mesh import Mesh, Rounds
from headrace.back.parallel.pipe import Pipe
from headrace.back.platforms import code_pages
from headrace.back.platforms.detect import detect
from headrace.back.platforms.device_threads import use_device
from headrace.back.platforms.facts import freest
from headrace.back.platforms.foreign import is_foreign, platform_of
from headrace.back.platforms.placement import interleave
from headrace.back.runner.hidden_states import HiddenStateFiles
from headrace.back.runner.runner import Runner
from headrace.back.runner.start import StartedRunner, start_runner
from headrace.back.sampling.sampler import choose_kernels
from headrace.back.speculative.network import DraftNetwork
from headrace.back.speculative.networks import load_network
from headrace.back.transfer.kv_files import KVFiles
from headrace.back.transfer.orders import WeightOrders
from headrace.base import extensions, heap
from headrace.base.affinity import set_affinity
from headrace.base.config.resolved import Decision, DeviceSpec, EngineSpec, verify_queries
from headrace.base.errors import ConfigError, StartError
from headrace.base.registry import Registry
from headrace.base.wire.slots import KVOrder, KVReply
from headrace.base.wire.step import AdapterOrder, AdapterReply, WorkerFacts
from headrace.base.wire.weights import BESIDE_STEPS, WeightOrder, WeightReply

log = logging.getLogger(__name__)

T = TypeVar("T")
DEFAULT_LOADER = "headrace.back.models.load:load_model"


@dataclass(frozen=True, kw_only=True)
class RankModel:
    """A model on this rank's device, and what drafts for it, where that has weights. `load_s`: the
    seconds of each part of its load; `origin`: how it was built; `movable`: its experts that may
    change ranks, `balancer`: of them."""

    spec: EngineSpec
    model: CausalModel
    network: DraftNetwork | None
    device: torch.device
    weight_bytes: int
    decisions: tuple[Decision, ...]
    load_s: dict[str, float]
    origin: Origin | None = None
    rank: int = 0
    pipe: Pipe | None = None
    balancer: Balancer = field(default_factory=lambda: Balancer((), 0))
    movable: tuple[MovableExperts, ...] = ()

    @property
    def whole_origin(self) -> Origin | None:
        """How it was built, where all of its layers are here: orders name tensors of these."""
        return self.origin if self.pipe is None else None

    def facts(self, started: StartedRunner) -> WorkerFacts:
        """What a runner over this model states, with what is known of the model."""
        facts = started.runner.facts
        stated = [(d.field, d.requested, d.chosen, d.why) for d in self.decisions]
        return msgspec.structs.replace(
            facts,
            weight_bytes=self.weight_bytes,
            start_s={**self.load_s, **started.start_s},
            decisions=[*stated, *facts.decisions],
        )


class Resident:
    """A loaded model, with a runner over it unless it is parked. Its weights are on the device;
    parked, in host memory (of a CPU they are there already). All methods are called by the thread
    that runs the steps."""

    def __init__(self, loaded: RankModel, *, checks: DeferredChecks | None = None) -> None:
        self._device = loaded.device
        self._loaded: RankModel | None = loaded
        self._started: StartedRunner | None = _start(loaded, checks)
        self._copy: HostCopy | None = None
        self._adapters: AdapterStore | None = None
        self._weight_orders = WeightOrders(loaded.whole_origin, loaded.device, loaded.rank)
        self._kv_files: KVFiles | None = None
        self.balancer, self.movable = loaded.balancer, loaded.movable

    def weigh(self, order: WeightOrder) -> WeightReply:
        """Carries out an order about the weights; `join` and `leave` may be called by another
        thread. Of a parked model the weights come back to the device first, without a runner."""
        use_device(self._device)
        if self._copy is not None and order.action not in BESIDE_STEPS:
            self._copy.back()
            self._copy = None
        if order.action not in BESIDE_STEPS:
            self.balancer.go_back()
        reply = self._weight_orders.carry_out(order)
        if self._kv_files is not None and order.action not in BESIDE_STEPS:
            self._kv_files.fingerprint = ""
        if order.action == "finish" or order.last:
            if self._adapters is not None:
                self._adapters.renew()
            if self._started is not None:
                self.runner.forget_content()
        return reply

    def adapt(self, order: AdapterOrder) -> AdapterReply:
        """Carries out an order; called by a thread of its own, which no step waits for."""
        loaded = self._loaded
        assert loaded is not None and loaded.model.adapters is not None, "it takes no adapters"
        use_device(self._device)
        if self._adapters is None:
            self._adapters = AdapterStore(loaded.model.adapters, self._device)
        return self._adapters.carry_out(order)

    def behind_steps(self) -> torch.cuda.Event | None:
        """The end of the steps so far on a GPU; a CPU has ended them when this is called."""
        if self._device.type != "cuda":
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def move(self, order: KVOrder, behind: torch.cuda.Event | None) -> KVReply:
        """Copies blocks to a file or from one, beside the steps and behind those before `behind`;
        called by a thread of its own."""
        loaded = self._loaded
        assert loaded is not None, "the model was given up"
        use_device(self._device)
        if self._kv_files is None:
            self._kv_files = KVFiles(loaded.origin, loaded.device, loaded.rank)
        return self._kv_files.carry_out(order, self.runner.memory, behind)

    @property
    def runner(self) -> Runner:
        """What runs the steps."""
        assert self._started is not None, "the model is parked"
        return self._started.runner

    @property
    def facts(self) -> WorkerFacts:
        """What this rank states of itself."""
        assert self._loaded is not None and self._started is not None, "the model is parked"
        return self._loaded.facts(self._started)

    def park(self) -> None:
        """Gives up the KV cache and everything else a runner holds; then the weights leave the
        device."""
        assert self._loaded is not None, "the model was given up"
        self.runner.release()
        self._started = None
        gc.collect()
        if self._device.type != "cpu":
            held = (self._loaded.model, self._loaded.network)
            self._copy = HostCopy(held, self._device)
        self._let_go()

    def unpark(self) -> None:
        """The weights come back, and a new runner over them."""
        assert self._loaded is not None, "the model was given up"
        if self._copy is not None:
            self._copy.back()
            self._copy = None
        self._loaded = replace(self._loaded, load_s={})
        self._started = _start(self._loaded, None)

    def close(self) -> None:
        """Gives up the model too, for good. Whoever holds this object holds no memory with it."""
        self._loaded = self._copy = self._started = self._adapters = self._kv_files = None
        self._weight_orders.close()
        self._weight_orders = WeightOrders(None, self._device, 0)
        gc.collect()
        self._let_go()

    def _let_go(self) -> None:
        """Memory that is free in this process goes back to the device and the system."""
        if self._device.type == "cuda":
            torch._C._cuda_clearCublasWorkspaces()  # 32 MiB for every stream there was
            torch.cuda.empty_cache()
        heap.trim()


def _start(loaded: RankModel, checks: DeferredChecks | None) -> StartedRunner:
    return start_runner(
        loaded.spec,
        loaded.model,
        device=loaded.device,
        checks=checks,
        network=loaded.network,
        routing=None if loaded.whole_origin is None else loaded.whole_origin.ledger.routing,
        hidden=_hidden_states(loaded),
        directions=loaded.model.directions if isinstance(loaded.model, Decoder) else None,
        pipe=loaded.pipe,
    )


def _hidden_states(loaded: RankModel) -> HiddenStateFiles | None:
    """The files of hidden states; ConfigError for models that have none of the layers' streams."""
    spec, model = loaded.spec.model.hidden_states, loaded.model
    if spec is None:
        return None
    if not isinstance(model, Decoder) or not model.taps_until:
        raise ConfigError(
            "--speculative-config: method 'extract_hidden_states' needs a plain decoder; "
            f"{loaded.spec.model.family} is none",
            field="speculative_config",
        )
    return HiddenStateFiles(spec, loaded.rank)


def build_resident(
    spec: EngineSpec, loader: str = DEFAULT_LOADER, mesh: Mesh | None = None
) -> Resident:
    """Loads the model and builds the runner on this rank's device.

    `loader` is "module:attribute" of a function with the signature of
    `back.models.load.load_model`.
    """
    extensions.check(extensions.MODELS, extensions.LOGITS_PROCESSORS)
    load_model: Any = Registry("model loader", {"model": loader}).load("model")
    mesh = mesh or Mesh()
    began = time.perf_counter()
    device = choose_device(spec.device.device, mesh)
    mesh, summing = with_sums(mesh, device, DTYPES[spec.model.dtype])
    ready_s = time.perf_counter() - began
    try:

        def build(checks: DeferredChecks | None = None) -> Resident:
            model, report = load_model(
                spec.model,
                mesh=mesh,
                device=device,
                block_tokens=spec.kv.block_tokens,
                verify_queries=verify_queries(spec),
            )
            network, drafting = _load_network(spec, model, device)
            if checks is not None:
                choose_kernels(device)
            load_s = time.perf_counter() - began - ready_s
            loaded = RankModel(
                spec=spec,
                model=model,
                network=network,
                device=device,
                weight_bytes=report.weight_bytes + drafting.weight_bytes,
                decisions=(*report.decisions, *summing, *drafting.decisions),
                load_s={"device": ready_s, "load": load_s},
                origin=report.origin,
                rank=mesh.rank,
                pipe=mesh.pipe,
                balancer=_balancer(spec, report, mesh.rounds),
                movable=() if report.origin is None else tuple(report.origin.ledger.movable),
            )
            return Resident(loaded, checks=checks)

        resident = checked(build) if device.type == "cuda" else build()
        if device.type == "cpu":
            code_pages.let_go("libtorch")
        return resident
    except torch.OutOfMemoryError as error:
        raise _too_small(error, device) from error


def _balancer(spec: EngineSpec, report: LoadReport, rounds: Rounds | None) -> Balancer:
    """Of the experts that may change ranks; the others have none to balance. Engine cores that
    share them out take other steps than each other, but the same rounds: of each mixture one is
    counted as a step."""
    balance = spec.device.expert_balance
    if balance is None or report.origin is None:
        return Balancer((), 0)
    movable = report.origin.ledger.movable
    if rounds is None:
        return Balancer(movable, balance.steps)
    rounds.between = Balancer(movable, balance.steps * len(movable)).at
    return Balancer((), 0)


def _load_network(
    spec: EngineSpec, model: CausalModel, device: torch.device
) -> tuple[DraftNetwork | None, LoadReport]:
    """What drafts for the model, where that has weights: whole on every rank."""
    speculation = spec.speculation
    if speculation is None or speculation.model is None:
        return None, LoadReport()
    tokens = spec.kv.block_tokens
    return load_network(speculation, model, device=device, block_tokens=tokens)


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
    if is_foreign(kind):
        platform = platform_of(kind)
        MORE_KERNELS.update(platform.kernels)
        return torch.device(platform.torch_device(mesh.rank))
    if kind != "cuda":
        return torch.device(kind)
    index = mesh.rank
    if mesh.size == 1:
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


def set_threads(device: DeviceSpec) -> None:
    """Gives torch, for work started from the calling thread, and this process's native kernels
    their threads; the calling thread and those keep to the CPUs they are given, and take memory
    from all NUMA nodes they are given."""
    set_affinity(device.cpus)
    if device.nodes:
        interleave(device.nodes)
    torch.set_num_threads(device.threads)
    use_threads(device.threads, device.cpus or None)
