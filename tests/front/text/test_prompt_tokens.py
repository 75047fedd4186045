"""Beginnings of prompts that are kept as ids (BEY-41): the ids are always those of the whole text."""

from __future__ import annotations

import base64
import json
import threading
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.front.text import chat
from headrace.front.text.chat import ChatTemplate
from headrace.front.text.prompt_tokens import NAME_BYTES, PromptTokens
from headrace.front.text.tokenizer_files import load_tokenizer
from headrace.front.text.tokenizer_json import JsonTokenizer
from tests.front.text import vocabularies

TEXTS = ("", " ", "  a", "hello world ", "\n", "東京", "<|im_", "end|>", "▁x", "im_start", "1 2 ")


@cache
def stripping() -> JsonTokenizer:
    """Control tokens that take the spaces beside them."""
    document = json.loads(vocabularies.byte_fallback()._library.to_str())
    for number, token in enumerate(document["added_tokens"]):
        token |= {"lstrip": number % 2 == 0, "rstrip": number % 3 == 0}
    return JsonTokenizer(json.dumps(document), vocabularies.FACTS)


VOCABULARIES = {
    "byte_level": vocabularies.byte_level,
    "byte_fallback": vocabularies.byte_fallback,
    "unigram": vocabularies.unigram,
    "stripping": stripping,
}


CONTROLS = st.sampled_from([*vocabularies.SPECIAL, *vocabularies.MARKUP])
TURNS = st.lists(st.tuples(CONTROLS, st.sampled_from(TEXTS)), max_size=6)


@pytest.mark.parametrize("kind", VOCABULARIES)
@settings(max_examples=40, deadline=None)
@given(chats=st.lists(st.tuples(st.sampled_from(TEXTS), TURNS), min_size=1, max_size=4))
def test_ids_are_those_of_the_whole_text(
    kind: str, chats: list[tuple[str, list[tuple[str, str]]]]
) -> None:
    """Turn by turn, chats that begin alike and others, whatever stands beside control tokens."""
    tokenizer = VOCABULARIES[kind]()
    known = PromptTokens(tokenizer)
    protect = tokenizer.guard.protect
    for first, turns in chats:
        rendered = protect(first)
        for control, text in turns:
            rendered += control + protect(text)
            assert known.encode(rendered, "me") == tokenizer.encode_guarded(rendered)


def test_formats_of_other_libraries_too(tmp_path: Path) -> None:
    """Ranks of tiktoken: their control tokens lie beside the ranks."""
    lines = [base64.b64encode(bytes([byte])) + b" %d" % byte for byte in range(256)]
    (tmp_path / "qwen.tiktoken").write_bytes(b"\n".join(lines))
    tokenizer = load_tokenizer(str(tmp_path))
    known, rendered = PromptTokens(tokenizer), ""
    for text in TEXTS:
        rendered += "<|im_start|>" + tokenizer.guard.protect(text) + "<|im_end|>"
        assert known.encode(rendered, "me") == tokenizer.encode_guarded(rendered), rendered
    assert known.num_found


def test_the_next_turn_encodes_what_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the prompt of the turn before ended otherwise; and so do chats that begin alike, of one tenant."""
    monkeypatch.setattr(chat, "KEPT_CHARS", 8)
    tokenizer = vocabularies.byte_level()
    template = ChatTemplate(vocabularies.TEMPLATE, tokenizer)
    encoded: list[int] = []
    encode = tokenizer.encode_guarded

    def counting(text: str) -> list[int]:
        encoded.append(len(text))
        return encode(text)

    monkeypatch.setattr(tokenizer, "encode_guarded", counting)
    talk = [{"role": "system", "content": "You are brief. " * 200}]
    try:
        for turn in range(3):
            talk.append({"role": "user", "content": f"And number {turn}?"})
            for tenant, most in (("me", 3500 if not turn else 300), ("me", 200), (None, 4000)):
                encoded.clear()
                ids = template.render(talk, tenant=tenant)
                assert sum(encoded) < most, (turn, tenant, encoded)
                assert ids == encode(tokenizer.guard.resolve(template._render(talk, {})))
            talk.append({"role": "assistant", "content": "Yes."})
        encoded.clear()
        template.render([talk[0], {"role": "user", "content": "Another chat."}], tenant="me")
        assert sum(encoded) < 200
        encoded.clear()
        template.render(talk, tenant="you")
        assert sum(encoded) > 3000
    finally:
        template.close()


def test_what_was_not_used_longest_goes() -> None:
    """And what is larger than all may be is not kept at all."""
    known = PromptTokens(vocabularies.byte_level(), most_bytes=1500)
    texts = [f"<|im_start|>{name * 40}<|im_end|>." for name in "abcdef"]

    def finds(text: str) -> bool:
        before = known.num_found
        known.encode(text, "")
        return known.num_found > before

    for text in texts:
        finds(text)
        assert finds(texts[0]) and known.num_bytes <= 1500
    assert not finds(texts[1]) and finds(texts[0])
    finds("<|im_start|>" + "z" * 4000 + "<|im_end|>")
    assert known.num_bytes <= 1500 and finds(texts[0])
    known.encode(texts[0] + "<|im_start|>" + "q" * 10 + "<|im_end|>", "")
    assert len(known._names) <= len(known._known)  # the longer prompt holds the shorter one's ids


def test_threads_share_it() -> None:
    tokenizer = vocabularies.byte_level()
    known = PromptTokens(tokenizer, most_bytes=6000)
    wrong: list[str] = []

    def work(number: int) -> None:
        rendered = f"<|im_start|>system\n{number % 3} lies here<|im_end|>"
        for turn in range(20):
            rendered += f"<|im_start|>user {turn}<|im_end|>"
            if known.encode(rendered, "") != tokenizer.encode_guarded(rendered):
                wrong.append(rendered)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    arrays = {id(ids): ids.nbytes for ids, _ in known._known.values()}
    assert wrong == [] and arrays.keys() == known._names.keys()
    assert known.num_bytes == sum(arrays.values()) + NAME_BYTES * len(known._known) <= 6000
