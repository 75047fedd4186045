"""The modules of a sentence-transformers folder: `modules.json`, the pooling folder, dense layers,
and what late interaction checkpoints say of queries and documents
(config_sentence_transformers.json)."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec

from headrace.base.config.hf import ConfigReader, read_json
from headrace.base.config.pooling import DenseSpec, LateSpec
from headrace.base.errors import CheckpointError

_HOW = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
}
_OTHER = (
    "pooling_mode_max_tokens",
    "pooling_mode_mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens",
)
_NAMES = {"cls": "cls", "mean": "mean", "lasttoken": "last"}
_ACTIVATIONS = ("identity", "tanh", "relu", "gelu", "sigmoid", "silu")
_MODELS = ("Transformer", "MLMTransformer")
_KNOWN = (*_MODELS, "Pooling", "SpladePooling", "Dense", "Normalize")
_WITH_FILES = ("Pooling", "SpladePooling", "Dense")
_FOLDER = re.compile(r"[A-Za-z0-9][\w-]{0,95}", re.ASCII)
MODULE_FILES = ("config.json", "model.safetensors")
"""Files of a module's folder; pooling has only the first."""
MAX_WIDTH = 65_536


class Modules(msgspec.Struct, frozen=True, kw_only=True):
    """What follows the transformer. `late`: nothing pools, so that every token keeps its vector.
    `unattended`: the checkpoint expands queries by tokens that nothing attends to. `image_form`,
    `padded`, `listwise`, `ends`, `leads`: see PoolingSpec."""

    how: str
    normalize: bool
    dense: tuple[DenseSpec, ...] = ()
    late: LateSpec | None = None
    unattended: bool = False
    image_form: str = ""
    padded: tuple[int, int] = (0, 0)
    listwise: tuple[str, str] | None = None
    ends: tuple[int, int] | None = None
    leads: tuple[tuple[str, ...], ...] = ()


def read_modules(folder: Path) -> Modules | None:
    """The modules, None for a checkpoint without modules.json; an unknown module is an error."""
    if not (folder.is_dir() and (folder / "modules.json").is_file()):
        return None
    how, normalize = None, False
    dense: list[DenseSpec] = []
    for module in _listed(folder / "modules.json"):
        entry = module if isinstance(module, dict) else {}
        kind = str(entry.get("type", "")).rsplit(".", 1)[-1]
        if kind == "Pooling":
            how = _pooling_mode(_config(folder, entry), folder)
        elif kind == "Dense":
            dense.append(_dense(_config(folder, entry), str(entry["path"])))
        elif kind == "SpladePooling":
            how = _splade(_config(folder, entry))
        elif kind == "Normalize":
            normalize = True
        elif kind not in _MODELS:
            raise CheckpointError(
                f"{folder}/modules.json: module {kind or module!r:.80} is not supported (known: {', '.join(_KNOWN)})",
                field="type",
            )
    if how is not None or not dense:
        return Modules(how=how or "mean", normalize=normalize, dense=tuple(dense))
    late, unattended = _late(folder)
    every = tuple(msgspec.structs.replace(one, of="every") for one in dense)
    return Modules(how="tokens", normalize=True, dense=every, late=late, unattended=unattended)


def module_folders(folder: Path) -> tuple[str, ...]:
    """Names of the folders with files of their own that modules.json lists, below the checkpoint's;
    CheckpointError for a name that is not a plain one."""
    if not (folder / "modules.json").is_file():
        return ()
    entries = [entry for entry in _listed(folder / "modules.json") if isinstance(entry, dict)]
    names = [
        str(entry.get("path", ""))
        for entry in entries
        if str(entry.get("type", "")).rsplit(".", 1)[-1] in _WITH_FILES
    ]
    for name in names:
        if _FOLDER.fullmatch(name) is None:
            raise CheckpointError(
                f"{folder}/modules.json: {name!r:.80} is not a plain folder name", field="path"
            )
    return tuple(names)


def check_modules(folder: Path) -> None:
    """CheckpointError if a module's folder is missing: pooling would silently be another."""
    for name in module_folders(folder):
        if not (folder / name / "config.json").is_file():
            raise CheckpointError(f"{folder}: {name}/config.json is missing; modules.json lists it")


def _config(folder: Path, module: dict[str, Any]) -> Path:
    """The config.json of a module, inside the checkpoint's folder."""
    path = folder / str(module.get("path", "")) / "config.json"
    if not path.resolve().is_relative_to(folder.resolve()) or not path.is_file():
        raise CheckpointError(f"{folder}/modules.json: a module's folder has no config.json")
    return path


def _pooling_mode(path: Path, folder: Path) -> str:
    config = read_json(path)
    named = config.get("pooling_mode")
    if isinstance(named, str):
        if named in _NAMES:
            return _NAMES[named]
        raise CheckpointError(
            f"{path}: pooling_mode {named!r} is not one of {', '.join(_NAMES)}",
            field="pooling_mode",
        )
    on = [key for key in (*_HOW, *_OTHER) if config.get(key)]
    if len(on) != 1 or on[0] not in _HOW:
        raise CheckpointError(
            f"{path}: pooling modes {', '.join(on) or 'none'}; exactly one of {', '.join(_HOW)} is supported",
            field="pooling_mode",
        )
    return _HOW[on[0]]


def _splade(path: Path) -> str:
    """The greatest log(1 + relu) of each word's logits; other ways are refused by key."""
    config = ConfigReader(read_json(path), str(path))
    config.choice("pooling_strategy", ("max",), "max")
    config.choice("activation_function", ("relu",), "relu")
    return "lexical"


def _dense(path: Path, inside: str) -> DenseSpec:
    config = ConfigReader(read_json(path), str(path))
    named = str(config.raw.get("activation_function", "Identity")).rsplit(".", 1)[-1].lower()
    if named not in _ACTIVATIONS:
        raise config.wrong("activation_function", f"one of {', '.join(_ACTIVATIONS)}")
    if config.bool("use_residual", False):
        raise config.wrong("use_residual", "false: residual dense modules are not supported")
    return DenseSpec(
        path=inside,
        inputs=config.int("in_features", ge=1, le=MAX_WIDTH),
        outputs=config.int("out_features", ge=1, le=MAX_WIDTH),
        bias=config.bool("bias", True),
        activation=named,
    )


def _late(folder: Path) -> tuple[LateSpec, bool]:
    """How texts become tokens, and whether queries would be expanded by tokens that nothing attends
    to."""
    path = folder / "config_sentence_transformers.json"
    config = ConfigReader(read_json(path) if path.is_file() else {}, str(path))
    expands = config.bool("do_query_expansion", True)
    attends = config.bool("attend_to_expansion_tokens", False)
    late = LateSpec(
        query_prefix=str(config.raw.get("query_prefix") or ""),
        document_prefix=str(config.raw.get("document_prefix") or ""),
        query_tokens=config.int("query_length", 32, ge=4, le=1 << 20),
        document_tokens=config.int("document_length", 180, ge=4, le=1 << 20),
        expands=expands and attends,
        skipped=config.list("skiplist_words", (), of=str) or (),
    )
    return late, expands and not attends


def _listed(path: Path) -> list[Any]:
    try:
        document = json.loads(path.read_bytes())
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{path}: {error}") from None
    if not isinstance(document, list) or len(document) > 64:
        raise CheckpointError(f"{path}: a list of at most 64 modules is expected")
    return document
