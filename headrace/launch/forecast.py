"""How fast a model would run, and whether it fits: the roofline of a device against what the model costs.

A decode step reads every weight once and the KV of every row once; a prefill token costs two operations per weight.
The step takes the longer of bytes / bandwidth and operations / rate. These are bounds, not measurements: the tables in
benchmarks/ say which share of them is reached.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from headrace.back.platforms.detect import FAKES
from headrace.back.platforms.facts import DeviceFacts
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


REACHED = 0.9  # share of a data sheet that large streams and matrix products reach
MEASURED = {"h200": (4.346e12, 795e12)}
"""Bandwidth and bf16 rate where we have measured them."""


def _model_of(name: str, facts: DeviceFacts) -> DeviceModel:
    assert facts.memory_gb_s is not None and facts.bf16_tflops is not None, name
    bandwidth, rate = REACHED * facts.memory_gb_s * 1e9, REACHED * facts.bf16_tflops * 1e12
    source = f"data sheet x {REACHED:g}"
    if name in MEASURED:
        (bandwidth, rate), source = MEASURED[name], "measured, bf16"
    return DeviceModel(
        name=name, memory_bytes=facts.memory_bytes, bandwidth=bandwidth, rate=rate, source=source
    )


KNOWN_DEVICES = {name: _model_of(name, facts) for name, facts in FAKES.items()}


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
    """Whether the model fits, what is left for KV, and how fast it would run at so many 10^9 bytes and operations per
    second, which are from `source`."""

    device: str
    read_gb_s: float
    gflops: float
    source: str
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
        read_gb_s=device.bandwidth / 1e9,
        gflops=device.rate / 1e9,
        source=device.source,
        fits=left > 0 and kv_memory <= left and kv_memory >= per_sequence,
        weight_bytes=cost.weight_bytes,
        kv_memory_bytes=kv_memory,
        kv_tokens=kv_memory * context // max(1, per_sequence),
        prefill_tok_s=device.rate / (2 * cost.multiplied),
        decode=tuple(predict_step(cost, device, batch=b, context=context) for b in batches),
    )
