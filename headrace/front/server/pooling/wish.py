"""What is to be scored, whatever scores it."""

from __future__ import annotations

from typing import Protocol

import msgspec


class Counted(Protocol):
    """An answer of the engine, as far as usage is concerned."""

    @property
    def num_prompt(self) -> int:
        """Prompt tokens."""
        ...

    @property
    def num_cached(self) -> int:
        """Those of them that were found in the prefix cache."""
        ...


class Wish(msgspec.Struct, frozen=True, kw_only=True):
    """What /score and /rerank hand to a scorer. `documents` pair with `queries` one to one; one query goes with all."""

    queries: list[str]
    documents: list[str]
    activate: bool
    late: bool
    truncate: int | None
    document_tokens: int | None = None
    instruction: str | None = None
    timeout_s: float | None = None
    fields: tuple[str, str] = ("query", "documents")
