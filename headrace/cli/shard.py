"""`headrace shard MODEL OUT --tensor-parallel 4`: writes what each rank holds, so that ranks read
their own files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.console import Console

from headrace.base.config.options import CommandLine
from headrace.base.config.units import show_bytes
from headrace.base.errors import ConfigError
from headrace.cli.model_argument import with_model
from headrace.launch.facts import resolve_options


def main(argv: Sequence[str]) -> int:
    """Writes OUT, and prints what each rank has."""
    line = CommandLine(
        "headrace shard",
        "Writes sharded state: the parameters of each rank of a tensor-parallel group.",
        groups=("model",),
        own=("quantization",),
    )
    line.parser.add_argument("path", nargs="?", metavar="MODEL", help="folder or hub id")
    line.parser.add_argument("out", nargs="?", metavar="OUT", help="folder to write: new, or empty")
    line.add_number("--tensor-parallel", "ranks", default=1, least=1, greatest=64)
    own, options = line.parse(argv)
    if own.path is None or own.out is None:
        raise ConfigError("headrace shard MODEL OUT: name both folders", field="OUT")
    resolved = resolve_options(
        msgspec.structs.replace(
            with_model(options, own.path),
            device=msgspec.structs.replace(options.device, device="cpu"),
        )
    )
    from headrace.launch.shard import shard_checkpoint  # torch, after the options were checked

    console = Console()
    total = shard_checkpoint(
        resolved.engine.model,
        Path(own.out),
        own.tensor_parallel,
        lambda rank, size: console.print(f"rank {rank}: {show_bytes(size)}"),
    )
    console.print(f"{own.out}: {show_bytes(total)} for {own.tensor_parallel} ranks")
    return 0
