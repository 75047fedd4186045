"""Grammars that force very much, fail, or are many: they cost the request that brought them, and
nobody else waits or ends (security P7, P12)."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from unittest import mock

import numpy as np
import psutil
import pytest

from headrace.base.wire.grammar import Ebnf, Json, Lark, Literal, Node, Regex
from headrace.core.grammar.backends import make_backend
from headrace.core.grammar.backends.guidance import GuidanceMatcher
from headrace.core.grammar.compiler import CompileLimits, Compiler
from headrace.core.grammar.hook import GrammarHook
from headrace.core.ports import MAX_FORCED, AdmissionVerdict
from tests.core.grammar.constrained import (
    BACKENDS,
    GrammarDriver,
    constrained,
    encoder,
    spec_for,
    vocabulary,
)
from tests.core.harness import Driver, make_request

DOUBLED = 'start: T20\nT0: "a"\n' + "\n".join(f"T{i}: T{i - 1} T{i - 1}" for i in range(1, 21))
FORCING: dict[str, Node] = {
    "gbnf": Ebnf('root ::= "a"{1000000}'),
    "regex": Regex("a{1000000}"),
    "nested": Regex("(a{1000}){900}"),
    "behind a choice": Regex("[ab]a{1000000}"),
    "schema": Json(json.dumps({"type": "string", "pattern": "^a{1000000}$"})),
    "doubled": Lark(DOUBLED),
    "array": Json(json.dumps({"type": "array", "items": {"const": "a"}, "minItems": 100_000})),
    "directive": Lark('%llguidance {"no_forcing": false}\nstart: /a{1000000}/'),
}


@pytest.mark.covering(0)
@pytest.mark.parametrize("kind", FORCING)
def test_a_million_forced_characters_cost_no_more_than_the_tokens_asked_for(kind: str) -> None:
    """Each step's masks and forced tokens take milliseconds of processor time, whatever they force."""
    driver = GrammarDriver()
    driver.run_one(constrained(9, Literal("warm")))
    driver.add(constrained(1, FORCING[kind], max_tokens=64), make_request(2, 8, max_tokens=200))
    slowest_s = 0.0
    while not {1, 2} <= driver.finished.keys():
        begin = time.thread_time()
        if driver.core.has_work:
            driver.step()
        else:
            time.sleep(0.001)
        slowest_s = max(slowest_s, time.thread_time() - begin)
    end = driver.finished[1]
    assert end.reason in ("length", "stop") or (
        end.error is not None and end.error.kind == "InvalidRequest"
    ), end
    assert len(driver.tokens[1]) <= 64
    assert driver.finished[2].reason == "length" and len(driver.tokens[2]) == 200
    assert slowest_s < 0.5, f"a step took {slowest_s:.2f} s of processor time"


def test_a_very_long_forced_text_is_not_looked_for_on_the_loop() -> None:
    """Walking through it took 4 to 12 ms of each step: the sandbox has seen how long it is."""
    driver = GrammarDriver()
    driver.run_one(constrained(9, Literal("warm")))
    with mock.patch.object(GuidanceMatcher, "forced", autospec=True, return_value=[]) as looked:
        driver.run_one(constrained(1, Literal("ab" * 8000), max_tokens=8))
        assert not looked.called
        driver.run_one(constrained(2, Literal("ab" * 20), max_tokens=8))
        assert looked.called
    assert len(driver.tokens[1]) == 8


def test_one_that_is_met_later_is_walked_through_once() -> None:
    backend = make_backend("llguidance", vocabulary(), encoder())
    matcher = backend.compile(Regex("(x|y)(ab){3000}"))
    (first,) = encoder()("x")
    assert matcher.forced() == [] and matcher.accept(first)
    tokens = matcher.forced()
    assert len(tokens) == MAX_FORCED and all(matcher.accept(token) for token in tokens)
    assert matcher.forced() == []


@pytest.mark.parametrize("backend", BACKENDS)
def test_at_most_so_many_forced_tokens_are_looked_for(backend: str) -> None:
    matcher = make_backend(backend, vocabulary(), encoder()).compile(Literal("ab" * 8000))
    tokens = matcher.forced()
    assert 0 < len(tokens) <= MAX_FORCED
    assert all(matcher.accept(token) for token in tokens)


def test_a_probe_that_gave_up_leaves_the_masks_as_they_were() -> None:
    """The matcher goes on by every token its mask allows, whether forced text is looked for or not."""
    backend = make_backend("llguidance", vocabulary(), encoder())
    matcher = backend.compile(Regex("(a{1000}){900}"))
    masks = np.zeros((1, -(-vocabulary().width // 32)), np.int32)
    for _ in range(100):
        matcher.forced()
        assert backend.fill([matcher], masks) == [None]
        allowed = np.flatnonzero(np.unpackbits(masks.view(np.uint8), bitorder="little"))
        assert len(allowed) and matcher.accept(int(allowed[-1]))


class FailingHook:
    """Fails at the token that is told to fail; looks after the requests with a payload of its name."""

    name = "failing"
    num_held = 0

    def __init__(self, method: str) -> None:
        self._method = method
        self._held: set[int] = set()

    def admit(self, request) -> AdmissionVerdict:
        if self.name in request.hook_payloads:
            self._held.add(request.id)
        return AdmissionVerdict("yes")

    def ready(self, request_id: int, computed: object) -> AdmissionVerdict:
        return AdmissionVerdict("yes")

    def payload(self, request_ids: list[int]) -> None:
        return None

    def finish(self, request_id: int) -> None:
        self._held.discard(request_id)

    def defers(self, request_ids: list[int]) -> bool:
        return not self._held.isdisjoint(request_ids)

    def deferred_payload(self, rows, request_ids: list[int], drafts) -> memoryview:
        assert self._method != "deferred_payload", "planted"
        return memoryview(b"")

    def forced(self) -> dict[int, list[int]]:
        return {}

    def accept_tokens(self, request_ids: list[int], tokens: list[int]) -> dict:
        assert self._method != "accept_tokens" or not self.defers(request_ids), "planted"
        return {}


@pytest.mark.parametrize("method", ["deferred_payload", "accept_tokens"])
def test_a_hook_that_raises_ends_the_requests_it_looks_after_and_no_other(method: str) -> None:
    driver = Driver(spec_for(), hooks=[FailingHook(method)])
    driver.add(
        make_request(1, 8, max_tokens=20, hook_payloads={"failing": b"\xc0"}),
        make_request(2, 8, max_tokens=20),
    )
    driver.run()
    error = driver.finished[1].error
    assert error is not None and error.kind == "EngineError"
    assert driver.finished[2].reason == "length" and len(driver.tokens[2]) == 20
    driver.add(make_request(3, 8, max_tokens=5))
    driver.run()
    assert driver.finished[3].reason == "length"


@pytest.mark.parametrize("count", [80, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_many_tiny_grammars_weigh_what_is_counted(backend: str, count: int) -> None:
    made = make_backend(backend, vocabulary(), encoder())
    masks = np.zeros((1, -(-vocabulary().width // 32)), np.int32)
    compiler = Compiler(vocabulary, backend=backend)
    kept = []

    def keep(count: int) -> None:
        for _ in range(count):
            matcher = made.compile(Regex(f"[ab]{{3}}x{len(kept)}y"))
            made.fill([matcher], masks)
            matcher.forced()
            kept.append(matcher)

    keep(20)
    before = psutil.Process().memory_info().rss
    keep(count)
    grown = psutil.Process().memory_info().rss - before
    entry = compiler.get(Regex("x"))
    assert grown <= count * entry.cost_bytes, grown / count


def test_what_one_tenant_asked_for_is_compiled_anew_for_another() -> None:
    """Else the time of the first token tells one tenant what another has asked for (REG-101)."""
    compiler = Compiler(vocabulary, limits=CompileLimits(threads=1))
    entry = compiler.get(Literal("x"), tenant="a")
    assert compiler.get(Literal("x"), tenant="a") is entry
    assert compiler.get(Literal("x"), tenant="b") is not entry


ENDS_AT_ONCE = """
import atexit, time
atexit.register(time.sleep, 0.3)  # runs last: what threads say meanwhile is seen
import psutil
from headrace.base.wire.grammar import Literal
from headrace.core.grammar.compiler import CompileLimits, Compiler
from tests.core.grammar.constrained import vocabulary
compiler = Compiler(vocabulary, limits=CompileLimits(threads=1))
for i in range(20):
    compiler.get(Literal(f"a{i}"))
while not psutil.Process().children():
    time.sleep(0.001)
"""


def test_a_process_that_ends_beside_grammars_that_wait_says_nothing() -> None:
    """A thread that was still starting its sandbox said that this does not start."""
    done = subprocess.run([sys.executable, "-c", ENDS_AT_ONCE], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_one_tenant_cannot_take_every_place_of_those_that_wait_to_be_compiled() -> None:
    from headrace.base.errors import Unavailable

    limits = CompileLimits(threads=0, max_waiting=10, max_waiting_per_tenant=3)
    compiler = Compiler(vocabulary, limits=limits)
    for i in range(3):
        compiler.get(Literal(f"a{i}"), tenant="a")
    with pytest.raises(Unavailable, match="as many as one key may have"):
        compiler.get(Literal("a3"), tenant="a")
    compiler.get(Literal("b"), tenant="b")
    hook = GrammarHook(vocabulary, limits=limits)
    assert hook.num_held == 0
