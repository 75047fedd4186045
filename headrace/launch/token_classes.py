"""Which tokens of a vocabulary read alike without case, accents and the kind of white space, for
models whose tables of n-grams are of such classes (back/layers/engram.py)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headrace.base.config.hf import ConfigReader
from headrace.base.errors import CheckpointError

CLASSES = "engram_token_classes"
"""The key under which a model finds them."""
ONE_SPACE = "\ue000"
"""Stands for a token that is one space while spaces around others are taken away."""


def with_token_classes(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    """The config of a model with such tables, and of each id of the folder's tokenizer.json the
    number of its class, in the order in which they come. CheckpointError if there are not as many
    as the tables were made for."""
    file = folder / "tokenizer.json"
    if CLASSES in config or not file.is_file():
        return config
    classes = token_classes(file)
    count = ConfigReader(config, str(folder / "config.json")).int("engram_compressed_vocab_size")
    if max(classes, default=-1) + 1 != count:
        raise CheckpointError(
            f"{file}: {max(classes, default=-1) + 1} classes of tokens that read alike; config.json "
            f"says {count} (engram_compressed_vocab_size)",
            field="engram_compressed_vocab_size",
        )
    return {**config, CLASSES: classes}


def token_classes(file: Path) -> list[int]:
    """The class of each id of a tokenizer.json."""
    from tokenizers import Regex, Tokenizer, normalizers

    library = Tokenizer.from_file(str(file))
    alike = normalizers.Sequence(
        [
            *(normalizers.NFKC(), normalizers.NFD(), normalizers.StripAccents()),
            *(normalizers.Lowercase(), normalizers.Replace(Regex(r"[ \t\r\n]+"), " ")),
            *(normalizers.Replace(Regex("^ $"), ONE_SPACE), normalizers.Strip()),
            normalizers.Replace(ONE_SPACE, " "),
        ]
    )
    known: dict[str, int] = {}
    classes = []
    for token_id in range(library.get_vocab_size(with_added_tokens=True)):
        text = library.decode([token_id], skip_special_tokens=False)
        if "\ufffd" in text:  # a part of a character is told by how it is written
            text = library.id_to_token(token_id) or text
        else:
            text = alike.normalize_str(text) or text
        classes.append(known.setdefault(text, len(known)))
    return classes
