"""A core with a grammar hook over the bundled model's vocabulary, on the null executor: it draws at random from what a
mask allows, which explores a grammar far better than a model that writes sense."""

from __future__ import annotations

import fcntl
import json
import os
import struct
import termios
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from headrace.back.executor.null import NullBehaviour
from headrace.base.config.resolved import EngineSpec
from headrace.base.wire.grammar import Constraint, Node, ReasoningRule, Vocabulary, pack
from headrace.base.wire.request import EngineRequest, Finished, RowSampling
from headrace.base.wire.step import KVGroup
from headrace.core.grammar.compiler import CompileLimits
from headrace.core.grammar.hook import GrammarHook
from headrace.core.ports import Encode
from headrace.front.text.parsing.engine import CallArguments, CallBegin, Content, Part
from headrace.front.text.tokenizer import Tokenizer
from headrace.front.text.tokenizer_files import load_tokenizer
from headrace.launch.vocabulary import vocabulary_of
from tests.core.harness import FULL, Driver, make_request, make_spec
from tests.stopwatch import Stopwatch

MODEL = Path(__file__).resolve().parents[3] / "demo" / "model"
EOS = (4089, 4087)
BACKENDS = ("llguidance", "xgrammar")


@cache
def tokenizer() -> Tokenizer:
    return load_tokenizer(str(MODEL))


def spec_for(**fields: Any) -> EngineSpec:
    spec = make_spec(**{"num_blocks": 512, "block_tokens": 8, "max_model_len": 1024, **fields})
    model = msgspec.structs.replace(spec.model, logits_width=4096, eos_ids=EOS)
    return msgspec.structs.replace(spec, model=model)


@cache
def vocabulary() -> Vocabulary:
    return vocabulary_of(str(MODEL), spec_for().model)


def encoder() -> Encode:
    return tokenizer().encode_plain


@cache
def shared_hook(backend: str) -> GrammarHook:
    """One compiler for all tests of a process: starting its own processes is what takes time. On a machine of many
    others a grammar may take longer than a server would wait."""
    limits = CompileLimits(threads=1, seconds=60.0)
    return GrammarHook(vocabulary, backend=backend, limits=limits, encoder=encoder)


def constrained(
    id: int,
    node: Node | None,
    *,
    reasoning: ReasoningRule | None = None,
    prompt: Any = 8,
    **fields: Any,
) -> EngineRequest:
    """A request with a grammar, sampled at random."""
    settings: dict[str, Any] = {
        "max_tokens": 400,
        "stop_ids": EOS,
        "sampling": RowSampling(temperature=1.0, seed=id),
        **fields,
    }
    rule = pack(Constraint(grammar=node, reasoning=reasoning))
    return make_request(id, prompt, hook_payloads={"grammar": rule}, **settings)


def bytes_to_read(pid: int) -> int:
    """What waits in the pipe that a process reads its questions from."""
    pipe = os.open(f"/proc/{pid}/fd/0", os.O_RDONLY | os.O_NONBLOCK)
    try:
        (size,) = struct.unpack("i", fcntl.ioctl(pipe, termios.FIONREAD, b"\0" * 4))
        return int(size)
    finally:
        os.close(pipe)


class GrammarDriver(Driver):
    """A driver whose core has a grammar hook, on the real clock."""

    def __init__(
        self,
        spec: EngineSpec | None = None,
        *,
        limits: CompileLimits | None = None,
        hook: GrammarHook | None = None,
        behaviour: NullBehaviour | None = None,
        groups: Sequence[KVGroup] = FULL,
    ) -> None:
        self.hook = hook or GrammarHook(vocabulary, limits=limits, encoder=encoder)
        super().__init__(
            spec or spec_for(),
            groups=groups,
            hooks=[self.hook],
            clock=time.monotonic,
            behaviour=behaviour,
        )

    def finish(self, *ids: int, within_s: float = 60.0) -> None:
        """Steps until these have ended; the bound is for what waits while nothing else runs."""
        watch = Stopwatch()
        while not all(id in self.finished for id in ids):
            if self.core.has_work:
                self.step()
            else:
                assert watch.undisturbed_s < within_s, self.ask("status")
                time.sleep(self.core.idle_s or 0.001)

    def text(self, id: int) -> str:
        """What the request wrote, control tokens left out."""
        return tokenizer().decode(self.tokens[id])

    def num_scores(self, id: int) -> int:
        """Tokens of the request that came with log-probabilities."""
        return sum(scores is not None for scores in self.logprobs[id])

    def run_one(self, request: EngineRequest) -> tuple[str, Finished]:
        return self.run_all([request])[0]

    def run_all(self, requests: Sequence[EngineRequest]) -> list[tuple[str, Finished]]:
        """Beside each other: what a request draws depends on its seed alone."""
        for request in requests:
            self.add(request)
        ids = [request.id for request in requests]
        self.finish(*ids)
        return [(self.text(id), self.finished[id]) for id in ids]


def calls_in(parts: Sequence[Part]) -> tuple[list[tuple[str, Any]], str]:
    """The calls among what a parser read, and the content beside them."""
    names = [part.name for part in parts if isinstance(part, CallBegin)]
    arguments = ["" for _ in names]
    for part in parts:
        if isinstance(part, CallArguments):
            arguments[part.index] += part.text
    content = "".join(part.text for part in parts if isinstance(part, Content))
    return [(n, json.loads(a or "{}")) for n, a in zip(names, arguments, strict=True)], content
