"""Grammar backends by name; imported when one is chosen."""

from __future__ import annotations

from typing import cast

from headrace.base.registry import Registry
from headrace.base.wire.grammar import Vocabulary
from headrace.core.ports import GrammarBackend

BACKENDS: Registry[type] = Registry(
    "grammar backend",
    {"llguidance": "headrace.core.grammar.backends.guidance:GuidanceBackend"},
)


def make_backend(name: str, vocabulary: Vocabulary) -> GrammarBackend:
    """The backend of that name for a vocabulary."""
    return cast(GrammarBackend, BACKENDS.load(name)(vocabulary))
