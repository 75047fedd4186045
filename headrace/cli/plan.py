"""`headrace plan MODEL [--device h200]`: does it fit, how much KV remains, which kernels would run and why, how fast.

Needs no such device. Its speeds are rooflines: bytes over bandwidth and operations over rate, whichever is longer.
Those of this machine come from steps of a few of the model's layers.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import msgspec
from rich.console import Console
from rich.table import Table

from headrace.base.config.options import CommandLine
from headrace.base.config.resolved import Decision, Resolved
from headrace.base.config.units import show_bytes
from headrace.cli.model_argument import add_model_argument, with_model
from headrace.launch.facts import resolve_options
from headrace.launch.forecast import KNOWN_DEVICES, Forecast, forecast, known_device


def main(argv: Sequence[str]) -> int:
    """Prints the plan; exit status 1 if the model does not fit."""
    line = CommandLine(
        "headrace plan",
        "Whether a model fits, and how fast it would run.",
        groups=("model", "kv", "scheduler"),
    )
    add_model_argument(line)
    line.parser.add_argument(
        "--device", default="cpu", help=f"cpu, {', '.join(KNOWN_DEVICES)} [cpu]"
    )
    line.parser.add_argument(
        "--context", type=int, default=1024, help="tokens per sequence in the prediction [1024]"
    )
    line.parser.add_argument("--json", action="store_true", help="print one JSON object")
    own, options = line.parse(argv)
    device = None if own.device == "cpu" else known_device(own.device)
    resolved = resolve_options(with_model(options, own.path))
    predicted, kernels = _predict(resolved, device, own.context)
    decisions = (*resolved.decisions, *kernels)
    if own.json:
        document = {
            **msgspec.to_builtins(predicted),
            "decisions": [msgspec.to_builtins(d) for d in decisions],
        }
        sys.stdout.write(msgspec.json.encode(document).decode() + "\n")
    else:
        _show(resolved, predicted, decisions)
    return 0 if predicted.fits else 1


def _predict(
    resolved: Resolved, device: object, context: int
) -> tuple[Forecast, tuple[Decision, ...]]:
    """The forecast and the kernels; torch is imported here, after the words were checked."""
    import psutil

    from headrace.back.models.registry import DTYPES
    from headrace.bench.sample import run_sample
    from headrace.launch.forecast import DeviceModel
    from headrace.launch.plan import build_without_memory, cost_of, kernels_of, probe_cpu

    spec, kv, sampled = resolved.engine.model, resolved.engine.kv, None
    cost = cost_of(
        build_without_memory(spec, block_tokens=kv.block_tokens), dtype=DTYPES[spec.dtype]
    )
    if isinstance(device, DeviceModel):
        target, memory = device, None
        kernels: tuple[Decision, ...] = (
            Decision(
                "kernels", "auto", "torch", f"kernels for {target.name} are chosen on that device"
            ),
        )
    else:
        target = probe_cpu(resolved.engine, memory_bytes=psutil.virtual_memory().available)
        memory = kv.memory_bytes
        if resolved.text.generates:
            sampled, kernels = run_sample(resolved, cost)
        else:
            kernels = kernels_of(spec, block_tokens=kv.block_tokens)
    return forecast(
        cost, target, kv_memory_bytes=memory, max_model_len=spec.max_model_len, context=context,
        sampled=sampled,
    ), kernels  # fmt: skip


def _show(resolved: Resolved, predicted: Forecast, decisions: Sequence[Decision]) -> None:
    console = Console()
    spec = resolved.engine.model
    verdict = "[green]fits[/]" if predicted.fits else "[red]does not fit[/]"
    console.print(f"{spec.name} ({spec.family}, {spec.dtype}) on {predicted.device}: {verdict}")
    console.print(
        f"weights {show_bytes(predicted.weight_bytes)}, KV cache {show_bytes(predicted.kv_memory_bytes)}"
        f" = {predicted.kv_tokens:,} tokens, prefill {predicted.prefill_tok_s:,.0f} tokens/s"
    )
    console.print(
        f"reads {predicted.read_gb_s:,.1f} GB/s, products {predicted.gflops:,.0f} GFLOP/s ({predicted.source})"
    )
    title = "roofline"
    if predicted.sample_layers:
        title = f"from steps of {predicted.sample_layers} layers, all measured in {predicted.probe_s:.2f} s"
    speed = Table("streams", "context", "decode step", "tokens/s", "bound by", title=title)
    for p in predicted.decode:
        speed.add_row(
            str(p.batch),
            str(p.context),
            f"{p.decode_step_ms:.3f} ms",
            f"{p.decode_tok_s:,.0f}",
            p.bound,
        )
    console.print(speed)
    table = Table("decided", "given", "chosen", "why", title="decisions")
    for d in decisions:
        table.add_row(d.field, d.given, d.chosen, d.why)
    console.print(table)
