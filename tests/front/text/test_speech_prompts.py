"""What decoders of speech models begin with, by language and task, as transformers' processors make it."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.base.errors import CheckpointError, InvalidRequest
from headrace.front.text.speech_prompts import speech_prompt

NAMES = (
    *("▁", "<|startofcontext|>", "<|startoftranscript|>", "<|emo:undefined|>", "<|en|>", "<|de|>"),
    *("<|pnc|>", "<|noitn|>", "<|notimestamp|>", "<|nodiarize|>", "__eng__", "__deu__"),
)


class Names:
    """A vocabulary of these alone."""

    def __init__(self, *missing: str) -> None:
        self._ids = {name: id for id, name in enumerate(NAMES) if name not in missing}

    def token_id(self, name: str) -> int | None:
        return self._ids.get(name)


def prompt(name: str, *missing: str) -> Any:
    tokenizer: Any = Names(*missing)
    return speech_prompt(name, tokenizer, (3,))


def test_tokens_of_languages_and_tasks() -> None:
    canary, cohere, seamless = (prompt(name) for name in ("context", "piece_context", "target"))
    assert canary.tokens("de", translates=False) == [1, 2, 3, 5, 5, 6, 7, 8, 9]
    assert canary.tokens("de", translates=True) == [1, 2, 3, 5, 4, 6, 7, 8, 9]
    assert cohere.tokens(None, translates=False) == [0, 1, 2, 3, 4, 4, 6, 7, 8, 9]
    assert seamless.tokens("de", translates=False) == [3, 11]
    assert seamless.tokens("de", translates=True) == [3, 10]
    assert prompt("") is None


def test_what_a_model_does_not_know_is_named() -> None:
    with pytest.raises(InvalidRequest, match="'fr' given; known: de, en"):
        prompt("context").check("fr", translates=False)
    with pytest.raises(InvalidRequest, match="translates nothing"):
        prompt("piece_context").check("de", translates=True)
    prompt("target").check("DE", translates=True)
    with pytest.raises(CheckpointError, match="<\\|pnc\\|>"):
        prompt("context", "<|pnc|>")
    with pytest.raises(CheckpointError, match="__eng__"):
        prompt("target", "__eng__")
