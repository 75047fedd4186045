"""What a quantized checkpoint asks for beside its weights, activations and KV caches of certain
numbers, and what becomes of it: told as decisions."""

from __future__ import annotations

from collections import Counter

from headrace.back.models.load.source import CheckpointTensor, Source
from headrace.back.models.protocol import LoadableModel
from headrace.back.quant.activations import AS_THEY_ARE, inputs_of
from headrace.back.quant.cache_scales import FORM, CacheScales
from headrace.back.quant.kept import INT8_ROWS, STORED_SCALE, with_int8_rows
from headrace.back.quant.stored import Stored
from headrace.base.config.quantization_activations import Activations
from headrace.base.config.resolved import Decision, ModelSpec

SPARSE = ("sparse-24", "sparse", "marlin-24", "gptq-marlin-24")
"""Arrangements without their zeros: two of four, or any."""


def input_decisions(
    model: LoadableModel, source: Source, stored: Stored, device: str
) -> tuple[Decision, ...]:
    """What becomes of the inputs that the checkpoint would have quantized: a decision for each
    way it asks, and each way that is gone."""
    kept = {
        piece.name: param.routed is not None
        for param in model.weights.params
        if param.on_groups is not None
        for piece in param.pieces
    }
    counts: Counter[tuple[str, str]] = Counter()
    for name, entry in source.entries.items():
        if entry.activations is not None:
            computed = AS_THEY_ARE
            if name in kept:
                computed = inputs_of(stored[name], device, routed=kept[name])
            counts[str(entry.activations), computed] += 1
    return tuple(
        Decision("activations", asked, computed, f"of {number} quantized weights")
        for (asked, computed), number in counts.items()
    )


def sparse_decisions(source: Source) -> tuple[Decision, ...]:
    """That zeros which a checkpoint leaves out are multiplied like other numbers."""
    kinds = (entry.dtype.partition(" ")[2] for entry in source.entries.values())
    count = sum(kind in SPARSE for kind in kinds)
    if not count:
        return ()
    why = f"of {count} weights: no kernel here leaves out zeros"
    return (Decision("sparsity", "as stored", "all inputs are multiplied", why),)


def cache_decisions(spec: ModelSpec, scales: CacheScales | None) -> tuple[Decision, ...]:
    """Whether the scales that the checkpoint holds for its KV cache are used."""
    if scales is None:
        return ()
    chosen, why = (
        "not used",
        f"the cache is {spec.kv_dtype or spec.dtype}; --kv-dtype fp8 uses them",
    )
    if spec.kv_dtype == FORM:
        chosen, why = "used", "keys and values beyond their range become its largest number"
    return (Decision("kv_scales", f"{len(scales)} stored", chosen, why),)


def with_asked_rows(stored: Stored, source: Source) -> Stored:
    """Integers are marked whose checkpoint asks for int8 activations, and, with a scale for each
    output, those and e4m3 numbers whose activations have a scale that it holds."""
    return {name: _marked(scheme, source.entries[name]) for name, scheme in stored.items()}


def with_stored_scales(stored: Stored, source: Source) -> Stored:
    """The same of CPUs, which multiply integers by int8 whatever is asked: int8 weights are marked
    whose activations have a scale that the checkpoint holds."""
    return {
        name: scheme + STORED_SCALE
        if scheme == "int8"
        and _is_int8(source.entries[name].activations)
        and _held(source.entries[name])
        else scheme
        for name, scheme in stored.items()
    }


def _marked(scheme: str, entry: CheckpointTensor) -> str:
    marked = with_int8_rows(scheme) if _is_int8(entry.activations) else scheme
    known = marked in ("fp8", "int8" + INT8_ROWS)
    return marked + STORED_SCALE if known and _held(entry) else marked


def _held(entry: CheckpointTensor) -> bool:
    """Whether there is a scale for all of its inputs."""
    asked = entry.activations
    held = asked is not None and not asked.dynamic and asked.shared == "tensor"
    return held and entry.input_scale


def _is_int8(asked: Activations | None) -> bool:
    return asked is not None and asked.bits == 8 and not asked.floating
