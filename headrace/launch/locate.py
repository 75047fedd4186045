"""Finds the model the user named: the bundled one, a folder, a GGUF file, or a hub id in the local
cache.

Nothing is fetched unless `allow_download` is on (hub.py); without a download huggingface_hub is not
even imported.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from headrace.base.config.gguf_vision import PREFIX as VISION_PREFIX
from headrace.base.config.gguf_vision import vision_beside
from headrace.base.config.resolved import Decision
from headrace.base.config.tensorizer_header import SUFFIX
from headrace.base.config.tree import ModelOptions
from headrace.base.config.weight_files import (
    WeightFiles,
    find_weight_files,
    folder_format,
    is_sharded,
    natural_key,
)
from headrace.base.errors import CheckpointError, ConfigError, StartError
from headrace.launch.hub import (
    REVISION,
    cached_snapshot,
    choose_variant,
    fetch,
    gguf_variants,
    hub_cache,
    is_hub_id,
    plan_download,
    split_name,
)
from headrace.launch.packed_weights import unpack_weights
from headrace.launch.pooling_modules import check_modules

BUNDLED: Final = {
    "text": ("headrace-demo", "demo_model", "demo/model"),
    "vision": ("headrace-vision", "demo_models/vision", "demo/models/vision"),
    "speech": ("headrace-speech", "demo_models/speech", "demo/models/speech"),
    "mixture": ("headrace-mixture", "demo_models/mixture", "demo/models/mixture"),
}
"""Each bundled model's name, and its folder in the installed package and in a checkout."""


@dataclass(frozen=True, kw_only=True)
class LocatedModel:
    """A model on disk. `path`: folder or GGUF file; `format`: safetensors, sharded_state, gguf or
    dummy; `commit` of a hub id; `remote`: its weights are elsewhere; `vision`: the GGUF file of a
    GGUF model's tower."""

    path: Path
    name: str
    format: str
    commit: str | None = None
    decisions: tuple[Decision, ...] = ()
    remote: bool = False
    vision: Path | None = None


def locate(options: ModelOptions) -> LocatedModel:
    """The model `options.model` stands for; ConfigError if there is none, CheckpointError if it
    cannot be read."""
    model = options.model
    if not model:
        return _at(bundled_model(options.demo), BUNDLED[options.demo][0], options)
    if options.demo != "text":
        raise ConfigError(
            f"--demo {options.demo}: goes without --model, and {model!r} is given", field="demo"
        )
    path = Path(model).expanduser()
    if path.exists():
        return _at(path, path.resolve().stem if path.is_file() else path.resolve().name, options)
    for demo, (name, _, _) in BUNDLED.items():
        if model == name:
            return _at(bundled_model(demo), name, options)
    if not is_hub_id(model):
        raise ConfigError(f"--model {model}: there is no such folder or file", field="model")
    return _from_hub(options)


def bundled_model(demo: str = "text") -> Path:
    """A demo model's folder: inside the installed package, or in a checkout beside it."""
    package = Path(__file__).resolve().parent.parent
    _, installed, in_checkout = BUNDLED[demo]
    for place in (package / installed, package.parent / in_checkout):
        if (place / "config.json").is_file():
            return _unpacked(place)
    raise ConfigError(
        f"the bundled demo model {demo!r} is not installed; name a model with --model",
        field="model",
    )


def _unpacked(folder: Path) -> Path:
    try:
        unpack_weights(folder)
    except OSError as error:
        raise StartError(
            f"the bundled model's weights cannot be unpacked into {folder}: {error}"
        ) from error
    return folder


def _at(path: Path, name: str, options: ModelOptions) -> LocatedModel:
    if path.is_file():
        return _gguf(path, name, options)
    kind = folder_format(path)
    if kind == "hf":
        return _folder(path, name, options)
    if kind == "mistral":
        raise CheckpointError(
            f"{path}: Mistral's own layout (params.json, consolidated*.safetensors) is not read; "
            "use the transformers layout (config.json, model*.safetensors)"
        )
    files = sorted(path.glob("*.gguf"), key=lambda file: natural_key(file.name))
    files = [file for file in files if not file.name.startswith(VISION_PREFIX)]
    firsts = [file for file in files if not re.search(r"-(?!0*1-)\d{5}-of-\d{5}\.gguf$", file.name)]
    if len(firsts) == 1:
        return _gguf(firsts[0], name, options)
    if firsts:
        names = ", ".join(file.name for file in firsts)
        raise ConfigError(f"--model {path}: several GGUF files; name one of {names}", field="model")
    raise CheckpointError(f"{path}: no config.json; it is not a model's folder")


def _gguf(path: Path, name: str, options: ModelOptions) -> LocatedModel:
    if options.load_format not in ("auto", "gguf", "dummy") or path.suffix != ".gguf":
        raise ConfigError(
            f"--model {path} with --load-format {options.load_format}: a single file must be a .gguf",
            field="model",
        )
    chosen = "dummy" if options.load_format == "dummy" else "gguf"
    vision, decisions = None, tuple[Decision, ...]()
    if not options.language_model_only:
        vision, decisions = vision_beside(path, options.mmproj)
    return LocatedModel(path=path, name=name, format=chosen, vision=vision, decisions=decisions)


def _folder(path: Path, name: str, options: ModelOptions) -> LocatedModel:
    if options.mmproj is not None:
        raise ConfigError(
            f"--mmproj goes with a GGUF file; {path} is a folder of safetensors", field="mmproj"
        )
    if options.load_format == "gguf":
        raise ConfigError(
            f"--load-format gguf: {path} is a folder of safetensors; name a .gguf file",
            field="load_format",
        )
    chosen = "dummy" if options.load_format == "dummy" else "safetensors"
    remote = _is_remote(options)
    if options.load_format == "sharded_state" or (chosen == "safetensors" and is_sharded(path)):
        chosen = "sharded_state"
    if chosen == "safetensors" and not remote:
        _check_kind(path, find_weight_files(path), options)
    return LocatedModel(path=path, name=name, format=chosen, remote=remote)


def _check_kind(path: Path, files: WeightFiles, options: ModelOptions) -> None:
    """That the files are tensorizer's where that is asked, and no others where others are."""
    tensorizer = files.files[0].suffix == SUFFIX
    if options.load_format not in ("auto", "tensorizer" if tensorizer else options.load_format):
        raise ConfigError(
            f"--load-format {options.load_format}: {path} has tensorizer's files alone "
            f"({files.files[0].name})",
            field="load_format",
        )
    if options.load_format == "tensorizer" and not tensorizer:
        raise ConfigError(
            f"--load-format tensorizer: {path} has {files.files[0].name}, which is read instead; "
            "name a folder of *.tensors files",
            field="load_format",
        )


def _is_remote(options: ModelOptions) -> bool:
    """Whether weights come from --weights-url; ConfigError where the options contradict each
    other."""
    url, load_format = options.weights_url, options.load_format
    if url is None:
        if load_format == "runai_streamer":
            raise ConfigError(
                "--load-format runai_streamer: name the objects with --weights-url",
                field="load_format",
            )
        return False
    if load_format not in ("auto", "runai_streamer"):
        raise ConfigError(
            f"--weights-url does not go with --load-format {load_format}", field="weights_url"
        )
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc or parts.query or parts.fragment:
        raise ConfigError(
            f"--weights-url {url}: must be http(s)://HOST/PATH, without a query",
            field="weights_url",
        )
    return True


def _from_hub(options: ModelOptions) -> LocatedModel:
    model, revision = options.model, options.revision
    if REVISION.fullmatch(revision) is None:
        raise ConfigError(
            f"--revision {revision!r} is not a branch, tag or commit", field="revision"
        )
    snapshot = cached_snapshot(split_name(model)[0], revision)
    if snapshot is not None:
        try:
            return _at_commit(_in_snapshot(snapshot, options), snapshot, "found in the local cache")
        except StartError as error:
            if not options.allow_download:
                raise CheckpointError(
                    f"{error.message}. The cached copy of {model} is incomplete; "
                    "--allow-download completes it, and so does `headrace pull`"
                ) from error
    if not options.allow_download:
        raise ConfigError(
            f"--model {model}: no such folder, and revision {revision!r} is not in the cache {hub_cache()}; "
            "--allow-download fetches it, and so does `headrace pull`",
            field="model",
        )
    fetched = fetch(plan_download(model, revision))
    return _at_commit(_in_snapshot(fetched, options), fetched, "downloaded")


def _in_snapshot(snapshot: Path, options: ModelOptions) -> LocatedModel:
    """The model in a repository of the cache: its folder, or one of its GGUF files."""
    names = [str(path.relative_to(snapshot)) for path in snapshot.rglob("*.gguf")]
    is_plain = any(snapshot.glob("model*.safetensors"))
    if split_name(options.model)[1] or (names and not is_plain):
        variants = gguf_variants(names)
        files = choose_variant(variants, split_name(options.model)[1], model=options.model)
        return _gguf(snapshot / files[0], options.model, options)
    located = _at(snapshot, options.model, options)
    check_modules(snapshot)
    return located


def _at_commit(located: LocatedModel, snapshot: Path, why: str) -> LocatedModel:
    decision = Decision("--revision", located.name, snapshot.name, why)
    return LocatedModel(
        path=located.path,
        name=located.name,
        format=located.format,
        vision=located.vision,
        commit=snapshot.name,
        decisions=(*located.decisions, decision),
    )
