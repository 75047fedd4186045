"""The grammar hook in the loop: what comes out is of the grammar, nobody else notices, nothing is left behind."""

from __future__ import annotations

import json
import re
import time

import jsonschema
import numpy as np
import psutil
import pytest

from headrace.base.wire.grammar import (
    Ebnf,
    Either,
    Json,
    Lark,
    Literal,
    Node,
    ReasoningRule,
    Regex,
    Repeat,
    Sequence,
    Tag,
    Triggered,
    Until,
    unpack_masks,
)
from headrace.base.wire.request import RowSampling
from headrace.core.grammar.compiler import CompileLimits
from headrace.core.grammar.hook import GrammarHook
from headrace.front.text.structure.requested import MAX_CHOICES
from tests.api.serving import eventually
from tests.core.grammar.constrained import (
    BACKENDS,
    EOS,
    GrammarDriver,
    bytes_to_read,
    constrained,
    encoder,
    shared_hook,
    spec_for,
    tokenizer,
    vocabulary,
)
from tests.core.harness import make_request

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
PERSON_NODE = Json(json.dumps(PERSON), compact=True)
THINK = ReasoningRule(open="<think>", close="</think>", inside=True, may_open=False, budget=6)


@pytest.fixture(scope="module", params=BACKENDS)
def hook(request: pytest.FixtureRequest) -> GrammarHook:
    return shared_hook(request.param)


@pytest.fixture
def driver(hook: GrammarHook) -> GrammarDriver:
    return GrammarDriver(hook=hook)


KINDS: list[tuple[Node, str]] = [
    (Regex(r"[a-c]{2,5}-\d"), r"[a-c]{2,5}-\d"),
    (Either((Literal("yes"), Literal("no"), Literal("ünïcode ☃"))), "yes|no|ünïcode ☃"),
    (Lark('start: "x" digit+ "."\ndigit: /[0-3]/'), r"x[0-3]+\."),
    (Ebnf('root ::= "a" [0-9]{2} "b"'), r"a[0-9]{2}b"),
    (Sequence((Literal("<a>"), Until("</a>"))), r"(?s:<a>.*</a>)"),
    (Repeat(Regex("[xyz]"), most=3, separator=", "), r"[xyz](, [xyz]){0,2}"),
    (
        Triggered(("<t",), (Tag("<t=1>", Regex("[0-9]+"), "</t>"),), at_least_one=True,
                  stop_after_first=True),
        r"<t=1>[0-9]+</t>",
    ),
    (Literal("stop<|im_end|>"), r"stop(<\|im_end\|>)?"),
]  # fmt: skip


@pytest.mark.parametrize(("node", "pattern"), KINDS, ids=lambda value: type(value).__name__)
def test_every_kind_of_node_is_held(driver: GrammarDriver, node: Node, pattern: str) -> None:
    for seed in range(3):
        text, end = driver.run_one(constrained(seed + 1, node))
        if end.reason == "stop":
            assert re.fullmatch(pattern, text), text
        else:
            assert end.reason == "length" and end.error is None
            assert isinstance(node, Lark | Sequence | Triggered), "a bounded text came to no end"


def test_the_end_of_a_grammar_ends_the_answer_although_eos_is_ignored(
    driver: GrammarDriver,
) -> None:
    text, end = driver.run_one(constrained(1, Literal("done"), stop_ids=()))
    assert (text, end.reason, end.stop_id) == ("done", "stop", None)


@pytest.mark.parametrize(
    "sampling",
    [
        RowSampling(temperature=1.0, seed=4, min_p=0.2, top_k=5, top_p=0.5),
        RowSampling(temperature=1.0, seed=5, repetition_penalty=1.5, presence_penalty=1.0),
        RowSampling(temperature=0.0, logprobs=3),
    ],
)
def test_json_under_a_schema_validates_whatever_the_sampling(
    driver: GrammarDriver, sampling: RowSampling
) -> None:
    text, end = driver.run_one(constrained(1, PERSON_NODE, sampling=sampling))
    assert end.reason == "stop"
    jsonschema.validate(json.loads(text), PERSON)


def test_reasoning_is_free_and_the_grammar_begins_behind_it(driver: GrammarDriver) -> None:
    """API-12: the first constrained token comes after the closing tag; the budget forces it."""
    text, end = driver.run_one(constrained(1, PERSON_NODE, reasoning=THINK))
    reasoning, tag, answer = text.partition("</think>")
    assert tag and end.reason == "stop"
    assert 6 <= len(tokenizer().encode_plain(reasoning)) <= 60, "random tokens do not merge"
    jsonschema.validate(json.loads(answer), PERSON)


def test_a_budget_alone_bounds_the_reasoning_and_leaves_the_answer_free(
    driver: GrammarDriver,
) -> None:
    text, end = driver.run_one(constrained(1, None, reasoning=THINK, max_tokens=40, stop_ids=()))
    assert "</think>" in text and end.reason == "length"
    assert text.index("</think>") < len(text) - 20


def test_the_answer_may_open_its_reasoning_itself_or_leave_it_out(driver: GrammarDriver) -> None:
    rule = ReasoningRule(open="<think>", close="</think>", inside=False, may_open=True, budget=3)
    shapes = set()
    for seed in range(1, 25):
        text, end = driver.run_one(
            constrained(seed, Either((Literal("<yes>"), Literal("no"))), reasoning=rule)
        )
        assert end.reason == "stop"
        thought, _, answer = text.rpartition("</think>")
        assert answer.lstrip("\r\n") in ("<yes>", "no"), text
        assert not thought or thought.startswith("<think>")
        shapes.add(bool(thought))
    assert shapes == {True, False}


def test_rows_without_a_grammar_get_the_same_tokens_as_alone(hook: GrammarHook) -> None:
    alone = GrammarDriver(hook=hook)
    plain = [make_request(i, 12, max_tokens=60) for i in (100, 101, 102)]
    alone.add(*plain)
    alone.run()
    among = GrammarDriver(hook=hook)
    among.add(*plain, *(constrained(i, PERSON_NODE) for i in (1, 2, 3)))
    among.finish(100, 101, 102, 1, 2, 3)
    assert {i: among.tokens[i] for i in (100, 101, 102)} == dict(alone.tokens)


def test_overlap_changes_no_token(hook: GrammarHook) -> None:
    found = []
    for overlap in (False, True):
        driver = GrammarDriver(spec_for(overlap=overlap), hook=hook)
        driver.add(*(constrained(i, PERSON_NODE) for i in range(1, 6)))
        driver.finish(*range(1, 6))
        found.append(dict(driver.tokens))
    assert found[0] == found[1]


def test_a_preempted_answer_goes_on_where_its_grammar_was(hook: GrammarHook) -> None:
    """The same tokens come out of a pool that is too small for all."""
    listed = Json(json.dumps({"type": "array", "items": PERSON, "minItems": 3}), compact=True)
    requests = [constrained(i, listed, max_tokens=70) for i in range(1, 7)]
    roomy, tight = GrammarDriver(hook=hook), GrammarDriver(spec_for(num_blocks=30), hook=hook)
    for driver in (roomy, tight):
        driver.add(*requests)
        driver.finish(*range(1, 7))
    assert sum(end.num_preemptions for end in tight.finished.values()) > 0
    assert dict(tight.tokens) == dict(roomy.tokens)


def test_an_abort_in_any_state_leaves_nothing(hook: GrammarHook) -> None:
    for steps in range(8):
        driver = GrammarDriver(hook=hook)
        new = Json(json.dumps({**PERSON, "title": f"v{steps}", "maxProperties": 2 + steps}))
        driver.add(constrained(1, new), constrained(2, PERSON_NODE), make_request(3, 8))
        for _ in range(steps):
            if driver.core.has_work:
                driver.step()
        driver.core.abort([1, 2])
        driver.finish(1, 2, 3)
        while driver.core.has_work:
            driver.step()
        driver.assert_at_rest()
        assert hook.num_held == 0


def test_two_tenants_with_one_grammar_share_no_state(driver: GrammarDriver) -> None:
    driver.add(
        constrained(1, PERSON_NODE, tenant="a", sampling=RowSampling(seed=1)),
        constrained(2, PERSON_NODE, tenant="b", sampling=RowSampling(seed=2)),
    )
    driver.finish(1, 2)
    for id in (1, 2):
        jsonschema.validate(json.loads(driver.text(id)), PERSON)
    assert driver.text(1) != driver.text(2)


@pytest.mark.parametrize(
    ("node", "words"),
    [
        (Regex("(a"), "unclosed|not closed"),
        (Regex("(?=a)b"), "look-around|Lookahead"),
        (Lark('start: "a" nowhere'), "nowhere"),
        (Ebnf("root ::= ("), "GBNF|EBNF"),
        (Json('{"type": "string", "not": {}}'), "not"),
        (Json('{"type": "integer", "minimum": 5, "maximum": 1}'), "minimum"),
        (Json('{"$ref": "#/$defs/gone"}'), "gone"),
    ],
)
def test_what_does_not_compile_is_told_to_its_sender_alone(
    driver: GrammarDriver, node: Node, words: str
) -> None:
    driver.add(constrained(1, node), make_request(2, 8))
    driver.finish(1, 2)
    error = driver.finished[1].error
    assert error is not None and error.kind == "InvalidRequest" and re.search(words, error.message)
    assert error.field == "structured_outputs" and len(error.message) < 400
    assert driver.finished[2].reason == "length"


@pytest.mark.slow
def test_a_grammar_that_takes_too_long_is_killed_and_nobody_waits() -> None:
    """P12, REG-109: the deadline ends the process, another grammar is compiled meanwhile, the next one works."""
    limits = CompileLimits(seconds=20.0, threads=2)
    others = {child.pid for child in psutil.Process().children()}
    driver = GrammarDriver(limits=limits)
    driver.run_one(constrained(9, Literal("warm")))

    def sandboxes() -> list[psutil.Process]:
        return [child for child in psutil.Process().children() if child.pid not in others]

    (warm,) = sandboxes()
    slow = Json(json.dumps({"enum": [f"{i}-{'x' * 30}" for i in range(300_000)]}))
    warm.suspend()  # whichever of the two gets the slow one is at it until it is let go on
    driver.add(constrained(1, slow), make_request(2, 8, max_tokens=3))
    driver.finish(2)
    eventually(lambda: bytes_to_read(warm.pid) > 0 or len(sandboxes()) == 2, within_s=60)
    busy = next((one for one in sandboxes() if one.pid != warm.pid), warm)
    if busy is not warm:
        busy.suspend()
        warm.resume()
    driver.add(constrained(4, Literal("meanwhile")))
    driver.finish(4)
    assert 1 not in driver.finished and driver.text(4) == "meanwhile", "it waited for the slow one"
    busy.resume()
    driver.finish(1)
    error = driver.finished[1].error
    assert error is not None and error.kind == "InvalidRequest"
    bounds = (
        "longer than 20 s",
        "too much memory",
        "too big",
    )  # whichever this machine meets first
    assert any(bound in error.message for bound in bounds), error.message
    text, _ = driver.run_one(constrained(3, Literal("after")))
    assert text == "after"


def test_as_many_choices_as_a_request_may_have_are_followed(hook: GrammarHook) -> None:
    """The library's own bound of 2,000 items in a row of its parser ended these with an error of ours (P7)."""
    many = Either(tuple(Literal(f"{i}") for i in range(MAX_CHOICES)))
    text, end = GrammarDriver(hook=hook).run_one(constrained(1, many))
    assert end.reason == "stop" and 0 <= int(text) < MAX_CHOICES


@pytest.mark.parametrize(
    "backend", ["llguidance", pytest.param("xgrammar", marks=pytest.mark.slow)]
)
def test_the_cache_is_bounded_in_bytes(backend: str) -> None:
    """What a grammar weighs is known once it is compiled; the bound holds from then on."""
    small = GrammarHook(
        vocabulary, backend=backend, limits=CompileLimits(cache_bytes=200_000, threads=1)
    )
    driver = GrammarDriver(hook=small)

    def kept() -> list[int]:
        return [entry.cost_bytes for entry in small._compiler._cache.values()]

    for i in range(1, 12):
        text, _ = driver.run_one(constrained(i, Literal(f"text {i}")))
        assert text == f"text {i}"
        assert sum(kept()) <= 200_000 or len(kept()) == 1
    assert kept()
    wide = {f"p{i}": {"enum": [f"{i}{j}" for j in range(8)]} for i in range(30)}
    driver.run_one(constrained(12, Json(json.dumps({"properties": wide, "required": ["p0"]}))))
    assert len(kept()) == 1 and kept()[0] > 100_000


def test_a_malformed_constraint_is_refused(driver: GrammarDriver) -> None:
    import msgspec

    for raw in (b"\xc1", b"\x01", msgspec.msgpack.encode({"grammar": {"type": "nothing"}})):
        driver.finished.pop(1, None)
        driver.add(make_request(1, 8, hook_payloads={"grammar": msgspec.Raw(raw)}))
        driver.finish(1)
        error = driver.finished[1].error
        assert error is not None and error.kind == "InvalidRequest"
    assert EOS


def test_a_compiler_that_is_gone_leaves_no_thread_and_no_process() -> None:
    import gc
    import threading
    import time

    import psutil

    before = {thread.ident for thread in threading.enumerate()}
    children = {child.pid for child in psutil.Process().children()}
    own = GrammarHook(vocabulary, encoder=encoder)
    driver = GrammarDriver(hook=own)
    driver.run_one(constrained(1, Literal("here")))
    assert {child.pid for child in psutil.Process().children()} - children
    del own, driver
    gc.collect()
    end = time.monotonic() + 200
    while time.monotonic() < end:
        threads = {thread.ident for thread in threading.enumerate()} - before
        processes = {child.pid for child in psutil.Process().children()} - children
        if not threads and not processes:
            return
        time.sleep(0.01)
    raise AssertionError((threads, processes))


def test_masks_behind_drafts_are_those_of_one_token_at_a_time(hook: GrammarHook) -> None:
    """API-09: a mask for each drafted position, up to the first draft that its own forbids."""
    text = '{"name": "Ann", "age": 3}'
    tokens = np.asarray(tokenizer().encode_plain(text), np.int32)
    row = np.array([3], np.int32)
    none = [np.zeros(0, np.int32)]
    hook.admit(constrained(1, PERSON_NODE))
    hook.admit(constrained(2, PERSON_NODE))
    while hook.ready(1).answer != "yes" or hook.ready(2).answer != "yes":
        time.sleep(0.001)
    ahead = unpack_masks(hook.deferred_payload(row, [1], [tokens]))
    masks = ahead.masks.copy()
    assert ahead.offsets.tolist() == list(range(len(tokens))), "none behind the end of the answer"
    assert (ahead.rows == 3).all()
    for place, token in enumerate(tokens.tolist()):
        one = unpack_masks(hook.deferred_payload(row, [2], none))
        assert (one.masks == masks[place]).all(), place
        last = {"stop"} if place == len(tokens) - 1 else set()
        assert set(hook.accept_tokens([2], [token]).values()) == last
    wrong = np.concatenate([tokens[:2], tokens[:3]])
    cut = unpack_masks(hook.deferred_payload(row, [1], [wrong]))
    assert cut.offsets.tolist() == [0, 1, 2]
    assert hook.accept_tokens([1], tokens[:1].tolist()) == {}, "no draft counts by itself"
    assert (unpack_masks(hook.deferred_payload(row, [1], none)).masks == masks[1]).all()
    for request_id in (1, 2):
        hook.finish(request_id)
