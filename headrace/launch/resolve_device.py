"""The device part of `resolve`: kind of device, workers, threads and where they run, GPU memory."""

from __future__ import annotations

import msgspec

from headrace.base import extensions
from headrace.base.config.device_options import OWN_EXECUTORS, DeviceOptions
from headrace.base.config.resolved import DeviceSpec, ExpertBalanceSpec, ExpertGroupSpec
from headrace.base.config.tree import Options
from headrace.base.config.units import parse_bytes
from headrace.base.errors import ConfigError
from headrace.launch.chooser import Chooser
from headrace.launch.cpu_binding import bound_cpus
from headrace.launch.model_facts import ModelFacts
from headrace.launch.shared_context import context_spec

CUDA_MEMORY_SHARE = 0.92


class MachineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What the machine has: kind and number of devices, memory of one (host memory for cpu), cores
    we may use; and of a CPU where threads and memory are best placed (back/platforms/placement.py:
    Placement)."""

    kind: str
    count: int
    total_bytes: int
    free_bytes: int
    cores: int
    usable_cpus: tuple[int, ...] = ()
    cpus: tuple[int, ...] = ()
    other_cpus: tuple[int, ...] = ()
    nodes: tuple[int, ...] = ()
    placed: str = ""


def resolve_device(
    options: Options, model: ModelFacts, machine: MachineFacts, choose: Chooser
) -> DeviceSpec:
    """The device's part of the tree; ConfigError for what the machine does not have."""
    requested = options.device
    kind = choose.pick("--device", requested.device, machine.kind, f"{machine.count} found")
    world = requested.tensor_parallel * requested.pipeline_parallel
    ranks = world * most_replicas(requested)
    _check_devices(requested, kind, machine, world=world, ranks=ranks)
    _check_shares(requested, world, kind)
    _check_executor(requested.executor)
    executor = choose.pick(
        "--executor",
        requested.executor,
        "processes" if world > 1 or shares_experts(requested) else "inline",
        "one worker per device",
    )
    alone = kind == "cpu" and executor == "inline" and ranks == 1
    # Asked for a number of threads, we leave their cores to the system: others may have been given
    # the rest.
    cpus = bound_cpus(
        requested.cpu_binding,
        placed=machine.cpus,
        usable=machine.usable_cpus,
        threads=requested.threads,
        single=alone,
    )
    if cpus:
        why = machine.placed if cpus == machine.cpus else f"--cpu-binding {requested.cpu_binding}"
        threads = choose.pick("--threads", requested.threads, len(cpus), why)
    else:
        share = max(1, machine.cores // ranks)
        threads = choose.pick(
            "--threads", requested.threads, share, f"{machine.cores} usable cores, {ranks} workers"
        )
    nodes = machine.nodes if alone and len(machine.nodes) > 1 else ()
    if nodes:
        names = ", ".join(map(str, nodes))
        choose.note("memory", "auto", "interleaved", f"over the NUMA nodes {names}, page by page")
    return DeviceSpec(
        device=kind,
        executor=executor,
        tensor_parallel=requested.tensor_parallel,
        pipeline_parallel=requested.pipeline_parallel,
        pipeline_layers=_stages(requested),
        sequence_parallel=requested.sequence_parallel,
        expert_parallel=requested.enable_expert_parallel,
        token_exchange=_exchange(options, choose),
        expert_balance=_expert_balance(options),
        expert_group=_expert_group(requested),
        context=context_spec(options, model),
        threads=threads,
        memory_bytes=_gpu_bytes(requested.gpu_memory, kind, executor, machine, choose),
        cpus=cpus,
        other_cpus=_other_cpus(machine, cpus),
        nodes=nodes,
        records=not requested.enforce_eager and not shares_experts(requested),
    )


def first_replicas(requested: DeviceOptions) -> int:
    """Engine cores at start; ConfigError if they are asked for twice."""
    if requested.replicas > 1 and requested.data_parallel > 1:
        raise ConfigError(
            f"--replicas {requested.replicas} does not go with --data-parallel "
            f"{requested.data_parallel}: both say how many engine cores there are",
            field="data_parallel",
        )
    return max(requested.replicas, requested.data_parallel)


def most_replicas(requested: DeviceOptions) -> int:
    """Engine cores that there may be at a time; ConfigError if fewer than at start."""
    most, first = requested.max_replicas, first_replicas(requested)
    if most is not None and most < first:
        raise ConfigError(
            f"--max-replicas {most}: at least {_cores(requested)} is needed", field="max_replicas"
        )
    return first if most is None else most


def shares_experts(requested: DeviceOptions) -> bool:
    """Whether the engine cores share out the routed experts."""
    return requested.enable_expert_parallel and requested.data_parallel > 1


def _cores(requested: DeviceOptions) -> str:
    """The engine cores at start, as they are typed."""
    name = "--data-parallel" if requested.data_parallel > 1 else "--replicas"
    return f"{name} {first_replicas(requested)}"


def _copies(requested: DeviceOptions) -> str:
    """All copies of the model, as they are typed."""
    if requested.max_replicas is None:
        return f"{_split(requested)} x {_cores(requested)}"
    return f"{_split(requested)} x --max-replicas {requested.max_replicas}"


def _check_executor(name: str) -> None:
    known = (*OWN_EXECUTORS, *extensions.allowed(extensions.EXECUTORS))
    if name not in known:
        raise ConfigError(
            f"--executor {name!r} is not known (known: {', '.join(known)}; --extensions says which "
            "packages' are)",
            field="executor",
        )


def _check_devices(
    requested: DeviceOptions, kind: str, machine: MachineFacts, *, world: int, ranks: int
) -> None:
    """ConfigError for devices that there are not. `world`: of one copy; `ranks`: of all copies."""
    if kind == "cuda" and machine.kind != "cuda":
        raise ConfigError("--device cuda: no CUDA device was found on this machine")
    if kind not in ("cpu", "cuda") and world > 1:
        raise ConfigError(
            f"--device {kind}: {_split(requested)} is not supported there; use --replicas",
            field="device",
        )
    if kind != "cpu" and ranks > machine.count:
        raise ConfigError(f"{_copies(requested)} needs {ranks} devices; {machine.count} found")


def _split(requested: DeviceOptions) -> str:
    """How a copy of the model is split over devices, as it is typed."""
    tensor = f"--tensor-parallel {requested.tensor_parallel}"
    if requested.pipeline_parallel == 1:
        return tensor
    stages = f"--pipeline-parallel {requested.pipeline_parallel}"
    return stages if requested.tensor_parallel == 1 else f"{tensor} x {stages}"


def _stages(requested: DeviceOptions) -> tuple[int, ...]:
    """The layers of each stage, where they are stated."""
    layers = requested.pipeline_layers or ()
    if layers and len(layers) != requested.pipeline_parallel:
        raise ConfigError(
            f"--pipeline-layers {','.join(map(str, layers))} names {len(layers)} stages, "
            f"--pipeline-parallel {requested.pipeline_parallel}: one number for each stage",
            field="pipeline_layers",
        )
    return layers


def _check_shares(requested: DeviceOptions, world: int, kind: str) -> None:
    """ConfigError for what takes several workers, or devices of a layer."""
    if world > 1 and requested.executor == "inline":
        raise ConfigError(f"--executor inline runs one worker; {_split(requested)} needs processes")
    alone = requested.tensor_parallel == 1 and requested.data_parallel == 1
    if requested.enable_expert_parallel and alone:
        raise ConfigError(
            "--enable-expert-parallel shares out experts to the devices of --tensor-parallel and --data-parallel, "
            "which are 1: raise one of them, or leave it out",
            field="enable_expert_parallel",
        )
    if shares_experts(requested):
        _check_group(requested)
    if requested.sequence_parallel and requested.tensor_parallel == 1:
        raise ConfigError(
            "--sequence-parallel divides rows between the ranks of --tensor-parallel, which is 1",
            field="sequence_parallel",
        )
    if requested.all2all_backend != "allreduce" and not requested.enable_expert_parallel:
        raise ConfigError(
            f"--all2all-backend {requested.all2all_backend} sends tokens to whole experts, which devices have with "
            "--enable-expert-parallel",
            field="all2all_backend",
        )
    if requested.all2all_backend == "ragged" and kind == "cuda":
        raise ConfigError(
            "--all2all-backend ragged reads on the host how many tokens a device gets, which recorded steps of GPUs "
            "cannot: padded sends the same in messages of one size",
            field="all2all_backend",
        )


def _check_group(requested: DeviceOptions) -> None:
    """ConfigError for what engine cores that share out experts cannot."""
    if requested.pipeline_parallel > 1:
        raise ConfigError(
            f"--pipeline-parallel {requested.pipeline_parallel} does not go with --data-parallel "
            f"{requested.data_parallel} --enable-expert-parallel: a rank serves other cores between "
            "its own core's steps; use --tensor-parallel",
            field="pipeline_parallel",
        )
    if requested.executor == "inline":
        raise ConfigError(
            f"--executor inline: with --data-parallel {requested.data_parallel} "
            "--enable-expert-parallel workers serve each other between steps; use processes",
            field="executor",
        )


def _expert_group(requested: DeviceOptions) -> ExpertGroupSpec | None:
    if not shares_experts(requested):
        return None
    cores = requested.data_parallel
    return ExpertGroupSpec(cores=cores, least=cores if _comes_and_goes(requested) else 0)


def _comes_and_goes(requested: DeviceOptions) -> bool:
    return requested.max_replicas not in (None, requested.data_parallel)


def _exchange(options: Options, choose: Chooser) -> str:
    """How tokens come to whole experts. Cores that have tokens of their own must send them."""
    requested = options.device
    if not shares_experts(requested):
        return requested.all2all_backend
    stated = requested.all2all_backend
    exchange: str = choose.pick(
        "--all2all-backend",
        "auto" if stated == "allreduce" else stated,
        "allgather_reducescatter",
        "engine cores have tokens of their own",
    )
    if options.model.deterministic and exchange == "allgather_reducescatter":
        raise ConfigError(
            f"--all2all-backend {exchange} does not go with --deterministic and --data-parallel "
            f"{requested.data_parallel}: the order of its sums may depend on how many tokens are "
            "sent; use padded or ragged",
            field="all2all_backend",
        )
    return exchange


def _expert_balance(options: Options) -> ExpertBalanceSpec | None:
    """How experts follow their loads; None: they do not."""
    requested = options.device
    redundant, steps = requested.num_redundant_experts, requested.expert_rebalance_steps
    if not redundant and not steps:
        return None
    field = "num_redundant_experts" if redundant else "expert_rebalance_steps"
    asked = f"--{field.replace('_', '-')} {redundant or steps}"
    if not requested.enable_expert_parallel:
        raise ConfigError(
            f"{asked} is about whole experts, which devices have with --enable-expert-parallel",
            field=field,
        )
    if options.model.deterministic:
        raise ConfigError(
            f"{asked} does not go with --deterministic: which device computes an expert decides in "
            "which order a token's sums are taken",
            field=field,
        )
    return ExpertBalanceSpec(redundant=redundant, steps=steps)


def _other_cpus(machine: MachineFacts, cpus: tuple[int, ...]) -> tuple[int, ...]:
    """Where the threads run that are no kernels; empty: anywhere."""
    if cpus == machine.cpus:
        return machine.other_cpus if cpus else ()
    return tuple(cpu for cpu in machine.usable_cpus if cpu not in cpus) if cpus else ()


def _gpu_bytes(
    requested: str, kind: str, executor: str, machine: MachineFacts, choose: Chooser
) -> int | None:
    """What a worker may take of its GPU; None where there is none."""
    if kind == "cpu" or executor == "null":
        if requested != "auto":
            raise ConfigError(f"--gpu-memory {requested}: there is no GPU in use ({kind})")
        return None
    share = CUDA_MEMORY_SHARE
    if requested != "auto":
        try:
            share = float(requested)
        except ValueError:
            return parse_bytes(requested, field="--gpu-memory")
        if share > 1:
            return int(share)
        if share <= 0:
            raise ConfigError(
                f"--gpu-memory {requested}: a size, or a fraction above 0 and up to 1"
            )
    room = int(machine.free_bytes * share)
    choose.note("--gpu-memory", requested, f"{room / 2**30:.1f}GiB", f"{share:g} of what is free")
    return room
