"""How products are computed: a measured table per device, shape and number of tokens, kept as JSON.

Shipped tables lie in tables/; `headrace build-kernels` measures the shapes of a model and keeps them in the cache
folder, which goes first. A file holds {"device": name, "version": VERSION, "shapes": {shape: {tokens: plan or
null}}}; a shape is "OUTPUTSxINPUTS", with "+act" if the outputs are gate and up, tokens is a size that `padded` gives,
null means the library's product. VERSION rises whenever a kernel changes so that old measurements mean nothing.

A shape that nobody measured gets a rule, which is the table's average.
"""

from __future__ import annotations

import json
from collections.abc import Container
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path

from headrace.base import env

VERSION = 1
MAX_FEW = 64
"""Tokens of the kernels for few; "wide" is for more."""
MAX_TOKENS = 8192
"""The most that are measured: more are computed in the same way."""
WIDE_TOKENS = 1536
"""From here on "wide" won with every shape that was measured."""
SHIPPED = Path(__file__).parent / "tables"


@dataclass(frozen=True, kw_only=True)
class ProductPlan:
    """One way to run a product. `kernel` is "gemv" (one token, no matrix unit), "skinny", "stream" or "wide".

    m, n, k: tokens (of "wide" only) and outputs of a program and inputs of a step; split: programs that share the
    inputs of one tile of outputs (of "stream": programs of a multiprocessor); group: tiles of tokens that take turns;
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
    m: int = 0
    group: int = 0


Measured = dict[str, dict[int, ProductPlan | None]]


def shape_name(outputs: int, inputs: int, *, gated: bool) -> str:
    """The table's key."""
    return f"{outputs}x{inputs}{'+act' if gated else ''}"


def padded(tokens: int) -> int:
    """The size whose plan a number of tokens takes: the next of 1, 2, 4 .. 64, then every 64 up to 512, every 256 up to
    2048, 4096 and 8192."""
    if tokens <= MAX_FEW:
        return 1 << max(0, tokens - 1).bit_length()
    for most, step in ((512, 64), (2048, 256), (4096, 4096)):
        if tokens <= most:
            return -(-tokens // step) * step
    return MAX_TOKENS


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
            shape: {str(tokens): plan and _told(plan) for tokens, plan in sorted(plans.items())}
            for shape, plans in sorted(kept.items())
        },
    }
    path.write_text(json.dumps(table, indent=1) + "\n")
    measured.cache_clear()


def _told(plan: ProductPlan) -> dict[str, str | int]:
    """The fields of a plan that are not as usual."""
    usual = {field.name: field.default for field in fields(plan)}
    return {name: value for name, value in asdict(plan).items() if value != usual[name]}


def plan_for(
    device: str,
    outputs: int,
    inputs: int,
    tokens: int,
    *,
    gated: bool,
    without: Container[str] = (),
) -> ProductPlan | None:
    """The plan for a padded number of tokens; None: the library's product. `without`: kernels that cannot be taken."""
    known = measured(device).get(shape_name(outputs, inputs, gated=gated), {})
    plan = known.get(tokens)
    if tokens not in known or (plan is not None and plan.kernel in without):
        return _rule(outputs, inputs, tokens, wide=gated and "wide" not in without)
    return plan


def _rule(outputs: int, inputs: int, tokens: int, *, wide: bool) -> ProductPlan | None:
    """What wins on an H200: one token always; more where few outputs leave the library short of programs; many where
    the product is gated."""
    if tokens >= WIDE_TOKENS:
        return ProductPlan(kernel="wide", n=192, k=64, warps=4, m=256, group=16) if wide else None
    if tokens == 1:
        few = outputs <= 8192
        return ProductPlan(kernel="gemv", n=8 if few else 4, k=1024, warps=4)
    if tokens <= 32 and outputs <= 4096 and inputs % 512 == 0:
        n, k = (64, 128) if outputs >= 4096 else (32, 256)
        return ProductPlan(kernel="skinny", n=n, k=k, warps=4, stages=5, split=4, prefetch=2)
    return None


def _file_name(device: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in device.lower())
