"""What a checkpoint says about pooling: sentence-transformers' `modules.json` and pooling folder, and the labels and
problem type of a classifier's config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from headrace.base.config.hf import ConfigReader, read_json
from headrace.base.config.resolved import PoolingSpec
from headrace.base.errors import CheckpointError

MAX_LABELS = 65_536
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


def labels_of(config: ConfigReader) -> tuple[str, ...]:
    """The names of a classifier's logits, in order: `id2label`, else LABEL_0 .. for `num_labels` (2 if unsaid)."""
    given = config.raw.get("id2label")
    if given is None:
        count = config.int("num_labels", 2, ge=1, le=MAX_LABELS)
        return tuple(f"LABEL_{i}" for i in range(count))
    names = {str(key): str(value) for key, value in given.items()} if _is_map(given) else {}
    wanted = [str(i) for i in range(len(names))]
    if not 0 < len(names) <= MAX_LABELS or sorted(names) != sorted(wanted):
        raise config.wrong("id2label", f"names for 0 .. at most {MAX_LABELS - 1}, without gaps")
    return tuple(names[key] for key in wanted)


def read_pooling(
    path: Path, config: ConfigReader, *, head: str, labels: tuple[str, ...], encodes: bool
) -> PoolingSpec:
    """Decoders pool their last token and encoders their mean, unless the checkpoint says otherwise; classifiers by
    the token they were trained on."""
    activation = _activation(config, head, labels)
    if head == "sequence":
        how = config.choice("classifier_pooling", ("cls", "mean"), "cls") if encodes else "last"
        return PoolingSpec(how=how, head=head, labels=labels, activation=activation)
    how, normalize = ("mean", True) if encodes else ("last", True)
    modules = path / "modules.json"
    if path.is_dir() and modules.is_file():
        how, normalize = _sentence_transformers(path)
    return PoolingSpec(
        how=how,
        normalize=normalize,
        head=head,
        labels=labels,
        activation=activation,
        matryoshka=_matryoshka(config),
    )


def _matryoshka(config: ConfigReader) -> tuple[int, ...] | None:
    """The lengths listed, or any where the config only says that shorter ones were trained."""
    listed = config.list("matryoshka_dimensions", None, of=int)
    if listed is not None:
        return listed
    return () if config.bool("is_matryoshka", False) else None


def _activation(config: ConfigReader, head: str, labels: tuple[str, ...]) -> str:
    """Sigmoid for one label or several that may hold at once, softmax for one of several, none for a regression of
    several values. One label is a score, which rerankers read as a logit."""
    if head not in ("sequence", "token"):
        return "none"
    kinds = ("regression", "single_label_classification", "multi_label_classification")
    named = config.choice("problem_type", kinds, None) if config.raw.get("problem_type") else None
    if len(labels) == 1 or named == "multi_label_classification":
        return "sigmoid"
    return "none" if named == "regression" else "softmax"


def _sentence_transformers(folder: Path) -> tuple[str, bool]:
    """How the modules after the transformer pool, and whether they normalize; others are refused by name."""
    where = f"{folder}/modules.json"
    modules = _list(folder / "modules.json")
    how, normalize = "mean", False
    for module in modules:
        kind = str(module.get("type", "")).rsplit(".", 1)[-1] if _is_map(module) else ""
        if kind == "Pooling":
            inner = folder / str(module.get("path", "")) / "config.json"
            how = _pooling_mode(inner, folder)
        elif kind == "Normalize":
            normalize = True
        elif kind != "Transformer":
            raise CheckpointError(
                f"{where}: module {kind or module!r} is not supported (known: Transformer, Pooling, Normalize)",
                field="type",
            )
    return how, normalize


def _pooling_mode(path: Path, folder: Path) -> str:
    if not path.resolve().is_relative_to(folder.resolve()) or not path.is_file():
        raise CheckpointError(f"{folder}/modules.json: its pooling folder has no config.json")
    given = read_json(path)
    named = given.get("pooling_mode")
    if isinstance(named, str):
        if named in _NAMES:
            return _NAMES[named]
        raise CheckpointError(
            f"{path}: pooling_mode {named!r} is not one of {', '.join(_NAMES)}",
            field="pooling_mode",
        )
    on = [key for key in (*_HOW, *_OTHER) if given.get(key)]
    if len(on) != 1 or on[0] not in _HOW:
        raise CheckpointError(
            f"{path}: pooling modes {', '.join(on) or 'none'}; exactly one of {', '.join(_HOW)} is supported",
            field="pooling_mode",
        )
    return _HOW[on[0]]


def _list(path: Path) -> list[Any]:

    try:
        found = json.loads(path.read_bytes())
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{path}: {error}") from None
    if not isinstance(found, list) or len(found) > 64:
        raise CheckpointError(f"{path}: a list of at most 64 modules is expected")
    return found


def _is_map(value: object) -> bool:
    return isinstance(value, dict)
