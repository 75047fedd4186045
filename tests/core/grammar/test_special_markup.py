"""Forced calls of families whose markup is control tokens of the vocabulary: only the tokens are structure to a parser
(P28), so nothing but the tokens may be forced. Letters that spell them would be text, and no call."""

from __future__ import annotations

import re
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tokenizers import Tokenizer as Library

from headrace.base.wire.grammar import Node
from headrace.core.grammar.compiler import CompileLimits
from headrace.core.grammar.hook import GrammarHook
from headrace.front.text.parsing.engine import Part
from headrace.front.text.parsing.families import TOOL_FAMILIES, ToolFamily
from headrace.front.text.parsing.parser import AnswerFormat
from headrace.front.text.parsing.xml_parameters import schemas_of
from headrace.front.text.structure.tools import required_calls, strict_calls
from headrace.front.text.tokenizer_files import load_tokenizer
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
from tests.covering import first_of_each

MARKUP = re.compile(r'<[^<>{}=" \n]+>|\[[A-Z_/]+\]|<\|"\|>')


def texts_of(row: msgspec.Struct) -> list[str]:
    """Every text in a row, rows in it included."""
    found: list[str] = []
    for value in msgspec.structs.astuple(row):
        for one in value if isinstance(value, tuple) else (value,):
            found += texts_of(one) if isinstance(one, msgspec.Struct) else [one]
    return [text for text in found if isinstance(text, str)]


def written_by(family: ToolFamily) -> set[str]:
    """What the family writes as tags."""
    return set(MARKUP.findall("\n".join(texts_of(family.writing))))


def markup_of(family: ToolFamily) -> set[str]:
    """Those of them that it reads."""
    read = "\n".join(texts_of(family.grammar))
    return {tag for tag in written_by(family) if tag in read}


MARKED = [family for family in TOOL_FAMILIES if markup_of(family)]
SYNTAXES = first_of_each(MARKED, [type(family.grammar) for family in MARKED])
WRITTEN_AS_TEXT = {tag for family in MARKED for tag in written_by(family) - markup_of(family)}
CONTROL = sorted({tag for family in MARKED for tag in markup_of(family)} - WRITTEN_AS_TEXT)


class Marked:
    """One vocabulary in which the markup of all these families is control tokens, but for what one of them writes as
    text: a model has tokens of formats that are not its own, and grammars of many share what was compiled."""

    def __init__(self, folder: Path, backend: str) -> None:
        library = Library.from_file(str(MODEL / "tokenizer.json"))
        library.add_special_tokens(CONTROL)
        library.save(str(folder / "tokenizer.json"))
        config = (MODEL / "tokenizer_config.json").read_text()
        (folder / "tokenizer_config.json").write_text(config)
        self.tokenizer = load_tokenizer(str(folder))
        spec = spec_for()
        width = -(-self.tokenizer.num_ids // 32) * 32
        model = msgspec.structs.replace(spec.model, logits_width=width)
        vocabulary = vocabulary_of(str(folder), model)
        hook = GrammarHook(
            lambda: vocabulary,
            backend=backend,
            limits=CompileLimits(threads=1),
            encoder=lambda: self.tokenizer.encode_plain,
        )
        self.driver = GrammarDriver(msgspec.structs.replace(spec, model=model), hook=hook)
        self._ids = count(1)

    def format_of(self, family: ToolFamily) -> AnswerFormat:
        """The family over this vocabulary."""
        return AnswerFormat(tools=family).bound(self.tokenizer)

    def run(self, node: Node, seeds: int, max_tokens: int) -> list[tuple[list[int], str]]:
        """The tokens of so many answers, and how they ended."""
        ids = []
        for seed in range(1, seeds + 1):
            request = constrained(next(self._ids), node, max_tokens=max_tokens)
            sampling = msgspec.structs.replace(request.sampling, seed=seed)
            self.driver.add(msgspec.structs.replace(request, sampling=sampling))
            ids.append(request.id)
        self.driver.finish(*ids)
        ends = [self.driver.finished[id] for id in ids]
        assert all(end.error is None for end in ends), ends
        return [(self.driver.tokens[id], end.reason) for id, end in zip(ids, ends, strict=True)]


@pytest.fixture(scope="module", params=BACKENDS)
def marked(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Marked:
    return Marked(tmp_path_factory.mktemp("marked"), request.param)


def calls_of(answers: AnswerFormat, ids: list[int]) -> tuple[list[tuple[str, Any]], str]:
    """What the family's parser reads, and the content beside it."""
    parser = answers.parser(prompt_tail="<|start|>assistant", schemas=schemas_of(TOOLS))
    assert parser is not None and answers.pieces is not None
    data = b""
    for i in ids:
        piece = answers.pieces[i]
        data += piece.encode() if isinstance(piece, str) else piece
    parts: list[Part] = [*parser.push(data.decode("utf-8", "replace")), *parser.finish()]
    return calls_in(parts)


@pytest.mark.covering(1)
@pytest.mark.parametrize("family", SYNTAXES, ids=lambda family: family.name)
def test_a_forced_call_is_written_in_the_tokens_and_read_as_a_call(
    family: ToolFamily, marked: Marked
) -> None:
    answers = marked.format_of(family)
    assert answers.tools is not None
    node = required_calls(TOOLS, answers.tools.writing, at_most_one=True)
    ended = 0
    for ids, reason in marked.run(node, seeds=4, max_tokens=300):
        if reason != "stop":
            continue  # a text without a bound, drawn at random
        ended += 1
        calls, content = calls_of(answers, ids)
        assert len(calls) == 1 and calls[0][0] in PARAMETERS, calls
        assert not content.strip(), marked.tokenizer.decode(ids, skip_special_tokens=False)
    assert ended


@pytest.mark.covering(1)
@pytest.mark.parametrize("family", SYNTAXES, ids=lambda family: family.name)
def test_strict_calls_compile_over_tokens(family: ToolFamily, marked: Marked) -> None:
    answers = marked.format_of(family)
    assert answers.tools is not None
    node = strict_calls(TOOLS, answers.tools.writing)
    if node is not None:
        [(ids, _)] = marked.run(node, seeds=1, max_tokens=30)
        assert ids
