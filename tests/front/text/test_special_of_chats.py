"""`add_special_tokens` of chats: what a raw prompt gets, once."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from headrace.front.text.tokenizer_files import load_tokenizer

MODEL = Path(__file__).resolve().parents[3] / "demo" / "model"


@pytest.mark.parametrize(("bos", "eos"), [(True, False), (True, True), (False, False)])
def test_a_chat_gets_the_special_tokens_of_a_raw_prompt_once(bos: bool, eos: bool) -> None:
    tokenizer = load_tokenizer(str(MODEL))
    special = {**tokenizer.facts.special_tokens, "bos_token": "<|im_start|>"}
    tokenizer.facts = msgspec.structs.replace(
        tokenizer.facts, add_bos=bos, add_eos=eos, special_tokens=special
    )
    ids = tokenizer.encode("a fox", add_special_tokens=False)
    whole = tokenizer.with_special(ids)
    assert whole == tokenizer.encode("a fox")
    assert tokenizer.with_special(whole) == whole
    assert (len(whole) > len(ids)) is bos
