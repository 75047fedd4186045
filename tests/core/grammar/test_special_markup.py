"""Forced calls of families whose markup is control tokens of the vocabulary: only the tokens are structure to a parser
(P28), so nothing but the tokens may be forced. Letters that spell them would be text, and no call."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tokenizers import Tokenizer as Library

from headrace.base.config.resolved import EngineSpec
from headrace.base.wire.grammar import Node
from headrace.core.grammar.gate import GrammarGate
from headrace.front.text.parsing.families import TOOL_FAMILIES, ToolFamily
from headrace.front.text.parsing.parser import AnswerFormat, schemas_of
from headrace.front.text.parsing.parts import Part
from headrace.front.text.structure.tools import required_calls, strict_calls
from headrace.front.text.tokenizer import load_tokenizer
from headrace.launch.vocabulary import vocabulary_of
from tests.core.grammar.constrained import (
    BACKENDS,
    MODEL,
    GrammarDriver,
    calls_in,
    constrained,
    spec_for,
)
from tests.core.grammar.test_tool_families import PARAMETERS, TOOLS

MARKUP = re.compile(r'<[^<>{}=" \n]+>|\[[A-Z_/]+\]|<\|"\|>')


def texts_of(row: msgspec.Struct) -> list[str]:
    """Every text in a row, rows in it included."""
    found: list[str] = []
    for value in msgspec.structs.astuple(row):
        for one in value if isinstance(value, tuple) else (value,):
            found += texts_of(one) if isinstance(one, msgspec.Struct) else [one]
    return [text for text in found if isinstance(text, str)]


def markup_of(family: ToolFamily) -> list[str]:
    """What the family writes and reads as tags."""
    written = MARKUP.findall("\n".join(texts_of(family.writing)))
    read = "\n".join(texts_of(family.grammar))
    return sorted({tag for tag in written if tag in read})


MARKED = [family for family in TOOL_FAMILIES if markup_of(family)]


class Marked:
    """A family bound to a vocabulary in which its markup is control tokens."""

    def __init__(self, family: ToolFamily, folder: Path, backend: str) -> None:
        library = Library.from_file(str(MODEL / "tokenizer.json"))
        library.add_special_tokens(markup_of(family))
        library.save(str(folder / "tokenizer.json"))
        config = (MODEL / "tokenizer_config.json").read_text()
        (folder / "tokenizer_config.json").write_text(config)
        self.tokenizer = load_tokenizer(str(folder))
        self.answers = AnswerFormat(tools=family).bound(self.tokenizer)
        assert self.answers.tools is not None
        self.writing = self.answers.tools.writing
        spec = spec_for()
        width = -(-self.tokenizer.num_ids // 32) * 32
        model = msgspec.structs.replace(spec.model, logits_width=width)
        self.spec: EngineSpec = msgspec.structs.replace(spec, model=model)
        vocabulary = vocabulary_of(str(folder), model)
        gate = GrammarGate(
            lambda: vocabulary, backend=backend, encoder=lambda: self.tokenizer.encode_plain
        )
        self.driver = GrammarDriver(self.spec, gate=gate)

    def run(self, node: Node, seed: int) -> tuple[list[int], str]:
        """The tokens of one answer, and how it ended."""
        request = constrained(seed, node, max_tokens=500)
        self.driver.add(request)
        self.driver.finish(request.id)
        end = self.driver.finished[request.id]
        assert end.error is None, end.error
        return self.driver.tokens[request.id], end.reason

    def calls(self, ids: list[int]) -> tuple[list[tuple[str, Any]], str]:
        """What the family's parser reads, and the content beside it."""
        parser = self.answers.parser(prompt_tail="<|start|>assistant", schemas=schemas_of(TOOLS))
        assert parser is not None and self.answers.pieces is not None
        data = b""
        for i in ids:
            piece = self.answers.pieces[i]
            data += piece.encode() if isinstance(piece, str) else piece
        parts: list[Part] = [*parser.push(data.decode("utf-8", "replace")), *parser.finish()]
        return calls_in(parts)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", MARKED, ids=lambda family: family.name)
def test_a_forced_call_is_written_in_the_tokens_and_read_as_a_call(
    family: ToolFamily, backend: str, tmp_path: Path
) -> None:
    marked = Marked(family, tmp_path, backend)
    node = required_calls(TOOLS, marked.writing, at_most_one=True)
    ended = 0
    for seed in range(1, 5):
        ids, reason = marked.run(node, seed)
        if reason != "stop":
            continue  # a text without a bound, drawn at random
        ended += 1
        calls, content = marked.calls(ids)
        assert len(calls) == 1 and calls[0][0] in PARAMETERS, calls
        assert not content.strip(), marked.tokenizer.decode(ids, skip_special_tokens=False)
    assert ended


@pytest.mark.parametrize("family", MARKED, ids=lambda family: family.name)
def test_strict_calls_compile_over_tokens(family: ToolFamily, tmp_path: Path) -> None:
    marked = Marked(family, tmp_path, "llguidance")
    node = strict_calls(TOOLS, marked.writing)
    if node is not None:
        ids, _ = marked.run(node, 1)
        assert ids
