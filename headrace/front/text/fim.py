"""Insertion between a prompt and a suffix ("fill in the middle"), with the control tokens that a
vocabulary has for it.

Models are trained on prefix, suffix, middle in this order; one family puts the suffix first.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from headrace.base.errors import InvalidRequest
from headrace.front.text.tokenizer import Tokenizer


class Markers(msgspec.Struct, frozen=True):
    """The tokens before the prefix, before the suffix and (unless empty) before the middle."""

    prefix: str
    suffix: str
    middle: str
    suffix_first: bool = False


MARKERS = (
    Markers("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    Markers("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    Markers("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    Markers("▁<PRE>", "▁<SUF>", "▁<MID>"),
    Markers("<PRE>", "<SUF>", "<MID>"),
    Markers("[PREFIX]", "[SUFFIX]", "", suffix_first=True),
)


def markers_of(tokenizer: Tokenizer) -> tuple[Markers, list[int]] | None:
    """The control tokens for insertion that the vocabulary has, and their ids; None: it has
    none."""
    for markers in MARKERS:
        names = (markers.prefix, markers.suffix, markers.middle)
        ids = [tokenizer.token_id(name) for name in names if name]
        known = [i for i in ids if i is not None]
        if len(known) == len(ids):
            return markers, known
    return None


def between(tokenizer: Tokenizer, prompt_ids: Sequence[int], suffix: str) -> list[int]:
    """The prompt that asks for what stands between `prompt_ids` and `suffix`."""
    known_markers = markers_of(tokenizer)
    if known_markers is None:
        raise InvalidRequest(
            "suffix: this model's vocabulary has no tokens for insertion", field="suffix"
        )
    markers, known = known_markers
    bos = tokenizer.special_id("bos_token")
    start = list(prompt_ids[:1]) if prompt_ids and prompt_ids[0] == bos else []
    prefix = [known[0], *prompt_ids[len(start) :]]
    tail = [known[1], *tokenizer.encode_plain(suffix)]
    parts = [*tail, *prefix] if markers.suffix_first else [*prefix, *tail]
    return [*start, *parts, *known[2:]]


FILE_SEPARATORS = ("<|file_sep|>", "<file_sep>")
"""Tokens that begin a file among others."""


def infill(
    tokenizer: Tokenizer,
    *,
    prefix: str,
    suffix: str,
    begun: str = "",
    extra: Sequence[tuple[str, str]] = (),
) -> list[int]:
    """The prompt that asks for what stands between two texts, behind (name, text) of other files;
    `begun`: how it begins."""
    if markers_of(tokenizer) is None:
        raise InvalidRequest(
            "input_suffix: this model's vocabulary has no tokens for insertion",
            field="input_suffix",
        )
    opening, _ = tokenizer.special_around()
    known = [tokenizer.token_id(name) for name in FILE_SEPARATORS]
    separator = [i for i in known if i is not None][:1]
    files: list[int] = []
    for name, text in extra:
        files += [*separator, *tokenizer.encode_plain(f"{name}\n{text}\n")]
    framed = between(tokenizer, tokenizer.encode_plain(prefix), suffix)
    return [*opening, *files, *framed, *tokenizer.encode_plain(begun)]
