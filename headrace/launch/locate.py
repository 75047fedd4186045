"""Finds the model the user named: the bundled one, a folder, a GGUF file, or a hub id in the local
cache.

Nothing is fetched unless `allow_download` is on. A download is pinned: the revision is resolved to
a commit first, and every file is of that commit; only weights (safetensors), JSON and tokenizer
files are fetched, never code or pickles. huggingface_hub does the transfer (locks, resumption);
without a download it is not even imported.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from headrace.base import env
from headrace.base.config.resolved import Decision
from headrace.base.config.tree import ModelOptions
from headrace.base.config.weight_files import find_weight_files, folder_format, natural_key
from headrace.base.errors import CheckpointError, ConfigError, HeadraceError
from headrace.base.optional import require
from headrace.launch.pooling_modules import MODULE_FILES, check_modules, module_folders

BUNDLED_NAME: Final = "headrace-demo"
DOWNLOADED_PATTERNS: Final = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.json",
    "chat_template.jinja",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
    "*.tiktoken",
    "modules.json",
    "config_sentence_transformers.json",
    "sentence_bert_config.json",
    "artifact.metadata",
    "model*.safetensors",
    "model.safetensors.index.json",
)
HUB_ID: Final = re.compile(
    r"(?!.*(?:--|\.\.))(?:[A-Za-z0-9][\w.-]{0,95}/)?[A-Za-z0-9][\w.-]{0,95}", re.ASCII
)
REVISION: Final = re.compile(r"(?!.*\.\.)[A-Za-z0-9][\w./-]{0,127}", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class LocatedModel:
    """A model on disk. `path`: folder or GGUF file; `format`: safetensors, gguf or dummy; `commit`
    of a hub id."""

    path: Path
    name: str
    format: str
    commit: str | None = None
    decisions: tuple[Decision, ...] = ()


def locate(options: ModelOptions) -> LocatedModel:
    """The model `options.model` stands for; ConfigError if there is none, CheckpointError if it
    cannot be read."""
    model = options.model
    if not model:
        return _at(bundled_model(), BUNDLED_NAME, options)
    path = Path(model).expanduser()
    if path.exists():
        return _at(path, path.resolve().stem if path.is_file() else path.resolve().name, options)
    if HUB_ID.fullmatch(model) is None or model.endswith(".gguf"):
        raise ConfigError(f"--model {model}: there is no such folder or file", field="model")
    return _from_hub(options)


def bundled_model() -> Path:
    """The demo model's folder: inside the installed package, or in a checkout beside it."""
    package = Path(__file__).resolve().parent.parent
    places = (package / "demo_model", package.parent / "demo" / "model")
    for place in places:
        if (place / "config.json").is_file():
            return place
    raise ConfigError(
        "the bundled demo model is not installed; name a model with --model", field="model"
    )


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
    firsts = [file for file in files if not re.search(r"-(?!0*1-)\d{5}-of-\d{5}\.gguf$", file.name)]
    if len(firsts) == 1:
        return _gguf(firsts[0], name, options)
    if firsts:
        names = ", ".join(file.name for file in firsts)
        raise ConfigError(f"--model {path}: several GGUF files; name one of {names}", field="model")
    raise CheckpointError(f"{path}: no config.json; it is not a model's folder")


def _gguf(path: Path, name: str, options: ModelOptions) -> LocatedModel:
    if options.load_format == "safetensors" or path.suffix != ".gguf":
        raise ConfigError(
            f"--model {path} with --load-format {options.load_format}: a single file must be a .gguf",
            field="model",
        )
    chosen = "dummy" if options.load_format == "dummy" else "gguf"
    return LocatedModel(path=path, name=name, format=chosen)


def _folder(path: Path, name: str, options: ModelOptions) -> LocatedModel:
    if options.load_format == "gguf":
        raise ConfigError(
            f"--load-format gguf: {path} is a folder of safetensors; name a .gguf file",
            field="load_format",
        )
    chosen = "dummy" if options.load_format == "dummy" else "safetensors"
    if chosen == "safetensors":
        find_weight_files(path)
    return LocatedModel(path=path, name=name, format=chosen)


def hub_cache() -> Path:
    """Where huggingface_hub keeps downloaded repositories."""
    return Path(env.get("HF_HOME") or "~/.cache/huggingface").expanduser() / "hub"


def _from_hub(options: ModelOptions) -> LocatedModel:
    repository, revision = options.model, options.revision
    if REVISION.fullmatch(revision) is None:
        raise ConfigError(
            f"--revision {revision!r} is not a branch, tag or commit", field="revision"
        )
    snapshot = _cached(repository, revision)
    if snapshot is not None:
        try:
            located = _at(snapshot, repository, options)
            check_modules(snapshot)
            return _at_commit(located, snapshot, "found in the local cache")
        except CheckpointError as error:
            if not options.allow_download:
                raise CheckpointError(
                    f"{error.message}. The cached copy of {repository} is incomplete; "
                    "--allow-download completes it"
                ) from error
    if not options.allow_download:
        raise ConfigError(
            f"--model {repository}: no such folder, and revision {revision!r} is not in the cache {hub_cache()}; "
            "--allow-download fetches it",
            field="model",
        )
    fetched = _download(repository, revision)
    check_modules(fetched)
    return _at_commit(_at(fetched, repository, options), fetched, "downloaded")


def _at_commit(located: LocatedModel, snapshot: Path, why: str) -> LocatedModel:
    decision = Decision("--revision", located.name, snapshot.name, why)
    return LocatedModel(
        path=located.path,
        name=located.name,
        format=located.format,
        commit=snapshot.name,
        decisions=(*located.decisions, decision),
    )


def _cached(repository: str, revision: str) -> Path | None:
    """The snapshot of a revision in the cache (layout: huggingface_hub, "Manage the cache"), None
    if absent."""
    folder = hub_cache() / ("models--" + repository.replace("/", "--"))
    reference = folder / "refs" / revision
    commit = revision
    if reference.is_file():
        commit = reference.read_text("ascii", errors="replace").strip()
    if re.fullmatch(r"[0-9a-f]{40}", commit) is None:
        return None
    snapshot = folder / "snapshots" / commit
    return snapshot if snapshot.is_dir() else None


def _download(repository: str, revision: str) -> Path:
    """Fetches the files of one commit; what is there already is kept, what was cut off goes on."""
    hub = require("huggingface_hub", extra="hf", purpose=f"downloading {repository}")

    def fetch(commit: str, patterns: list[str], ignored: list[str]) -> Path:
        folder = hub.snapshot_download(
            repository,
            revision=commit,
            cache_dir=str(hub_cache()),
            allow_patterns=patterns,
            ignore_patterns=ignored,
        )
        return Path(folder)

    try:
        commit = hub.HfApi().model_info(repository, revision=revision).sha
        snapshot = fetch(commit, list(DOWNLOADED_PATTERNS), ["*/*"])
        folders = module_folders(snapshot)
        if folders:
            names = [f"{folder}/{name}" for folder in folders for name in MODULE_FILES]
            fetch(commit, names, [])
        return snapshot
    except HeadraceError:
        raise
    except Exception as error:  # the library raises its own, httpx's and OSError alike
        raise ConfigError(
            f"--model {repository}: downloading revision {revision!r} failed: {error}",
            field="model",
        ) from error
