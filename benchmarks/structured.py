"""What structured output costs: tokens per second of 64 streams with a grammar each, against the same streams without.

    python -m benchmarks.structured [--streams N] [--tokens N] [--rounds N] [--write]

The core runs in this process on an executor of its own: the bundled model on this machine's CPU, and the null executor
with a simulated step and a vocabulary of 4,096 or of 150,000 tokens. Every stream has a schema of its own (nothing is
shared but the compiler), white space is free, every answer is as long as the free one. Free runs, runs in which every
token is sampled under its mask, and runs that jump over forced tokens take turns. The machine is shared: of the rounds
the fastest of each kind counts, which others disturbed least; processor time per token (all threads) is the median over
the rounds, and is not told for the null executor, whose own it is.

Two more tables: what one mask takes on one thread, by kinds of text, and the steps that jumping saves.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
import numpy as np

from headrace.back.executor.choose import make_executor
from headrace.base.config.resolved import DeviceSpec, EngineSpec
from headrace.base.config.tree import Options
from headrace.base.wire.grammar import Constraint, Json, Vocabulary, pack
from headrace.base.wire.request import EngineRequest, RowSampling, StopRules
from headrace.core.core import EngineCore
from headrace.core.grammar.backends.guidance import GuidanceBackend
from headrace.core.grammar.hook import GrammarHook
from headrace.launch.facts import resolve_options
from headrace.launch.vocabulary import encoder_of, vocabulary_of

PROMPT_TOKENS = 8
FIRST_PASS = 1 << 40
LARGE = 150_000
PAGE = Path(__file__).with_suffix(".md")
WORDS = [
    "name",
    "age",
    "city",
    "color",
    "animal",
    "fruit",
    "job",
    "size",
    "count",
    "active",
    "day",
    "language",
    "room",
    "level",
    "score",
    "owner",
    "key",
]


def schema(random_: random.Random) -> str:
    """A list of objects with texts, numbers, an enumeration and a nested list, long enough for any answer."""
    first, second, third, fourth = random_.sample(WORDS, 4)
    item = {
        "type": "object",
        "properties": {
            first: {"type": "string", "minLength": 8},
            second: {"type": "integer"},
            third: {"enum": random_.sample(WORDS, 5)},
            fourth: {"type": "array", "items": {"type": "number"}, "minItems": 3, "maxItems": 9},
        },
        "required": [first, second, third, fourth],
        "additionalProperties": False,
    }
    return json.dumps({"type": "array", "items": item, "minItems": 1000})


def requests(
    base: int, *, streams: int, tokens: int, width: int, constrained: bool
) -> list[EngineRequest]:
    """One request per stream, all of the same length."""
    random_ = random.Random(base)
    prompts = np.random.default_rng(base)
    made = []
    for i in range(streams):
        hooks = {}
        if constrained:
            hooks["grammar"] = pack(Constraint(grammar=Json(schema(random_))))
        made.append(
            EngineRequest(
                id=base + i,
                prompt=prompts.integers(3, width, PROMPT_TOKENS, dtype=np.int32).tobytes(),
                stop=StopRules(max_tokens=tokens),
                sampling=RowSampling(temperature=0.8, seed=i),
                hook_payloads=hooks,
            )
        )
    return made


def run_out(core: EngineCore, wanted: list[EngineRequest]) -> None:
    """Runs these to their end."""
    for request in wanted:
        core.add(request)
    left = {request.id for request in wanted}
    while left:
        if not core.has_work:
            time.sleep(core.idle_s or 0.0)
            continue
        output = core.step(wait=True)
        left -= {end.id for end in output.tokens.finished} if output.tokens else set()


def rate(core: EngineCore, wanted: list[EngineRequest]) -> tuple[float, float]:
    """Decoded tokens per second, and microseconds of processor time for each, from the first step in which every stream
    decodes to the end of the first one."""
    first = [
        msgspec.structs.replace(one, id=one.id + FIRST_PASS, stop=StopRules(max_tokens=1))
        for one in wanted
    ]
    run_out(core, first)  # compiles the grammars
    for request in wanted:
        core.add(request)
    ids, ended = {request.id for request in wanted}, False
    begun, spent_before, count = 0.0, 0.0, 0
    while not ended:
        if not core.has_work:
            time.sleep(core.idle_s or 0.0)
            continue
        output = core.step(wait=True)
        if output.tokens is None:
            continue
        ended = any(end.id in ids for end in output.tokens.finished)
        assert not any(end.error for end in output.tokens.finished), output.tokens.finished
        if begun:
            count += len(output.tokens.tokens)
        elif len(output.tokens.tokens) == len(wanted):
            begun, spent_before = time.perf_counter(), time.process_time()
    elapsed, spent = time.perf_counter() - begun, time.process_time() - spent_before
    core.abort(ids)
    while core.num_in_flight:
        core.step(wait=True)
    return count / elapsed, 1e6 * spent / count


def measure(
    spec: EngineSpec, load: Callable[[], Vocabulary], *, streams: int, tokens: int, rounds: int
) -> tuple[float, float, float, float]:
    """Tokens per second free, constrained and with jumps (fastest rounds), and the cost of masks in processor time in
    per cent (median)."""
    assert spec.grammar is not None
    encoder = partial(encoder_of, spec.grammar.tokenizer_path)
    cores = [
        EngineCore(
            spec,
            make_executor(spec),
            hooks=[GrammarHook(load, encoder=encoder, jump_forward=jump_forward)],
        )
        for jump_forward in (False, True)
    ]
    kinds = ((cores[0], False), (cores[0], True), (cores[1], True))
    pairs = []
    for turn in range(rounds + 1):
        found = []
        for kind, (core, constrained) in enumerate(kinds):
            base = 1 + 3 * streams * turn + streams * kind
            made = requests(
                base,
                streams=streams,
                tokens=tokens,
                width=spec.model.logits_width,
                constrained=constrained,
            )
            found.append(rate(core, made))
        shown = "   ".join(f"{tokens:8.0f} tok/s {cpu:6.0f} us" for tokens, cpu in found)
        print(f"  {shown}", file=sys.stderr, flush=True)
        pairs += [found] if turn else []  # the first round loads and compiles
    for core in cores:
        core.close()
    free, held, jumped = ([pair[i] for pair in pairs] for i in range(3))
    fastest = [max(one[0] for one in side) for side in (free, held, jumped)]
    processor = statistics.median(
        100.0 * (h[1] / f[1] - 1) for f, h in zip(free, held, strict=True)
    )
    return fastest[0], fastest[1], fastest[2], processor


TEXTS = {
    "a text of any length": {"type": "string"},
    "a text of 3 to 40 characters": {"type": "string", "minLength": 3, "maxLength": 40},
    "a text under a pattern": {"type": "string", "pattern": "^[a-z ]{4,30}$"},
    "a number": {"type": "integer"},
}


def mask_times(vocabulary: Vocabulary) -> list[str]:
    """Microseconds of processor time for one mask on one thread: rows of a table."""
    backend = GuidanceBackend(vocabulary)
    ids = {piece: i for i, piece in enumerate(vocabulary.pieces)}
    masks = np.zeros((1, -(-vocabulary.width // 32)), np.int32)
    rows = []
    for name, kind in TEXTS.items():
        number = kind["type"] == "integer"
        begin, letter = ([], b"1") if number else ([b'"'], b"a")
        times = []
        for _ in range(5):
            matcher = backend.compile(Json(json.dumps(kind)))
            for piece in (*begin, *[letter] * 10):
                began = time.thread_time()
                backend.fill([matcher], masks)
                times.append(1e6 * (time.thread_time() - began))
                assert matcher.accept(ids[piece])
        rows.append(
            f"| {name} | {len(vocabulary.pieces):,} | {statistics.median(times):.0f} | {max(times):,.0f} |"
        )
    return rows


LONG_KEYS = {
    "type": "object",
    "properties": {
        "the_name_of_the_customer": {"type": "string", "maxLength": 12},
        "the_number_of_items_ordered": {"type": "integer", "minimum": 0, "maximum": 999},
        "the_delivery_was_confirmed": {"enum": ["confirmed_by_phone", "confirmed_by_letter"]},
        "remarks_of_the_warehouse": {"type": "string", "maxLength": 20},
    },
    "required": [
        "the_name_of_the_customer",
        "the_number_of_items_ordered",
        "the_delivery_was_confirmed",
        "remarks_of_the_warehouse",
    ],
    "additionalProperties": False,
}


def steps_saved(spec: EngineSpec, load: Callable[[], Vocabulary]) -> str:
    """Tokens and steps of one answer with long keys, without jumps and with: a row of a table."""
    assert spec.grammar is not None
    encoder = partial(encoder_of, spec.grammar.tokenizer_path)
    found = []
    for jump_forward in (False, True):
        hook = GrammarHook(load, encoder=encoder, jump_forward=jump_forward)
        core = EngineCore(spec, make_executor(spec), hooks=[hook])
        request = EngineRequest(
            id=1,
            prompt=np.arange(5, 13, dtype=np.int32).tobytes(),
            stop=StopRules(max_tokens=200),
            sampling=RowSampling(temperature=0.0),
            hook_payloads={"grammar": pack(Constraint(grammar=Json(json.dumps(LONG_KEYS))))},
        )
        run_out(core, [request])
        counters = core.counters
        found.append((counters.output_tokens, counters.steps, counters.jump_forward_tokens))
        core.close()
    (tokens, before, _), (same, after, jumped) = found
    assert tokens == same, found
    share = 100.0 * (1 - after / before)
    return f"| {tokens} | {jumped} | {before} | {after} | {share:.0f} % |"


def bundled_spec(streams: int) -> EngineSpec:
    """The bundled model as `headrace serve` would run it, with room for the streams."""
    resolved = resolve_options(Options())
    scheduler = msgspec.structs.replace(resolved.engine.scheduler, max_running=streams)
    return msgspec.structs.replace(resolved.engine, scheduler=scheduler)


def null_spec(spec: EngineSpec, *, step_s: float, width: int) -> EngineSpec:
    """The same engine over the null executor."""
    config = {**spec.model.config, "null_step_s": step_s}
    model = msgspec.structs.replace(spec.model, config=config, logits_width=width)
    kv = msgspec.structs.replace(spec.kv, num_blocks=8192, memory_bytes=None)
    device = DeviceSpec(device="cpu", executor="null")
    return msgspec.structs.replace(spec, model=model, kv=kv, device=device)


def enlarged(vocabulary: Vocabulary, size: int) -> Vocabulary:
    """A vocabulary of `size` tokens: the given one, and made-up words of its letters."""
    random_ = random.Random(0)
    pieces = list(vocabulary.pieces)
    known = set(pieces)
    plain = [p for i, p in enumerate(pieces) if p and i not in set(vocabulary.special_ids)]
    while len(pieces) < size:
        word = random_.choice(plain) + random_.choice(plain)
        if word not in known and len(word) < 24:
            known.add(word)
            pieces.append(word)
    return msgspec.structs.replace(vocabulary, pieces=pieces, width=size)


def table(streams: int, tokens: int, rounds: int) -> str:
    """The markdown table."""
    spec = bundled_spec(streams)
    assert spec.grammar is not None
    small = vocabulary_of(spec.grammar.tokenizer_path, spec.model)
    large = enlarged(small, LARGE)
    cases: list[tuple[str, EngineSpec, Vocabulary]] = [
        ("bundled model, CPU", spec, small),
        ("null, steps of 10 ms, 4,096 tokens", null_spec(spec, step_s=0.01, width=4096), small),
        ("null, steps of 10 ms, 150,000 tokens", null_spec(spec, step_s=0.01, width=LARGE), large),
        ("null, steps of 25 ms, 150,000 tokens", null_spec(spec, step_s=0.025, width=LARGE), large),
    ]
    lines = [
        "| executor | free tok/s | with grammars tok/s | cost by the clock | in processor time | with jumps tok/s |",
        "|---|---|---|---|---|---|",
    ]
    for name, one, vocabulary in cases:
        print(name, file=sys.stderr)
        free, held, jumped, processor = measure(
            one, lambda v=vocabulary: v, streams=streams, tokens=tokens, rounds=rounds
        )
        idle = one.device.executor == "null"  # its processor time is the fake's own
        cost = "-" if idle else f"{processor:.1f} %"
        clock = 100.0 * (1 - held / free)
        lines.append(
            f"| {name} | {free:,.0f} | {held:,.0f} | {clock:.1f} % | {cost} | {jumped:,.0f} |"
        )
    lines += [
        "\nOne mask on one thread, microseconds of processor time:\n",
        "| what comes | tokens | median | largest |",
        "|---|---|---|---|",
        *(row for vocabulary in (small, large) for row in mask_times(vocabulary)),
        "\nOne JSON object with four long keys (bundled model, temperature 0):\n",
        "| tokens | of them forced | steps token by token | steps with jumps | saved |",
        "|---|---|---|---|---|",
        steps_saved(spec, lambda: small),
    ]
    return "\n".join(lines)


def main() -> None:
    """Prints the table, or writes it beside this file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=150)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    made = table(given.streams, given.tokens, given.rounds)
    print(made)
    if given.write:
        machine = (
            f"{platform.processor() or platform.machine()}, Python {platform.python_version()}"
        )
        head = (
            f"# Structured output\n\n`python -m benchmarks.structured --write` on {machine}. "
            f"{given.streams} streams, {given.tokens} tokens each, a schema of its own for every stream; "
            f"the fastest of {given.rounds} rounds each, in turn. The target is a cost of at most 5 %. "
            f"Load of the machine while it ran (processes that want one of its {os.cpu_count()} cores): "
            f"{os.getloadavg()[1]:.0f}.\n\n"
        )
        PAGE.write_text(head + made + "\n")


if __name__ == "__main__":
    main()
