"""`headrace plan` for weights in host memory: what the device holds then, and how a model that does
not fit would run."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from headrace.back.models.load.offloaded import OffloadChoice, choose_offload
from headrace.back.models.protocol import LoadableModel
from headrace.base.config.resolved import Decision, ModelSpec, OffloadSpec
from headrace.base.errors import ConfigError
from headrace.launch.offload import room_of
from headrace.launch.performance_model import (
    DeviceModel,
    ModelCost,
    OffloadOffer,
    estimate_performance,
)


def offloaded(
    model: LoadableModel, spec: ModelSpec, cost: ModelCost
) -> tuple[ModelCost, tuple[Decision, ...]]:
    """The cost with what the specification keeps in host memory, and the decision about it."""
    if spec.offload is None:
        return cost, ()
    choice = choose_offload(model.weights, spec.offload, family=spec.family)
    requested = "auto" if spec.offload.count is None else str(spec.offload.count)
    return _cost(cost, choice), (choice.decision(requested, len(model.weights.layers)),)


def offers(
    model: LoadableModel,
    spec: ModelSpec,
    cost: ModelCost,
    device: DeviceModel,
    *,
    memory_bytes: int,
    step_tokens: int,
) -> Iterator[OffloadOffer]:
    """The ways in which a model that is too large would run with weights in host memory, with as
    few there as the device needs; none where there is no such way. `memory_bytes`: what a worker
    may take."""
    for what in ("experts", "layers"):
        wanted = OffloadSpec(what=what, room_bytes=room_of(memory_bytes, None))
        try:
            choice = choose_offload(model.weights, wanted, family=spec.family)
        except ConfigError:  # there is no such way
            continue
        there = _cost(cost, choice)
        estimate = estimate_performance(
            there,
            device,
            kv_memory_bytes=None,
            max_model_len=spec.max_model_len,
            batches=(1,),
            step_tokens=step_tokens,
        )
        yield OffloadOffer(
            option=f"--offload-{what} auto",
            layers=len(choice.layers),
            host_bytes=choice.host_bytes,
            decode_tok_s=estimate.decode[0].decode_tok_s,
            prefill_tok_s=estimate.prefill_tok_s,
        )


def _cost(cost: ModelCost, choice: OffloadChoice) -> ModelCost:
    routed = max(cost.routed)[1:] if choice.experts and cost.routed else None
    beside = cost.weight_bytes - choice.host_bytes + choice.slot_bytes
    return replace(cost, weight_bytes=beside, host_bytes=choice.host_bytes, host_routed=routed)
