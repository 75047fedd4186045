"""Small products against cuBLAS and the memory's floor, for the shapes of two models; writes the table that ships.

Every launch of a chain reads another weight. The norm before, the activation after and the addition into the residual
are part of our kernels' time and are not in cuBLAS' figure.
"""

from __future__ import annotations

import itertools
import multiprocessing
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace

import torch
import torch.nn.functional as F

from benchmarks.h200.timing import copies, each_us
from headrace.back.kernels.linear.table import ProductPlan, shape_name
from headrace.back.kernels.linear.triton_small import Product, launcher


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One product of a model."""

    name: str
    outputs: int
    inputs: int
    norm: bool = False
    gated: bool = False
    add: bool = False

    @property
    def key(self) -> str:
        """Its name in tables."""
        return shape_name(self.outputs, self.inputs, gated=self.gated)


def of_model(
    name: str, width: int, heads: int, kv_heads: int, inner: int, head_dim: int = 128
) -> list[Shape]:
    """The products of one layer, and of the head."""
    return [
        Shape(
            name=f"{name} qkv", outputs=(heads + 2 * kv_heads) * head_dim, inputs=width, norm=True
        ),
        Shape(name=f"{name} o", outputs=width, inputs=heads * head_dim, add=True),
        Shape(name=f"{name} gate_up", outputs=2 * inner, inputs=width, norm=True, gated=True),
        Shape(name=f"{name} down", outputs=width, inputs=inner, add=True),
        Shape(name=f"{name} head", outputs=151936, inputs=width),
    ]


SHAPES = [
    *of_model("8B", 4096, 32, 8, 12288),
    *of_model("0.6B", 1024, 16, 8, 3072),
]
SWEPT = (1, 8, 32, 64)
TOKENS = {1: (1,), 8: (2, 4, 8, 16), 32: (32,), 64: (64,)}
"""Numbers of tokens that share a sweep, since the kernel pads them to one size."""


def plans(shape: Shape, tokens: int) -> Iterator[ProductPlan]:
    """The plans that are tried."""
    if tokens == 1:
        ks = (1024, 2048, 4096)
        for n, k, warps, ahead in itertools.product((2, 4, 8), ks, (4, 8), (0, 1)):
            values = n * k // (32 * warps)
            if k <= 2 * shape.inputs and 8 <= values <= 64 and (not ahead or 2 * k <= shape.inputs):
                yield ProductPlan(kernel="gemv", n=n, k=k, warps=warps, stages=1, prefetch=ahead)
        return
    splits = (1,) if shape.outputs > 8192 else (1, 2, 4)
    for n, k, split, stages in itertools.product((32, 64), (128, 256), splits, (3, 5)):
        tiles = (shape.outputs // (2 if shape.gated else 1)) / n
        tile_bytes = (2 if shape.gated else 1) * n * k * 2 + max(16, tokens) * k * 2
        if stages * tile_bytes > 200_000 or shape.inputs / split < 2 * k:
            continue
        if tiles * split < 60 or (split > 1 and tiles * split > 600):
            continue
        yield ProductPlan(
            kernel="skinny", n=n, k=k, warps=4, stages=stages, split=split, prefetch=2
        )


class Bench:
    """The tensors of one shape."""

    def __init__(self, shape: Shape, *, count: int | None = None) -> None:
        self.shape = shape
        number = count or copies(2 * shape.outputs * shape.inputs)
        new = {"device": "cuda", "dtype": torch.bfloat16}
        self.weights = [
            torch.randn(shape.outputs, shape.inputs, **new).mul_(shape.inputs**-0.5)
            for _ in range(number)
        ]
        self.norm = torch.rand(shape.inputs, device="cuda") + 0.5 if shape.norm else None
        self.results = shape.outputs // (2 if shape.gated else 1)
        self.x = torch.randn(64, shape.inputs, **new)
        self.y = torch.zeros(64, self.results, **new)

    def products(self, tokens: int) -> list[Product]:
        """One per weight, with all there is around it (a norm for one token only)."""
        return [
            Product(
                weight_OI=weight, norm_I=self.norm if tokens == 1 else None, eps=1e-6, add=self.shape.add,
                activation="silu" if self.shape.gated else "",
            )
            for weight in self.weights
        ]  # fmt: skip

    def ours(self, plan: ProductPlan, tokens: int) -> list[Callable[[], object]]:
        """A chain by a plan."""
        x, y = self.x[:tokens], self.y[:tokens]
        padded = 1 << (tokens - 1).bit_length()
        runs = [launcher(product, plan, padded) for product in self.products(tokens)]
        return [lambda run=run: run(x, y) for run in runs]

    def cublas(self, tokens: int) -> list[Callable[[], object]]:
        """The same chain by the library, products alone (with the addition, which it does too)."""
        x, y = self.x[:tokens], self.y[:tokens]
        if self.shape.add:
            return [lambda weight=weight: y.addmm_(x, weight.t()) for weight in self.weights]
        return [lambda weight=weight: F.linear(x, weight) for weight in self.weights]


def floor_us(shape: Shape, tokens: int, rate: float) -> float:
    """Microseconds to move weight, x and y once."""
    return 2e6 * (shape.outputs * shape.inputs + tokens * (shape.inputs + shape.outputs)) / rate


def _compile(task: tuple[Shape, int, list[ProductPlan]]) -> int:
    shape, tokens, some = task
    bench = Bench(shape, count=1)
    done = 0
    for plan in some:
        try:
            bench.ours(plan, tokens)[0]()
            done += 1
        except Exception as error:  # too much shared memory: the plan falls out of the sweep
            print("compile", shape.name, tokens, plan, type(error).__name__, flush=True)
    torch.cuda.synchronize()
    return done


def compile_all(processes: int = 14) -> int:
    """Fills Triton's cache by many processes; returns how many plans compiled."""
    tasks = []
    for shape in SHAPES:
        for tokens in SWEPT:
            every = list(plans(shape, tokens))
            tasks += [(shape, tokens, every[i::4]) for i in range(4)]
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        return sum(pool.imap_unordered(_compile, tasks, chunksize=1))


def sweep(rate: float) -> tuple[dict[str, dict[int, ProductPlan | None]], list[dict[str, object]]]:
    """The best plan of every shape and number of tokens, and the figures."""
    table: dict[str, dict[int, ProductPlan | None]] = {}
    rows = []
    for shape in SHAPES:
        bench = Bench(shape)
        for swept, sizes in TOKENS.items():
            tried = list(_tried(bench, swept))
            for tokens in sizes:
                row, plan = _best(bench, tokens, tried[:4], rate)
                table.setdefault(shape.key, {})[tokens] = plan
                rows.append(row)
                print(row, flush=True)
        del bench
        torch.cuda.empty_cache()
    return table, rows


def _tried(bench: Bench, tokens: int) -> list[tuple[float, ProductPlan]]:
    """Every plan by rising microseconds."""
    tried = []
    for plan in plans(bench.shape, tokens):
        try:
            tried.append((each_us(bench.ours(plan, tokens), replays=3), plan))
        except Exception as error:  # too much shared memory: the plan falls out of the sweep
            print("run", bench.shape.name, tokens, plan, type(error).__name__, flush=True)
    return sorted(tried, key=lambda pair: pair[0])


def _best(
    bench: Bench, tokens: int, tried: list[tuple[float, ProductPlan]], rate: float
) -> tuple[dict[str, object], ProductPlan | None]:
    """The figures of one number of tokens, and the plan of the table."""
    shape = bench.shape
    library = each_us(bench.cublas(tokens))
    finals = [(each_us(bench.ours(plan, tokens)), plan) for _, plan in tried]
    if tokens > 1:
        behind = replace(finals[0][1], prefetch=0)
        finals.append((each_us(bench.ours(behind, tokens)), behind))
    finals.sort(key=lambda pair: pair[0])
    ours, plan = finals[0]
    floor = floor_us(shape, tokens, rate)
    spared = 2.0 * (shape.gated + (shape.norm and tokens == 1))  # launches cuBLAS' figure lacks
    row = {
        "shape": shape.name, "tokens": tokens, "floor_us": round(floor, 2),
        "cublas_us": round(library, 2), "ours_us": round(ours, 2),
        "cublas_floor": round(floor / library, 3), "ours_floor": round(floor / ours, 3),
        "plans": [(round(us, 2), *asdict(plan).values()) for us, plan in finals],
    }  # fmt: skip
    return row, plan if ours < library + spared else None
