"""`headrace merge-adapter MODEL ADAPTER OUT`: writes a plain checkpoint with a low-rank adapter
merged into its weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from headrace.base.config.options import CommandLine
from headrace.base.config.resolved import ModelSpec
from headrace.base.config.units import show_bytes
from headrace.base.errors import ConfigError
from headrace.cli.model_argument import with_model
from headrace.launch.facts import resolve_options


def main(argv: Sequence[str]) -> int:
    """Writes OUT, and prints its size."""
    line = CommandLine(
        "headrace merge-adapter",
        "Writes a plain checkpoint with a low-rank adapter (LoRA) merged into its weights.",
        groups=("model",),
        own=("quantization",),
    )
    for name, words in (
        ("path", "MODEL: folder or hub id, of plain safetensors"),
        ("adapter", "ADAPTER: folder as PEFT saves it"),
        ("out", "OUT: folder to write: new, or empty"),
    ):
        line.parser.add_argument(name, nargs="?", metavar=words.partition(":")[0], help=words)
    own, options = line.parse(argv)
    if own.path is None or own.adapter is None or own.out is None:
        raise ConfigError("headrace merge-adapter MODEL ADAPTER OUT: name all three", field="OUT")
    resolved = resolve_options(
        msgspec.structs.replace(
            with_model(options, own.path),
            device=msgspec.structs.replace(options.device, device="cpu"),
        )
    )
    return _write(resolved.engine.model, Path(own.adapter), Path(own.out))


def _write(spec: ModelSpec, adapter: Path, out: Path) -> int:
    """Imports torch here, after the options were checked."""
    from headrace.launch.merge import merge_adapter
    from headrace.launch.quantize import stored_bytes

    console = Console()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("merging", total=stored_bytes(spec))
        merged = merge_adapter(
            spec, adapter, out, lambda name, size: bar.update(task, advance=size)
        )
    console.print(
        f"{out}: {show_bytes(merged.num_bytes)}, {merged.num_matrices} matrices with an adapter of "
        f"rank {merged.rank}"
    )
    return 0
