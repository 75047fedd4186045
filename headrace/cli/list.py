"""`headrace list`: the models in the local cache."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from headrace.base.config.units import show_bytes
from headrace.launch.hub import gguf_variants, hub_cache
from headrace.launch.locate import BUNDLED, bundled_model


class CachedModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model that can be named; `num_bytes` of its weights, `changed_at` as a Unix time."""

    name: str
    format: str
    num_bytes: int
    changed_at: float


def main(argv: Sequence[str]) -> int:
    """Prints a row for each model."""
    argparse.ArgumentParser(
        prog="headrace list", description="List the models in the local cache (HF_HOME)."
    ).parse_args(argv)
    table = Table("name", "format", "size", "modified", box=None, pad_edge=False)
    for model in sorted([*_bundled(), *cached_models()], key=lambda one: -one.changed_at):
        day = time.strftime("%Y-%m-%d", time.localtime(model.changed_at))
        table.add_row(model.name, model.format, show_bytes(model.num_bytes), day)
    Console().print(table)
    return 0


def _bundled() -> Iterator[CachedModel]:
    for demo, (name, _, _) in BUNDLED.items():
        yield _described(name, "safetensors", [bundled_model(demo) / "model.safetensors"])


def cached_models() -> Iterator[CachedModel]:
    """What is in the cache and complete enough to be named: the newest snapshot of every
    repository, and of GGUF repositories every variant."""
    for folder in sorted(hub_cache().glob("models--*")):
        snapshots = sorted(folder.glob("snapshots/*"), key=lambda path: path.stat().st_mtime)
        if not snapshots:
            continue
        name = folder.name.removeprefix("models--").replace("--", "/")
        newest = snapshots[-1]
        weights = list(newest.glob("model*.safetensors"))
        if weights and (newest / "config.json").exists():
            yield _described(name, "safetensors", weights)
        names = [str(path.relative_to(newest)) for path in newest.rglob("*.gguf")]
        for variant, files in gguf_variants(names).items():
            tag = variant.rpartition("-")[2] if len(gguf_variants(names)) > 1 else ""
            shown = f"{name}:{tag}" if tag else name
            yield _described(shown, "gguf", [newest / file for file in files])


def _described(name: str, kind: str, files: list[Path]) -> CachedModel:
    stats = [file.stat() for file in files]
    return CachedModel(
        name=name,
        format=kind,
        num_bytes=sum(one.st_size for one in stats),
        changed_at=max(one.st_mtime for one in stats),
    )
