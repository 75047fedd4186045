"""`headrace bench serve|latency|throughput|startup`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from headrace.base.config.options import CommandLine
from headrace.base.config.tree import Options
from headrace.base.errors import ConfigError
from headrace.bench.report import emit, versions

ENGINE_GROUPS = ("model", "kv", "scheduler", "device")
ABOUT = {
    "serve": "Load on any OpenAI-compatible server, with a ledger.",
    "latency": "One batch at a time: prefill rate, decode step, start-up.",
    "throughput": "Everything queued at once: tokens and requests per second.",
    "startup": "A fresh server each time; all options go to `headrace serve`.",
}


MOST_STEP_TOKENS = 16384


def main(argv: Sequence[str]) -> int:
    """Runs one benchmark and prints its result."""
    kinds = {"serve": _serve, "latency": _latency, "throughput": _throughput, "startup": _startup}
    if argv and argv[0] in ("-h", "--help"):
        print(_usage())
        return 0
    if not argv or argv[0] not in kinds:
        raise ConfigError(f"headrace bench: name one of {', '.join(kinds)}")
    return kinds[argv[0]](list(argv[1:]))


def _usage() -> str:
    lines = [f"  {name:12} {text}" for name, text in ABOUT.items()]
    end = "headrace bench KIND --help shows the options of each."
    return "\n".join(["usage: headrace bench KIND [options]", "", *lines, "", end])


def _add(line: CommandLine, flag: str, kind: Any, default: Any, text: str) -> None:
    shown = text if default is None else f"{text} [{default}]"
    line.parser.add_argument(flag, type=kind, default=default, help=shown)


def _engine(options: Options) -> tuple[Any, dict[str, Any]]:
    """The offline engine of the options, and what its result says about it."""
    begin = time.perf_counter()
    from headrace.bench.offline import OfflineEngine
    from headrace.launch.facts import resolve_options

    resolved = resolve_options(options)
    engine = OfflineEngine(resolved)
    spec = resolved.engine
    return engine, {
        "model": spec.model.name,
        "family": spec.model.family,
        "dtype": spec.model.dtype,
        "device": spec.device.device,
        "threads": spec.device.threads,
        "start_s": time.perf_counter() - begin,
        "versions": versions(),
    }


def _engine_line(kind: str) -> CommandLine:
    line = CommandLine(f"headrace bench {kind}", ABOUT[kind], groups=ENGINE_GROUPS)
    line.parser.add_argument("--json", action="store_true", help="print one JSON object")
    _add(line, "--input-len", int, 128, "prompt tokens")
    _add(line, "--output-len", int, 128, "generated tokens")
    return line


def _without_cache(argv: list[str]) -> list[str]:
    return argv if "--prefix-caching" in argv else [*argv, "--no-prefix-caching"]


def _latency(argv: list[str]) -> int:
    line = _engine_line("latency")
    _add(line, "--batch-size", int, 1, "requests in the batch")
    _add(line, "--iterations", int, 5, "counted repetitions")
    _add(line, "--warmup", int, 1, "repetitions before counting")
    own, options = line.parse(_without_cache(argv))
    if own.batch_size < 1 or own.input_len < 1 or own.output_len < 2 or own.iterations < 1:
        raise ConfigError(
            "bench latency: --batch-size, --input-len and --iterations must be at least 1, --output-len at least 2"
        )
    from headrace.bench.latency import latency

    engine, facts = _engine(_in_one_step(options, own.batch_size, own.input_len))
    try:
        result = latency(
            engine,
            batch_size=own.batch_size,
            input_len=own.input_len,
            output_len=own.output_len,
            iterations=own.iterations,
            warmup=own.warmup,
        )
    finally:
        engine.close()
    emit({**facts, **result}, as_json=own.json, title="bench latency")
    return 0


def _in_one_step(options: Options, batch_size: int, input_len: int) -> Options:
    """Room for the whole batch's prefill in one step, unless the user bounds it: then all requests decode together."""
    given = options.scheduler
    tokens = min(batch_size * input_len, MOST_STEP_TOKENS)
    return msgspec.structs.replace(
        options,
        scheduler=msgspec.structs.replace(
            given,
            max_running=batch_size if given.max_running == "auto" else given.max_running,
            max_step_tokens=max(tokens, batch_size)
            if given.max_step_tokens == "auto"
            else given.max_step_tokens,
        ),
    )


def _throughput(argv: list[str]) -> int:
    line = _engine_line("throughput")
    _add(line, "--num-requests", int, 64, "requests")
    _add(line, "--spread", float, 0.5, "lengths vary by this share around their means")
    _add(line, "--temperature", float, 0.0, "sampling temperature")
    own, options = line.parse(_without_cache(argv))
    from headrace.bench.throughput import throughput

    engine, facts = _engine(options)
    try:
        result = throughput(
            engine,
            num_requests=own.num_requests,
            input_len=own.input_len,
            output_len=own.output_len,
            spread=own.spread,
            temperature=own.temperature,
        )
    finally:
        engine.close()
    emit({**facts, **result}, as_json=own.json, title="bench throughput")
    return 0


def _startup(argv: list[str]) -> int:
    line = CommandLine("headrace bench startup", ABOUT["startup"], groups=())
    line.parser.add_argument("--json", action="store_true", help="print one JSON object")
    _add(line, "--iterations", int, 3, "starts")
    own, rest = line.parser.parse_known_args(argv)
    if own.help is not None:
        print(line.help_text(own.help))
        return 0
    from headrace.bench.startup import startup

    result = startup(rest, iterations=own.iterations)
    emit(
        {"arguments": " ".join(rest), **result, "versions": versions()},
        as_json=own.json,
        title="bench startup",
    )
    return 0


def _serve(argv: list[str]) -> int:
    line = CommandLine("headrace bench serve", ABOUT["serve"], groups=())
    line.parser.add_argument("--json", action="store_true", help="print one JSON object")
    line.parser.add_argument(
        "--plot", help="write the latency distributions to this PNG or SVG file"
    )
    line.parser.add_argument(
        "--no-ignore-eos", action="store_true", help="let answers end by themselves"
    )
    _add(line, "--url", str, "http://127.0.0.1:8000", "address of the server")
    _add(line, "--model", str, None, "model name; by default the first the server lists")
    _add(line, "--api-key", str, None, "key")
    _add(line, "--endpoint", str, "chat", "chat or completions")
    _add(line, "--num-requests", int, 100, "requests in all")
    _add(line, "--concurrency", int, 8, "users that ask one after another (closed loop)")
    _add(
        line,
        "--rate",
        float,
        None,
        "arrivals per second, Poisson (open loop); replaces --concurrency",
    )
    _add(line, "--input-words", int, 64, "random words in a prompt")
    _add(line, "--shared-words", int, 0, "words all prompts begin with")
    _add(line, "--token-ids", int, 0, "prompts of random token ids below this, not of words")
    _add(line, "--spread", float, 0.0, "lengths of such prompts vary by this share")
    _add(line, "--output-len", int, 64, "max_tokens")
    _add(line, "--temperature", float, 0.0, "sampling temperature")
    _add(line, "--timeout", float, 600.0, "seconds after which a silent request counts as lost")
    own, _ = line.parse(argv)
    if own.endpoint not in ("chat", "completions"):
        raise ConfigError(f"--endpoint: {own.endpoint!r} (one of: chat, completions)")
    from headrace.bench.serve import Load, run_load

    load = Load(
        base_url=own.url, model=own.model, api_key=own.api_key, endpoint=own.endpoint,
        num_requests=own.num_requests, concurrency=own.concurrency, rate=own.rate,
        input_words=own.input_words, token_ids=own.token_ids, spread=own.spread,
        shared_words=own.shared_words, output_tokens=own.output_len,
        temperature=own.temperature, timeout_s=own.timeout, ignore_eos=not own.no_ignore_eos,
    )  # fmt: skip
    result = run_load(load, plot=Path(own.plot) if own.plot else None)
    emit(result, as_json=own.json, title=f"bench serve {own.url}")
    return 0 if result["ledger"]["lost"] == 0 else 1
