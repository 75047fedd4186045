"""RWKV's World vocabulary against a search through all of its tokens."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.base.errors import CheckpointError
from headrace.front.text.gguf_tokenizer import gguf_tokenizer
from headrace.front.text.tokenizer_files import load_tokenizer
from headrace.front.text.tokenizer_world import TEMPLATE, WorldTokenizer, load_world
from tests.front.text.test_gguf_tokenizer import write

WORDS: list[str | bytes] = [
    *("the", "then", " the", "\n\n", "th", "é", "日本", "日本語", "User", "User:", "it's", "\"'"),
    *("\t\t", "\\n", b"\xe6\x97"),
]
ALL = [*(bytes((byte,)) for byte in range(256)), *WORDS]


def as_bytes(token: str | bytes) -> bytes:
    return token.encode() if isinstance(token, str) else token


def lines(tokens: list[str | bytes]) -> str:
    return "".join(
        f"{number} {token!r} {len(as_bytes(token))}\n" for number, token in enumerate(tokens, 1)
    )


def text_file(folder: Path, text: str | None = None) -> Path:
    path = folder / "rwkv_vocab_v20230424.txt"
    path.write_text(lines(ALL) if text is None else text, encoding="utf-8")
    return path


def gguf_file(path: Path) -> str:
    def fill(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("rwkv")
        literals = [repr(as_bytes(token))[2:-1].encode() for token in ALL]
        writer.add_token_list([b"<s>", *literals, b"[PAD1]"])
        writer.add_token_types([3, *[1] * len(literals), 5])
        writer.add_bos_token_id(0)
        writer.add_eos_token_id(0)
        writer.add_eot_token_id(261)
        writer.add_chat_template("rwkv-world")

    return write(path, fill)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> WorldTokenizer:
    return load_world(str(text_file(tmp_path_factory.mktemp("world"))))


def longest(text: str) -> list[int]:
    data, ids = text.encode(), []
    while data:
        fits = [
            (len(as_bytes(one)), i)
            for i, one in enumerate(ALL, 1)
            if data.startswith(as_bytes(one))
        ]
        length, number = max(fits)
        ids.append(number)
        data = data[length:]
    return ids


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from([*map(str, WORDS[:-1]), "x", " ", "日", "🦆"])).map("".join))
def test_the_longest_token_is_taken_at_each_place(tokenizer: WorldTokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert ids == longest(text) == tokenizer.encode_plain(text)
    assert tokenizer.decode(ids) == text


def test_a_gguf_file_holds_the_same_vocabulary(tmp_path: Path, tokenizer: WorldTokenizer) -> None:
    found = load_tokenizer(gguf_file(tmp_path / "m.gguf"))
    for text in ('it\'s "the" then\n\nthere\\n\t\t日本語 日x', "User: é🦆", ""):
        assert found.encode(text) == tokenizer.encode(text) == longest(text)
    assert found.special_ids == {0} and found.special_id("eos_token") == 0
    assert found.facts.chat_template == TEMPLATE
    assert found.token_bytes(len(ALL) + 1) == b""


def test_what_spells_the_end_is_the_end_in_prompts_alone(tokenizer: WorldTokenizer) -> None:
    assert tokenizer.encode("x<s>") == [ALL.index(b"x") + 1, 0]
    assert 0 not in tokenizer.encode_plain("x<s>")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("0 'a' 1\n", "line 1 is not an id of at least 1"),
        ("1 'é' 1\n", "line 1 is not .*2 bytes"),
        ("1 open('x') 1\n", "line 1 is not"),
        ("1 'a' 1\n", "lacks 255 of the 256 bytes"),
    ],
)
def test_a_damaged_vocabulary_is_refused(line: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=words):
        load_world(str(text_file(tmp_path, line)))


def test_a_damaged_gguf_vocabulary_is_refused(tmp_path: Path) -> None:
    def fill(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("rwkv")
        writer.add_token_list(["a"])

    with pytest.raises(CheckpointError, match="lacks 255 of the 256 bytes"):
        gguf_tokenizer(write(tmp_path / "m.gguf", fill))
