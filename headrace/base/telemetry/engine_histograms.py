"""What an engine core reports as histograms, and the memory of processes, as Prometheus reads
them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from headrace.base.process_memory import resident_bytes

HISTOGRAMS = (
    "block_lifetime_seconds",
    "block_idle_before_evict_seconds",
    "block_reuse_gap_seconds",
)
"""Figures of a core that are a mapping: greatest value of a bucket -> count, and "sum"."""

FURTHER = (
    'Every number an engine core reports appears as `headrace_engine_NAME{engine="i"}` as well.\n'
    "`rss_bytes` is the memory of its process, `workers_rss_bytes` that of those below it,\n"
    "`headrace_process_resident_memory_bytes` that of the API process that answers. With\n"
    "`--mfu-metrics` `estimated_flops`, `estimated_read_bytes` and `estimated_write_bytes` are what\n"
    "the steps asked of each device, by the model's shapes: weights, KV cache and attention, without\n"
    "activations and recurrences. FLOPs utilization is\n"
    "`rate(headrace_engine_estimated_flops[1m]) / PEAK`, PEAK of one device's data sheet. With\n"
    "`--watched-blocks N` these are histograms, of one in N blocks of the KV cache: "
    + ", ".join(f"`headrace_engine_{name}`" for name in HISTOGRAMS)
)


def further_text(engines: Sequence[Mapping[str, object]]) -> bytes:
    """The lines of these histograms, and of this API process's memory."""
    name = "headrace_process_resident_memory_bytes"
    lines = [f"# TYPE {name} gauge", f"{name} {float(resident_bytes())}"]
    for figure in HISTOGRAMS:
        reported = [(i, one[figure]) for i, one in enumerate(engines) if figure in one]
        if reported:
            lines.append(f"# TYPE headrace_engine_{figure} histogram")
        for index, counts in reported:
            assert isinstance(counts, Mapping)
            label = engines[index].get("model", index)
            lines += _histogram(f"headrace_engine_{figure}", counts, f'engine="{label}"')
    return ("\n".join(lines) + "\n").encode()


def _histogram(name: str, counts: Mapping[str, float], label: str) -> list[str]:
    lines: list[str] = []
    total = 0.0
    for bound, count in counts.items():
        if bound == "sum":
            continue
        total += count
        least = "+Inf" if bound == "inf" else bound
        lines.append(f'{name}_bucket{{{label},le="{least}"}} {total}')
    return [*lines, f"{name}_sum{{{label}}} {counts['sum']}", f"{name}_count{{{label}}} {total}"]
