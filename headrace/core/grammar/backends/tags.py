"""From a node to a structural tag, the tree of formats xgrammar takes. Pure data; the library
checks the result."""

from __future__ import annotations

import re
from typing import Any, TypeAlias

import msgspec

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
    Tag,
    Token,
    Triggered,
    Until,
    Vocabulary,
)
from headrace.core.grammar.backends.keywords import check_keywords

MANY = 39_017
"""How the library is asked for any white space; this number finds it again in the grammar, where a
space, or a line break and an indentation, take its place: a weak model that may write any white
space may never write anything else."""
_CHARACTER = re.compile(r'(^\w+ ::= \(\(|"\\"" )\[\^\\"\\\\\\r\\n\](?=\)\)$| "\\"")', re.M)
_JSON_CHARACTER = r'\1[^\\0-\\u001f\\"\\\\]'
"""In texts of bounded length the library allows control characters, which JSON does not."""
_HEX = re.compile(r"(?<!\\)((?:\\\\)*)\\x([0-9a-f]{2})")
_FOUR_DIGITS = r"\1\\u00\2"
"""The library writes a character as two digits, and reads as many digits as there are behind it."""
_SPACES = re.compile(rf"\b(whitespace(?:_\d+)?)\{{0, {MANY}\}}")
_SPACE = re.compile(r"^(whitespace(?:_\d+)?) ::= .*$", re.M)
_JSON_SPACE = r'\1 ::= ((" ") | ("\\n" [ ]{0,40}))'
Format: TypeAlias = dict[str, Any]


def has_tokens(form: Any) -> bool:
    """Whether a format, or one within it, names tokens of the vocabulary."""
    if isinstance(form, list):
        return any(map(has_tokens, form))
    if not isinstance(form, dict):
        return False
    return str(form.get("type")).startswith("token") or any(map(has_tokens, form.values()))


class TagWriter:
    """Writes formats. `library` parses what has no format of its own."""

    def __init__(self, library: Any, vocabulary: Vocabulary) -> None:
        self._library = library
        self._special = {
            vocabulary.pieces[i].decode(errors="replace"): i
            for i in vocabulary.special_ids
            if i < len(vocabulary.pieces) and vocabulary.pieces[i]
        }
        names = sorted(self._special, key=len, reverse=True)
        self._any_special = re.compile("|".join(map(re.escape, names))) if names else None

    def write(self, node: Node) -> Format:
        """The format of a node; it can stand inside of any other."""
        match node:
            case Literal():
                return self._literal(node.text)
            case Token():
                match = self._special.get(node.text)
                return _text(node.text) if match is None else {"type": "token", "token": match}
            case Json():
                return self._json(node)
            case Regex():
                return {"type": "regex", "pattern": node.pattern}
            case Lark():
                return _grammar(_text_of(self._library.Grammar.from_lark(node.text)))
            case Ebnf():
                return _grammar(node.text)
            case Until():
                return _tag("", {"type": "any_text"}, self._end(node.stop))
            case Sequence():
                return _sequence([self.write(item) for item in node.items])
            case Either():
                return {"type": "or", "elements": [self.write(item) for item in node.items]}
            case Repeat():
                return self._repeat(node)
            case Triggered():
                return self._triggered(node)

    def _literal(self, text: str) -> Format:
        if self._any_special is None:
            return _text(text)
        parts, at = [], 0
        for match in self._any_special.finditer(text):
            parts += [_text(text[at : match.start()])] if match.start() > at else []
            token = {"type": "token", "token": self._special[match[0]]}
            parts.append({"type": "or", "elements": [token, _text(match[0])]})
            at = match.end()
        if at < len(text) or not parts:
            parts.append(_text(text[at:]))
        return _sequence(parts)

    def _json(self, node: Json) -> Format:
        if node.whitespace is not None:
            raise InvalidRequest("the xgrammar backend takes no whitespace_pattern")
        check_keywords(msgspec.json.decode(node.schema))
        grammar = self._library.Grammar.from_json_schema(
            node.schema,
            any_whitespace=not node.compact,
            separators=(", ", ": ") if node.compact else None,
            max_whitespace_cnt=None if node.compact else MANY,
            strict_mode=False,
        )
        text = _CHARACTER.sub(_JSON_CHARACTER, _text_of(grammar))
        return _grammar(_SPACE.sub(_JSON_SPACE, _SPACES.sub(r"\1{0, 1}", text)))

    def _end(self, text: str) -> Any:
        token = self._special.get(text)
        return text if token is None else {"type": "token", "token": token}

    def _repeat(self, node: Repeat) -> Format:
        item = self.write(node.item)
        if node.most == 1:
            return item
        again = _sequence([self._literal(node.separator), item]) if node.separator else item
        if node.most is None:
            return _sequence([item, {"type": "star", "content": again}])
        most = node.most - 1
        return _sequence([item, {"type": "repeat", "min": 0, "max": most, "content": again}])

    def _triggered(self, node: Triggered) -> Format:
        triggers = sorted({_trigger(tag, node.triggers) for tag in node.tags})
        tokens = [self._special.get(trigger) for trigger in triggers]
        if any(token is None for token in tokens):
            if any(token is not None for token in tokens):
                raise InvalidRequest("triggers are texts or special tokens, not some of each")
            return {
                "type": "triggered_tags",
                "triggers": triggers,
                "tags": [
                    _tag(tag.begin, self.write(tag.content), self._end(tag.end))
                    for tag in node.tags
                ],
                "at_least_one": node.at_least_one,
                "stop_after_first": node.stop_after_first,
            }
        return {
            "type": "token_triggered_tags",
            "trigger_tokens": tokens,
            "tags": [self._token_tag(tag.begin, tag.content, tag.end) for tag in node.tags],
            "at_least_one": node.at_least_one,
            "stop_after_first": node.stop_after_first,
        }

    def _token_tag(self, begin: str, content: Node, end: str) -> Format:
        """A tag that begins with a special token; what stands behind it there belongs to the
        content."""
        name = max((s for s in self._special if begin.startswith(s)), key=len)
        parts = [self._literal(begin[len(name) :])] if begin != name else []
        whole = _sequence([*parts, self.write(content)])
        return _tag({"type": "token", "token": self._special[name]}, whole, self._end(end))


def _trigger(tag: Tag, triggers: tuple[str, ...]) -> str:
    """What makes a tag begin; one that no trigger stands for is its own."""
    match = (t for t in sorted(triggers, key=len) if tag.begin.startswith(t))
    return next(match, tag.begin)


def _text_of(grammar: Any) -> str:
    """A grammar as text that is read as the same grammar."""
    return _HEX.sub(_FOUR_DIGITS, str(grammar))


def _text(text: str) -> Format:
    return {"type": "const_string", "value": text}


def _grammar(text: str) -> Format:
    return {"type": "grammar", "grammar": text}


def _sequence(parts: list[Format]) -> Format:
    return parts[0] if len(parts) == 1 else {"type": "sequence", "elements": parts}


def _tag(begin: Any, content: Format, end: Any) -> Format:
    return {"type": "tag", "begin": begin, "content": content, "end": end}
