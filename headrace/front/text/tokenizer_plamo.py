"""PLaMo 2's vocabulary (`tokenizer.jsonl`): a unigram language model over characters (Kudo 2018)
whose best path is found from the end of a text. Of equal paths the one with the longest token at
each place is taken, and a character without a token is the tokens of its bytes.

A line is a token, its score and its kind; ids are the places of lines. GGUF files hold the same
(gguf_tokenizer.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import msgspec

from headrace.base.errors import CheckpointError
from headrace.front.text.threads import refusing_failures
from headrace.front.text.tokenizer import TokenizerFacts
from headrace.front.text.tokenizer_files import read_facts
from headrace.front.text.tokenizer_world import ListedTokenizer

UNKNOWN_COST = 10_000_000
"""Of a character by its bytes."""
PRECISION = 10_000
"""Scores are compared as whole numbers of these parts."""
Row = tuple[str, float, str]
"""A token, its score and its kind."""
UNUSED = "UNUSED"
_SPECIAL = ("CONTROL", "UNKNOWN")
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_ROLES = ("unk", "bos", "eos", "pad")


class PlamoTokenizer(ListedTokenizer):
    """See the file. `costs`: of ordinary tokens, by their texts, the cost and the id; `of_bytes`:
    the token of each byte."""

    def __init__(
        self,
        costs: dict[str, tuple[int, int]],
        of_bytes: dict[int, int],
        special: dict[str, int],
        facts: TokenizerFacts,
    ) -> None:
        tokens = {number: text.encode() for text, (_, number) in costs.items()}
        tokens |= {number: bytes((byte,)) for byte, number in of_bytes.items()}
        super().__init__(tokens, special, facts)
        self._costs, self._of_bytes = costs, of_bytes
        lengths: dict[str, set[int]] = {}
        for text in costs:
            lengths.setdefault(text[0], set()).add(len(text))
        self._lengths = {head: sorted(several, reverse=True) for head, several in lengths.items()}

    def encode_plain(self, text: str) -> list[int]:
        with refusing_failures(text):
            text = text.encode(errors="replace").decode()
            return self._along(text, self._best(text))

    def _best(self, text: str) -> list[tuple[int, int]]:
        """Of each place the length and the id of the token that begins there, -1 for bytes."""
        count, costs, lengths = len(text), self._costs, self._lengths
        total = [0] * (count + 1)
        steps = [(1, -1)] * count
        for place in range(count - 1, -1, -1):
            least, step = total[place + 1] + UNKNOWN_COST, (1, -1)
            best: int | None = None
            for length in lengths.get(text[place], ()):
                known = costs.get(text[place : place + length])
                if known is None or place + length > count:
                    continue
                cost = total[place + length] + known[0]
                if best is None or cost < best:
                    best, step = cost, (length, known[1])
            if best is None or least < best:
                best, step = least, (1, -1)
            total[place], steps[place] = best, step
        return steps

    def _along(self, text: str, steps: list[tuple[int, int]]) -> list[int]:
        ids, place = [], 0
        while place < len(text):
            length, number = steps[place]
            if number < 0:
                ids += [self._of_bytes[byte] for byte in text[place].encode()]
            else:
                ids.append(number)
            place += length
        return ids


def load_plamo(path: str) -> PlamoTokenizer:
    """The vocabulary of a file; CheckpointError names the line that is wrong."""
    file = Path(path)
    rows = [_row(file, number, line) for number, line in enumerate(file.read_bytes().splitlines())]
    facts = read_facts(file.parent)
    known = {f"{role}_token": f"<|plamo:{role}|>" for role in _ROLES}
    special = {text for text, _, kind in rows if kind in _SPECIAL}
    known = {role: text for role, text in known.items() if text in special}
    named = msgspec.structs.replace(facts, special_tokens=known | facts.special_tokens)
    return plamo_of_rows(rows, file.name, named)


def plamo_of_rows(rows: Iterable[Row], where: str, facts: TokenizerFacts) -> PlamoTokenizer:
    """Of all tokens, in the order of their ids; of the kind UNUSED they stand for nothing."""
    costs: dict[str, tuple[int, int]] = {}
    of_bytes: dict[int, int] = {}
    special: dict[str, int] = {}
    for number, (text, score, kind) in enumerate(rows):
        byte = _BYTE.fullmatch(text) if kind == "BYTE" else None
        if byte is not None:
            of_bytes[int(byte[1], 16)] = number
        elif kind in _SPECIAL:
            special[text] = number
        elif kind != UNUSED:
            costs[text] = (-round(score * PRECISION), number)
    if len(of_bytes) < 256:
        raise CheckpointError(
            f"{where}: it has tokens of {len(of_bytes)} bytes, not of all 256: some texts have no "
            "tokens"
        )
    return PlamoTokenizer(costs, of_bytes, special, facts)


def _row(file: Path, number: int, line: bytes) -> Row:
    try:
        row = msgspec.json.decode(line, type=list)
        text, score = row[0], row[1]
        kind = row[2] if len(row) > 2 else "NORMAL"
        if not (isinstance(text, str) and text and isinstance(score, (int, float))):
            raise ValueError("no token with a score")
    except (msgspec.DecodeError, IndexError, ValueError) as error:
        raise CheckpointError(
            f"{file.name}: line {number + 1} is not a token, its score and its kind ({error})"
        ) from error
    return text, float(score), str(kind)
