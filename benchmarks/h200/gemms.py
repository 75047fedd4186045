"""Small products against cuBLAS and the memory's floor, for the shapes of two models; writes the table that ships."""

from __future__ import annotations

import multiprocessing
from dataclasses import asdict

import torch

from headrace.back.kernels.linear.table import GemmPlan, Measured
from headrace.back.kernels.linear.tune import SWEEPS, GemmShape, GemmTrial, candidates


def of_model(width: int, heads: int, kv_heads: int, inner: int) -> dict[str, GemmShape]:
    """The products of one layer, and of the head; head_dim is 128."""
    return {
        "qkv": GemmShape(outputs=(heads + 2 * kv_heads) * 128, inputs=width, norm=True),
        "o": GemmShape(outputs=width, inputs=heads * 128, add=True),
        "gate_up": GemmShape(outputs=2 * inner, inputs=width, norm=True, gated=True),
        "down": GemmShape(outputs=width, inputs=inner, add=True),
        "head": GemmShape(outputs=151936, inputs=width),
    }


MODELS = {"8B": of_model(4096, 32, 8, 12288), "0.6B": of_model(1024, 16, 8, 3072)}
SHAPES = {
    f"{model} {name}": shape for model, shapes in MODELS.items() for name, shape in shapes.items()
}


def floor_us(shape: GemmShape, tokens: int, rate: float) -> float:
    """Microseconds to move weight, x and y once."""
    return 2e6 * (shape.outputs * shape.inputs + tokens * (shape.inputs + shape.outputs)) / rate


def _compile(task: tuple[GemmShape, int, list[GemmPlan]]) -> int:
    shape, tokens, plans = task
    trial, done = GemmTrial(shape, torch.bfloat16, count=1), 0
    for plan in plans:
        try:
            trial.ours(plan, tokens)[0]()
            done += 1
        except Exception as error:  # too much shared memory: the plan falls out of the sweep
            print("compile", shape.key, tokens, plan, type(error).__name__, flush=True)
    torch.cuda.synchronize()
    return done


def compile_all(processes: int = 14) -> int:
    """Fills Triton's cache by many processes; returns how many plans compiled."""
    tasks = []
    for shape in SHAPES.values():
        for tokens in SWEEPS:
            every = list(candidates(shape, tokens))
            tasks += [(shape, tokens, every[i::4]) for i in range(4)]
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        return sum(pool.imap_unordered(_compile, tasks, chunksize=1))


def sweep(rate: float) -> tuple[Measured, list[dict[str, object]]]:
    """The best plan of every shape and number of tokens, and the figures."""
    table: Measured = {}
    rows = []
    for name, shape in SHAPES.items():
        trial = GemmTrial(shape, torch.bfloat16)
        for swept, sizes in SWEEPS.items():
            tried = trial.tried(swept)
            for tokens in sizes:
                library_us, finals, plan = trial.best(tokens, tried)
                table.setdefault(shape.key, {})[tokens] = plan
                floor, ours_us = floor_us(shape, tokens, rate), finals[0][0]
                rows.append(
                    {
                        "shape": name, "tokens": tokens, "floor_us": round(floor, 2),
                        "cublas_us": round(library_us, 2), "ours_us": round(ours_us, 2),
                        "cublas_floor": round(floor / library_us, 3),
                        "ours_floor": round(floor / ours_us, 3),
                        "plans": [(round(us, 2), *asdict(plan).values()) for us, plan in finals],
                    }
                )  # fmt: skip
                print(rows[-1], flush=True)
        del trial
        torch.cuda.empty_cache()
    return table, rows
