"""What cublasLt would compute the products of 8B by, under load, beside torch's choice:
`python -m benchmarks.lab.library_plans [gate_up,qkv,o,down] [8192,2048,256]`.

torch takes the first plan that the library's heuristic names; here up to ten of each are replayed. A plan's tile and
cluster are the library's own numbers (cublasLt.h: CUBLASLT_MATMUL_TILE_*, CUBLASLT_CLUSTER_SHAPE_*).
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F

from benchmarks.h200.gemms import MODELS
from headrace.back.kernels.linear.tune import loaded_us

MOST, ROOM = 10, 64 << 20
FLOAT, BF16, FLOAT_SUMS, TRANSPOSED = 0, 14, 68, 1
TRANS_A, WORKSPACE, TILE, CLUSTER = 3, 1, 1, 8
LAYERS = 6


class Found(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algo", ctypes.c_uint64 * 8),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


class Plans:
    """The library's plans for y = x W^T of one shape, which it sees as columns: y^T = W x^T."""

    def __init__(self, tokens: int, outputs: int, inputs: int) -> None:
        self._library = ctypes.CDLL("libcublasLt.so.13")
        self._handle, self._description = ctypes.c_void_p(), ctypes.c_void_p()
        self._call("Create", ctypes.byref(self._handle))
        self._call("MatmulDescCreate", ctypes.byref(self._description), FLOAT_SUMS, FLOAT)
        transposed = ctypes.c_int(TRANSPOSED)
        self._call(
            "MatmulDescSetAttribute", self._description, TRANS_A, ctypes.byref(transposed), ctypes.c_size_t(4)
        )  # fmt: skip
        self._layouts = [
            self._layout(rows, columns)
            for rows, columns in ((inputs, outputs), (inputs, tokens), (outputs, tokens))
        ]
        self.found = self._ask()

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self._library, f"cublasLt{name}")(*arguments)
        assert status == 0, (name, status)

    def _layout(self, rows: int, columns: int) -> ctypes.c_void_p:
        made = ctypes.c_void_p()
        self._call(
            "MatrixLayoutCreate", ctypes.byref(made), BF16, ctypes.c_uint64(rows), ctypes.c_uint64(columns),
            ctypes.c_int64(rows),
        )  # fmt: skip
        return made

    def _ask(self) -> list[Found]:
        preference, room = ctypes.c_void_p(), ctypes.c_size_t(ROOM)
        self._call("MatmulPreferenceCreate", ctypes.byref(preference))
        self._call(
            "MatmulPreferenceSetAttribute", preference, WORKSPACE, ctypes.byref(room), ctypes.c_size_t(8)
        )  # fmt: skip
        found, count = (Found * MOST)(), ctypes.c_int()
        weight, x, y = self._layouts
        self._call(
            "MatmulAlgoGetHeuristic", self._handle, self._description, weight, x, y, y, preference, MOST, found,
            ctypes.byref(count),
        )  # fmt: skip
        return list(found[: count.value])

    def number(self, plan: Found, attribute: int, size: int = 4) -> int:
        """A number of a plan's configuration."""
        value, written = ctypes.c_uint32(), ctypes.c_size_t()
        self._call(
            "MatmulAlgoConfigGetAttribute", plan.algo, attribute, ctypes.byref(value), ctypes.c_size_t(size),
            ctypes.byref(written),
        )  # fmt: skip
        return value.value

    def run(
        self,
        plan: Found,
        x: torch.Tensor,
        weight: torch.Tensor,
        y: torch.Tensor,
        room: torch.Tensor,
    ) -> None:
        """One product."""
        one, zero = ctypes.c_float(1), ctypes.c_float(0)
        of = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (weight, x, y, room)]
        a, b, c = self._layouts
        self._call(
            "Matmul", self._handle, self._description, ctypes.byref(one), of[0], a, of[1], b, ctypes.byref(zero),
            of[2], c, of[2], c, plan.algo, of[3], ctypes.c_size_t(ROOM),
            ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
        )  # fmt: skip


def chains(name: str, tokens: int) -> Iterator[tuple[str, list[Callable[[], object]]]]:
    """torch's chain, and one for each plan."""
    shape = MODELS["8B"][name]
    size = shape.outputs, shape.inputs

    def random(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, device="cuda", dtype=torch.bfloat16)

    weights = [random(*size).mul_(size[1] ** -0.5) for _ in range(LAYERS)]
    x, y = random(tokens, size[1]), random(tokens, size[0])
    room = torch.empty(ROOM, device="cuda", dtype=torch.uint8)
    yield "torch", [partial(F.linear, x, weight) for weight in weights]
    plans = Plans(tokens, *size)
    for plan in plans.found:
        title = f"tile {plans.number(plan, TILE)}, cluster {plans.number(plan, CLUSTER, 2)}"
        yield title, [partial(plans.run, plan, x, weight, y, room) for weight in weights]
    yield "torch again", [partial(F.linear, x, weight) for weight in weights]


def main() -> None:
    defaults = ["gate_up,qkv,o,down", "8192,2048,256"]
    names, sizes = sys.argv[1:3] + defaults[len(sys.argv) - 1 :]
    for tokens in map(int, sizes.split(",")):
        for name in names.split(","):
            cells = [f"{title}: {loaded_us(calls):.1f}" for title, calls in chains(name, tokens)]
            print(f"{name} {tokens}, us: " + "; ".join(cells), flush=True)


if __name__ == "__main__":
    main()
