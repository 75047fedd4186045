"""The part of `resolve` for weights in host memory: what is asked for, and where it cannot be."""

from __future__ import annotations

from headrace.back.models.families import FALLBACK
from headrace.base.config.resolved import DeviceSpec, KVSpec, OffloadSpec
from headrace.base.config.tree import Options
from headrace.base.errors import ConfigError
from headrace.launch.adapters import adapter_spec
from headrace.launch.model_facts import ModelFacts

RESERVE_BYTES = 2 << 30
"""Of a GPU, for steps and graphs."""
KV_SHARE = 8
"""With auto, one part in so many of the memory is left for the KV cache where nothing is stated."""


def offloads(options: Options) -> bool:
    """Whether weights are to lie in host memory."""
    return options.device.offload_layers != 0 or options.device.offload_experts != 0


def offload_spec(
    options: Options, model: ModelFacts, device_spec: DeviceSpec, kv: KVSpec
) -> OffloadSpec | None:
    """Which weights lie in host memory; ConfigError where they cannot."""
    asked = {
        "layers": options.device.offload_layers,
        "experts": options.device.offload_experts,
    }
    asked = {what: count for what, count in asked.items() if count != 0}
    if not asked:
        return None
    if len(asked) == 2:
        raise ConfigError(
            "--offload-layers and --offload-experts: one of them; experts are part of their layers",
            field="offload_experts",
        )
    ((what, count),) = asked.items()
    _check(f"--offload-{what} {count}", f"offload_{what}", model, device_spec)
    if adapter_spec(options, model, device_spec) is not None:
        raise ConfigError(
            f"--offload-{what} {count} does not go with --enable-lora: adapters stay on the device",
            field=f"offload_{what}",
        )
    if count != "auto":
        return OffloadSpec(what=what, count=int(count))
    assert device_spec.memory_bytes is not None, device_spec
    stated_kv = None if kv.fit else kv.memory_bytes
    return OffloadSpec(what=what, room_bytes=room_of(device_spec.memory_bytes, stated_kv))


def room_of(memory_bytes: int, kv_bytes: int | None) -> int:
    """What weights may take of a device's memory."""
    kv = memory_bytes // KV_SHARE if kv_bytes is None else kv_bytes
    return max(0, memory_bytes - RESERVE_BYTES - kv)


def _check(asked: str, field: str, model: ModelFacts, device_spec: DeviceSpec) -> None:
    if device_spec.device != "cuda" or device_spec.executor == "null":
        raise ConfigError(
            f"{asked}: weights are in host memory already (--device {device_spec.device})",
            field=field,
        )
    if model.family == FALLBACK or model.encodes or model.has_encoder:
        raise ConfigError(
            f"{asked}: needs a decoder of headrace's own families, not {model.architecture}",
            field=field,
        )
