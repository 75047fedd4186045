"""How GEMMs are computed: by a measured table where there is one, else by time_model.py.

Shipped tables lie in tables/; `headrace build-kernels` measures the shapes of a model and keeps
them in the cache folder. A file holds the facts of the GPU that was measured (GemmDevice), VERSION
and {"shapes": {shape: {tokens: plan or null}}}; a shape is "OUTPUTSxINPUTS", with "+act" if the
outputs are gate and up, tokens is a size that `padded` gives, null means the library's GEMM.
VERSION rises whenever a kernel changes so that old measurements mean nothing.

A shape is looked for in the GPU's own tables, the user's first, then in that of the GPU most like
it among those of the same capability. What neither holds is chosen by the time model; `source` says
which it was, for the table of decisions.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Container
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path

from headrace.back.kernels.linear.time_model import GemmDevice, best_kernel
from headrace.base import env

VERSION = 1
MAX_FEW = 64
"""Tokens of the kernels for few; "wide" is for more."""
MAX_TOKENS = 8192
"""The most that are measured: more are computed in the same way."""
WIDE_TOKENS = 1536
"""From here on "wide" won with every shape that was measured."""
STREAM_TOKENS = 16
"""Beyond it "stream" won with no shape."""
BUSY = 0.6
"""Share of the multiprocessors that are to have a program before the inputs are split further."""
MOST_SPLIT_TILES = 512
"""Tiles beyond which a split could only add work."""
SHIPPED = Path(__file__).parent / "tables"


@dataclass(frozen=True, kw_only=True)
class GemmPlan:
    """One way to run a GEMM. `kernel` is "gemv" (one token, no tensor cores), "gemv_bytes" (the
    same for weights of bytes, its k a matter of its warps), "skinny", "stream" or "wide".

    m, n, k: tokens (of "wide" only) and outputs of a program and inputs of a step; split: programs
    that share the inputs of one tile of outputs (of "stream": programs of a multiprocessor); group:
    tiles of tokens that take turns; prefetch: steps asked for before the kernel waits for the one
    before it; swap: the tensor cores multiply weight by tokens, not tokens by weight.
    """

    kernel: str
    n: int
    k: int
    warps: int
    stages: int = 3
    split: int = 1
    prefetch: int = 0
    swap: bool = False
    m: int = 0
    group: int = 0


Measured = dict[str, dict[int, GemmPlan | None]]


def shape_name(outputs: int, inputs: int, *, gated: bool) -> str:
    """The table's key."""
    return f"{outputs}x{inputs}{'+act' if gated else ''}"


def padded(tokens: int) -> int:
    """The size whose plan a number of tokens takes: the next of 1, 2, 4 .. 64, then every 64 up to
    512, every 256 up to 2048, 4096 and 8192."""
    if tokens <= MAX_FEW:
        return 1 << max(0, tokens - 1).bit_length()
    for most, step in ((512, 64), (2048, 256), (4096, 4096)):
        if tokens <= most:
            return -(-tokens // step) * step
    return MAX_TOKENS


def user_file(device: GemmDevice) -> Path:
    """Where tables measured on this machine are kept."""
    return _user_folder() / f"{_file_name(device.name)}.json"


@cache
def measured(device: GemmDevice) -> Measured:
    """What was measured on GPUs of this name; the user's own measurements go first."""
    shapes: Measured = {}
    for path in (SHIPPED / f"{_file_name(device.name)}.json", user_file(device)):
        known = read(path) if path.exists() else None
        if known is not None and known[0].name == device.name:
            shapes |= known[1]
    return shapes


@cache
def nearest(device: GemmDevice) -> tuple[GemmDevice, Measured] | None:
    """The table of the GPU most like this one, of its capability and another name; None if there is
    none."""
    tables = [read(path) for path in sorted((*SHIPPED.glob("*.json"), *_user_tables()))]
    alike = [
        table
        for table in tables
        if table is not None
        and table[0].name != device.name
        and table[0].capability == device.capability
    ]
    return min(alike, key=lambda table: device.distance(table[0]), default=None)


def source(device: GemmDevice, outputs: int, inputs: int, *, gated: bool) -> str:
    """Where the plans of a shape come from, in words."""
    shape = shape_name(outputs, inputs, gated=gated)
    if shape in measured(device):
        return "plans measured on this GPU"
    table = nearest(device)
    if table is not None and shape in table[1]:
        return f"plans measured on {table[0].name}"
    return f"plans of {shape} by the time model (headrace build-kernels measures them)"


def read(path: Path) -> tuple[GemmDevice, Measured] | None:
    """A table's GPU and shapes; None if it is of another version."""
    table = json.loads(path.read_text())
    if table["version"] != VERSION or "capability" not in table:
        return None
    device = GemmDevice(
        name=table["device"],
        capability=(table["capability"][0], table["capability"][1]),
        sms=table["sms"],
        memory_gb_s=table["memory_gb_s"],
        bf16_tflops=table["bf16_tflops"],
    )
    shapes = {
        shape: {int(tokens): plan and GemmPlan(**plan) for tokens, plan in plans.items()}
        for shape, plans in table["shapes"].items()
    }
    return device, shapes


def write(path: Path, device: GemmDevice, shapes: Measured) -> None:
    """Adds shapes to a table."""
    before = read(path) if path.exists() else None
    known = before[1] if before is not None and before[0].name == device.name else {}
    path.parent.mkdir(parents=True, exist_ok=True)
    table = {
        "device": device.name,
        "capability": list(device.capability),
        "sms": device.sms,
        "memory_gb_s": device.memory_gb_s,
        "bf16_tflops": device.bf16_tflops,
        "version": VERSION,
        "shapes": {
            shape: {str(tokens): plan and _stated(plan) for tokens, plan in sorted(plans.items())}
            for shape, plans in sorted((known | shapes).items())
        },
    }
    path.write_text(json.dumps(table, indent=1) + "\n")
    measured.cache_clear()
    nearest.cache_clear()


_skipped: dict[tuple[GemmDevice, str], set[str]] = {}


def skip(device: GemmDevice, shape: str, kernel: str) -> None:
    """Goes on without a kernel for a shape, in this process: its self-check failed."""
    _skipped.setdefault((device, shape), set()).add(kernel)


def _stated(plan: GemmPlan) -> dict[str, str | int]:
    """The fields of a plan that are not as usual."""
    usual = {field.name: field.default for field in fields(plan)}
    return {name: value for name, value in asdict(plan).items() if value != usual[name]}


def plan_for(
    device: GemmDevice,
    outputs: int,
    inputs: int,
    tokens: int,
    *,
    gated: bool,
    without: Container[str] = (),
) -> GemmPlan | None:
    """The plan for a padded number of tokens; None: the library's GEMM. `without`: kernels that
    cannot be taken."""
    shape = shape_name(outputs, inputs, gated=gated)
    skipped = _skipped.get((device, shape), set())

    def usable(kernel: str) -> bool:
        return kernel not in without and kernel not in skipped

    table = nearest(device)
    for known in (measured(device), {} if table is None else table[1]):
        plans = known.get(shape, {})
        if tokens in plans:
            plan = plans[tokens]
            if plan is None or usable(plan.kernel):
                return plan
    return _modelled(device, outputs, inputs, tokens, gated=gated, usable=usable)


def _modelled(
    device: GemmDevice,
    outputs: int,
    inputs: int,
    tokens: int,
    *,
    gated: bool,
    usable: Callable[[str], bool],
) -> GemmPlan | None:
    """The kernel that the time model says is quickest, with tiles by rule; many tokens of a gated
    GEMM on Hopper by "wide", which won with every shape that was measured."""
    if tokens > MAX_FEW:
        wide = gated and tokens >= WIDE_TOKENS and device.capability == (9, 0) and usable("wide")
        return GemmPlan(kernel="wide", n=192, k=64, warps=4, m=256, group=16) if wide else None
    kernels = ["gemv"] if tokens == 1 else []
    if tokens > 1 and inputs % 512 == 0:  # else the steps of a share have a rest, which is slow
        kernels.append("skinny")
    if 1 < tokens <= STREAM_TOKENS and device.capability == (9, 0):
        kernels.append("stream")
    candidates = tuple(kernel for kernel in kernels if usable(kernel))
    best = best_kernel(device, candidates, outputs, inputs, tokens, gated=gated)
    return None if best == "library" else _by_rule(best, device, outputs, inputs, gated=gated)


def _by_rule(
    kernel: str, device: GemmDevice, outputs: int, inputs: int, *, gated: bool
) -> GemmPlan:
    """Sizes that mostly won in sweeps on an H200, the inputs split until most multiprocessors have
    a program."""
    if kernel == "gemv":
        return GemmPlan(kernel="gemv", n=8 if outputs <= 8192 else 4, k=1024, warps=4)
    if kernel == "stream":
        k = 128 if gated else 256
        return GemmPlan(kernel="stream", n=64, k=k, warps=4, stages=4)
    k, tiles = (64 if gated else 128), -(-outputs // (2 if gated else 1) // 64)
    splits = [split for split in (1, 2, 4) if inputs // split >= 2 * k]
    enough = (split for split in splits if tiles * split >= BUSY * device.sms)
    split = next(enough, splits[-1]) if tiles <= MOST_SPLIT_TILES else 1
    return GemmPlan(
        kernel="skinny", n=64, k=k, warps=4, stages=6, split=split, prefetch=2, swap=True
    )


def _user_folder() -> Path:
    return env.cache_dir() / "gemms"


def _user_tables() -> list[Path]:
    folder = _user_folder()
    return sorted(folder.glob("*.json")) if folder.is_dir() else []


def _file_name(device: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in device.lower())
