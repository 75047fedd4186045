"""From a node to a grammar in llguidance's Lark dialect. Pure text work; the library checks the
result.

Special tokens are no text to the library: a literal that spells one may be written as the token or
letter by letter, a Token only as the token.
"""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec
from llguidance import LLMatcher, regex_to_lark
from llguidance.gbnf_to_lark import gbnf_to_lark

from headrace.base.errors import InvalidRequest
from headrace.base.wire.grammar import (
    Ebnf,
    Either,
    Json,
    Lark,
    Literal,
    Node,
    Regex,
    Repeat,
    Sequence,
    Token,
    Triggered,
    Until,
    Vocabulary,
)

ANY_TEXT = r"/(.|\n)*/"
SPACE = r"(\x20|\x0A(\x20{0,40}|\x09{0,16}))"
"""White space inside of JSON: a space, or a line break and an indentation. A weak model that may
write any white space may never write anything else."""


def to_grammar(node: Node, vocabulary: Vocabulary) -> str:
    """The grammar as the library takes it: Lark, or a JSON document of several Lark grammars."""
    if isinstance(node, Lark):
        return str(LLMatcher.grammar_from_lark(node.text))
    writer = _Writer(vocabulary)
    start = writer.write(node)
    main = "\n".join([f"start: {start}", *writer.rules])
    if not writer.others:
        return str(LLMatcher.grammar_from_lark(main))
    grammars = [{"name": "main", "lark_grammar": main}, *writer.others]
    return json.dumps({"grammars": grammars})


class _Writer:
    """Collects the rules of one grammar; `write` returns the expression that stands for a node."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.rules: list[str] = []
        self.others: list[dict[str, str]] = []
        self._special = {
            vocabulary.pieces[i].decode(errors="replace"): i
            for i in vocabulary.special_ids
            if vocabulary.pieces[i]
        }
        names = sorted(self._special, key=len, reverse=True)
        self._any_special = re.compile("|".join(map(re.escape, names))) if names else None

    def write(self, node: Node) -> str:
        """The expression of a node; it can stand inside of any other."""
        match node:
            case Literal():
                return self._literal(node.text)
            case Token():
                return self._token(node.text)
            case Json():
                return self._rule("%json " + _json_schema(node))
            case Regex():
                return self._rule(f"/{regex_to_lark(node.pattern)}/")
            case Lark():
                return self._other(node.text)
            case Ebnf():
                return self._other(self._from_ebnf(node.text))
            case Until():
                return self._until(node.stop)
            case Sequence():
                return self._rule(" ".join(map(self.write, node.items)) or '""')
            case Either():
                return self._rule(" | ".join(map(self.write, node.items)))
            case Repeat():
                return self._repeat(node)
            case Triggered():
                return self._triggered(node)

    def _rule(self, body: str, attributes: str = "") -> str:
        name = f"n{len(self.rules)}"
        self.rules.append("")
        self.rules[-1] = f"{name}{attributes}: {body}"
        return name

    def _other(self, text: str) -> str:
        name = f"g{len(self.others)}"
        self.others.append({"name": name, "lark_grammar": text})
        return f"@{name}"

    def _from_ebnf(self, text: str) -> str:
        try:
            return str(gbnf_to_lark(text))
        except Exception as error:
            raise InvalidRequest(f"not a grammar in GBNF: {str(error)[:200]}") from None

    def _literal(self, text: str) -> str:
        if not text:
            return '""'
        if self._any_special is None:
            return json.dumps(text)
        parts, at = [], 0
        for match in self._any_special.finditer(text):
            if match.start() > at:
                parts.append(json.dumps(text[at : match.start()]))
            parts.append(f"(<[{self._special[match[0]]}]> | {json.dumps(match[0])})")
            at = match.end()
        if at < len(text):
            parts.append(json.dumps(text[at:]))
        return "(" + " ".join(parts) + ")" if len(parts) > 1 else parts[0]

    def _token(self, text: str) -> str:
        match = self._special.get(text)
        return self._literal(text) if match is None else f"<[{match}]>"

    def _until(self, stop: str) -> str:
        if stop in self._special:
            return f"({self._rule(ANY_TEXT)} <[{self._special[stop]}]>)"
        return self._rule(ANY_TEXT, f"[suffix={json.dumps(stop)}]")

    def _repeat(self, node: Repeat) -> str:
        item = self.write(node.item)
        if node.most == 1:
            return item
        bound = "*" if node.most is None else f"{{0,{node.most - 1}}}"
        again = self._rule(f"{self._literal(node.separator)} {item}") if node.separator else item
        return self._rule(f"{item} {again}{bound}")

    def _triggered(self, node: Triggered) -> str:
        groups: dict[str, list[str]] = {}
        for tag in node.tags:
            trigger = next(
                (t for t in sorted(node.triggers, key=len) if tag.begin.startswith(t)), tag.begin
            )
            rest = self._literal(tag.begin[len(trigger) :])
            body = f"{rest} {self.write(tag.content)} {self._literal(tag.end)}"
            groups.setdefault(trigger, []).append(self._rule(body))
        if node.at_least_one:
            bodies = [
                f"{self._literal(trigger)} ({' | '.join(options)})"
                for trigger, options in groups.items()
            ]
            one = self._rule(" | ".join(bodies))
            return one if node.stop_after_first else self._rule(f"{one} (/[ \\n]{{0,2}}/ {one})*")
        tags = self._rule(" | ".join(self._after_text(*group) for group in groups.items()))
        rest = self._rule(f"TEXT{len(self.rules)}")
        self.rules.append(f"TEXT{len(self.rules) - 1}: {ANY_TEXT}")
        return self._rule(f"({rest} | {tags})" if node.stop_after_first else f"({tags})* {rest}")

    def _after_text(self, trigger: str, options: list[str]) -> str:
        text = f"TEXT{len(self.rules)}"
        self.rules.append(f"{text}: {ANY_TEXT}")
        choice = f"({' | '.join(options)})"
        if trigger in self._special:
            return self._rule(f"{text} <[{self._special[trigger]}]> {choice}")
        lead = self._rule(f"{text} {json.dumps(trigger)}", "[lazy]")
        return self._rule(f"{lead} {choice}")


def _json_schema(node: Json) -> str:
    schema = msgspec.json.decode(node.schema)
    if schema is True:
        schema = {}
    assert isinstance(schema, dict), "the front sends objects"
    if node.compact:
        spacing: dict[str, Any] = {
            "whitespace_flexible": False,
            "item_separator": ", ",
            "key_separator": ": ",
        }
    else:
        spacing = {"whitespace_pattern": node.whitespace or SPACE}
    return json.dumps({**schema, "x-guidance": spacing}, ensure_ascii=False)
