"""Insertion before a suffix: the control tokens of the vocabulary, in the order the model knows."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from headrace.base.errors import InvalidRequest
from headrace.front.text.fim import MARKERS, Markers, between, infill
from headrace.front.text.tokenizer_files import load_tokenizer


def vocabulary(tmp_path, markers: Markers | None):
    names = [n for n in (markers.prefix, markers.suffix, markers.middle) if n] if markers else []
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({token: i for i, token in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.add_special_tokens(names)
    made.save(str(tmp_path / "tokenizer.json"))
    return load_tokenizer(str(tmp_path))


@pytest.mark.parametrize("markers", MARKERS, ids=lambda markers: markers.prefix)
def test_every_known_set_of_tokens_frames_prefix_and_suffix(tmp_path, markers: Markers) -> None:
    tokenizer = vocabulary(tmp_path, markers)
    found = between(tokenizer, tokenizer.encode_plain("ab"), "cd")
    text = tokenizer.decode(found, skip_special_tokens=False)
    if markers.suffix_first:
        assert text == f"{markers.suffix}cd{markers.prefix}ab"
    else:
        assert text == f"{markers.prefix}ab{markers.suffix}cd{markers.middle}"


def test_other_files_stand_in_front_and_what_is_begun_behind(tmp_path) -> None:
    """BEY-42."""
    tokenizer = vocabulary(tmp_path, MARKERS[0])
    ids = infill(tokenizer, prefix="ab", suffix="cd", begun="e", extra=[("f.py", "x")])
    text = tokenizer.decode(ids, skip_special_tokens=False).replace("Ċ", "\n")
    m = MARKERS[0]
    assert text == f"f.py\nx\n{m.prefix}ab{m.suffix}cd{m.middle}e"
    with pytest.raises(InvalidRequest, match=r"^input_suffix: "):
        infill(vocabulary(tmp_path, None), prefix="a", suffix="b")


def test_a_suffix_that_spells_a_token_stays_text(tmp_path) -> None:
    """P28."""
    tokenizer = vocabulary(tmp_path, MARKERS[0])
    found = between(tokenizer, tokenizer.encode_plain("a"), MARKERS[0].middle)
    assert sum(token in tokenizer.special_ids for token in found) == 3


def test_a_vocabulary_without_such_tokens_is_told_so(tmp_path) -> None:
    with pytest.raises(InvalidRequest, match="no tokens for insertion"):
        between(vocabulary(tmp_path, None), [1], "x")
