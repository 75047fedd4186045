"""`headrace plan` without its printing: what a model costs, read off the model itself built without
memory, and what this machine reads and multiplies per second.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from headrace.back.attention.forms import StateForm
from headrace.back.kernels.native.library import NativeLibrary, load, use_threads
from headrace.back.kernels.op import DeferredChecks, decisions
from headrace.back.kernels.probe.native import reader
from headrace.back.layers.gemms import Weight, gemm_of
from headrace.back.models.families import FALLBACK
from headrace.back.models.load import load_model, open_source, stored_blocks
from headrace.back.models.protocol import LoadableModel
from headrace.back.models.registry import DTYPES, build_model
from headrace.back.parallel.mesh import Axis, ContextSplit, Mesh, with_whole_experts
from headrace.back.parallel.param import Param, local_shape
from headrace.back.platforms import huge_pages
from headrace.back.platforms.facts import DeviceFacts
from headrace.back.quant.online import pack
from headrace.back.quant.scheme import ONLINE_SCHEMES
from headrace.back.quant.stored import Stored
from headrace.back.runner.start import foretold
from headrace.back.sampling.sampler import choose_kernels
from headrace.base.config.layer_count import first_layers
from headrace.base.config.resolved import ContextSpec, Decision, DeviceSpec, EngineSpec, ModelSpec
from headrace.base.errors import ConfigError
from headrace.base.optional import available
from headrace.launch.performance_model import STATE, DeviceModel, KVForetold, ModelCost

_PROBE_BYTES = 128 << 20
_PROBE_ROWS, _PROBE_SIZE = 256, 2048
_PROBE_S = 0.03
"""Of each of the two probes."""


def build_without_memory(
    spec: ModelSpec,
    *,
    block_tokens: int,
    tensor_parallel: int = 1,
    expert_parallel: bool = False,
    expert_cores: int = 1,
    context: ContextSpec | None = None,
    planned: str = "",
    stored: Stored | None = None,
) -> LoadableModel:
    """The model on the meta device; the first rank's share if there are several. `expert_parallel`
    and `context`: see DeviceSpec; `expert_cores`: engine cores that share out the experts;
    `planned` and `stored`: see Scope."""
    ranks = tensor_parallel
    # Nothing is summed on the meta device.
    group = None
    if ranks * expert_cores > 1:
        group = dist.ProcessGroup(0, ranks)  # type: ignore[call-arg]  # missing in the stub
    mesh = Mesh(tp=Axis(size=ranks, group=group))
    if expert_parallel:
        whole = with_whole_experts(mesh)
        axis = replace(whole.ep, size=ranks * expert_cores, group=group)
        mesh = replace(whole, ep=axis)
    if context is not None:
        axis = Axis(name="dcp", size=context.ranks, group=group)
        mesh = replace(mesh, dcp=ContextSplit(axis=axis, interleave=context.interleave))
    meta = torch.device("meta")
    return build_model(
        spec, mesh=mesh, device=meta, block_tokens=block_tokens, planned=planned, stored=stored
    )


def rank_share(device: DeviceSpec) -> dict[str, Any]:
    """What `build_without_memory` must know of what a rank has of the layers."""
    group = device.expert_group
    return {
        "tensor_parallel": device.tensor_parallel,
        "expert_parallel": device.expert_parallel,
        "expert_cores": 1 if group is None else group.cores,
    }


def stored_on_absent_device(spec: ModelSpec, device: DeviceFacts) -> Stored:
    """What of a checkpoint would stay quantized on a GPU that is not here."""
    quantized = spec.format == "gguf" or "quantization_config" in spec.config
    quantized = quantized and spec.format != "dummy"
    if device.kind != "cuda" or not quantized or not available("triton"):
        return {}
    from headrace.back.kernels.triton.wrap import planned_for

    assert device.capability is not None
    with closing(open_source(spec)) as source, planned_for(device.capability[:2]):
        return stored_blocks(spec, source, torch.device(device.kind))[0]


def cost_of(model: LoadableModel, *, dtype: torch.dtype) -> ModelCost:
    """Bytes and operations from the model's parameters and KV layers, of this rank."""
    sizes = {
        p.name: (int(np.prod(_shape(p))), _num_bytes(p), len(p.shape)) for p in model.weights.params
    }
    tables = [name for name in sizes if "embed" in name]
    tied = not any("lm_head" in name or name == "head" for name in sizes)
    table_bytes = sum(sizes[n][1] for n in tables)
    total = sum(num_bytes for _, num_bytes, _ in sizes.values())
    slots = 0 if model.adapters is None else model.adapters.num_bytes
    routed = {p.name: p.routed for p in model.weights.params if p.routed is not None}
    matrices = sum(
        count
        for name, (count, _, dims) in sizes.items()
        if dims == 2 and name not in (tables[1:] if tied else tables) and name not in routed
    )
    matrices += sum(sizes[name][0] * chosen // of for name, (of, chosen) in routed.items())
    head_bytes = sum(s[1] for n, s in sizes.items() if "lm_head" in n or n == "head")
    looked_up = sum(sizes[n][1] for n in tables[1:])  # of these no step reads more than a few rows
    return ModelCost(
        weight_bytes=total + slots,
        read_bytes=total - (looked_up if tied else table_bytes),
        head_bytes=table_bytes - looked_up if tied else head_bytes,
        multiplied=matrices,
        kv_layers=_kv_layers(model, dtype),
        routed=_routed({name: sizes[name][1] for name in routed}, routed),
    )


def kv_of(model: LoadableModel, spec: EngineSpec, memory_bytes: int) -> KVForetold:
    """What a worker's KV memory of so many bytes holds: as the runner will cut it. Nothing of
    encoders, and of the fallback, whose caches are known once it has run."""
    kv = spec.kv
    if not model.kv_forms:
        return KVForetold()
    if kv.num_blocks is None:
        kv = msgspec.structs.replace(kv, memory_bytes=memory_bytes, fit=False)
    try:
        layout, counts = foretold(msgspec.structs.replace(spec, kv=kv), model)
    except ConfigError:  # it holds not one token: said where the estimate is made
        return KVForetold()
    rows = counts.state_rows + counts.drafted_states
    return KVForetold(
        blocks=counts.num_blocks,
        block_bytes=layout.slab_bytes,
        state_bytes=layout.state_bytes * rows,
        snapshot_bytes=layout.state_bytes * counts.snapshot_slots,
    )


def _routed(
    num_bytes: dict[str, int], routed: dict[str, tuple[int, int]]
) -> tuple[tuple[int, int, int], ...]:
    """See ModelCost: those of one kind together."""
    kinds: dict[tuple[int, int], int] = {}
    for name, kind in routed.items():
        kinds[kind] = kinds.get(kind, 0) + num_bytes[name]
    return tuple((size, *kind) for kind, size in kinds.items())


def _kv_layers(model: LoadableModel, dtype: torch.dtype) -> tuple[tuple[int, int | None], ...]:
    """See ModelCost. The state of a recurrence belongs to the inputs kept right before it."""
    layers: list[tuple[int, int | None]] = []
    for form in model.kv_forms:
        num_bytes = math.ceil(form.block_bytes(1, dtype) / form.block_ratio(1))
        span = form.span
        if isinstance(form, StateForm):
            span = STATE
            if form.dtype is not None and layers and layers[-1][1] == STATE:
                num_bytes += layers.pop()[0]
        layers.append((num_bytes, span))
    return tuple(layers)


def _shape(param: Param) -> tuple[int, ...]:
    return local_shape(param) if param.tensor is None else tuple(param.tensor.shape)


def _num_bytes(param: Param) -> int:
    return param.packed_bytes or int(np.prod(_shape(param))) * param.dtype.itemsize


def with_layers(spec: ModelSpec, num_layers: int) -> ModelSpec:
    """The model's first layers, with dummy weights."""
    config = first_layers(spec.config, num_layers)
    return msgspec.structs.replace(spec, config=config, format="dummy")


def kernels_of(spec: ModelSpec, *, block_tokens: int) -> tuple[Decision, ...]:
    """The kernels this machine would choose for the model's first layer, with the reasons."""
    _, report = load_model(
        with_layers(spec, 1), mesh=Mesh(), device=torch.device("cpu"), block_tokens=block_tokens
    )
    return report.decisions


def kernels_on_absent_device(
    spec: ModelSpec,
    device: DeviceFacts,
    *,
    block_tokens: int,
    tensor_parallel: int = 1,
    expert_parallel: bool = False,
    expert_cores: int = 1,
) -> tuple[Decision, ...]:
    """The kernels that a GPU which is not here would be given, by what they say of themselves, with
    the reasons. Whether each agrees with its reference is seen there, at start."""
    why = ""
    if device.kind != "cuda":
        why = f"which ones {device.name} takes is seen there"
    elif spec.family == FALLBACK:
        why = "the transformers fallback chooses by running"
    elif not available("triton"):
        why = "Triton is not installed here, without which its kernels cannot be asked"
    if why:
        return (Decision("kernels", "auto", "at start", why),)
    from headrace.back.kernels.triton.wrap import planned_for

    assert device.capability is not None
    stored = stored_on_absent_device(spec, device)
    with DeferredChecks() as checks, planned_for(device.capability[:2]):
        model = build_without_memory(
            spec,
            block_tokens=block_tokens,
            tensor_parallel=tensor_parallel,
            expert_parallel=expert_parallel,
            expert_cores=expert_cores,
            planned=device.kind,
            stored=stored,
        )
        model.finish_load()
        samplers = decisions(choose_kernels(torch.device(device.kind)))
    checks.forget()
    return (*model.decisions, *samplers)


def probe_cpu(spec: EngineSpec, *, memory_bytes: int) -> DeviceModel:
    """This machine's read bandwidth and GEMM rate, by the kernels, the threads and the type
    of weights the engine would have, in a tenth of a second (a slow machine gets fewer
    repetitions)."""
    begin = time.perf_counter()
    torch.set_num_threads(spec.device.threads)
    use_threads(spec.device.threads, spec.device.cpus or None)
    data = torch.empty(_PROBE_BYTES, dtype=torch.uint8)
    huge_pages.advise(data.data_ptr(), data.nbytes)  # as the weights are
    data.fill_(1)
    library = load()
    read = reader(library, data) if isinstance(library, NativeLibrary) else data.sum
    gemm = _gemm(spec)
    bandwidth = _PROBE_BYTES / _best_s(read)
    rate = 2 * _PROBE_ROWS * _PROBE_SIZE**2 / _best_s(gemm)
    bits = spec.model.quantization or spec.model.dtype
    return DeviceModel(
        name="cpu",
        memory_bytes=memory_bytes,
        bandwidth=bandwidth,
        rate=rate,
        source=f"measured on {spec.device.threads} threads, {bits}",
        probe_s=time.perf_counter() - begin,
    )


def _gemm(spec: EngineSpec) -> Callable[[], object]:
    """A GEMM of a prompt's rows with a square weight, by the kernel a layer would have."""
    dtype = DTYPES[spec.model.dtype]
    x_TI = torch.ones(_PROBE_ROWS, _PROBE_SIZE, dtype=dtype)
    plain = torch.ones(_PROBE_SIZE, _PROBE_SIZE, dtype=dtype)
    scheme = spec.model.quantization
    weight: Weight = plain if scheme is None else pack(plain, ONLINE_SCHEMES[scheme])
    op, problem = gemm_of(weight, device="cpu", dtype=dtype)
    gemm = op.choose(problem).bind(weight, None)
    return lambda: gemm(x_TI)


def _best_s(work: Callable[[], object]) -> float:
    """Seconds of the fastest of a few runs; the first, which is not counted, touches what the
    others use."""
    end = time.perf_counter() + _PROBE_S
    times: list[float] = []
    work()
    while not times or (time.perf_counter() < end and len(times) < 5):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return min(times)
