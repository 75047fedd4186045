"""What the triton_*.py of every op share: the reasons not to serve, facts about the device, scratch
that kernels clean.

Under TRITON_INTERPRET=1 the same kernels run on CPU tensors, for the tests; bfloat16 arithmetic is
wrong there, so it is refused. Compiled kernels are kept in headrace's cache folder, so that only
the first start on a machine compiles.

Matrix products ask for "ieee" precision: float32 is not rounded to tf32, and every target knows the
word.

Programmatic dependent launch (Hopper and later): a kernel is started while the one before it still
runs, and waits for it by `gdc_wait` before it reads what that one wrote. Every program of every
kernel launched so waits, or the kernel after it could overtake the one before it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
import triton

from headrace.back.kernels.kv_write.quantized import LARGEST
from headrace.back.kernels.triton.compilers import FOLDER
from headrace.back.kernels.triton.room import Pretended
from headrace.base import env

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
INTERPRETED_SMS = 3
COUNTERS = 1 << 16

_planned: tuple[int, int] | None = None

env.set_default("TRITON_CACHE_DIR", str(env.cache_dir() / FOLDER))


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter."""
    return bool(triton.knobs.runtime.interpret)


def unsupported(device: str, dtype: torch.dtype) -> str | None:
    """The reason that holds for every Triton kernel: wrong device or element type."""
    if interpreted():
        if device != "cpu":
            return "the interpreter works on CPU tensors"
        if dtype is torch.bfloat16:
            return "the interpreter computes bfloat16 wrongly"
    elif device != "cuda":
        return "runs on GPUs only"
    if dtype not in DTYPES:
        return f"knows {', '.join(str(known) for known in DTYPES)}, not {dtype}"
    return None


def unsupported_quantization(quantized: str | None, head_dim: int) -> str | None:
    """The reason for kernels of a quantized KV cache (kernels/kv_write/quantized.py)."""
    if quantized is None:
        return None
    if quantized not in LARGEST and (head_dim < 16 or head_dim & (head_dim - 1)):
        return f"{quantized}: reads heads of a power of two from 16 on, not {head_dim}"
    if head_dim % 16:
        return f"reads quantized heads of a multiple of 16, not {head_dim}"
    if quantized == "fp8" and not interpreted() and torch.version.hip is None:
        major, minor = capability()
        if (major, minor) < (8, 9):
            return f"fp8 needs compute capability 8.9, not {major}.{minor}"
    return None


def capability() -> tuple[int, int]:
    """That of the device kernels are chosen for: the planned one, or this machine's."""
    return _planned or torch.cuda.get_device_capability()


@contextmanager
def planned_for(capability: tuple[int, int]) -> Iterator[None]:
    """Meanwhile kernels say what they support on a device of this compute capability, which need
    not be here."""
    global _planned
    _planned = capability
    try:
        yield
    finally:
        _planned = None


@cache
def num_sms(device: torch.device) -> int:
    """Multiprocessors of the device."""
    if device.type != "cuda":
        return INTERPRETED_SMS
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def has_dependent_launch(device: torch.device) -> bool:
    """Whether a kernel may be started while the one before it still runs."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


@cache
def has_bfloat_pairs() -> bool:
    """Whether assembly of NVIDIA's, with arithmetic on pairs of bfloat16, may be used."""
    if interpreted() or not torch.cuda.is_available() or torch.version.hip is not None:
        return False
    return pairs_compile(torch.cuda.get_device_capability()[0])


def pairs_compile(major: int) -> bool:
    """The same by compute capability: there is such arithmetic from 9.0 on, but in loops around the
    matrix unit of 10 and 11 the compiler (3.6, 3.7) takes no assembly ("pipeliner doesn't know how
    to predicate this op")."""
    return major >= 9 and major not in (10, 11)


@cache
def has_known_products() -> bool:
    """Whether matrix instructions of any size give a row the same bits: seen on Ampere's and
    Hopper's, assumed in the interpreter, not known of others."""
    if interpreted():
        return True
    if not torch.cuda.is_available() or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability()[0] in (8, 9)


def product_precision(dtype: torch.dtype) -> str:
    """Of products of float32 numbers whose results are rounded to `dtype`: NVIDIA's matrix units
    take them with ten bits behind the first, which is more than bfloat16 keeps."""
    target = Pretended.target or ("cuda" if torch.version.hip is None else "hip")
    return "tf32" if dtype is torch.bfloat16 and target.startswith("cuda") else "ieee"


def launch(device: torch.device) -> dict[str, bool]:
    """The keywords every launch passes: the kernel's own constant and the launcher's option."""
    dependent = has_dependent_launch(device)
    return {"DEPENDENT": True, "launch_pdl": True} if dependent else {"DEPENDENT": False}


def counters(device: torch.device) -> torch.Tensor:
    """int32 [COUNTERS], all zero between kernels: whoever counts up sets back to zero. Each stream
    has its own, since kernels of two streams may run at once; a recording on a stream that has none
    takes the device's."""
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    zeros = _counters.get((device, stream))
    if zeros is None and device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        zeros = _counters.get((device, 0))
    if zeros is None:
        for key in {(device, 0), (device, stream)} - _counters.keys():
            _counters[key] = torch.zeros(COUNTERS, dtype=torch.int32, device=device)
        zeros = _counters[device, stream]
    return zeros


_counters: dict[tuple[torch.device, int], torch.Tensor] = {}


def power_of_two(number: int, *, least: int = 1) -> int:
    """The smallest power of two that is at least `number` and `least`."""
    return max(least, 1 << max(0, number - 1).bit_length())
