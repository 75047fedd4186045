"""Which files of a folder hold its weights, and which layout the folder has.

Only file names and the index are looked at. Names from an index are untrusted: plain names only,
and what they lead to must lie in the model's folder. Files come back in natural order, equal
on every rank.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from headrace.base.config.hf import ConfigReader, read_json
from headrace.base.errors import CheckpointError

INDEX_NAME: Final = "model.safetensors.index.json"
SINGLE_NAME: Final = "model.safetensors"
MAX_INDEX_BYTES: Final = 64 << 20
WEIGHT_SUFFIXES: Final = (".safetensors", ".bin", ".pth", ".pt", ".gguf", ".xz")
"""Of files that hold weights; `.xz`: packed ones."""
PICKLE_SUFFIXES: Final = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


@dataclass(frozen=True, kw_only=True)
class WeightFiles:
    """`files` in natural order; `weight_map` says which file has which tensor, where an index says
    so. `prefixes`: what stands before the names of a file's tensors (checkpoint_parts.py)."""

    files: tuple[Path, ...]
    weight_map: Mapping[str, str] | None = None
    prefixes: Mapping[Path, str] = field(default_factory=dict)


def natural_key(name: str) -> tuple[tuple[int, int, str], ...]:
    """Sorts shard-2 before shard-10."""
    parts = re.findall(r"\d+|\D+", name)
    return tuple((0, int(part), "") if part.isdecimal() else (1, 0, part) for part in parts)


def folder_format(folder: Path) -> str:
    """The layout of a model folder: "hf", "mistral" or "none".

    hf needs config.json and is preferred where both are there: it is the one we read. mistral needs
    params.json and consolidated*.safetensors; Mistral's tokenizer and parameter files without these
    weights do not make it one.
    """
    if (folder / "config.json").is_file():
        alone = _named(folder, "consolidated*.safetensors") and not _named(
            folder, "model*.safetensors"
        )
        return "mistral" if alone and (folder / "params.json").is_file() else "hf"
    if (folder / "params.json").is_file() and _named(folder, "consolidated*.safetensors"):
        return "mistral"
    return "none"


def is_sharded(folder: Path) -> bool:
    """Whether the folder has files of ranks (`headrace shard`) instead of a checkpoint's."""
    return any(folder.glob("model-rank-*-part-*.safetensors"))


def find_weight_files(folder: Path) -> WeightFiles:
    """The safetensors files of a model folder, or else tensorizer's; none, missing shards, escapes
    and pickles only: CheckpointError."""
    index = folder / INDEX_NAME
    if (folder / SINGLE_NAME).is_file() or not index.exists():
        paths = _without_index(folder)
        return WeightFiles(files=tuple(confined(folder, path.name) for path in paths))
    weight_map = _weight_map(index)
    names = sorted(set(weight_map.values()), key=natural_key)
    files = tuple(confined(folder, name) for name in names)
    missing = [path.name for path in files if not path.is_file()]
    if missing:
        raise CheckpointError(
            f"{index}: {len(missing)} of {len(files)} files are missing: {_some(missing)}"
        )
    return WeightFiles(files=files, weight_map=weight_map)


def confined(folder: Path, name: str) -> Path:
    """`folder / name`, refused unless `name` is a plain file name that stays in the model's
    folder.

    A hub cache keeps the files of a snapshot as links into its `blobs` folder, two levels up: these
    are followed.
    """
    if name in ("", ".", "..") or re.search(r"[/\\\x00:]", name):
        raise CheckpointError(f"{folder}: {name!r} is not a plain file name; paths are refused")
    path = folder / name
    root = Path(os.path.realpath(folder))
    roots = [root]
    if folder.absolute().parent.name == "snapshots":
        roots.append(Path(os.path.realpath(folder.absolute().parent.parent)) / "blobs")
    real = Path(os.path.realpath(path))
    if not any(real.is_relative_to(one) for one in roots):
        raise CheckpointError(
            f"{path} is a link that leads out of the model's folder; it is refused"
        )
    return path


def _weight_map(index: Path) -> dict[str, str]:
    return read_weight_map(read_json(index, limit=MAX_INDEX_BYTES), str(index))


def read_weight_map(raw: Mapping[str, Any], index: str) -> dict[str, str]:
    """Which file has which tensor, by an index; CheckpointError where it does not say."""
    reader = ConfigReader(raw, index)
    section = reader.section("weight_map")
    if section is None or not section.raw:
        raise CheckpointError(f"{index}: weight_map is missing or empty", field="weight_map")
    weight_map = {name: section.str(name) for name in section.raw}
    for name in set(weight_map.values()):
        if not name.endswith(".safetensors"):
            raise CheckpointError(
                f"{index}: {name!r} is not a safetensors file", field="weight_map"
            )
    return weight_map


def _without_index(folder: Path) -> list[Path]:
    if (folder / SINGLE_NAME).is_file():
        return [folder / SINGLE_NAME]
    named = _named(folder, "model*.safetensors")
    named = named or [p for p in _named(folder, "*.safetensors") if not _is_other(p.name)]
    named = named or _named(folder, "*.tensors")
    if not named:
        raise _no_weights(folder)
    folders = [path.name for path in named if not path.is_file()]
    if folders:
        raise CheckpointError(f"{folder}: {_some(folders)} is not a file")
    _check_numbered(folder, named)
    return named


def _is_other(name: str) -> bool:
    return name.startswith(("consolidated", "adapter_model"))


def _no_weights(folder: Path) -> CheckpointError:
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLE_SUFFIXES)
    if pickles:
        return CheckpointError(
            f"{folder}: only pickled weights ({_some(pickles)}); these can run code and are not read. "
            "Convert them to safetensors"
        )
    return CheckpointError(f"{folder}: no *.safetensors file; the weights are missing")


def _check_numbered(folder: Path, files: Iterable[Path]) -> None:
    """Files named -00002-of-00003 must be complete also where no index says so."""
    groups: dict[tuple[str, int], set[int]] = {}
    for path in files:
        match = re.fullmatch(r"(.*)-(\d{1,6})-of-(\d{1,6})\.safetensors", path.name)
        if match:
            groups.setdefault((match[1], int(match[3])), set()).add(int(match[2]))
    for (stem, count), numbers in groups.items():
        missing = [number for number in range(1, min(count, 99_999) + 1) if number not in numbers]
        if missing:
            names = [f"{stem}-{number:05d}-of-{count:05d}.safetensors" for number in missing]
            raise CheckpointError(
                f"{folder}: {len(missing)} of {count} files are missing: {_some(names)}"
            )


def _named(folder: Path, pattern: str) -> list[Path]:
    return sorted(folder.glob(pattern), key=lambda path: natural_key(path.name))


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"
