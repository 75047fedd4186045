"""PLaMo 2's vocabulary against a search through all ways to cut a text."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import gguf
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.base.errors import CheckpointError
from headrace.front.text.gguf_tokenizer import gguf_tokenizer
from headrace.front.text.tokenizer_files import load_tokenizer
from headrace.front.text.tokenizer_plamo import PlamoTokenizer, load_plamo
from tests.front.text.test_gguf_tokenizer import write

SPECIAL = [("<|plamo:unk|>", 0.0, "UNKNOWN"), ("<|plamo:bos|>", 0.0, "CONTROL")]
BYTES = [(f"<0x{byte:02X}>", 0.0, "BYTE") for byte in range(256)]
WORDS = [
    *(
        ("a", -3.0, "NORMAL"),
        ("b", -3.5, "NORMAL"),
        ("ab", -5.0, "NORMAL"),
        ("aba", -9.5, "NORMAL"),
    ),
    *(
        (" a", -4.25, "NORMAL"),
        ("日本", -6.0, "NORMAL"),
        ("本", -2.0, "NORMAL"),
        ("bb", -7.0, "NORMAL"),
    ),
]
ROWS = [*SPECIAL, *BYTES, *WORDS]
IDS = {text: number for number, (text, _, _) in enumerate(ROWS)}


def vocabulary(folder: Path, rows: list[tuple[str, float, str]] = ROWS) -> Path:
    path = folder / "tokenizer.jsonl"
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PlamoTokenizer:
    return load_plamo(str(vocabulary(tmp_path_factory.mktemp("plamo"))))


def of_bytes(text: str) -> list[int]:
    return [IDS[f"<0x{byte:02X}>"] for byte in text.encode()]


def searched(text: str) -> list[int]:
    """The cheapest way; of equal ones that with the longest token first."""

    @cache
    def best(place: int) -> tuple[float, tuple[int, ...]]:
        if place == len(text):
            return 0.0, ()
        ways = []
        for word, score, _ in WORDS:
            if text.startswith(word, place):
                cost, ids = best(place + len(word))
                ways.append((round(cost - score, 6), -len(word), (IDS[word], *ids)))
        cost, ids = best(place + 1)
        ways.append((cost + 1000.0, 0, (*of_bytes(text[place]), *ids)))
        least = min(ways)
        return least[0], least[2]

    return list(best(0)[1])


@settings(max_examples=60, deadline=None)
@given(st.text(alphabet="ab 日本🦆", max_size=12))
def test_the_cheapest_way_is_taken(tokenizer: PlamoTokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert ids == searched(text) == tokenizer.encode_plain(text)
    assert tokenizer.decode(ids) == text


def test_control_tokens_are_found_in_prompts_alone(tmp_path: Path) -> None:
    vocabulary(tmp_path)
    found = load_tokenizer(str(tmp_path))
    assert found.encode("a<|plamo:bos|>b") == [IDS["a"], 1, IDS["b"]]
    assert 1 not in found.encode_plain("<|plamo:bos|>")
    assert found.special_id("bos_token") == 1 and found.special_ids == {0, 1}


def test_a_gguf_file_holds_the_same_vocabulary(tmp_path: Path, tokenizer: PlamoTokenizer) -> None:
    kinds = {"NORMAL": 1, "UNKNOWN": 2, "CONTROL": 3, "BYTE": 6}

    def fill(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("plamo2")
        writer.add_token_list([*(text for text, _, _ in ROWS), "[PAD1]"])
        writer.add_token_scores([*(score for _, score, _ in ROWS), -1000.0])
        writer.add_token_types([*(kinds[kind] for _, _, kind in ROWS), 5])
        writer.add_bos_token_id(1)

    found = gguf_tokenizer(write(tmp_path / "m.gguf", fill))
    for text in ("abab 日本🦆", "[PAD1]", "a<|plamo:bos|>b"):
        assert found.encode_plain(text) == tokenizer.encode_plain(text)
        assert found.encode(text) == tokenizer.encode(text)
    assert found.special_id("bos_token") == 1


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([("a", "b", "NORMAL")], "line 1 is not a token"),
        (ROWS[:200], "tokens of 198 bytes, not of all 256"),
    ],
)
def test_a_damaged_vocabulary_is_refused(rows: list, words: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=words):
        load_plamo(str(vocabulary(tmp_path, rows)))
