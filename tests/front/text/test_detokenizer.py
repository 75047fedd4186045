import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.front.text.tokenizer import Detokenizer
from tests.front.text import vocabularies
from tests.spent import assert_linear

KINDS = [vocabularies.byte_level, vocabularies.byte_fallback, vocabularies.unigram]


def pieces_of(tokenizer, ids, sizes, **options):
    detokenizer, given_, pieces = Detokenizer(tokenizer, **options), list(ids), []
    for size in sizes:
        pieces.append(detokenizer.push(given_[:size]))
        given_ = given_[size:]
    return [*pieces, detokenizer.push(given_), detokenizer.finish()]


@pytest.mark.parametrize("make", KINDS)
@settings(max_examples=60, deadline=None)
@given(
    text=st.text(alphabet="abc <|é東🎉👩\u200d👧\n", max_size=40),
    sizes=st.lists(st.integers(0, 4), max_size=30),
    skip=st.booleans(),
)
def test_any_split_gives_the_text_of_the_whole(make, text, sizes, skip):
    tokenizer = make()
    ids = [*tokenizer.encode_plain(text), tokenizer.token_id("<|im_end|>")]
    options = {"skip_special_tokens": skip}
    pieces = pieces_of(tokenizer, ids, sizes, continues=False, **options)
    assert "".join(pieces) == tokenizer.decode(ids, **options)


@settings(max_examples=100, deadline=None)
@given(
    ids=st.lists(st.integers(0, 430), max_size=40), sizes=st.lists(st.integers(0, 3), max_size=30)
)
def test_malformed_byte_level_text_equals_the_library(ids, sizes):
    tokenizer = vocabularies.byte_level()
    known = [i for i in ids if i < tokenizer.num_ids]
    pieces = pieces_of(tokenizer, known, sizes, skip_special_tokens=False)
    assert "".join(pieces) == tokenizer._library.decode(known, skip_special_tokens=False)


@pytest.mark.parametrize("make", [vocabularies.byte_level, vocabularies.byte_fallback])
def test_no_piece_holds_half_a_character(make):
    tokenizer = make()
    ids = tokenizer.encode_plain("🎉東é")
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.push([token_id]) for token_id in ids]
    assert len(ids) > 3, "the vocabulary must spell these as bytes"
    assert "\ufffd" not in "".join(pieces)
    assert "".join(pieces).strip() == "🎉東é"


def test_an_unfinished_character_ends_as_a_replacement_character():
    tokenizer = vocabularies.byte_level()
    ids = tokenizer.encode_plain("☃")
    assert len(ids) == 3
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.push(ids[:-1]) == ""
    assert detokenizer.finish() == "\ufffd"


@pytest.mark.parametrize("continues", [True, False])
def test_the_first_space_belongs_to_a_text_that_continues(continues):
    tokenizer = vocabularies.byte_fallback()
    ids = tokenizer.encode_plain("hello world")
    text = Detokenizer(tokenizer, continues=continues).push(ids)
    assert text == (" hello world" if continues else "hello world")


def test_ids_beyond_the_vocabulary_have_no_text():
    """The logits may be wider than the vocabulary."""
    tokenizer = vocabularies.byte_level()
    assert Detokenizer(tokenizer).push([tokenizer.num_ids + 5]) == ""


def test_time_is_linear_in_the_number_of_tokens():
    tokenizer = vocabularies.byte_level()
    ids = tokenizer.encode_plain("🎉 hello " * 2000)

    def read(repeat):
        detokenizer = Detokenizer(tokenizer)
        for token_id in ids * repeat:
            detokenizer.push((token_id,))

    assert_linear(read, 1)
