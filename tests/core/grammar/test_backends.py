"""The backends agree (P12: all behave alike), and a trial process that dies costs one answer and nothing else."""

from __future__ import annotations

import json

import numpy as np
import psutil
import pytest

from headrace.base.wire.grammar import (
    Ebnf,
    Either,
    Json,
    Literal,
    Node,
    Regex,
    Repeat,
    Sequence,
    StructuredOutputs,
    Tag,
    Triggered,
    Vocabulary,
)
from headrace.core.grammar.backends import make_backend
from headrace.core.grammar.compiler import CompileLimits
from headrace.core.grammar.hook import GrammarHook
from headrace.core.ports import GrammarBackend
from headrace.front.text.structure.requested import node_of
from headrace.front.text.structure.schema import checked_schema
from tests.api.serving import eventually
from tests.core.grammar.constrained import (
    BACKENDS,
    EOS,
    GrammarDriver,
    bytes_to_read,
    constrained,
    encoder,
    shared_hook,
    vocabulary,
)
from tests.core.harness import make_request

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
NODES: list[Node] = [
    node_of(StructuredOutputs(regex=r"[a-c]{2,5}-\d[\d\w]?\s?")),
    Either((Literal("yes"), Literal("no"), Literal("ünïcode ☃"))),
    Ebnf('root ::= "a" [0-9]{2} ("b" | "c")'),
    Sequence((Literal("<a>"), Regex("[xy]{1,3}"), Literal("</a>"))),
    Repeat(Regex("[xyz]"), most=3, separator=", "),
    Json(checked_schema(PERSON, field="json"), compact=True),
    node_of(StructuredOutputs(json={"pattern": r"^\d\w{1,3}$", "type": "string"})),
    Triggered(
        ("<t",), (Tag("<t=1>", Regex("[0-9]{1,4}"), "</t>"),), at_least_one=True,
        stop_after_first=True,
    ),
]  # fmt: skip


@pytest.fixture(scope="module")
def hooks() -> dict[str, GrammarHook]:
    return {name: shared_hook(name) for name in BACKENDS}


@pytest.fixture(scope="module")
def backends() -> dict[str, GrammarBackend]:
    return {name: make_backend(name, vocabulary(), encoder()) for name in BACKENDS}


@pytest.mark.parametrize("node", NODES, ids=lambda node: type(node).__name__)
@pytest.mark.parametrize("name", BACKENDS)
def test_an_answer_of_one_backend_is_one_of_the_other(
    hooks: dict[str, GrammarHook], backends: dict[str, GrammarBackend], name: str, node: Node
) -> None:
    (other,) = set(BACKENDS) - {name}
    assert compared(hooks[name], backends[other], node)


def test_white_space_between_tokens_is_freer_in_llguidance(
    hooks: dict[str, GrammarHook], backends: dict[str, GrammarBackend]
) -> None:
    """Either writes JSON under the schema; only one way round is every answer also the other's."""
    node = Json(checked_schema(PERSON, field="json"))
    assert compared(hooks["xgrammar"], backends["llguidance"], node)


def compared(hook: GrammarHook, other: GrammarBackend, node: Node) -> int:
    """How many answers came to their end; each is an answer of the other backend."""
    driver = GrammarDriver(hook=hook)
    ended = 0
    for seed in range(1, 5):
        text, end = driver.run_one(constrained(seed, node, max_tokens=300))
        if end.reason != "stop":
            assert end.reason == "length" and end.error is None
            continue
        ended += 1
        matcher = other.compile(node)
        for token in driver.tokens[seed]:
            if token not in EOS:
                assert matcher.accept(token), (other.name, text)
    return ended


def test_what_one_backend_refuses_is_an_error_of_the_request_in_the_other_too(
    hooks: dict[str, GrammarHook],
) -> None:
    for node in (Regex("(a"), Ebnf("root ::= ("), Json('{"$ref": "#/$defs/gone"}')):
        for hook in hooks.values():
            _, end = GrammarDriver(hook=hook).run_one(constrained(1, node, max_tokens=5))
            assert end.error is not None and end.error.kind == "InvalidRequest"


def test_a_trial_that_is_killed_while_it_compiles_costs_that_answer_alone() -> None:
    """P12: others stream on, the next grammar gets a new process."""
    driver = GrammarDriver(
        hook=GrammarHook(vocabulary, limits=CompileLimits(seconds=30.0, threads=1), encoder=encoder)
    )
    before = {child.pid for child in psutil.Process().children()}
    driver.run_one(constrained(9, Literal("warm")))
    (trial,) = [child for child in psutil.Process().children() if child.pid not in before]
    slow = Json(json.dumps({"enum": [f"{i}-{'x' * 30}" for i in range(9_000)]}))
    trial.suspend()  # it is at it as long as we like
    driver.add(constrained(1, slow), make_request(2, 8, max_tokens=3))
    driver.finish(2)
    assert 1 not in driver.finished
    # Killed before it was asked, it would be replaced, and its successor asked.
    eventually(lambda: bytes_to_read(trial.pid) > 0, within_s=20)
    trial.kill()
    driver.finish(1)
    error = driver.finished[1].error
    assert error is not None and error.kind == "Unavailable", "the grammar was not at fault"
    assert "killed" in error.message and error.field == "structured_outputs"
    text, _ = driver.run_one(constrained(3, Literal("after")))
    assert text == "after"
    text, end = driver.run_one(constrained(4, slow))
    assert "killed" not in str(end.error), "what was killed once is tried anew"


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("whole", [False, True])
def test_no_answer_holds_the_encoding_of_a_surrogate(name: str, whole: bool) -> None:
    """It is no UTF-8: three replacement characters would stand where the schema allows two characters (API-24)."""
    pieces = [bytes([i]) for i in range(256)] + ([b"\xed\xa0", b"a\xed"] if whole else [])
    made = Vocabulary(
        pieces=[*pieces, b"<end>"], special_ids=(len(pieces),), eos_ids=(len(pieces),), width=288
    )
    backend = make_backend(name, made, lambda text: list(text.encode()))
    schema = {"type": "string", "maxLength": 2}
    for written, good in (
        ([b'"', b"\xed", b"\x9f", b"\xbf", b"a", b'"'], True),
        ([b'"', b"\xed", b"\xa0"], False),
        ([b'"', b"\xed", b"\xbf"], False),
        ([b'"', b"\xed\xa0"], False),
        ([b'"', b"a\xed", b"\x80", b"\x80", b'"'], True),
        ([b'"', b"a\xed", b"\xa0"], False),
    ):
        matcher = backend.compile(Json(checked_schema(schema, field="json"), compact=True))
        for number, piece in enumerate(written):
            if piece not in pieces:
                break
            token = pieces.index(piece)
            matcher = matcher.copy()
            masks = np.zeros((1, 9), np.int32)
            assert backend.fill([matcher], masks) == [None]
            allowed = bool(masks[0][token // 32] >> (token % 32) & 1)
            assert allowed == (good or number < len(written) - 1), (written, piece)
            assert matcher.copy().accept(token) == allowed
            matcher.accept(token)
