import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.front.text.tokenizer import BREAK, CLOSE, OPEN, Guard
from tests.front.text import vocabularies

GUARD = Guard(vocabularies.SPECIAL, vocabularies.MARKUP)
_BITS = [
    "<",
    "|",
    ">",
    "im_",
    "start",
    "<|",
    "|>",
    "<s",
    "[",
    "INST",
    "]",
    "<think>",
    BREAK,
    OPEN,
    CLOSE,
    "0",
]
PARTS = st.lists(st.sampled_from([*_BITS, *vocabularies.SPECIAL, "a", " "]), max_size=6).map(
    "".join
)


@settings(max_examples=300, deadline=None)
@given(st.lists(PARTS, max_size=4))
def test_no_joined_texts_become_a_control_token(texts):
    resolved = GUARD.resolve("".join(GUARD.protect(text) for text in texts))
    assert OPEN not in resolved and CLOSE not in resolved


@settings(max_examples=200, deadline=None)
@given(PARTS)
def test_protected_text_comes_back_as_it_was(text):
    clean = text.replace(BREAK, "").replace(OPEN, "").replace(CLOSE, "")
    assert GUARD.resolve(GUARD.protect(clean)) == clean


@settings(max_examples=200, deadline=None)
@given(PARTS, PARTS)
def test_templates_own_tokens_are_found_beside_any_text(before, after):
    rendered = f"{GUARD.protect(before)}<|im_start|>{GUARD.protect(after)}"
    resolved = GUARD.resolve(rendered)
    assert resolved.count(OPEN) == 1
    assert f"{GUARD.spellings['<|im_start|>']}" in resolved


def test_a_name_between_the_halves_of_a_token_is_broken():
    assert OPEN not in GUARD.resolve("<|" + GUARD.protect_name("im_start") + "|>")


def test_the_longest_token_at_a_place_wins():
    guard = Guard(["<a", "<ab>", "<ab"])
    assert guard.resolve("<ab>") == guard.spellings["<ab>"]
    assert guard.resolve("<abc") == guard.spellings["<ab"] + "c"


def test_an_assistants_markup_stays_but_its_special_tokens_do_not():
    text = "<think>x</think><|im_end|>"
    resolved = GUARD.resolve(GUARD.protect_special(text))
    assert resolved.count(OPEN) == 2
    assert "<|im_end|>" in resolved


@pytest.mark.parametrize("text", ["  padded  ", "plain", "ünï"])
def test_trimming_and_comparing_work_on_protected_text(text):
    assert GUARD.protect(text).strip() == text.strip()
