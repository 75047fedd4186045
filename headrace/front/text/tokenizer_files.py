"""The tokenizer of a model folder or a GGUF file: which of the formats it has, and the facts that
stand beside its vocabulary. A format's own file is imported on use."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from headrace.base.errors import CheckpointError
from headrace.base.registry import Registry
from headrace.front.text.tokenizer import Tokenizer, TokenizerFacts
from headrace.front.text.tokenizer_classes import (
    MARIAN,
    PIECE_CLASSES,
    PIECE_FILES,
    WORD_CLASSES,
)

_FORMATS: Registry[Callable[[str], Tokenizer]] = Registry(
    "tokenizer format",
    {
        "gguf": "headrace.front.text.gguf_tokenizer:gguf_tokenizer",
        "json": "headrace.front.text.tokenizer_json:load_json",
        "sentencepiece": "headrace.front.text.tokenizer_sentencepiece:load_sentencepiece",
        "words": "headrace.front.text.tokenizer_words:load_words",
        "pieces": "headrace.front.text.tokenizer_pieces:load_pieces",
        "moses": "headrace.front.text.tokenizer_moses:load_moses",
        "letters": "headrace.front.text.tokenizer_letters:load_letters",
        "tekken": "headrace.front.text.tokenizer_tekken:load_tekken",
        "tiktoken": "headrace.front.text.tokenizer_tiktoken:load_tiktoken",
        "plamo": "headrace.front.text.tokenizer_plamo:load_plamo",
        "world": "headrace.front.text.tokenizer_world:load_world",
    },
)


def load_tokenizer(path: str, *, chat_template: str | None = None) -> Tokenizer:
    """The tokenizer of a model folder or a GGUF file; a folder without one is refused by the names
    looked for.

    `chat_template` replaces the model's own. The guard has to know it: markup that it writes is
    control markup.
    """
    kind, file = _find(Path(path))
    tokenizer = _FORMATS.load(kind)(str(file))
    if chat_template is not None:
        tokenizer.facts = msgspec.structs.replace(tokenizer.facts, chat_template=chat_template)
    return tokenizer


def _find(place: Path) -> tuple[str, Path]:
    if place.is_file() and place.suffix == ".gguf":
        return "gguf", place
    if not place.is_dir():
        raise CheckpointError(f"tokenizer: {place} is neither a folder nor a GGUF file")
    if (place / "tokenizer.json").is_file():
        return "json", place / "tokenizer.json"
    if (place / "tekken.json").is_file():
        return "tekken", place / "tekken.json"
    for file in (place / name for name in PIECE_FILES):
        if file.is_file() and piece_class_of(place):
            return "pieces", file
    named = ("tokenizer.model", "spiece.model", "tiktoken.model")
    for file in (*(place / name for name in named), *place.glob("*.tiktoken")):
        if file.is_file():
            return ("tiktoken" if _is_tiktoken(file) else "sentencepiece"), file
    if (place / "vocab-src.json").is_file():
        return "moses", place / "vocab-src.json"
    words = place / ("vocab.json" if (place / "merges.txt").is_file() else "vocab.txt")
    if (place / "prophetnet.tokenizer").is_file():
        words = place / "prophetnet.tokenizer"
    if words.is_file() and WORD_CLASSES.of(*_stated(place)):
        return "words", words
    if (place / "vocab.json").is_file() and not (place / "merges.txt").is_file():
        return "letters", place / "vocab.json"
    if (place / "tokenizer.jsonl").is_file():
        return "plamo", place / "tokenizer.jsonl"
    for file in sorted(place.glob("rwkv_vocab*.txt")):
        return "world", file
    raise CheckpointError(
        f"tokenizer: {place} holds none of tokenizer.json, tokenizer.model, spiece.model, "
        "sentencepiece.bpe.model or source.spm of a known class, tiktoken.model, *.tiktoken, "
        "tekken.json, vocab.json with merges.txt or vocab.txt of a known class, vocab.json of "
        "letters, vocab-src.json, rwkv_vocab*.txt, tokenizer.jsonl"
    )


def piece_class_of(folder: Path) -> str | None:
    """See PIECE_CLASSES."""
    if (folder / PIECE_FILES[0]).is_file():
        return MARIAN
    return PIECE_CLASSES.of(*_stated(folder))


def _stated(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """tokenizer_config.json and config.json."""
    beside, config = (_read_json(folder / f"{n}.json") for n in ("tokenizer_config", "config"))
    return beside, config


def _is_tiktoken(path: Path) -> bool:
    """A tiktoken file is lines of base64 and a rank; a SentencePiece model is binary."""
    with path.open("rb") as file:
        head = file.read(64).split(b"\n", 1)[0]
    token, _, rank = head.partition(b" ")
    return bool(token) and rank.strip().isdigit()


def check_vocabulary(tokenizer: Tokenizer, width: int) -> None:
    """CheckpointError if ordinary tokens lie beyond the model's `width` logits: the tokenizer is
    another model's, and every client would be told that its text cannot be. Special tokens there
    are left over in some checkpoints and stay unused."""
    beyond = [i for i in range(width, tokenizer.num_ids) if i not in tokenizer.special_ids]
    if beyond:
        raise CheckpointError(
            f"the tokenizer does not fit the model: it has token ids up to {beyond[-1]}, the model "
            f"(vocab_size) up to {width - 1}; name another with --tokenizer",
            field="tokenizer",
        )


def read_facts(folder: Path) -> TokenizerFacts:
    """Reads tokenizer_config.json, special_tokens_map.json and a chat template file, as far as they
    exist."""
    config = {
        **_read_json(folder / "special_tokens_map.json"),
        **_read_json(folder / "tokenizer_config.json"),
    }
    special = {
        name: text
        for name, value in config.items()
        if name.endswith("_token") and (text := _token_text(value)) is not None
    }
    return TokenizerFacts(
        special_tokens=special,
        chat_template=_chat_template(folder, config.get("chat_template")),
        add_bos=_flag(config.get("add_bos_token")),
        add_eos=_flag(config.get("add_eos_token")),
        tokenizer_class=_token_text(config.get("tokenizer_class")),
    )


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise CheckpointError(f"{path.name}: not a JSON object ({error})") from error


def _token_text(value: object) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _flag(value: object) -> bool | None:
    return value if isinstance(value, bool) else None


def _chat_template(folder: Path, configured: object) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    if isinstance(configured, list):
        named = {
            item.get("name"): item.get("template") for item in configured if isinstance(item, dict)
        }
        configured = named.get("default")
    if configured is None:
        configured = _read_json(folder / "chat_template.json").get("chat_template")
    return configured if isinstance(configured, str) else None
