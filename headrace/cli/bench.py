"""`headrace bench serve|sweep|latency|throughput|startup|mm-processor`."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from headrace.base.config.options import CommandLine
from headrace.base.config.tree import Options
from headrace.base.errors import ConfigError
from headrace.base.wire.request import BOUNDS
from headrace.bench.report import emit, versions
from headrace.bench.serve import LoadSpec, run_load
from headrace.bench.sweep import loads_of, parse_limits, parse_points, show_sweep, sweep

ENGINE_GROUPS = ("model", "kv", "scheduler", "device", "adapters")
ABOUT = {
    "serve": "Load on any OpenAI-compatible server, with a ledger.",
    "sweep": "Several such loads, by concurrency or rate, in one table.",
    "latency": "One batch at a time: prefill rate, decode step, start-up.",
    "throughput": "Everything queued at once: tokens and requests per second.",
    "startup": "A fresh server each time; all options go to `headrace serve`.",
    "mm-processor": "Images on their way to the engine: reading, processing, placeholders.",
}
MOST_STEP_TOKENS = 16384
MAX_LENGTH = 1 << 24
MAX_REQUESTS = 10_000_000
MAX_USERS = 65_536
MAX_RATE = 100_000.0
MAX_TEMPERATURE = BOUNDS["temperature"].greatest


def main(argv: Sequence[str]) -> int:
    """Runs one benchmark and prints its result."""
    kinds = {
        "serve": _serve,
        "sweep": _sweep,
        "latency": _latency,
        "throughput": _throughput,
        "startup": _startup,
        "mm-processor": _mm_processor,
    }
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
    line.add_number("--input-len", "prompt tokens", default=128, least=1, greatest=MAX_LENGTH)
    least = 2 if kind == "latency" else 1  # a decode step lies between two tokens
    line.add_number(
        "--output-len", "generated tokens", default=128, least=least, greatest=MAX_LENGTH
    )
    return line


def _add_temperature(line: CommandLine) -> None:
    line.add_number(
        "--temperature",
        "sampling temperature",
        default=0.0,
        least=0,
        greatest=MAX_TEMPERATURE,
        whole=False,
    )


def _add_spread(line: CommandLine, help_text: str, default: float) -> None:
    line.add_number("--spread", help_text, default=default, least=0, greatest=1, whole=False)


def _without_cache(argv: list[str]) -> list[str]:
    return argv if "--prefix-caching" in argv else [*argv, "--no-prefix-caching"]


def _latency(argv: list[str]) -> int:
    line = _engine_line("latency")
    line.add_number("--batch-size", "requests in the batch", default=1, least=1, greatest=MAX_USERS)
    line.add_number("--iterations", "counted repetitions", default=5, least=1, greatest=10_000)
    line.add_number("--warmup", "repetitions before counting", default=1, least=0, greatest=10_000)
    own, options = line.parse(_without_cache(argv))
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
    """Room for the whole batch's prefill in one step, unless the user bounds it: then all requests
    decode together."""
    requested = options.scheduler
    tokens = min(batch_size * input_len, MOST_STEP_TOKENS)
    return msgspec.structs.replace(
        options,
        scheduler=msgspec.structs.replace(
            requested,
            max_running=batch_size if requested.max_running == "auto" else requested.max_running,
            max_step_tokens=max(tokens, batch_size)
            if requested.max_step_tokens == "auto"
            else requested.max_step_tokens,
        ),
    )


def _throughput(argv: list[str]) -> int:
    line = _engine_line("throughput")
    line.add_number("--num-requests", "requests", default=64, least=1, greatest=MAX_REQUESTS)
    _add_spread(line, "lengths vary by this share around their means", 0.5)
    _add_temperature(line)
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
    line.add_number("--iterations", "starts", default=3, least=1, greatest=10_000)
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


def _mm_processor(argv: list[str]) -> int:
    about = ABOUT["mm-processor"]
    line = CommandLine("headrace bench mm-processor", about, groups=("model",))
    line.parser.add_argument("--json", action="store_true", help="print one JSON object")
    for flag, help_text, default, least, greatest in (
        ("--num-prompts", "chats", 32, 1, MAX_REQUESTS),
        ("--images-per-prompt", "images in each", 1, 1, 64),
        ("--width", "pixels", 1024, 8, 16_384),
        ("--height", "pixels", 768, 8, 16_384),
        ("--concurrency", "chats at a time", 1, 1, MAX_USERS),
        ("--warmup", "chats before counting", 1, 0, 10_000),
    ):
        line.add_number(flag, help_text, default=default, least=least, greatest=greatest)
    own, options = line.parse(argv)
    from headrace.bench.mm_processor import mm_processor
    from headrace.launch.facts import resolve_text

    text, _, _ = resolve_text(options)
    result = asyncio.run(
        mm_processor(
            text,
            num_prompts=own.num_prompts,
            images=own.images_per_prompt,
            size=(own.width, own.height),
            concurrency=own.concurrency,
            warmup=own.warmup,
        )
    )
    facts = {"model": text.model_names[0], **result, "versions": versions()}
    emit(facts, as_json=own.json, title="bench mm-processor")
    return 0


def _load_line(kind: str) -> CommandLine:
    """The flags that `bench serve` and `bench sweep` share."""
    line = CommandLine(f"headrace bench {kind}", ABOUT[kind], groups=())
    line.parser.add_argument("--json", action="store_true", help="print one JSON object")
    line.parser.add_argument(
        "--goodput",
        nargs="+",
        metavar="NAME:MS",
        help="also count the requests within these limits: ttft:500 tpot:50 e2el:9000 (ms)",
    )
    line.parser.add_argument(
        "--no-ignore-eos", action="store_true", help="let answers end by themselves"
    )
    for flag, default, help_text in (
        ("--url", "http://127.0.0.1:8000", "address of the server"),
        ("--model", None, "model name; by default the first the server lists"),
        ("--api-key", None, "key"),
        ("--endpoint", "chat", "chat or completions"),
    ):
        shown = help_text if default is None else f"{help_text} [{default}]"
        line.parser.add_argument(flag, default=default, help=shown)
    for flag, default, least, help_text in (
        ("--input-words", 64, 0, "random words in a prompt"),
        ("--shared-words", 0, 0, "words all prompts begin with"),
        ("--token-ids", 0, 0, "prompts of random token ids below this, not of words"),
        ("--output-len", 64, 1, "max_tokens"),
    ):
        line.add_number(flag, help_text, default=default, least=least, greatest=MAX_LENGTH)
    _add_spread(line, "lengths of such prompts vary by this share", 0.0)
    _add_temperature(line)
    line.add_number(
        "--timeout",
        "seconds after which a silent request counts as lost",
        default=600.0,
        least=0,
        greatest=1e6,
        whole=False,
        above=True,
    )
    return line


def _load_of(own: Any) -> LoadSpec:
    """The load that the shared flags describe."""
    if own.endpoint not in ("chat", "completions"):
        raise ConfigError(
            f"--endpoint: {own.endpoint!r:.80} (one of: chat, completions)", field="--endpoint"
        )
    return LoadSpec(
        base_url=own.url,
        model=own.model,
        api_key=own.api_key,
        endpoint=own.endpoint,
        input_words=own.input_words,
        token_ids=own.token_ids,
        spread=own.spread,
        shared_words=own.shared_words,
        output_tokens=own.output_len,
        temperature=own.temperature,
        timeout_s=own.timeout,
        ignore_eos=not own.no_ignore_eos,
        limits=parse_limits(own.goodput),
    )


def _serve(argv: list[str]) -> int:
    line = _load_line("serve")
    line.parser.add_argument(
        "--plot", help="write the latency distributions to this PNG or SVG file"
    )
    line.add_number(
        "--num-requests", "requests in all", default=100, least=1, greatest=MAX_REQUESTS
    )
    line.add_number(
        "--concurrency",
        "users that ask one after another (closed loop)",
        default=8,
        least=1,
        greatest=MAX_USERS,
    )
    line.add_number(
        "--rate",
        "arrivals per second, Poisson (open loop); replaces --concurrency",
        default=None,
        least=0,
        greatest=MAX_RATE,
        whole=False,
        above=True,
    )
    own, _ = line.parse(argv)
    load = msgspec.structs.replace(
        _load_of(own),
        num_requests=own.num_requests,
        concurrency=own.concurrency,
        rate=own.rate,
    )
    result = run_load(load, plot=Path(own.plot) if own.plot else None)
    emit(result, as_json=own.json, title=f"bench serve {own.url}")
    return 0 if result["ledger"]["lost"] == 0 else 1


def _sweep(argv: list[str]) -> int:
    line = _load_line("sweep")
    line.parser.add_argument(
        "--concurrency", metavar="LIST", help="numbers of users, such as 1,4,16 (closed loops)"
    )
    line.parser.add_argument(
        "--rates", metavar="LIST", help="arrivals per second, such as 0.5,1,2 (open loops)"
    )
    line.add_number(
        "--num-requests",
        "requests of each load [4 per user, or 30 s of arrivals; at least 32]",
        default=None,
        least=1,
        greatest=MAX_REQUESTS,
    )
    own, _ = line.parse(argv)
    if own.concurrency is None and own.rates is None:
        raise ConfigError("bench sweep: --concurrency 1,4,16 or --rates 0.5,1,2 is needed")
    loads = loads_of(
        _load_of(own),
        concurrency=parse_points(
            own.concurrency, flag="--concurrency", greatest=MAX_USERS, whole=True
        ),
        rates=parse_points(own.rates, flag="--rates", greatest=MAX_RATE, whole=False),
        num_requests=own.num_requests,
    )
    points = sweep(loads)
    if own.json:
        sys.stdout.write(json.dumps({"points": points}) + "\n")
    else:
        show_sweep(points, title=f"bench sweep {own.url}")
    return 0 if all(point["ledger"]["lost"] == 0 for point in points) else 1
