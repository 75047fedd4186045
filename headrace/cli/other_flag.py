"""A row of the tables of other servers' flags (vllm_flags.py, llama_flags.py)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

ONE, SEVERAL, OPTIONAL = 1, "+", "?"
PER_REQUEST = "send it with each request, or put it into the model's generation_config.json"
ALWAYS = "always so"
KERNELS = "kernels are chosen and checked at start"
EDIT_CONFIG = "edit the model's config.json"


@dataclass(frozen=True, kw_only=True)
class OtherFlag:
    """A row. `arity`: how many words follow it (0, ONE, SEVERAL or OPTIONAL); `words`: ours for
    them, None where the values cannot be honoured; `why`: the reason shown, or the hint of a
    refusal. `is_object`: its value is JSON, of which `FLAG.KEY VALUE` is a part."""

    words: Callable[[list[str]], list[str] | None]
    arity: int | str
    why: str
    is_object: bool = False


def as_ours(flag: str, arity: int | str = ONE, why: str = "the same option") -> OtherFlag:
    """Our flag, with the same value; several are joined by commas."""
    return OtherFlag(words=lambda values: [flag, ",".join(values)], arity=arity, why=why)


def switch(flag: str, why: str = "the same option") -> OtherFlag:
    """Our flag, which has no value."""
    return OtherFlag(words=lambda values: [flag], arity=0, why=why)


def left_out(why: str, arity: int | str = 0) -> OtherFlag:
    """Nothing: it is so anyway, or there is no option for it."""
    return OtherFlag(words=lambda values: [], arity=arity, why=why)


def refused(hint: str, arity: int | str = ONE) -> OtherFlag:
    """An error with a hint."""
    return OtherFlag(words=lambda values: None, arity=arity, why=hint)


def by_value(table: Mapping[str, Sequence[str]], hint: str) -> OtherFlag:
    """Ours by the value; other values are refused."""

    def words(values: list[str]) -> list[str] | None:
        chosen = table.get(values[0].lower())
        return None if chosen is None else list(chosen)

    return OtherFlag(words=words, arity=ONE, why=hint)


def rows(flags: str, row: OtherFlag) -> dict[str, OtherFlag]:
    """One row for several flags, with spaces between them."""
    return dict.fromkeys(flags.split(), row)
