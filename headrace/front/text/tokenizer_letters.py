"""vocab.json of letters, as models of speech that label frames have it (wav2vec 2.0): each token is
a letter, one of them stands between words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from headrace.base.config.hf import read_json
from headrace.base.errors import CheckpointError
from headrace.front.text.tokenizer_files import read_facts
from headrace.front.text.tokenizer_json import JsonTokenizer

SPACE = "\u2581"
"""What tokenizer.json has in place of the token between words."""
_SPECIAL = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def load_letters(path: str) -> JsonTokenizer:
    """The vocabulary as a tokenizer.json of single characters."""
    file = Path(path)
    vocabulary = read_json(file)
    beside = file.parent / "tokenizer_config.json"
    config = read_json(beside) if beside.is_file() else {}
    if not all(isinstance(value, int) for value in vocabulary.values()):
        raise CheckpointError(f"{file}: a vocabulary for each language is not read", field="path")
    between = config.get("word_delimiter_token", "|")
    letters = {SPACE if token == between else token: i for token, i in vocabulary.items()}
    special = [_text(config.get(key, text)) for key, text in _SPECIAL.items()]
    return JsonTokenizer(json.dumps(_document(letters, special)), read_facts(file.parent))


def _text(token: Any) -> str:
    return str(token.get("content", "")) if isinstance(token, dict) else str(token)


def _document(letters: dict[str, int], special: list[str]) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [
        {"id": letters[token], "content": token, "special": True, **flags}
        for token in sorted({*special} & letters.keys(), key=lambda token: letters[token])
    ]
    unknown = special[-1] if special[-1] in letters else next(iter(letters))
    return {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": SPACE},
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"Regex": "."},
            "behavior": "Isolated",
            "invert": False,
        },
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
                {"type": "Fuse"},
            ],
        },
        "model": {"type": "WordLevel", "vocab": letters, "unk_token": unknown},
    }
