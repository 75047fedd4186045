"""What a rendered request tells besides its ids, where it is asked: the prompt's text, and each token's span in it.

Both are asked for of the render routes alone; a request that generates takes neither.
"""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any, Literal

import msgspec

from headrace.front.server.openai.schema import typed
from headrace.front.text.tokenizer import Tokenizer

ASKS = ("return_prompt_text", "return_token_offsets", "return_mm_kwargs", "mm_payload")


class Asks(msgspec.Struct, frozen=True, kw_only=True):
    """What to tell. There are no media, so that nothing of them can be asked for."""

    return_prompt_text: bool | None = None
    return_token_offsets: bool | None = None
    return_mm_kwargs: Literal[False] | None = None
    mm_payload: Literal["none"] | None = None


def taken_out(document: Any) -> tuple[Any, Asks]:
    """The request without these fields, and what they ask for."""
    asks = typed(document, Asks)
    return {name: value for name, value in document.items() if name not in ASKS}, asks


def told(tokenizer: Tokenizer, ids: list[int], asks: Asks) -> dict[str, Any]:
    """The fields to add to a rendered request."""
    found: dict[str, Any] = {}
    if asks.return_prompt_text:
        found["prompt_text"] = tokenizer.decode(ids, skip_special_tokens=False)
    if asks.return_token_offsets:
        found["token_offsets"] = spans(tokenizer, ids)
    return found


def spans(tokenizer: Tokenizer, ids: list[int]) -> list[tuple[int, int]]:
    """[begin, end) of each token in the prompt's text, in code points. A character that several tokens make belongs to
    each of them."""
    data = [tokenizer.token_bytes(i) for i in ids]
    begun = [0, *accumulate(sum(byte & 0xC0 != 0x80 for byte in one) for one in data)]
    found = [
        (begin - bool(one and one[0] & 0xC0 == 0x80), end)
        for one, (begin, end) in zip(data, pairwise(begun), strict=True)
    ]
    whole = b"".join(data[:2])
    cut = int(tokenizer.drop_first_space and whole.startswith(b" "))
    return [(max(0, begin - cut), max(0, end - cut)) for begin, end in found]
