"""`headrace plan MODEL [--device h200]`: does it fit, how much KV remains, which kernels would run
and why, how fast.

Needs no such device. Its speeds are rooflines: bytes over bandwidth and operations over rate,
whichever is longer. Those of this machine come from steps of a few of the model's layers.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from headrace.back.platforms.detect import FAKES
from headrace.base.config.options import CommandLine
from headrace.base.config.resolved import Decision, KVSpec, Resolved
from headrace.base.config.tree import Options
from headrace.base.config.units import show_bytes
from headrace.base.errors import ConfigError
from headrace.cli.model_argument import add_model_argument, with_model
from headrace.cli.other_servers import translated, without_gpu
from headrace.launch.facts import resolve_options
from headrace.launch.media_counts import media_counts
from headrace.launch.performance_model import (
    KNOWN_DEVICES,
    STATE,
    DeviceModel,
    ModelCost,
    PerformanceEstimate,
    estimate_performance,
    known_device,
    with_kv,
)
from headrace.launch.resolve import MIN_KV_BYTES, DoesNotFit
from headrace.launch.topology import planned_facts

MAX_CONTEXT = 1 << 24


def main(argv: Sequence[str]) -> int:
    """Prints the plan; exit status 1 if the model does not fit."""
    line = CommandLine(
        "headrace plan",
        "Whether a model fits, and how fast it would run.",
        groups=("model", "kv", "scheduler", "device", "adapters"),
        own=("device",),
    )
    add_model_argument(line)
    line.parser.add_argument(
        "--device", default="cpu", help=f"cpu, {', '.join(KNOWN_DEVICES)} [cpu]"
    )
    line.add_number(
        "--context",
        "tokens per sequence in the prediction",
        default=1024,
        least=1,
        greatest=MAX_CONTEXT,
    )
    line.parser.add_argument("--json", action="store_true", help="print one JSON object")
    line.parser.add_argument(
        "--explain", action="store_true", help="also why kernels of other devices do not run here"
    )
    words, notes = translated(argv, line.flags)
    own, options = line.parse(words)
    device = None if own.device == "cpu" else known_device(own.device)
    if device is None:
        options, notes = without_gpu(_on(options, device="cpu"), notes)
    resolved, shortfall = _resolve(with_model(options, own.path), own.device)
    if resolved.engine.device.pipeline_parallel > 1:
        raise ConfigError("--pipeline-parallel: what stages take is not estimated here")
    estimate, kernels = _predict(resolved, device, own.context)
    if shortfall:
        estimate = msgspec.structs.replace(estimate, fits=False, shortfall=shortfall)
    decisions = (*notes, *resolved.decisions, *kernels)
    if own.json:
        document = {
            **msgspec.to_builtins(estimate),
            "media_tokens": dict(_media(resolved)),
            "decisions": [msgspec.to_builtins(d) for d in decisions],
        }
        sys.stdout.write(msgspec.json.encode(document).decode() + "\n")
    else:
        shown = decisions if own.explain else tuple(map(_without_other_devices, decisions))
        _show(resolved, estimate, shown)
    return 0 if estimate.fits else 1


def _resolve(options: Options, device: str) -> tuple[Resolved, str]:
    """What would be decided there, and why the model does not fit, if so: then with the least KV
    cache."""
    if device == "cpu":
        return resolve_options(_on(options, device="cpu")), ""
    threads = options.device.threads
    options = _on(options, device="cuda", threads=1 if threads == "auto" else threads)
    planned = planned_facts(device, options.device)
    try:
        return resolve_options(options, planned), ""
    except DoesNotFit as error:
        least = msgspec.structs.replace(options.kv, kv_memory=str(MIN_KV_BYTES))
        return resolve_options(msgspec.structs.replace(options, kv=least), planned), error.message


def _on(options: Options, **changes: object) -> Options:
    return msgspec.structs.replace(
        options, device=msgspec.structs.replace(options.device, **changes)
    )


def _predict(
    resolved: Resolved, device: DeviceModel | None, context: int
) -> tuple[PerformanceEstimate, tuple[Decision, ...]]:
    """The estimate and the kernels. Imports torch here, after the options were checked."""
    import psutil

    from headrace.back.models.families import FALLBACK
    from headrace.back.models.registry import DTYPES
    from headrace.bench.sample import run_sample
    from headrace.launch.offload_plan import offers, offloaded
    from headrace.launch.plan import (
        build_without_memory,
        cost_of,
        kernels_of,
        kernels_on_absent_device,
        kv_of,
        probe_cpu,
        rank_share,
        stored_on_absent_device,
    )

    engine, sample = resolved.engine, None
    spec, kv, ranks = engine.model, engine.kv, engine.device.tensor_parallel
    share: dict[str, Any] = {"block_tokens": kv.block_tokens, **rank_share(engine.device)}
    absent = None if device is None or spec.family == FALLBACK else FAKES[device.name]
    model = build_without_memory(
        spec,
        **share,
        context=engine.device.context,
        planned="cuda" if absent is not None and absent.kind == "cuda" else "",
        stored={} if absent is None else stored_on_absent_device(spec, absent),
    )
    whole = cost_of(model, dtype=DTYPES[spec.dtype])
    cost, choices = offloaded(model, spec, whole)
    if device is not None:
        target = device
        kernels = kernels_on_absent_device(spec, FAKES[device.name], **share)
    else:
        target = probe_cpu(engine, memory_bytes=psutil.virtual_memory().available)
        if _can_be_sampled(resolved):
            sample, kernels = run_sample(resolved, cost)
        else:
            kernels = kernels_of(spec, block_tokens=kv.block_tokens)
    memory = kv.memory_bytes
    if memory is None and kv.num_blocks is not None:
        per_token = sum(layer for layer, window in cost.kv_layers if window != STATE)
        memory = kv.num_blocks * kv.block_tokens * per_token
    estimate = estimate_performance(
        cost, target, kv_memory_bytes=memory, max_model_len=spec.max_model_len, context=context,
        sample=sample, devices=ranks, step_tokens=engine.scheduler.max_step_tokens,
    )  # fmt: skip
    if device is not None and not estimate.fits and spec.offload is None:
        ways = offers(
            model, spec, whole, target,
            memory_bytes=engine.device.memory_bytes or target.memory_bytes,
            step_tokens=engine.scheduler.max_step_tokens,
        )  # fmt: skip
        estimate = msgspec.structs.replace(estimate, offers=tuple(ways))
    estimate = with_kv(estimate, kv_of(model, engine, estimate.kv_memory_bytes), cost)
    return _with_stated_length(estimate, kv, cost), (*choices, *kernels)


def _can_be_sampled(resolved: Resolved) -> bool:
    """Whether a few layers, run alone, say what steps take: not of ranks, nor of a decoder that
    waits for its encoder."""
    engine = resolved.engine
    encoder = engine.model.spectrogram or engine.model.encoder_tokens
    return resolved.text.generates and not encoder and engine.device.tensor_parallel == 1


def _with_stated_length(
    estimate: PerformanceEstimate, kv: KVSpec, cost: ModelCost
) -> PerformanceEstimate:
    """The server does not start where one sequence of the stated length is more than the stated
    memory."""
    needed = 0 if kv.least_tokens is None else cost.kv_bytes(kv.least_tokens)
    if needed <= estimate.kv_memory_bytes:
        return estimate
    shortfall = (
        f"--max-model-len {kv.least_tokens} takes {show_bytes(needed)} for one sequence, more than "
        f"--kv-memory ({show_bytes(estimate.kv_memory_bytes)}): raise the one or lower the other"
    )
    return msgspec.structs.replace(estimate, fits=False, shortfall=shortfall)


# What a kernel of another device answers (`supports` of back/kernels): "runs on the CPU only".
OTHER_DEVICE = re.compile(r"; \w+: runs on [^;]* only(?=;|$)")


def _without_other_devices(decision: Decision) -> Decision:
    """The decision without the kernels that were rejected for their device: nobody expects them."""
    return msgspec.structs.replace(decision, why=OTHER_DEVICE.sub("", decision.why))


def _media(resolved: Resolved) -> tuple[tuple[str, int], ...]:
    """See media_counts."""
    spec = resolved.text.media
    return () if spec is None else media_counts(spec)


def _show(resolved: Resolved, estimate: PerformanceEstimate, decisions: Sequence[Decision]) -> None:
    console = Console()
    spec = resolved.engine.model
    verdict = "[green]fits[/]" if estimate.fits else "[red]does not fit[/]"
    several = estimate.devices > 1
    shared = several or resolved.engine.device.expert_group is not None
    where = f"{estimate.devices} x {estimate.device}" if several else estimate.device
    console.print(f"{spec.name} ({spec.family}, {spec.dtype}) on {where}: {verdict}")
    if estimate.shortfall:
        console.print(estimate.shortfall, markup=False)
    for offer in estimate.offers:
        console.print(
            f"with {offer.option}: {offer.layers} layers, {show_bytes(offer.host_bytes)} in host memory, "
            f"{offer.decode_tok_s:,.1f} tokens/s of one stream, prefill {offer.prefill_tok_s:,.0f} tokens/s",
            markup=False,
        )
    console.print(
        f"{'on each: ' if shared else ''}weights {show_bytes(estimate.weight_bytes)}, "
        f"KV cache {show_bytes(estimate.kv_memory_bytes)} = {estimate.kv_tokens:,} tokens"
    )
    if states := estimate.kv.state_bytes + estimate.kv.snapshot_bytes:
        console.print(
            f"of it recurrent state {show_bytes(states)}, "
            f"{show_bytes(estimate.kv.snapshot_bytes)} of that snapshots"
        )
    console.print(
        f"reads {estimate.read_gb_s:,.1f} GB/s, GEMMs {estimate.gflops:,.0f} GFLOP/s ({estimate.source})"
    )
    console.print(f"prefill {estimate.prefill_tok_s:,.0f} tokens/s")
    if counts := _media(resolved):
        each = "; ".join(f"{label} {count:,}" for label, count in counts)
        console.print(f"tokens of media: {each}")
    title = "roofline" + (", sums between the devices left out" if several else "")
    if estimate.sample_layers:
        title = f"from steps of {estimate.sample_layers} layers, all measured in {estimate.probe_s:.2f} s"
    speed = Table("streams", "context", "decode step", "tokens/s", "bound by", title=title)
    for p in estimate.decode:
        speed.add_row(
            str(p.batch),
            str(p.context),
            f"{p.decode_step_ms:.3f} ms",
            f"{p.decode_tok_s:,.0f}",
            p.bound,
        )
    console.print(speed)
    table = Table("option", "requested", "chosen", "why", title="decisions")
    for d in decisions:
        table.add_row(d.field, d.requested, d.chosen, d.why)
    console.print(table)
