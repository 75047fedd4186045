"""`headrace rm HUB_ID ...`: removes models from the local cache."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Sequence
from pathlib import Path

from headrace.base.config.gguf_vision import PREFIX
from headrace.base.config.units import show_bytes
from headrace.base.errors import ConfigError
from headrace.cli.pull import check_hub_id
from headrace.launch.hub import cached_folder, gguf_variants, hub_cache, split_name


def main(argv: Sequence[str]) -> int:
    """Removes every model named, or none if one of them is not there."""
    parser = argparse.ArgumentParser(
        prog="headrace rm",
        description="Remove models from the local cache, with all their revisions; HUB_ID:TAG "
        "removes one GGUF file of a repository.",
    )
    parser.add_argument("models", metavar="HUB_ID", nargs="+")
    models = parser.parse_args(argv).models
    for model in models:
        check_hub_id(model)
        if not _files_of(model):
            raise ConfigError(f"{model} is not in the cache {hub_cache()}")
    for model in models:
        print(f"removed {model} ({show_bytes(_remove(model))})")
    return 0


def _files_of(model: str) -> list[Path]:
    """What is removed: the repository's folder, or the files that a tag names, with the last model
    also the file of its vision tower."""
    repository, tag = split_name(model)
    folder = cached_folder(repository)
    if not tag:
        return [folder] if folder.is_dir() else []
    files = []
    for snapshot in folder.glob("snapshots/*"):
        names = [str(path.relative_to(snapshot)) for path in snapshot.rglob("*.gguf")]
        variants = gguf_variants(names)
        chosen = [one for one in variants if one.lower().endswith(tag.lower())]
        files += [snapshot / part for one in chosen for part in variants[one]]
        if len(chosen) == len(variants):
            files += [snapshot / name for name in names if Path(name).name.startswith(PREFIX)]
    return files


def _remove(model: str) -> int:
    """Removes it; the bytes that are free then."""
    num_bytes = 0
    for path in _files_of(model):
        if path.is_dir():
            num_bytes += sum(
                file.stat().st_size
                for file in path.rglob("*")
                if file.is_file() and not file.is_symlink()
            )
            shutil.rmtree(path)
            shutil.rmtree(hub_cache() / ".locks" / path.name, ignore_errors=True)
            continue
        stored = path.resolve()
        num_bytes += stored.stat().st_size
        path.unlink()
        stored.unlink(missing_ok=True)
    return num_bytes
