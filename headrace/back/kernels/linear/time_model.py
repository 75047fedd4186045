"""How long a GEMM of few tokens takes on a GPU, by its shape, multiprocessors, bandwidth and rate.

What no table has measured is chosen by this model: the library's kernel or one of ours. Such GEMMs
read the weight once, so the time is that of the memory (or of the tensor cores, where there are
many tokens) plus a launch; with fewer tiles than multiprocessors the chain of steps along the
inputs shows, since each step waits for memory. The constants were fitted to 40 measurements on an
H200 (benchmarks/h200/kernels.md: shapes of two models, 1 to 64 tokens); those in microseconds are
latencies, which bandwidth does not change. Nothing here imports torch: plans for GPUs that are not
here are made, and tested, from their facts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

BYTES = 2
"""Of a value: the kernels for few tokens take bfloat16 and float16."""
LAUNCH_US = {"library": 3.3, "gemv": 1.8, "skinny": 3.2, "stream": 2.9}
"""Microseconds that a launch adds in a chain of launches."""
OVER_MEMORY = {"library": 1.03, "gemv": 1.0, "skinny": 1.02, "stream": 1.02}
"""Times of the bytes' own time."""
MORE_TOKENS = {"library": 0.0, "skinny": 0.07, "stream": 0.12}
"""What 64 tokens add to that: tokens are read again for every tile."""
GATED_TOKENS = 0.17
"""What 32 tokens add where a tile has gates and ups."""
STEP_US = 1.0
"""Microseconds of 1024 inputs in the library's kernel on a multiprocessor that nobody shares."""
TILE = 64
"""Outputs of a tile of the library."""
REACHED = 0.9
"""Share of the nominal bandwidth that long streams reach."""
REACHED_RATE = 0.8
"""Share of the nominal rate of the tensor cores."""
UNTUNED = 1.06
"""What sizes by rule cost beside those of a sweep, which the constants were fitted to; those of
"gemv" hardly matter."""
SPARED_US = 2.0
"""What a launch less behind the GEMM, the activation's, is worth."""


@dataclass(frozen=True, kw_only=True)
class GemmDevice:
    """What the choice of GEMM kernels asks of a GPU.

    name          as the driver says it: the key of measured tables
    capability    (major, minor); (0, 0) under the interpreter
    sms           multiprocessors
    memory_gb_s   nominal bandwidth, 10^9 bytes per second
    bf16_tflops   nominal dense rate, 10^12 operations per second
    """

    name: str
    capability: tuple[int, int]
    sms: int
    memory_gb_s: float
    bf16_tflops: float

    def distance(self, other: GemmDevice) -> float:
        """How unlike another GPU of the same capability is; 0 if alike."""
        return abs(math.log(self.sms / other.sms)) + abs(
            math.log(self.memory_gb_s / other.memory_gb_s)
        )


NOMINAL = {
    (8, 0): (2039.0, 2.89), (8, 6): (768.0, 0.87), (8, 9): (864.0, 2.55), (9, 0): (3350.0, 7.49),
    (10, 0): (8000.0, 15.2), (12, 0): (1792.0, 2.5),
}  # fmt: skip
"""By capability: 10^9 bytes per second of a usual board, 10^12 bf16 operations per second and
multiprocessor (data sheets); for boards that do not say theirs."""


def gemm_device(
    name: str, capability: tuple[int, int], sms: int, *, memory_gb_s: float | None = None
) -> GemmDevice:
    """A GPU by what its runtime says; the rates it does not say are nominal ones of its
    capability, or the nearest below."""
    below = max((one for one in NOMINAL if one <= capability), default=min(NOMINAL))
    bandwidth, rate_per_sm = NOMINAL[below]
    return GemmDevice(
        name=name,
        capability=capability,
        sms=sms,
        memory_gb_s=memory_gb_s or bandwidth,
        bf16_tflops=round(rate_per_sm * sms, 1),
    )


def roofline_us(device: GemmDevice, outputs: int, inputs: int, tokens: int) -> float:
    """Microseconds of the bytes of weight and activations, or of the operations if those are
    more."""
    num_bytes = BYTES * (outputs * inputs + tokens * (outputs + inputs))
    memory_us = num_bytes / (device.memory_gb_s * REACHED * 1e3)
    rate_us = 2 * outputs * inputs * tokens / (device.bf16_tflops * REACHED_RATE * 1e6)
    return max(memory_us, rate_us)


def time_us(
    device: GemmDevice, kernel: str, outputs: int, inputs: int, tokens: int, *, gated: bool = False
) -> float:
    """Microseconds of a GEMM by "library", "gemv", "skinny" or "stream" in a chain of launches; the
    activation is in ours and not in the library's."""
    over = OVER_MEMORY[kernel] + MORE_TOKENS.get(kernel, 0.0) * tokens / 64
    if gated and kernel != "library" and tokens > 1:
        over += GATED_TOKENS * min(1.0, tokens / 32)
    time = LAUNCH_US[kernel] + over * roofline_us(device, outputs, inputs, tokens)
    if kernel == "library":
        idle = max(0.0, 1 - math.ceil(outputs / TILE) / device.sms)
        time += STEP_US * inputs / 1024 * idle
    return time


def best_kernel(
    device: GemmDevice, usable: tuple[str, ...], outputs: int, inputs: int, tokens: int, *, gated: bool
) -> str:  # fmt: skip
    """The quickest of the `usable` kernels and the library by the model; a tie is the library's."""
    library_us = time_us(device, "library", outputs, inputs, tokens) + SPARED_US * gated
    times = {"library": library_us}
    for kernel in usable:
        time = time_us(device, kernel, outputs, inputs, tokens, gated=gated)
        times[kernel] = time if kernel == "gemv" else UNTUNED * time
    return min(times, key=lambda kernel: times[kernel])
