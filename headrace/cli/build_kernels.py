"""`headrace build-kernels MODEL`: compiles the GPU kernels that a model needs on this machine and
measures its GEMMs.

What it leaves in the cache folder: Triton's binaries, and the table of GEMMs
(back/kernels/linear/table.py). The next start compiles nothing. No weights are read: the model is
made of seeded random ones, and serves its warm-up steps.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

import msgspec

from headrace.base.config.options import CommandLine
from headrace.base.config.resolved import Resolved
from headrace.base.errors import StartError
from headrace.cli.model_argument import add_model_argument, with_model
from headrace.launch.facts import resolve_options


def main(argv: Sequence[str]) -> int:
    """Builds; exit status 2 without a GPU."""
    line = CommandLine(
        "headrace build-kernels",
        "Compile a model's GPU kernels ahead, and measure its GEMMs.",
        groups=("model", "kv", "scheduler", "device"),
    )
    add_model_argument(line)
    line.parser.add_argument(
        "--no-measure",
        action="store_true",
        help="compile only; keep the table of GEMMs as it is",
    )
    own, options = line.parse(argv)
    options = with_model(options, own.path)
    model = msgspec.structs.replace(options.model, load_format="dummy")
    resolved = resolve_options(msgspec.structs.replace(options, model=model))
    if resolved.engine.device.device != "cuda":
        raise StartError(
            "build-kernels is for GPUs; the kernels of a CPU are built on installation"
        )
    began = time.perf_counter()
    if not own.no_measure:
        _measure(resolved)
    _warm(resolved)
    _say(f"built in {time.perf_counter() - began:.1f} s")
    return 0


def _warm(resolved: Resolved) -> None:
    """Starts the model and lets it run its warm-up steps, which compile what they launch."""
    from headrace.back.executor.inline import InlineExecutor

    executor = InlineExecutor(resolved.engine)
    executor.close()


def _measure(resolved: Resolved) -> None:
    """Starts the model to learn its GEMMs, then measures those that no table has."""
    _warm(resolved)
    import torch

    from headrace.back.kernels.fused_linear.op import OP as FUSED
    from headrace.back.kernels.linear import table, tune
    from headrace.back.kernels.linear.op import OP as LINEAR
    from headrace.back.kernels.linear.triton_small import gemm_device_of

    torch.cuda.empty_cache()
    device = gemm_device_of(torch.device("cuda", torch.cuda.current_device()))
    shapes = {}
    for problem in [choice.problem for choice in (*FUSED.choices(), *LINEAR.choices())]:
        shape = tune.GemmShape(
            outputs=problem.outputs,
            inputs=problem.inputs,
            norm=getattr(problem, "eps", None) is not None,
            gated=getattr(problem, "activation", None) is not None,
            add=getattr(problem, "add", False),
        )
        if problem.device == "cuda":
            shapes.setdefault(shape.key, (shape, problem.dtype))
    count = tune.measure_missing(shapes.values(), device, _say)
    if count:
        _say(f"{count} GEMMs measured: {table.user_file(device)}")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
