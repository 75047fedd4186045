"""From a model's tokenizer to the vocabulary that grammars are matched against: the one place where
the core's grammar room and the front's tokenizers meet."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from headrace.base.config.resolved import ModelSpec
from headrace.base.wire.grammar import Vocabulary
from headrace.front.text.tokenizer import Tokenizer
from headrace.front.text.tokenizer_files import load_tokenizer


@lru_cache(maxsize=1)
def _tokenizer(path: str) -> Tokenizer:
    return load_tokenizer(path)


def encoder_of(tokenizer_path: str) -> Callable[[str], list[int]]:
    """The tokenizer's encode of what a grammar forces."""
    return _tokenizer(tokenizer_path).encode_written


def vocabulary_of(tokenizer_path: str, model: ModelSpec) -> Vocabulary:
    """Loads the tokenizer (about a second for 150,000 tokens) and reads every token's bytes."""
    tokenizer = _tokenizer(tokenizer_path)
    count = min(tokenizer.num_ids, model.logits_width)
    specials = {*tokenizer.special_ids, *model.eos_ids}
    return Vocabulary(
        pieces=[tokenizer.token_bytes(i) for i in range(count)],
        special_ids=tuple(sorted(i for i in specials if i < count)),
        eos_ids=model.eos_ids or (0,),
        width=model.logits_width,
    )
