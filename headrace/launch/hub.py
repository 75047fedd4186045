"""Models on a hub: which files of a repository make a model, and how they come into the local
cache.

A download is of one commit. Only weights (safetensors, GGUF), JSON and tokenizer files are fetched,
never code or pickles. huggingface_hub does the transfer: it locks, goes on where it was cut off,
honours HF_ENDPOINT and its tokens. What came is checked here: its size, and its digest, which the
hub states as the name of the cached file (SHA-256, or the object id of git for small files).
"""

from __future__ import annotations

import hashlib
import importlib
import logging
import re
from collections.abc import Callable, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from headrace.base import env
from headrace.base.config.checkpoint_parts import PARTS
from headrace.base.config.gguf_vision import vision_file_of
from headrace.base.errors import CheckpointError, ConfigError, HeadraceError
from headrace.base.optional import require
from headrace.launch.pooling_modules import MODULE_FILES, module_folders

SMALL_FILES: Final = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "chat_template.json",
    "chat_template.jinja",
    "added_tokens.json",
    "vocab.json",
    "vocab-src.json",
    "vocab-tgt.json",
    "merges.txt",
    "vocab.txt",
    "prophetnet.tokenizer",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "source.spm",
    "target.spm",
    "tiktoken.model",
    "*.tiktoken",
    "modules.json",
    "config_sentence_transformers.json",
    "sentence_bert_config.json",
    "artifact.metadata",
)
WEIGHTS: Final = ("model*.safetensors", "model.safetensors.index.json")
PART_FOLDERS: Final = tuple({folder for parts in PARTS.values() for folder in parts})
PART_FILES: Final = ("config.json", "model.safetensors")
HUB_ID: Final = re.compile(
    r"(?!.*(?:--|\.\.))(?:[A-Za-z0-9][\w.-]{0,95}/)?[A-Za-z0-9][\w.-]{0,95}", re.ASCII
)
TAG: Final = re.compile(r"[A-Za-z0-9][\w.-]{0,63}", re.ASCII)
REVISION: Final = re.compile(r"(?!.*\.\.)[A-Za-z0-9][\w./-]{0,127}", re.ASCII)
PREFERRED_TAGS: Final = ("Q4_K_M", "Q8_0")
_SHARD = re.compile(r"-\d{5}-of-\d{5}$")
_HEX = {64: "sha256", 40: "sha1"}
T = TypeVar("T")
Advance = Callable[[int], None]
"""Called with bytes that have come, or were there already."""


class Download(msgspec.Struct, frozen=True, kw_only=True):
    """What a download brings: the files of the commit that a revision is now, with their sizes
    (0: the hub does not say)."""

    repository: str
    revision: str
    commit: str
    sizes: dict[str, int]

    @property
    def num_bytes(self) -> int:
        """All files together."""
        return sum(self.sizes.values())


def split_name(model: str) -> tuple[str, str]:
    """A hub id and the tag behind its colon, which names one quantization of a GGUF repository; ""
    without one."""
    repository, _, tag = model.partition(":")
    return repository, tag


def is_hub_id(model: str) -> bool:
    """Whether this is how a model of a hub is named: `org/name`, `org/name:TAG`."""
    repository, tag = split_name(model)
    named = HUB_ID.fullmatch(repository) is not None and not model.endswith(".gguf")
    return named and (":" not in model or TAG.fullmatch(tag) is not None)


def hub_cache() -> Path:
    """Where huggingface_hub keeps downloaded repositories."""
    return Path(env.get("HF_HOME") or "~/.cache/huggingface").expanduser() / "hub"


def cached_folder(repository: str) -> Path:
    """The folder of a repository in the cache."""
    return hub_cache() / ("models--" + repository.replace("/", "--"))


def cached_snapshot(repository: str, revision: str) -> Path | None:
    """The snapshot of a revision in the cache (layout: huggingface_hub, "Manage the cache"), None
    if absent."""
    folder = cached_folder(repository)
    reference = folder / "refs" / revision
    commit = revision
    if reference.is_file():
        commit = reference.read_text("ascii", errors="replace").strip()
    if re.fullmatch(r"[0-9a-f]{40}", commit) is None:
        return None
    snapshot = folder / "snapshots" / commit
    return snapshot if snapshot.is_dir() else None


def plan_download(model: str, revision: str) -> Download:
    """Asks the hub what the model is made of; ConfigError where there is none, or no answer."""
    repository, tag = split_name(model)
    hub = _library(repository)

    def ask() -> Any:
        return hub.HfApi().model_info(repository, revision=revision, files_metadata=True)

    info = _asking(ask, model, revision)
    sizes = {one.rfilename: one.size or 0 for one in info.siblings or ()}
    names = wanted_files(sizes, tag, model=model)
    return Download(
        repository=repository,
        revision=revision,
        commit=info.sha,
        sizes={name: sizes[name] for name in names},
    )


def wanted_files(sizes: Mapping[str, int], tag: str, *, model: str) -> list[str]:
    """Those of a repository's files that make the model: safetensors and what belongs to them, or
    the GGUF files of one quantization."""
    top = [name for name in sizes if "/" not in name]
    small = [name for name in top if any(fnmatch(name, pattern) for pattern in SMALL_FILES)]
    weights = [name for name in top if any(fnmatch(name, pattern) for pattern in WEIGHTS)]
    if weights and not tag:
        parts = {f"{part}/{name}" for part in PART_FOLDERS for name in PART_FILES}
        return sorted([*small, *weights, *(name for name in sizes if name in parts)])
    variants = gguf_variants(sizes)
    if not variants:
        raise ConfigError(
            f"--model {model}: the repository has no "
            + ("GGUF files" if tag else "model*.safetensors and no GGUF files"),
            field="model",
        )
    chosen, vision = choose_variant(variants, tag, model=model), vision_file_of(top)
    return sorted([*small, *chosen, *([] if vision is None else [vision])])


def gguf_variants(names: Mapping[str, int] | list[str]) -> dict[str, list[str]]:
    """The GGUF models among these files (at most one folder deep), split ones as one: name without
    the number of the part -> files."""
    variants: dict[str, list[str]] = {}
    for name in sorted(names):
        path = Path(name)
        if path.suffix != ".gguf" or len(path.parts) > 2 or path.name.startswith("mmproj"):
            continue
        variants.setdefault(_SHARD.sub("", path.stem), []).append(name)
    return variants


def choose_variant(variants: Mapping[str, list[str]], tag: str, *, model: str) -> list[str]:
    """The files of the variant that a tag names, or of the usual one; ConfigError names those there
    are."""
    wanted = [tag] if tag else list(PREFERRED_TAGS)
    if not tag and len(variants) == 1:
        return next(iter(variants.values()))
    for word in wanted:
        matches = [name for name in variants if _has_tag(name, word)]
        if len(matches) == 1:
            return variants[matches[0]]
    raise ConfigError(
        f"--model {model}: name one of its GGUF files by NAME:TAG; there are {', '.join(variants)}",
        field="model",
    )


def _has_tag(name: str, tag: str) -> bool:
    return re.search(rf"(?:^|[-._]){re.escape(tag)}$", name, re.IGNORECASE) is not None


def fetch(download: Download, advance: Advance = lambda count: None) -> Path:
    """Fetches what is missing; the snapshot's folder. CheckpointError for a file that is not what
    the hub said."""
    hub = _library(download.repository)
    snapshot = cached_folder(download.repository) / "snapshots" / download.commit
    for name, size in download.sizes.items():
        _fetch_file(hub, download, name, size, advance)
    for folder in module_folders(snapshot):
        for name in MODULE_FILES:
            _fetch_module_file(hub, download, f"{folder}/{name}", advance)
    if download.revision != download.commit:
        _note_revision(download)
    return snapshot


def _note_revision(download: Download) -> None:
    """In the cache the revision is this commit from now on."""
    reference = cached_folder(download.repository) / "refs" / download.revision
    reference.parent.mkdir(parents=True, exist_ok=True)
    reference.write_text(download.commit, "ascii")


def _fetch_module_file(hub: Any, download: Download, name: str, advance: Advance) -> None:
    """Of a module's files some are there only for some modules."""
    try:
        _fetch_file(hub, download, name, 0, advance)
    except ConfigError as error:
        absent = importlib.import_module("huggingface_hub.errors").EntryNotFoundError
        if not isinstance(error.__cause__, absent):
            raise


def _fetch_file(hub: Any, download: Download, name: str, size: int, advance: Advance) -> None:
    place = cached_folder(download.repository) / "snapshots" / download.commit / name
    if place.exists():
        advance(size)
        return

    def get() -> str:
        path: str = hub.hf_hub_download(
            download.repository,
            name,
            revision=download.commit,
            cache_dir=str(hub_cache()),
            tqdm_class=_bar_class(advance),
        )
        return path

    path = Path(_asking(get, download.repository, download.commit))
    _check_file(path, size, what=f"{download.repository}: {name}")


def _check_file(path: Path, size: int, *, what: str) -> None:
    """Compares a file with what the hub said of it; one that differs is removed."""
    stored = path.resolve()
    actual = stored.stat().st_size
    why = f"it has {actual} bytes, the hub says {size}" if size and actual != size else ""
    stated = stored.name
    if not why and re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", stated):
        digest = _digest(stored, _HEX[len(stated)])
        why = f"its digest is {digest}, the hub says {stated}" if digest != stated else ""
    if why:
        path.unlink()
        stored.unlink(missing_ok=True)
        raise CheckpointError(
            f"{what}: the file that came is damaged: {why}; it was removed, try again"
        )


def _digest(path: Path, kind: str) -> str:
    """SHA-256 of a file, or the id that git gives it (a SHA-1 over a header and the file)."""
    digest = hashlib.new(kind)
    if kind == "sha1":
        digest.update(b"blob %d\0" % path.stat().st_size)
    with path.open("rb") as file:
        while data := file.read(1 << 20):
            digest.update(data)
    return digest.hexdigest()


def _bar_class(advance: Advance) -> type:
    """What huggingface_hub takes for a progress bar."""

    class Bar:
        def __init__(self, *, initial: int = 0, **_: object) -> None:
            advance(initial)

        def update(self, count: float | None = 1) -> None:
            advance(int(count or 0))

        def set_description(self, *_: object, **__: object) -> None:
            pass

        def refresh(self) -> None:
            pass

        def close(self) -> None:
            pass

        def __enter__(self) -> Bar:
            return self

        def __exit__(self, *_: object) -> None:
            pass

    return Bar


def _library(repository: str) -> Any:
    hub = require("huggingface_hub", extra="hf", purpose=f"downloading {repository}")
    if importlib.import_module("huggingface_hub.constants").HF_HUB_OFFLINE:
        raise ConfigError(
            f"--model {repository}: HF_HUB_OFFLINE is set, so that nothing is downloaded",
            field="model",
        )
    for client in ("httpx", "httpx2"):  # a line for every request otherwise
        logging.getLogger(client).setLevel(logging.WARNING)
    return hub


def _asking(work: Callable[[], T], model: str, revision: str) -> T:
    try:
        return work()
    except HeadraceError:
        raise
    except Exception as error:  # the library raises its own, httpx's and OSError alike
        raise ConfigError(
            f"--model {model}: downloading revision {revision!r} failed: {error}", field="model"
        ) from error
