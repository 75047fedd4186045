"""`headrace plan` without its printing: what a model costs, read off the model itself built without memory.

The kernels are those the real choice picks: a few layers of the model are built with dummy weights on this machine.
"""

from __future__ import annotations

import time

import msgspec
import numpy as np
import torch

from headrace.back.models.load import load_model
from headrace.back.models.protocol import LoadableModel
from headrace.back.models.registry import DTYPES, build_model
from headrace.back.parallel.mesh import Mesh
from headrace.back.parallel.param import Param
from headrace.base.config.resolved import Decision, ModelSpec
from headrace.launch.forecast import DeviceModel, ModelCost

SAMPLE_LAYERS = 6
SAMPLE_BYTES = 2 << 30
_PROBE_BYTES = 256 << 20
_PROBE_SIZE = 1024


def build_without_memory(spec: ModelSpec, *, block_tokens: int) -> LoadableModel:
    """The model on the meta device."""
    return build_model(spec, mesh=Mesh(), device=torch.device("meta"), block_tokens=block_tokens)


def cost_of(model: LoadableModel, *, dtype: torch.dtype) -> ModelCost:
    """Bytes and operations from the model's parameters and KV layers."""
    sizes = {
        p.name: (int(np.prod(p.shape)), _num_bytes(p), len(p.shape)) for p in model.weights.params
    }
    tables = [name for name in sizes if "embed" in name]
    tied = not any("lm_head" in name or name == "head" for name in sizes)
    unread = 0 if tied else sum(sizes[n][1] for n in tables)
    total = sum(num_bytes for _, num_bytes, _ in sizes.values())
    matrices = sum(
        count
        for name, (count, _, dims) in sizes.items()
        if dims == 2 and (tied or name not in tables)
    )
    kv = tuple(
        (2 * layer.kv_heads * layer.head_dim * dtype.itemsize, layer.window)
        for layer in model.kv_layers
    )
    return ModelCost(
        weight_bytes=total, read_bytes=total - unread, multiplied=matrices, kv_layers=kv
    )


def _num_bytes(param: Param) -> int:
    return param.packed_bytes or int(np.prod(param.shape)) * param.dtype.itemsize


def kernels_of(spec: ModelSpec, cost: ModelCost, *, block_tokens: int) -> tuple[Decision, ...]:
    """The kernels this machine would choose for the model's layers, with the reasons."""
    num_layers = len(cost.kv_layers)
    wanted = SAMPLE_LAYERS if cost.weight_bytes / num_layers * SAMPLE_LAYERS < SAMPLE_BYTES else 1
    config = {**spec.config, "num_hidden_layers": min(num_layers, wanted)}
    if isinstance(config.get("layer_types"), list):
        config["layer_types"] = config["layer_types"][: config["num_hidden_layers"]]
    sample = msgspec.structs.replace(spec, config=config, format="dummy")
    _, report = load_model(
        sample, mesh=Mesh(), device=torch.device("cpu"), block_tokens=block_tokens
    )
    return report.decisions


def probe_cpu(*, memory_bytes: int, dtype: str) -> DeviceModel:
    """This machine's read bandwidth and matrix rate, measured in under half a second."""
    array = torch.ones(_PROBE_BYTES // 4)
    bandwidth = _PROBE_BYTES / min(_timed(lambda: array.sum()) for _ in range(3))
    left = torch.ones(_PROBE_SIZE, _PROBE_SIZE, dtype=DTYPES[dtype])
    rate = 2 * _PROBE_SIZE**3 / min(_timed(lambda: left @ left) for _ in range(4))
    return DeviceModel(
        name="cpu",
        memory_bytes=memory_bytes,
        bandwidth=bandwidth,
        rate=rate,
        source="measured just now",
    )


def _timed(work: object) -> float:
    assert callable(work)
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin
