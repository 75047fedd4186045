"""Classes of tokens that read alike (DeepSeek V4.1's tables of n-grams)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models

from headrace.base.errors import CheckpointError
from headrace.launch.config_files import read_config

TOKENS = ["The", "Ġthe", "THE", "Ġ", "ĠĠ", "Ċ", "caf", "Ã", "é", "Ã©", "E", "a", "Á", "½", "Ġa"]
"""As byte-level vocabularies write bytes: Ã, é, Á and ½ are parts of characters, each a class of its own, Ã© is é."""
ALIKE = [0, 0, 0, 1, 1, 1, 2, 3, 4, 5, 5, 6, 7, 8, 6]


def written(folder: Path, count: int) -> None:
    library = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(TOKENS)}, merges=[]))
    library.decoder = decoders.ByteLevel()
    library.save(str(folder / "tokenizer.json"))
    text = {"engram_layer_ids": [1], "engram_compressed_vocab_size": count, "vocab_size": 20}
    config = {"architectures": ["DeepseekV41ForCausalLM"], "text_config": text}
    (folder / "config.json").write_text(json.dumps(config))


def test_tokens_that_read_alike_have_one_class(tmp_path: Path) -> None:
    written(tmp_path, 9)
    assert read_config(tmp_path)["engram_token_classes"] == ALIKE


def test_another_number_of_classes_is_refused(tmp_path: Path) -> None:
    written(tmp_path, 12)
    with pytest.raises(CheckpointError, match=r"9 classes of tokens .* says 12"):
        read_config(tmp_path)


def test_without_a_tokenizer_no_class_is_stated(tmp_path: Path) -> None:
    written(tmp_path, 12)
    (tmp_path / "tokenizer.json").unlink()
    assert "engram_token_classes" not in read_config(tmp_path)
