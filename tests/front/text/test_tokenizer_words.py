"""vocab.json with merges.txt, and vocab.txt, against transformers' class of each name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from headrace.base.errors import CheckpointError
from headrace.front.text.tokenizer_files import load_tokenizer
from tests.front.text import vocabularies

TEXTS = ["hello world", "Grüße aus Köln, 東京", " a  b</s>c\n[SEP] d", "1234 привет 🎉"]
FAIRSEQ = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")


def byte_level(folder: Path, special: tuple[str, ...]) -> None:
    model = json.loads(vocabularies.byte_level()._document)["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    ids = {token: i for i, token in enumerate(dict.fromkeys((*special, *tokens)))}
    (folder / "vocab.json").write_text(json.dumps(ids))
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    (folder / "merges.txt").write_text("\n".join(("#version: 0.2", *merges, "")))


def word_pieces(folder: Path, special: tuple[str, ...]) -> None:
    words = [
        "hello",
        "wor",
        "##ld",
        "a",
        "b",
        "c",
        "d",
        "gru",
        "##ße",
        "aus",
        ",",
        "<",
        "/",
        ">",
        "s",
    ]
    words += ["12", "##34", "東", "京", "Grüße", "hel", "##lo", "[", "]", "sep", "k", "##oln"]
    (folder / "vocab.txt").write_text("\n".join((*special, *words)), encoding="utf-8")


def prophetnet(folder: Path, special: tuple[str, ...]) -> None:
    word_pieces(folder, special)
    (folder / "vocab.txt").rename(folder / "prophetnet.tokenizer")


BERT = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
CASES: dict[str, tuple[Any, tuple[str, ...], str, dict[str, Any]]] = {
    "gpt2": (byte_level, ("<|endoftext|>",), "GPT2Tokenizer", {}),
    "roberta": (byte_level, FAIRSEQ, "RobertaTokenizer", {}),
    "bart": (byte_level, FAIRSEQ, "BartTokenizer", {"add_prefix_space": True}),
    "prophetnet": (prophetnet, (*BERT, "[X_SEP]"), "ProphetNetTokenizer", {}),
    "bert": (word_pieces, BERT, "BertTokenizer", {}),
    "bert-cased": (word_pieces, BERT, "BertTokenizer", {"do_lower_case": False}),
}


def written(name: str, folder: Path) -> str:
    make, special, kind, config = CASES[name]
    make(folder, special)
    stated = {"tokenizer_class": kind, **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(stated))
    return kind


@pytest.mark.parametrize("name", CASES)
def test_ids_and_texts_equal_transformers(name: str, tmp_path: Path) -> None:
    theirs = getattr(transformers, written(name, tmp_path)).from_pretrained(tmp_path)
    ours = load_tokenizer(str(tmp_path))
    for text in TEXTS:
        ids = theirs(text)["input_ids"]
        assert ours.encode(text) == ids, (text, theirs.convert_ids_to_tokens(ids))
        # a space before a comma stays: pieces become text one by one
        assert ours.decode(ids).replace(" ,", ",") == theirs.decode(ids, skip_special_tokens=True)
    if name != "gpt2":
        assert ours.encode_pair("hello", "a b")[0] == theirs("hello", "a b")["input_ids"]


def test_opt_begins_with_a_token_and_blenderbot_ends_with_one(tmp_path: Path) -> None:
    byte_level(tmp_path, FAIRSEQ)
    stated = {"add_bos_token": True, "bos_token": "</s>", "eos_token": "</s>", "unk_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(stated))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "opt"}))
    bare = load_tokenizer(str(tmp_path)).encode("hello", add_special_tokens=False)
    assert load_tokenizer(str(tmp_path)).encode("hello") == [2, *bare]
    (tmp_path / "tokenizer_config.json").write_text("{}")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "blenderbot"}))
    assert load_tokenizer(str(tmp_path)).encode("hello")[-1] == 2


def test_added_tokens_have_the_ids_that_a_file_says(tmp_path: Path) -> None:
    written("gpt2", tmp_path)
    count = load_tokenizer(str(tmp_path)).num_ids
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<b>": count + 1, "<a>": count}))
    tokenizer = load_tokenizer(str(tmp_path))
    assert tokenizer.encode("<a><b>") == [count, count + 1]
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<a>": count + 9}))
    with pytest.raises(CheckpointError, match="'<a>' has another id"):
        load_tokenizer(str(tmp_path))
