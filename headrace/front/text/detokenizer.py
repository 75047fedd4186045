"""Token ids to text, as they come.

Bytes that do not yet make a whole character are held back, so that no answer ever holds half of
one. The pieces of a token stream joined are the text of the whole, however it was cut. Time is
linear in the number of tokens; the plain case costs one look-up per token (about 0.1 us).
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Mapping

from headrace.front.text.guard import neutral
from headrace.front.text.tokenizer import Tokenizer

_UTF8 = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """Turns the tokens of one answer into text.

    `pieces` replaces the tokenizer's own table. `continues`: the text follows a prompt, so its
    first space is its own; otherwise the first space of a SentencePiece vocabulary is dropped, as
    `Tokenizer.decode` does.
    """

    __slots__ = ("_decoder", "_drop_space", "_held", "_pieces", "_reserved")

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        continues: bool = True,
        pieces: Mapping[int, str | bytes] | None = None,
    ) -> None:
        own = tokenizer.pieces_without_special if skip_special_tokens else tokenizer.pieces
        self._pieces = own if pieces is None else pieces
        # characters that such a table uses as marks must not arise from bytes
        self._reserved = pieces is not None
        self._decoder = _UTF8(errors="replace")
        self._held = False
        self._drop_space = tokenizer.drop_first_space and not continues

    def push(self, ids: Iterable[int]) -> str:
        """The text that `ids` complete."""
        text = ""
        pieces = self._pieces
        for token_id in ids:
            piece = pieces[token_id]
            text += piece if type(piece) is str and not self._held else self._through(piece)
        return text if not self._drop_space else self._without_space(text)

    def finish(self) -> str:
        """What is left: bytes that never became a character, as U+FFFD."""
        return self._decoder.decode(b"", True)

    def _through(self, piece: str | bytes) -> str:
        text = self._decoder.decode(piece.encode() if isinstance(piece, str) else piece)
        self._held = bool(self._decoder.getstate()[0])
        return neutral(text) if self._reserved and isinstance(piece, bytes) else text

    def _without_space(self, text: str) -> str:
        if not text:
            return text
        self._drop_space = False
        return text.removeprefix(" ")
