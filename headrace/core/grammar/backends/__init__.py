"""Grammar backends by name; imported when one is chosen."""

from __future__ import annotations

from typing import cast

from headrace.base.registry import Registry
from headrace.base.wire.grammar import Vocabulary
from headrace.core.ports import Encode, GrammarBackend

BACKENDS: Registry[type] = Registry(
    "grammar backend",
    {
        "llguidance": "headrace.core.grammar.backends.guidance:GuidanceBackend",
        "xgrammar": "headrace.core.grammar.backends.xgrammar:XgrammarBackend",
    },
)


def make_backend(name: str, vocabulary: Vocabulary, encode: Encode | None = None) -> GrammarBackend:
    """The backend of that name for a vocabulary. `encode`: the tokenizer's, for forced texts."""
    return cast(GrammarBackend, BACKENDS.load(name)(vocabulary, encode))
