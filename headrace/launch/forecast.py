"""How fast a model would run, and whether it fits: the roofline of a device against what the model costs.

A decode step reads every weight once and the KV of every row once; a prefill token costs two operations per weight.
The step takes the longer of bytes / bandwidth and operations / rate. These are bounds, not measurements: the tables in
benchmarks/ say which share of them is reached.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from headrace.base.errors import ConfigError

GIB = 1 << 30


class DeviceModel(msgspec.Struct, frozen=True, kw_only=True):
    """A device as the roofline sees it. Bandwidth in bytes/s and rate in operations/s, as reached by large streams
    and matrix products; `source` says where the two come from."""

    name: str
    memory_bytes: int
    bandwidth: float
    rate: float
    source: str


KNOWN_DEVICES: dict[str, DeviceModel] = {
    device.name: device
    for device in (
        DeviceModel(
            name="h200",
            memory_bytes=139 * GIB,
            bandwidth=4.346e12,
            rate=795e12,
            source="measured, bf16",
        ),
        DeviceModel(
            name="h100",
            memory_bytes=80 * GIB,
            bandwidth=3.0e12,
            rate=790e12,
            source="data sheet x 0.9",
        ),
        DeviceModel(
            name="a100",
            memory_bytes=80 * GIB,
            bandwidth=1.83e12,
            rate=280e12,
            source="data sheet x 0.9",
        ),
        DeviceModel(
            name="l40s",
            memory_bytes=45 * GIB,
            bandwidth=0.78e12,
            rate=325e12,
            source="data sheet x 0.9",
        ),
        DeviceModel(
            name="rtx4090",
            memory_bytes=23 * GIB,
            bandwidth=0.91e12,
            rate=149e12,
            source="data sheet x 0.9",
        ),
        DeviceModel(
            name="mi300x",
            memory_bytes=190 * GIB,
            bandwidth=4.77e12,
            rate=1170e12,
            source="data sheet x 0.9",
        ),
    )
}


def known_device(name: str) -> DeviceModel:
    """The device of that name; an unknown name lists the known ones."""
    if name not in KNOWN_DEVICES:
        raise ConfigError(
            f"--device: unknown device {name!r} (known: cpu, {', '.join(KNOWN_DEVICES)})",
            field="--device",
        )
    return KNOWN_DEVICES[name]


class ModelCost(msgspec.Struct, frozen=True, kw_only=True):
    """What a model costs. `read_bytes` are the weights one decode step reads (all but the embedding table, unless it is
    also the head); `multiplied` is the number of weights a token is multiplied with. `kv_layers`: one (bytes per token,
    window in tokens or None) per layer."""

    weight_bytes: int
    read_bytes: int
    multiplied: int
    kv_layers: tuple[tuple[int, int | None], ...]

    def kv_bytes(self, context: int) -> int:
        """KV bytes of one sequence of `context` tokens."""
        return sum(
            per_token * min(context, window or context) for per_token, window in self.kv_layers
        )


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """The roofline of one load: `batch` rows at `context` tokens each."""

    batch: int
    context: int
    decode_step_ms: float
    decode_tok_s: float
    bound: str


class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the model fits, what is left for KV, and how fast it would run."""

    device: str
    fits: bool
    weight_bytes: int
    kv_memory_bytes: int
    kv_tokens: int
    prefill_tok_s: float
    decode: tuple[Prediction, ...]


def predict_step(cost: ModelCost, device: DeviceModel, *, batch: int, context: int) -> Prediction:
    """One decode step at the roofline."""
    bytes_s = (cost.read_bytes + batch * cost.kv_bytes(context)) / device.bandwidth
    operations_s = 2 * batch * cost.multiplied / device.rate
    step_s = max(bytes_s, operations_s)
    return Prediction(
        batch=batch,
        context=context,
        decode_step_ms=step_s * 1e3,
        decode_tok_s=batch / step_s,
        bound="memory" if bytes_s >= operations_s else "arithmetic",
    )


def forecast(
    cost: ModelCost,
    device: DeviceModel,
    *,
    kv_memory_bytes: int | None,
    max_model_len: int,
    batches: Sequence[int] = (1, 8, 32, 128),
    context: int = 1024,
) -> Forecast:
    """The whole forecast; `kv_memory_bytes` None takes 90 % of what the weights leave."""
    left = device.memory_bytes - cost.weight_bytes
    kv_memory = int(max(0, left) * 0.9) if kv_memory_bytes is None else kv_memory_bytes
    context = min(context, max_model_len)
    per_sequence = cost.kv_bytes(context)
    return Forecast(
        device=device.name,
        fits=left > 0 and kv_memory <= left and kv_memory >= per_sequence,
        weight_bytes=cost.weight_bytes,
        kv_memory_bytes=kv_memory,
        kv_tokens=kv_memory * context // max(1, per_sequence),
        prefill_tok_s=device.rate / (2 * cost.multiplied),
        decode=tuple(predict_step(cost, device, batch=b, context=context) for b in batches),
    )
