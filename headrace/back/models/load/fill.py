"""Checks a checkpoint against what a model wants, then copies it in.

The check comes first and names everything that is wrong at once: missing, mis-shaped, wrongly typed
and unwanted tensors, with their files. Nothing is copied, and on a device nothing allocated, before
it passes (REL 1.13, REG-060).
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from threading import Lock

import torch

from headrace.back.models.load.safetensors import TORCH_DTYPES
from headrace.back.models.load.source import CheckpointTensor, Source
from headrace.back.models.weights import Copy, Param, WeightPlan, copies
from headrace.back.parallel.param import member_name
from headrace.back.platforms.device_threads import device_pool
from headrace.base.errors import CheckpointError

FLOATS = ("F64", "F32", "F16", "BF16")
CONVERTED = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
"""What plain floats are converted to; other types are taken as they are stored."""
COPY_THREADS = 2
"""Copying is page faults and memory traffic; torch lets go of the interpreter meanwhile. More
threads gain nothing."""
DEVICE_COPY_THREADS = 8
"""To a GPU the threads mostly wait for reads, which the disk serves the better the more there
are."""
SHOWN = 6


def check(plan: WeightPlan, source: Source, *, whole: bool = True) -> None:
    """CheckpointError with every fault of the checkpoint, unless it holds exactly what the plan
    wants; if not the `whole` of it is asked for, it may hold a part of that."""
    problems: list[str] = []
    missing = [
        f"{name} {list(shape)}"
        for param in (plan.params if whole else ())
        if not absent(param, source)
        for name, shape, _ in _wanted(param)
        if name not in source.entries
    ]
    _add(problems, list(dict.fromkeys(missing)), "missing")
    _add(problems, list(dict.fromkeys(_misfits(plan, source))), "not what the model needs")
    _add(problems, list(_extras(plan, source)), "unknown to the model")
    if problems:
        raise CheckpointError(f"{source.where}: " + "; ".join(problems))


def fill(plan: WeightPlan, source: Source, *, scan_finite: bool = True) -> int:
    """Copies every wanted rectangle into its parameter, in file order; returns the bytes written.

    Unless `scan_finite` is off, a NaN or Inf in what was copied is a CheckpointError that names
    file and tensor.
    """
    work: list[tuple[Param, Copy]] = []
    for param in plan.params:
        if absent(param, source):
            initialise(param)
            param.filled()
        else:
            work += [(param, copy) for copy in copies(param)]
    left, lock = Counter(id(param) for param, _ in work), Lock()
    work.sort(key=lambda pair: source.entries[pair[1].name].order)

    def one(pair: tuple[Param, Copy]) -> int:
        param, copy = pair
        num_bytes = write(param, copy, source, scan_finite=scan_finite)
        with lock:
            left[id(param)] -= 1
            last = left[id(param)] == 0
        if last:
            param.filled()
        return num_bytes

    on_host = all(param.tensor is None or param.tensor.device.type == "cpu" for param, _ in work)
    threads = COPY_THREADS if on_host else DEVICE_COPY_THREADS
    with device_pool(threads, "load") as pool:
        return sum(pool.map(one, work))


def write(param: Param, copy: Copy, source: Source, *, scan_finite: bool = True) -> int:
    """Writes one rectangle, in whichever form the parameter takes it; returns its bytes."""
    how = _write_floats
    if param.on_blocks is not None:
        how = _write_blocks
    elif param.on_groups is not None:
        how = _write_groups
    return how(param, copy, source, scan_finite)


def _write_floats(param: Param, copy: Copy, source: Source, scan_finite: bool) -> int:
    target = param.target(copy)
    source.copy(copy.name, copy.shape, copy.source, target)
    if copy.scale != 1.0:
        target.mul_(copy.scale)
    if scan_finite:
        scan(copy.name, source, target)
    return target.nbytes


def _write_blocks(param: Param, copy: Copy, source: Source, scan_finite: bool) -> int:
    """Packing looks at every scale anyway, so a damaged one is refused always: quantized values and
    multipliers are whole numbers, which cannot be NaN."""
    assert param.on_blocks is not None, param.name
    rows = source.blocks(copy.name)
    bad = param.on_blocks(copy, rows)
    if bad is not None:
        entry = source.entries[copy.name]
        raise CheckpointError(
            f"{entry.where}: tensor {copy.name!r} holds NaN or Inf (a scale of its {entry.dtype} blocks, in row {bad} "
            f"of the file's {len(rows.data)}; the tensor starts at byte {entry.order[1]})"
        )
    return rows.data.nbytes * len(range(*copy.source[0].indices(len(rows.data)))) // len(rows.data)


def _write_groups(param: Param, copy: Copy, source: Source, scan_finite: bool) -> int:
    """A damaged scale is refused always, as for blocks. Of experts in one tensor, each by
    itself."""
    return sum(_write_numbers(param, one, source) for one in _matrices(copy))


def _matrices(copy: Copy) -> Iterator[Copy]:
    if len(copy.shape) < 3:
        yield copy
        return
    start, stop, _ = copy.source[0].indices(copy.shape[0])
    first = copy.target[0]
    assert isinstance(first, slice)
    for i in range(stop - start):
        here, there = start + i, (first.start or 0) + i
        yield replace(
            copy,
            source=(slice(here, here + 1), *copy.source[1:]),
            target=(slice(there, there + 1), *copy.target[1:]),
        )


def _write_numbers(param: Param, copy: Copy, source: Source) -> int:
    assert param.on_groups is not None, param.name
    groups, numbers = source.groups(copy.name, copy.source, param.groups_on)
    bad = param.on_groups(copy, groups, numbers)
    if bad is not None:
        entry = source.entries[copy.name]
        raise CheckpointError(
            f"{entry.where}: a scale of tensor {copy.name!r} is NaN or Inf (row "
            f"{copy.source[0].indices(copy.shape[0])[0] + bad})"
        )
    return groups.values_RC.nbytes


def absent(param: Param, source: Source) -> bool:
    """Whether an optional parameter has none of its pieces in the checkpoint."""
    return param.optional and not any(name in source.entries for name, _, _ in _wanted(param))


def initialise(param: Param) -> None:
    """Gives an optional parameter that the checkpoint lacks its constant."""
    assert param.init in ("ones", "zeros"), f"{param.name}: an optional parameter needs a constant"
    param.present().fill_(1 if param.init == "ones" else 0)


def _wanted(param: Param) -> Iterator[tuple[str, tuple[int, ...], torch.dtype]]:
    """(name, shape, dtype) of every checkpoint tensor that a parameter is put together from."""
    for piece in param.pieces:
        if param.bundle is None:
            yield piece.name, piece.shape, param.dtype
            continue
        for member in param.bundle.members:
            yield member_name(piece.name, member.name), member.shape(piece.shape), member.dtype


def _misfits(plan: WeightPlan, source: Source) -> Iterator[str]:
    for param in plan.params:
        for name, shape, dtype in _wanted(param):
            entry = source.entries.get(name)
            fault = None if entry is None else _fault(entry, shape, dtype)
            if entry is not None and fault:
                yield f"{name} in {entry.where} {fault}"


def _fault(entry: CheckpointTensor, shape: tuple[int, ...], dtype: torch.dtype) -> str | None:
    if not entry.fits(shape):
        return f"has the shape {list(entry.shape)}, not {list(shape)}"
    converts = dtype in CONVERTED and (entry.dequantized or entry.dtype in FLOATS)
    if not converts and TORCH_DTYPES.get(entry.dtype) != dtype:
        allowed = ", ".join(FLOATS) if dtype in CONVERTED else str(dtype)
        return f"has the dtype {entry.dtype}, not {allowed}"
    return None


def _extras(plan: WeightPlan, source: Source) -> Iterator[str]:
    wanted = {name for param in plan.params for name, _, _ in _wanted(param)}
    ignored = [re.compile(pattern) for pattern in plan.ignored]
    for name, entry in source.entries.items():
        if name not in wanted and not any(pattern.fullmatch(name) for pattern in ignored):
            yield f"{name} in {entry.where}"


def _add(problems: list[str], names: list[str], what: str) -> None:
    if names:
        more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        noun = "tensor is" if len(names) == 1 else "tensors are"
        problems.append(f"{len(names)} {noun} {what}: {', '.join(names[:SHOWN])}{more}")


def scan(name: str, source: Source, values: torch.Tensor) -> None:
    """CheckpointError for NaN or Inf. Smallest and largest value carry them along; 18 GB/s on one
    core, forty times isfinite."""
    if values.is_floating_point() and values.itemsize > 1 and values.numel():
        low, high = values.aminmax()
        if not (math.isfinite(low.item()) and math.isfinite(high.item())):
            where = source.entries[name].where
            raise CheckpointError(f"{where}: tensor {name!r} holds NaN or Inf (as {values.dtype})")
