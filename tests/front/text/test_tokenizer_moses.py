"""FSMT's two vocabularies: merges by hand, and ids against transformers' class where Moses is there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.base.errors import CheckpointError, MissingDependency
from headrace.base.optional import available
from headrace.front.text.tokenizer import TokenizerFacts
from headrace.front.text.tokenizer_files import load_tokenizer
from headrace.front.text.tokenizer_moses import MosesTokenizer

COMMON = ("<s>", "<pad>", "</s>", "<unk>")
SOURCE = (*COMMON, "lo", "low", "low</w>", "er</w>", "e", "r</w>", ".</w>", "&apos;s</w>", "a</w>")
TARGET = (*COMMON, "nie", "drig</w>", ".</w>", "&apos;</w>", "er</w>")
MERGES = [("l", "o"), ("lo", "w"), ("lo", "w</w>"), ("e", "r</w>"), ("&", "apos;s</w>")]
MERGES += [("a", "p"), ("ap", "o"), ("apo", "s"), ("apos", ";"), ("apos;", "s</w>")]


def ids(tokens: tuple[str, ...]) -> dict[str, int]:
    return {token: i for i, token in enumerate(tokens)}


def tokenizer(words: object = str.split) -> MosesTokenizer:
    return MosesTokenizer(ids(SOURCE), ids(TARGET), MERGES, words=words, facts=TokenizerFacts())


def written(folder: Path) -> None:
    (folder / "vocab-src.json").write_text(json.dumps(ids(SOURCE)))
    (folder / "vocab-tgt.json").write_text(json.dumps(ids(TARGET)))
    lines = [f"{a} {b} 1" for a, b in MERGES]
    (folder / "merges.txt").write_text("\n".join((*lines, "")))
    (folder / "tokenizer_config.json").write_text(json.dumps({"langs": ["en", "de"]}))
    (folder / "config.json").write_text(json.dumps({"model_type": "fsmt"}))


def test_words_are_merged_by_rank_and_ids_of_answers_are_the_other_languages() -> None:
    ours = tokenizer()
    assert ours.encode("lower low xa .") == [5, 7, 6, 3, 12, 10, 2]
    assert ours.encode("lolow", add_special_tokens=False) == [4, 6]
    assert ours.decode([4, 5, 6]) == "niedrig . "
    assert ours.decode([7, 2]) == "' "


def test_what_spells_a_control_token_is_one_in_a_raw_prompt_alone() -> None:
    ours = tokenizer()
    assert ours.encode("low </s>low") == [6, 2, 6, 2]
    assert ours.encode_plain("low</s>") == [5, 3, 3, 3, 3]


def test_ids_that_differ_between_the_languages_are_refused() -> None:
    other = ids(("<pad>", "<s>", *TARGET[2:]))
    with pytest.raises(CheckpointError, match="<s> must have one id in both"):
        MosesTokenizer(ids(SOURCE), other, MERGES, words=str.split, facts=TokenizerFacts())


@pytest.mark.skipif(available("sacremoses"), reason="sacremoses is there")
def test_without_moses_the_extra_is_named(tmp_path: Path) -> None:
    written(tmp_path)
    with pytest.raises(MissingDependency, match=r"pip install 'headrace\[moses\]'"):
        load_tokenizer(str(tmp_path))


@pytest.mark.skipif(not available("sacremoses"), reason="the extra moses is not installed")
def test_ids_equal_transformers(tmp_path: Path) -> None:
    from transformers import FSMTTokenizer

    written(tmp_path)
    theirs, ours = FSMTTokenizer.from_pretrained(tmp_path), load_tokenizer(str(tmp_path))
    for text in (
        "low lower.",
        "Lo’s low…  “a” — x.y。",
        "a\tlow\u200b ３ low-er &",
        "",
        "low's Mr. a.",
    ):
        assert ours.encode(text) == theirs(text)["input_ids"], text
