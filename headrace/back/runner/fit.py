"""How much of a device is left for the KV cache, by one measurement of the largest step."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.base.errors import ConfigError

GRAPH_BYTES = 1 << 30
"""Kept free for what recorded graphs take beside their shared pool of activations."""


@dataclass(frozen=True, kw_only=True)
class Profile:
    """What the largest step has shown of a device, in bytes. held: allocated between steps, so
    weights and tables; step: what the step took on top at its peak; free: what the device has left
    with nothing cached."""

    held: int
    step: int
    free: int


def fit_kv(profile: Profile, *, budget: int, wanted: int, least: int) -> int:
    """Bytes for the KV cache: `wanted`, or what is left of the budget once the step has its memory
    twice (launched, and in the graphs' pool). ConfigError if that is less than `least`."""
    taken = profile.held + 2 * profile.step + GRAPH_BYTES
    room = min(budget - taken, profile.free - 2 * profile.step - GRAPH_BYTES)
    if room < least:
        gib = 1 << 30
        raise ConfigError(
            f"{(least - room) / gib:.1f} GiB more are needed on the device for a KV cache of {least / gib:.2f} GiB: "
            f"of {budget / gib:.1f} GiB the weights and tables take {profile.held / gib:.1f}, and the largest step "
            f"{2 * profile.step / gib:.1f}. Lower --max-step-tokens or --max-model-len, raise --gpu-memory, or use "
            "--tensor-parallel 2",
            field="gpu_memory",
        )
    return min(wanted, room)
