"""The process of one engine core: `python -m headrace.launch.core_process --spec FILE --socket PATH`.

The main thread runs `EngineCore.step`; an IO thread (`Fronts`) accepts the API processes on a 0600 Unix socket, reads
their frames and writes what their sockets did not take at once. A watchdog thread ends the process when a step takes
longer than `step_timeout_s`: stacks are dumped, the fronts see the end of file and fail their requests, the supervisor
restarts (reliability 1.6).
"""

from __future__ import annotations

import argparse
import faulthandler
import logging
import os
import socket
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import NoReturn

import msgspec
import numpy as np

from headrace.back.executor.choose import make_executor
from headrace.base.affinity import keep_to
from headrace.base.age import process_age_s
from headrace.base.config.resolved import EngineSpec
from headrace.base.config.tree import ModelOptions
from headrace.base.errors import ConfigError, EngineError, StartError
from headrace.base.telemetry import log as logs
from headrace.base.wire.request import (
    AbortRequests,
    Call,
    EngineRequest,
    Reply,
    TokenBatch,
)
from headrace.base.wire.step import WorkerFacts
from headrace.core.absent import AbsentExecutor
from headrace.core.core import EngineCore
from headrace.core.grammar.gate import GrammarGate
from headrace.core.outbox import StepOutput
from headrace.core.ports import Executor, Gate
from headrace.launch.fronts import FrontGone, Fronts, Incoming
from headrace.launch.locate import locate
from headrace.launch.model_facts import read_model_facts
from headrace.launch.topology import Report, report, tie_to_parent
from headrace.launch.vocabulary import encoder_of, vocabulary_of

log = logging.getLogger(__name__)
FLUSH_S = 1.0
HUNG_EXIT = 70
FAILED_EXIT = 71


class Watchdog:
    """Ends the process when one step takes too long, and beats towards the parent while it runs itself.

    Beats come from this thread: they say "the process runs", however long a step takes. `begin` and `end` are plain
    stores: they cost the loop nothing.
    """

    def __init__(self, timeout_s: float, status: socket.socket) -> None:
        self._timeout_s = timeout_s
        self._status = status
        self._since: float | None = None
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def begin(self) -> None:
        """A step starts."""
        self._since = time.monotonic()

    def end(self) -> None:
        """The step is over."""
        self._since = None

    def report(self, message: Report) -> None:
        """Tells the parent."""
        report(self._status, message)

    def _watch(self) -> None:
        pause_s = min(1.0, max(0.01, self._timeout_s / 4))
        while True:
            time.sleep(pause_s)
            report(self._status, Report(beat=True))
            since = self._since
            if since is not None and time.monotonic() - since > self._timeout_s:
                log.error("a step has taken more than %g s: the engine is hung", self._timeout_s)
                faulthandler.dump_traceback(sys.stderr)
                os._exit(HUNG_EXIT)


class CoreLoop:
    """Carries messages between the fronts and the core.

    Invariants: `_owner` holds exactly the requests whose end has not been sent yet; a request belongs to the front
    that added it, and only that front can abort it or sees its tokens.
    """

    def __init__(self, core: EngineCore, fronts: Fronts, watchdog: Watchdog) -> None:
        self._core = core
        self._fronts = fronts
        self._watchdog = watchdog
        self._owner: dict[int, int] = {}
        self._calls: dict[int, tuple[int, int]] = {}
        self._call_number = 0
        self._told = core.hello()

    def run(self) -> None:
        """Serves until the process ends."""
        while True:
            self.turn()

    def turn(self) -> None:
        """Takes what has arrived (waits if there is nothing to compute), runs one step, sends its results."""
        core = self._core
        for message in self._fronts.take(block=not core.has_work, at_most_s=core.idle_s):
            self._handle(message)
        if not core.has_work:
            return
        self._watchdog.begin()
        try:
            output = core.step(wait=True)
        except EngineError as error:
            self._fail(error)
        self._watchdog.end()
        self._send(output)

    def _fail(self, error: EngineError) -> NoReturn:
        """The step failed as a whole: everyone is told, then this process ends and is started anew (ENG-14)."""
        log.critical("the engine failed: %s", error.message, exc_info=error)
        faulthandler.dump_traceback(sys.stderr)
        self._send(self._core.fail_all(error))
        self._fronts.flush(FLUSH_S)
        os._exit(FAILED_EXIT)

    def _handle(self, incoming: Incoming) -> None:
        front, message = incoming
        match message:
            case EngineRequest():
                self._add(front, message)
            case AbortRequests():
                self._core.abort([i for i in message.ids if self._owner.get(i) == front])
            case Call():
                self._call(front, message)
            case FrontGone():
                self._forget(front)

    def _add(self, front: int, request: EngineRequest) -> None:
        if request.id in self._owner:
            self._fronts.drop(front, "it used a request id that is taken")
            return
        self._owner[request.id] = front
        self._core.add(request)

    def _call(self, front: int, call: Call) -> None:
        """Numbers of different fronts may be equal: the core sees numbers of ours."""
        self._call_number += 1
        self._calls[self._call_number] = (front, call.number)
        before = self._rest()
        reply = self._core.call(msgspec.structs.replace(call, number=self._call_number))
        if (rest := self._rest()) != before:
            self._watchdog.report(rest)
        if (hello := self._core.hello()) != self._told:
            if hello.log_level != self._told.log_level:
                self._watchdog.report(Report(log_level=hello.log_level))
            self._told = hello
            self._fronts.announce(hello)
        if reply is not None:
            self._reply(reply)

    def _rest(self) -> Report:
        """How the core rests: whoever takes its place goes on so."""
        control, swap = self._core.control, self._core.swap
        return Report(paused=control.mode or "", asleep=swap.asleep)

    def _reply(self, reply: Reply) -> None:
        front, number = self._calls.pop(reply.number)
        self._fronts.send(front, msgspec.structs.replace(reply, number=number))

    def _forget(self, front: int) -> None:
        """A front that is gone takes its requests along."""
        self._core.abort([i for i, owner in self._owner.items() if owner == front])

    def _send(self, output: StepOutput) -> None:
        if output.tokens is not None:
            for front, batch in split(output.tokens, self._owner).items():
                self._fronts.send(front, batch)
            for end in output.tokens.finished:
                self._owner.pop(end.id, None)
        for reply in output.replies:
            self._reply(reply)


def split(batch: TokenBatch, owner: dict[int, int]) -> dict[int, TokenBatch]:
    """The batch by owning front; requests without an owner are left out. One front: the batch itself, uncopied."""
    fronts = np.fromiter((owner.get(i, -1) for i in batch.ids.tolist()), np.int64, len(batch.ids))
    others = (*batch.prompt_logprobs, *batch.pooled, *batch.captured, *batch.cached)
    named = [*(i for i, _ in others), *(end.id for end in batch.finished)]
    present = {*np.unique(fronts).tolist(), *(owner.get(i, -1) for i in named)}
    if len(present) == 1 and -1 not in present:
        return {present.pop(): batch}
    return {
        front: TokenBatch(
            ids=batch.ids[fronts == front],
            tokens=batch.tokens[fronts == front],
            logprobs=[
                entry
                for entry, at in zip(batch.logprobs, fronts.tolist(), strict=False)
                if at == front
            ],
            prompt_logprobs=[
                entry for entry in batch.prompt_logprobs if owner.get(entry[0]) == front
            ],
            pooled=[entry for entry in batch.pooled if owner.get(entry[0]) == front],
            captured=[entry for entry in batch.captured if owner.get(entry[0]) == front],
            cached=[entry for entry in batch.cached if owner.get(entry[0]) == front],
            finished=[end for end in batch.finished if owner.get(end.id) == front],
        )
        for front in sorted(present - {-1})
    }


def main() -> int:
    """Runs the process; 2 if it cannot start."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--spec", required=True)
    parser.add_argument("--socket", required=True)
    parser.add_argument("--status-fd", type=int, required=True)
    parser.add_argument("--parent", type=int)
    parser.add_argument("--log-level", default="info")
    parser.add_argument("--paused", default="")
    parser.add_argument("--asleep", action="store_true")
    given = parser.parse_args()
    tie_to_parent(given.parent)
    faulthandler.enable()
    logs.configure("core", given.log_level)
    status = socket.socket(fileno=given.status_fd)
    try:
        rest = Report(paused=given.paused, asleep=given.asleep)
        loop = _start(given.spec, given.socket, status, rest)
    except StartError as error:
        report(status, Report(error=error.message))
        return 2
    try:
        loop.run()
    except Exception as error:
        log.critical("the engine loop failed: %s", error, exc_info=error)
        os._exit(FAILED_EXIT)
    return 0


def _start(spec_path: str, socket_path: str, status: socket.socket, rest: Report) -> CoreLoop:
    parts = {"process": process_age_s()}
    began = time.monotonic()
    try:
        spec = msgspec.json.decode(Path(spec_path).read_bytes(), type=EngineSpec)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"the engine's specification cannot be read: {error}") from None
    source = Weights(spec, Path(spec_path))
    executor = AbsentExecutor(source.resting()) if rest.asleep else make_executor(spec)
    keep_to(spec.device.other_cpus)  # the loop leaves the kernels' cores alone
    parts |= executor.facts.start_s
    parts["imports"] = time.monotonic() - began - sum(executor.facts.start_s.values())
    core = EngineCore(spec, executor, gates=gates_of(spec), source=source)
    if rest.paused:  # before it died; who paused it has not resumed it
        core.control.begin_paused(rest.paused)
    if rest.asleep:
        core.swap.begin_asleep()
    fronts = Fronts(socket_path, core.hello(), status)
    facts = executor.facts
    memory = {
        "weight_bytes": facts.weight_bytes,
        "kv_bytes": facts.kv_bytes,
        "kv_blocks": facts.num_blocks,
        "kv_tokens": facts.num_blocks * facts.block_tokens,
    }
    report(status, Report(ready=True, memory=memory, start_s=parts, decisions=facts.decisions))
    return CoreLoop(core, fronts, Watchdog(spec.scheduler.step_timeout_s, status))


class Weights:
    """Implements `core.ports.ExecutorSource`: executors over other weights of the model the engine was started with.

    What was made last is written to the spec, so that a core that is started anew after a crash begins with it; what
    rests is written beside it, so that one that died asleep is replaced without loading what it had given back.
    """

    def __init__(self, spec: EngineSpec, spec_path: Path) -> None:
        self._spec = spec
        self._spec_path = spec_path

    def check(self, model: str) -> None:
        """See ExecutorSource."""
        self._for(model)

    def make(self, model: str) -> Executor:
        """See ExecutorSource."""
        spec = self._for(model)
        executor = make_executor(spec)
        if spec is not self._spec:
            self._spec = spec
            self._write(self._spec_path, spec)
        return executor

    def rests(self, facts: WorkerFacts) -> None:
        """See ExecutorSource."""
        self._write(self._facts_path(), facts)

    def resting(self) -> WorkerFacts:
        """What rested last."""
        return msgspec.json.decode(self._facts_path().read_bytes(), type=WorkerFacts)

    def _facts_path(self) -> Path:
        return self._spec_path.with_suffix(".facts")

    def _write(self, path: Path, what: msgspec.Struct) -> None:
        draft = path.with_suffix(f".{os.getpid()}")
        draft.write_bytes(msgspec.json.encode(what))
        draft.replace(path)

    def _for(self, model: str) -> EngineSpec:
        if not model:
            return self._spec
        given = self._spec.model
        if given.format == "dummy":
            raise ConfigError("--load-format dummy: there are no weights to reload", field="model")
        facts = read_model_facts(locate(ModelOptions(model=model)), family=given.family)
        config = facts.config
        differs = [name for name in _SAME if config.get(name) != given.config.get(name)]
        if differs or facts.logits_width != given.logits_width:
            named = differs[0] if differs else "vocab_size"
            raise ConfigError(
                f"model: {named} is {config.get(named)!r} there and {given.config.get(named)!r} here; "
                "only weights of the same architecture and sizes can be swapped in",
                field="model",
            )
        swapped = msgspec.structs.replace(
            given, path=facts.path, format=facts.format, config=facts.config
        )
        return msgspec.structs.replace(self._spec, model=swapped)


_SAME = (
    *("architectures", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "eos_token_id"),
)


def gates_of(spec: EngineSpec) -> list[Gate]:
    """The gates an engine has. Nothing is loaded before a request needs it."""
    if spec.grammar is None:
        return []
    load = partial(vocabulary_of, spec.grammar.tokenizer_path, spec.model)
    encoder = partial(encoder_of, spec.grammar.tokenizer_path)
    return [GrammarGate(load, backend=spec.grammar.backend, encoder=encoder)]


if __name__ == "__main__":
    raise SystemExit(main())
