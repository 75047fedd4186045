"""Languages that a translator knows by tokens of its vocabulary, and where these stand: that of the
source beside the prompt, that of the target where the decoder begins (M2M-100, NLLB, mBART,
SeamlessM4T), or before the prompt (Marian)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from headrace.base.errors import InvalidRequest
from headrace.front.text.tokenizer import Tokenizer

_SPECIAL = re.compile(r"__([a-zA-Z_]{2,16})__|([a-z]{2,3}_[A-Z][A-Za-z]{1,3})")
"""__fr__, fra_Latn, fr_XX."""
_BEFORE = re.compile(r">>([^<>]{1,32})<<")
_SHOWN = 40


@dataclass(frozen=True, kw_only=True)
class Languages:
    """`ids`: by the codes of the vocabulary; `leads`: the target's token stands before the
    prompt."""

    ids: Mapping[str, int]
    leads: bool = False

    def of(self, code: str, *, field: str) -> int:
        """The token of a language; InvalidRequest for one that the model does not know."""
        token_id = self.ids.get(code)
        if token_id is None:
            known = sorted(self.ids)
            rest = f" and {len(known) - _SHOWN} more" if len(known) > _SHOWN else ""
            raise InvalidRequest(
                f"{field}: {code[:32]!r} given; known: {', '.join(known[:_SHOWN]) or 'none'}{rest}",
                field=field,
            )
        return token_id

    def prompt(self, ids: Sequence[int], *, source: str | None, target: str | None) -> list[int]:
        """What the encoder reads: the prompt in its source language, and told the target's where
        that is said there."""
        ids = list(ids)
        if source is not None:
            if self.leads:
                raise InvalidRequest(
                    "source_language: this model reads its languages without being told which",
                    field="source_language",
                )
            token_id, known = self.of(source, field="source_language"), {*self.ids.values()}
            places = [at for at in dict.fromkeys((0, len(ids) - 1)) if ids and ids[at] in known]
            if not places:
                raise InvalidRequest(
                    "source_language: the prompt neither begins nor ends with a language's token "
                    "that could be replaced",
                    field="source_language",
                )
            ids[places[0]] = token_id
        if target is None:
            return ids
        token_id = self.of(target, field="target_language")
        return [token_id, *ids] if self.leads else ids

    def start(self, start: Sequence[int], target: str | None) -> tuple[int, ...]:
        """What the decoder begins with where the checkpoint says `start`; empty: that."""
        if target is None or self.leads:
            return ()
        token_id = self.of(target, field="target_language")
        first = tuple(start[:1])
        return (token_id,) if first and first[0] in self.ids.values() else (*first, token_id)


@cache
def languages_of(tokenizer: Tokenizer) -> Languages:
    """Those of a vocabulary; looked for once."""
    special = {tokenizer.vocabulary_token(i): i for i in sorted(tokenizer.special_ids)}
    ids = {m[1] or m[2]: i for token, i in special.items() if (m := _SPECIAL.fullmatch(token))}
    if ids:
        return Languages(ids=ids)
    tokens = ((tokenizer.vocabulary_token(i), i) for i in range(tokenizer.num_ids))
    leads = {m[1]: i for token, i in tokens if (m := _BEFORE.fullmatch(token))}
    return Languages(ids=leads, leads=bool(leads))
