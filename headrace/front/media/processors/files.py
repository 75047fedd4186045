"""The files of a checkpoint that say how its media are processed."""

from __future__ import annotations

from pathlib import Path

from headrace.base.config.gguf import read_gguf
from headrace.base.config.hf import ConfigReader, read_json


def read_keys(folder: Path, name: str) -> ConfigReader:
    """The keys of a JSON file, none where there is no such file."""
    path = folder / name
    return ConfigReader(read_json(path) if path.is_file() else {}, str(path))


def special_text(folder: Path, token: int | None) -> str:
    """The text of an added token, "" if there is none of this id."""
    for each in read_keys(folder, "tokenizer.json").raw.get("added_tokens") or ():
        if isinstance(each, dict) and each.get("id") == token:
            return str(each.get("content", ""))
    return ""


def written_as(folder: Path, config: ConfigReader, **tokens: int) -> dict[str, str]:
    """By kind what its placeholder is called, of checkpoints whose template takes texts."""
    if config.list("architectures", (), of=str)[:1] not in _TEXTS_ALONE:
        return {}
    names = {kind: special_text(folder, token) for kind, token in tokens.items()}
    return {kind: name for kind, name in names.items() if name}


_TEXTS_ALONE = (("Phi4MMForCausalLM",),)


def special_token(folder: Path, text: str) -> int | None:
    """The id of a token that the tokenizer's files list as added, or a GGUF file at all."""
    if folder.suffix == ".gguf":
        tokens = read_gguf(folder).texts("tokenizer.ggml.tokens") or []
        return tokens.index(text) if text in tokens else None
    listed = read_keys(folder, "added_tokens.json").raw.get(text)
    if isinstance(listed, int):
        return listed
    for token in read_keys(folder, "tokenizer.json").raw.get("added_tokens") or ():
        if isinstance(token, dict) and token.get("content") == text:
            return int(token["id"])
    for token in read_keys(folder, "tekken.json").raw.get("special_tokens") or ():
        if isinstance(token, dict) and token.get("token_str") == text:
            return int(token["rank"])
    return None


def extractor_keys(folder: Path) -> ConfigReader:
    """The keys of the feature extractor: in a file of its own, or a section of the processor's."""
    whole = read_keys(folder, "processor_config.json").section("feature_extractor")
    return whole or read_keys(folder, "preprocessor_config.json")


def first_special(folder: Path) -> tuple[int, str] | None:
    """Id and text of the first special token: for models that have none for images, but need
    one."""
    for token in read_keys(folder, "tokenizer.json").raw.get("added_tokens") or ():
        if isinstance(token, dict) and token.get("special"):
            return int(token["id"]), str(token["content"])
    return None
