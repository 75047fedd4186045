"""How small products are computed: a measured table per device, shape and number of tokens, kept as JSON.

Shipped tables lie in tables/; `headrace build-kernels` measures the shapes of a model and keeps them in the cache
folder, which goes first. A file holds {"device": name, "version": VERSION, "shapes": {shape: {tokens: plan or
null}}}; a shape is "OUTPUTSxINPUTS", with "+act" if the outputs are gate and up, tokens is a power of two (what a
size is padded to), null means the library's product. VERSION rises whenever a kernel changes so that old measurements
mean nothing.

A shape that nobody measured gets a rule, which is the table's average.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from headrace.base import env

VERSION = 1
MAX_TOKENS = 64
SHIPPED = Path(__file__).parent / "tables"


@dataclass(frozen=True, kw_only=True)
class ProductPlan:
    """One way to run a small product. `kernel` is "gemv" (one token, no matrix unit), "skinny" or "stream".

    n, k: outputs of a program and inputs of a step; split: programs that share the inputs of one tile of outputs (of
    "stream": programs of a multiprocessor);
    prefetch: steps asked for before the kernel waits for the one before it; swap: the matrix unit multiplies weight by
    tokens, not tokens by weight.
    """

    kernel: str
    n: int
    k: int
    warps: int
    stages: int = 3
    split: int = 1
    prefetch: int = 0
    swap: bool = False


Measured = dict[str, dict[int, ProductPlan | None]]


def shape_name(outputs: int, inputs: int, *, gated: bool) -> str:
    """The table's key."""
    return f"{outputs}x{inputs}{'+act' if gated else ''}"


def user_file(device: str) -> Path:
    """Where tables measured on this machine are kept."""
    return env.cache_dir() / "products" / f"{_file_name(device)}.json"


@cache
def measured(device: str) -> Measured:
    """What is known about a device, by its name; the user's own measurements go first."""
    found: Measured = {}
    for path in (SHIPPED / f"{_file_name(device)}.json", user_file(device)):
        if path.exists():
            found |= read(path, device)
    return found


def read(path: Path, device: str) -> Measured:
    """A table's shapes; none if it is of another device or version."""
    table = json.loads(path.read_text())
    if table["device"] != device or table["version"] != VERSION:
        return {}
    return {
        shape: {int(tokens): plan and ProductPlan(**plan) for tokens, plan in plans.items()}
        for shape, plans in table["shapes"].items()
    }


def write(path: Path, device: str, shapes: Measured) -> None:
    """Adds shapes to a table."""
    kept = (read(path, device) if path.exists() else {}) | shapes
    path.parent.mkdir(parents=True, exist_ok=True)
    table = {
        "device": device,
        "version": VERSION,
        "shapes": {
            shape: {str(tokens): plan and asdict(plan) for tokens, plan in sorted(plans.items())}
            for shape, plans in sorted(kept.items())
        },
    }
    path.write_text(json.dumps(table, indent=1) + "\n")
    measured.cache_clear()


def plan_for(
    device: str, outputs: int, inputs: int, tokens: int, *, gated: bool, streams: bool = True
) -> ProductPlan | None:
    """The plan for a padded number of tokens (a power of two); None: the library's product. `streams`: "stream" can
    compute it."""
    if tokens > MAX_TOKENS:
        return None
    known = measured(device).get(shape_name(outputs, inputs, gated=gated), {})
    plan = known.get(tokens)
    if tokens not in known or (plan is not None and plan.kernel == "stream" and not streams):
        return _rule(outputs, inputs, tokens)
    return plan


def _rule(outputs: int, inputs: int, tokens: int) -> ProductPlan | None:
    """What wins on an H200: one token always; more where few outputs leave the library short of programs."""
    if tokens == 1:
        few = outputs <= 8192
        return ProductPlan(kernel="gemv", n=8 if few else 4, k=1024, warps=4)
    if tokens <= 32 and outputs <= 4096 and inputs % 512 == 0:
        n, k = (64, 128) if outputs >= 4096 else (32, 256)
        return ProductPlan(kernel="skinny", n=n, k=k, warps=4, stages=5, split=4, prefetch=2)
    return None


def _file_name(device: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in device.lower())
