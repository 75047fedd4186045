"""Downloads as the command line shows them: what would come, the question whether it may, and a
progress bar."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from headrace.base.config.tree import ModelOptions, Options
from headrace.base.config.units import show_bytes
from headrace.base.errors import StartError
from headrace.launch.hub import Download, fetch, is_hub_id, plan_download
from headrace.launch.locate import locate


def download(model: str, revision: str) -> Path:
    """Fetches what is missing of a model, with a progress bar; its folder in the cache."""
    console = Console(stderr=True)
    plan = plan_download(model, revision)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(model, total=plan.num_bytes or None)
        return fetch(plan, lambda count: progress.advance(task, count))


def is_there(options: ModelOptions) -> bool:
    """Whether the model can be had without a download."""
    try:
        locate(msgspec.structs.replace(options, allow_download=False))
    except StartError:
        return False
    return True


def is_absent_hub_id(options: ModelOptions) -> bool:
    """Whether only a download can bring the model."""
    return is_hub_id(options.model) and not is_there(options)


def with_permission(options: Options) -> Options:
    """The options once a model that is not there yet has been fetched: with --allow-download, or
    because somebody at a terminal has said yes. Else they are as they were, and the model is
    refused with the way to get it."""
    model = options.model
    if not is_absent_hub_id(model):
        return options
    if not model.allow_download and not _may_fetch(model):
        return options
    download(model.model, model.revision)
    return options


def _may_fetch(model: ModelOptions) -> bool:
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return False
    plan = plan_download(model.model, model.revision)
    print(f"{model.model} is not in the local cache.", file=sys.stderr)
    print(described(plan), file=sys.stderr)
    print("Download it? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def described(plan: Download) -> str:
    """The files of a download, the largest first, and their sum."""
    ordered = sorted(plan.sizes.items(), key=lambda item: -item[1])
    rows = [f"  {show_bytes(size):>10}  {name}" for name, size in ordered]
    return "\n".join([*rows, f"  {show_bytes(plan.num_bytes):>10}  in {len(rows)} files"])
