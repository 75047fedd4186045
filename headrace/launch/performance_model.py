"""Whether a model fits a device and how fast it would run: the device's roofline against the
model's cost.

A decode step reads every weight once and the KV of every row once; a prefill token costs two
operations per weight. The step takes the longer of bytes / bandwidth and operations / rate. These
are bounds, not measurements: the tables in benchmarks/ give the share that is reached. On this
machine a sample of the model is measured instead (a few layers and the head, bench/sample.py), and
its step times are scaled by the ratio of costs.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from headrace.back.platforms.detect import FAKES
from headrace.back.platforms.facts import DeviceFacts
from headrace.base.errors import ConfigError

GIB = 1 << 30


class DeviceModel(msgspec.Struct, frozen=True, kw_only=True):
    """A device as the roofline sees it. Bandwidth in bytes/s and rate in operations/s, as reached
    by large streams and matrix products; `source` says where the two come from, `probe_s` how long
    they were measured. `link`: bytes/s from host memory, 0: unknown."""

    name: str
    memory_bytes: int
    bandwidth: float
    rate: float
    source: str
    probe_s: float = 0.0
    link: float = 0.0


LINK_REACHED = 0.85  # share of a link's data sheet that large copies from pinned memory reach
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
        name=name,
        memory_bytes=facts.memory_bytes,
        bandwidth=bandwidth,
        rate=rate,
        source=source,
        link=LINK_REACHED * (facts.link_gb_s or 0.0) * 1e9,
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


STATE = 1
"""The window of a recurrent state: its bytes are there once, however long the context is."""


class ModelCost(msgspec.Struct, frozen=True, kw_only=True):
    """What a model costs. `read_bytes` are the weights one decode step reads (all but the embedding
    table, unless it is also the head), of them `head_bytes` the head's; `multiplied` is the number
    of weights a token is multiplied with. `kv_layers`: one (bytes per token, window in tokens or
    None) per layer, recurrent states each with the window STATE. `routed`: of mixtures (bytes,
    experts, those that a token takes), part of `read_bytes`. `host_bytes`: of the weights that lie
    in host memory, `host_routed` (experts, those that a token takes) if they are routed experts;
    `weight_bytes` then counts what the device holds."""

    weight_bytes: int
    read_bytes: int
    multiplied: int
    kv_layers: tuple[tuple[int, int | None], ...]
    head_bytes: int = 0
    routed: tuple[tuple[int, int, int], ...] = ()
    host_bytes: int = 0
    host_routed: tuple[int, int] | None = None

    def linked_by(self, tokens: int) -> float:
        """Bytes that a step of so many tokens has from host memory: all that lie there, or of few
        tokens the experts that uniform routing sends one of them to."""
        if self.host_routed is None:
            return self.host_bytes
        experts, chosen = self.host_routed
        if 2 * tokens * chosen > experts:
            return self.host_bytes
        return self.host_bytes * (1 - (1 - chosen / experts) ** tokens)

    def read_by(self, rows: int) -> float:
        """Bytes of weights that a decode step of so many rows reads: of experts those that uniform
        routing sends one of them to."""
        left = (size * (1 - chosen / experts) ** rows for size, experts, chosen in self.routed)
        return self.read_bytes - sum(left)

    def kv_bytes(self, context: int) -> int:
        """KV bytes of one sequence of `context` tokens."""
        return sum(
            per_token * min(context, window or context) for per_token, window in self.kv_layers
        )


class SampleTiming(msgspec.Struct, frozen=True, kw_only=True):
    """A sample of a model, measured: what it `cost`s, `steps` of (rows, seconds) at `context`
    tokens a row, and `prompts` of (tokens, seconds) alone, a short one and a long one. All that was
    measured in `seconds`."""

    cost: ModelCost
    context: int
    steps: tuple[tuple[int, float], ...]
    prompts: tuple[tuple[int, float], tuple[int, float]]
    seconds: float = 0.0

    def step_s(self, rows: int) -> float:
        """Seconds of the sample's step: between measured numbers of rows, and beyond them, on a
        straight line."""
        points = self.steps
        at = next((i for i, (r, _) in enumerate(points[1:-1]) if rows <= r), len(points) - 2)
        (r0, s0), (r1, s1) = points[at : at + 2]
        return s0 + (s1 - s0) * (rows - r0) / (r1 - r0)

    def decode_s(self, cost: ModelCost, rows: int) -> float:
        """Seconds of the whole model's step over `rows` rows of `context` tokens: in proportion to
        the bytes read."""
        whole = cost.read_by(rows) + rows * cost.kv_bytes(self.context)
        return (
            self.step_s(rows)
            * whole
            / (self.cost.read_by(rows) + rows * self.cost.kv_bytes(self.context))
        )

    def prefill_tok_s(self, cost: ModelCost) -> float:
        """Tokens of a prompt of PROMPT_TOKENS per second. What a token more takes is the layers',
        in proportion to them; what is left, the head and the host's work, a prompt takes once."""
        (short, short_s), (long, long_s) = self.prompts
        token_s = max(long_s - short_s, 0.5 * long_s * (long - short) / long) / (long - short)
        once_s = max(0.0, long_s - long * token_s)
        ratio = self._prompt_layers(cost) / self._prompt_layers(self.cost)
        return PROMPT_TOKENS / (PROMPT_TOKENS * token_s * ratio + once_s)

    def _prompt_layers(self, cost: ModelCost) -> float:
        """Layers that each token of a prompt goes through; of the last only a part."""
        return len(cost.kv_layers) - 1 + LAST_LAYER


PROMPT_TOKENS = 512
LAST_LAYER = 0.1
"""Of the last layer most tokens of a prompt need keys and values alone: this part of its work."""


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """One load: `batch` rows at `context` tokens each. `bound`: what most of a step is spent on, or
    that so many do not run at once."""

    batch: int
    context: int
    decode_step_ms: float
    decode_tok_s: float
    bound: str


class OffloadOffer(msgspec.Struct, frozen=True, kw_only=True):
    """How a model larger than the device would run: `option` as typed, what lies in host memory,
    and one stream's tokens per second."""

    option: str
    layers: int
    host_bytes: int
    decode_tok_s: float
    prefill_tok_s: float


class KVForetold(msgspec.Struct, frozen=True, kw_only=True):
    """What a KV memory is cut into: blocks of `block_bytes`, of all caches that share one pool;
    recurrent state of every running row and behind each draft of a step; snapshots of it."""

    blocks: int = 0
    block_bytes: int = 0
    state_bytes: int = 0
    snapshot_bytes: int = 0


class PerformanceEstimate(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the model fits, what is left for KV, and how fast it would run at so many 10^9 bytes
    and operations per second, which are from `source`; with `sample_layers` from their steps.
    `probe_s`: seconds of all measuring. Bytes and tokens of KV are those of each of `devices`, and
    `kv` what they are cut into;
    `offers`: how a model that does not fit would run;
    `lack`: why it does not fit, where there is more to say."""

    device: str
    devices: int = 1
    read_gb_s: float
    gflops: float
    source: str
    fits: bool
    weight_bytes: int
    kv_memory_bytes: int
    kv_tokens: int
    prefill_tok_s: float
    decode: tuple[Prediction, ...]
    probe_s: float = 0.0
    sample_layers: int = 0
    shortfall: str = ""
    offers: tuple[OffloadOffer, ...] = ()
    kv: KVForetold = KVForetold()


def with_kv(estimate: PerformanceEstimate, kv: KVForetold, cost: ModelCost) -> PerformanceEstimate:
    """The estimate with tokens counted in what is left of the memory beside recurrent state."""
    if not kv.blocks:
        return estimate
    context = estimate.decode[0].context
    per_sequence = sum(
        size * min(context, window or context) for size, window in cost.kv_layers if window != STATE
    )
    tokens = estimate.kv_tokens
    if per_sequence:
        tokens = kv.blocks * kv.block_bytes * context // per_sequence
    return msgspec.structs.replace(estimate, kv=kv, kv_tokens=tokens)


def predict_step(
    cost: ModelCost,
    device: DeviceModel,
    *,
    batch: int,
    context: int,
    sample: SampleTiming | None = None,
) -> Prediction:
    """One decode step: at the roofline, or as a sample of the model says."""
    bytes_s = (cost.read_by(batch) + batch * cost.kv_bytes(context)) / device.bandwidth
    operations_s = 2 * batch * cost.multiplied / device.rate
    link_s = cost.linked_by(batch) / device.link if device.link else 0.0
    step_s = max(bytes_s, operations_s, link_s)
    if sample is not None:
        more_kv = cost.kv_bytes(context) - cost.kv_bytes(sample.context)
        step_s = sample.decode_s(cost, batch) + batch * more_kv / device.bandwidth
        operations_s = step_s - bytes_s
    return Prediction(
        batch=batch,
        context=context,
        decode_step_ms=step_s * 1e3,
        decode_tok_s=batch / step_s,
        bound="link to host memory"
        if link_s > max(bytes_s, operations_s)
        else "memory"
        if bytes_s >= operations_s
        else "arithmetic",
    )


def _prefill_tok_s(cost: ModelCost, device: DeviceModel, step_tokens: int) -> float:
    rate = device.rate / (2 * cost.multiplied)
    if not cost.host_bytes or not device.link:
        return rate
    return min(rate, step_tokens * device.link / cost.host_bytes)


def estimate_performance(
    cost: ModelCost,
    device: DeviceModel,
    *,
    kv_memory_bytes: int | None,
    max_model_len: int,
    batches: Sequence[int] = (1, 8, 32, 128),
    context: int = 1024,
    sample: SampleTiming | None = None,
    devices: int = 1,
    step_tokens: int = PROMPT_TOKENS,
) -> PerformanceEstimate:
    """The whole estimate; `kv_memory_bytes` None takes 90 % of what the weights leave; rooflines if
    there is no sample. `cost`, memory and device describe one of `devices` that share each layer;
    their all-reduces are not counted. `step_tokens`: of a step of prompts."""
    left = device.memory_bytes - cost.weight_bytes
    kv_memory = int(max(0, left) * 0.9) if kv_memory_bytes is None else kv_memory_bytes
    context = min(context, max_model_len)
    per_sequence = cost.kv_bytes(context)
    held = kv_memory // per_sequence if per_sequence else max(batches)
    decode = (predict_step(cost, device, batch=b, context=context, sample=sample) for b in batches)
    return PerformanceEstimate(
        device=device.name,
        devices=devices,
        read_gb_s=device.bandwidth / 1e9,
        gflops=device.rate / 1e9,
        source=device.source,
        fits=left > 0 and kv_memory <= left and kv_memory >= per_sequence,
        weight_bytes=cost.weight_bytes,
        kv_memory_bytes=kv_memory,
        kv_tokens=kv_memory * context // max(1, per_sequence),
        prefill_tok_s=_prefill_tok_s(cost, device, step_tokens)
        if sample is None
        else sample.prefill_tok_s(cost),
        decode=tuple(
            p if p.batch <= held else msgspec.structs.replace(p, bound=f"KV cache holds {held}")
            for p in decode
        ),
        probe_s=device.probe_s + (sample.seconds if sample else 0.0),
        sample_layers=len(sample.cost.kv_layers) if sample else 0,
    )
