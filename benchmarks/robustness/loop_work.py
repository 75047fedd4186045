"""What requests with large bodies cost the event loop's own thread, in processor time (security P9, reliability 1.17).

    python -m benchmarks.robustness.loop_work --write

The application of a server without a model runs here in one process and is called as an ASGI server calls it, a body
after the other, of every route that reads one and of the shapes that cost most: long texts, many messages, many ids,
many tools, large schemas, many entries. While one callback of the loop runs, no stream of the process goes on; so the
greatest one of each request is told, and where it was. Processor time of the thread does not depend on what else the
machine does.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import sys
import time
from asyncio.events import Handle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.robustness.serving import DEMO
from headrace.base.config.tree import ModelOptions, Options
from headrace.front.server.render_server import text_services
from headrace.front.server.table import make_app
from headrace.launch.facts import resolve_text

BOUND_MS = 100.0
NO_MODEL = 501


def shapes(size: int) -> Iterator[tuple[str, str, Any]]:
    """Name, path and document of every case, of about `size` bytes each."""
    say = [{"role": "user", "content": "x"}]
    words, ids = "word " * (size // 5), [7] * min(size // 3, 2_000_000)
    text = [{"role": "user", "content": words}]
    chat = "/v1/chat/completions"
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    tools = [{**tool, "function": {**tool["function"], "name": f"f{i}"}} for i in range(40_000)]
    yield "text", chat, {"messages": text}
    yield "text, truncated", chat, {"messages": text, "truncate_prompt_tokens": 8}
    yield "messages", chat, {"messages": say * min(size // 34, 120_000)}
    parts = [{"type": "text", "text": "x"}] * min(size // 30, 120_000)
    yield "parts", chat, {"messages": [{"role": "user", "content": parts}]}
    yield "tools", chat, {"messages": say, "tools": tools[: size // 85]}
    yield "forced tools", chat, {
        "messages": say, "tools": tools[: size // 85], "tool_choice": "required",
    }  # fmt: skip
    enum = {"enum": [f"value {i}" for i in range(size // 16)]}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": enum}}
    yield "enum", chat, {"messages": say, "response_format": form}
    fields = {f"field{i}": {"type": "string"} for i in range(min(size // 34, 100_000))}
    wide = {"type": "object", "properties": fields, "required": list(fields)}
    yield "properties", chat, {"messages": say, "structured_outputs": {"json": wide}}
    yield "choices", chat, {
        "messages": say, "structured_outputs": {"choice": [f"c{i}" for i in range(size // 9)]},
    }  # fmt: skip
    yield "regex", chat, {"messages": say, "structured_outputs": {"regex": "(a|b)" * (size // 5)}}
    grammar = "root ::= " + "| ".join(['"a"'] * (size // 5))
    yield "grammar", chat, {"messages": say, "structured_outputs": {"grammar": grammar}}
    yield "bias", chat, {"messages": say, "logit_bias": {str(i): 1 for i in range(size // 12)}}
    yield "stops", chat, {"messages": say, "stop": [f"s{i}" for i in range(size // 12)]}
    yield "metadata", chat, {
        "messages": say, "metadata": {f"k{i}": "v" for i in range(size // 12)},
    }  # fmt: skip
    yield "template arguments", chat, {
        "messages": say, "chat_template_kwargs": {f"k{i}": i for i in range(size // 16)},
    }  # fmt: skip
    yield "unknown field", chat, {"messages": say, "other": ids}
    yield "prediction", chat, {
        "messages": say, "prediction": {"type": "content", "content": words},
    }  # fmt: skip
    yield "prompt", "/v1/completions", {"prompt": words}
    yield "prompt ids", "/v1/completions", {"prompt": ids}
    yield "prompt ids, truncated", "/v1/completions", {"prompt": ids, "truncate_prompt_tokens": 8}
    yield "prompts", "/v1/completions", {"prompt": ["x"] * min(size // 4, 100_000)}
    yield "tokenize", "/tokenize", {"prompt": words}
    yield "tokenize messages", "/tokenize", {"messages": text}
    yield "detokenize", "/detokenize", {"tokens": ids}
    yield "generate", "/inference/v1/generate", {"token_ids": ids, "sampling_params": {}}
    yield "render", chat + "/render", {"messages": text}
    yield "derender", chat + "/derender", {
        "request": {"messages": say}, "response": {"choices": [{"index": 0, "token_ids": ids}]},
    }  # fmt: skip
    yield "messages api", "/v1/messages", {"messages": text, "max_tokens": 1}
    yield "messages api, many", "/v1/messages", {
        "messages": [*say, {"role": "assistant", "content": "y"}] * min(size // 70, 60_000),
        "max_tokens": 1,
    }  # fmt: skip
    yield "count_tokens", "/v1/messages/count_tokens", {"messages": text}
    yield "responses", "/v1/responses", {"input": words, "store": False}
    items = [{"type": "message", **say[0]}] * min(size // 50, 120_000)
    yield "responses items", "/v1/responses", {"input": items, "store": False}
    yield "cohere", "/v2/chat", {"model": "demo", "messages": text}
    yield "embed", "/v1/embeddings", {"input": words}
    yield "embed many", "/v1/embeddings", {"input": ["x"] * min(size // 4, 100_000)}
    yield "rerank", "/rerank", {"query": "x", "documents": ["x y"] * min(size // 6, 100_000)}
    yield "score", "/score", {"text_1": "x", "text_2": ["x y"] * min(size // 6, 100_000)}


class LoopClock:
    """The greatest callback of the loop since `reset`, in processor seconds of its thread."""

    def __init__(self) -> None:
        self.greatest, self.total, self.where = 0.0, 0.0, ""
        run, clock = Handle._run, self

        def timed(handle: Handle) -> None:
            began = time.thread_time()
            run(handle)
            clock.note(time.thread_time() - began, handle)

        Handle._run = timed

    def note(self, seconds: float, handle: Handle) -> None:
        self.total += seconds
        if seconds > self.greatest:
            self.greatest, self.where = seconds, _name(handle)

    def reset(self) -> None:
        self.greatest, self.total, self.where = 0.0, 0.0, ""


def _name(handle: Handle) -> str:
    callback: Any = handle._callback
    task = getattr(callback, "__self__", None)
    if isinstance(task, asyncio.Task):
        return f"task {getattr(task.get_coro(), '__qualname__', '')}"
    return getattr(callback, "__qualname__", repr(callback)[:60])


def messages(body: bytes) -> list[dict[str, Any]]:
    """The body as a server hands it on, last piece first."""
    return [
        {"type": "http.request", "body": body[at : at + 65536], "more_body": at + 65536 < len(body)}
        for at in range(0, len(body), 65536)
    ][::-1]


async def call(app: Any, path: str, sent: list[dict[str, Any]], length: int) -> int:
    """One request; the status of its answer."""
    status = 0
    never = asyncio.Event()

    async def receive() -> Any:
        if sent:
            return sent.pop()
        await never.wait()

    async def send(message: Any) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]

    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST",
        "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "",
        "scheme": "http", "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 8000), "state": {},
        "headers": [
            (b"host", b"127.0.0.1"), (b"content-type", b"application/json"),
            (b"content-length", str(length).encode()),
        ],
    }  # fmt: skip
    await app(scope, receive, send)
    return status


async def run(given: argparse.Namespace) -> list[dict[str, Any]]:
    """A row per case."""
    text, server, _ = resolve_text(Options(model=ModelOptions(model=str(DEMO))))
    services = text_services(text, server)
    app, clock, rows = make_app(services), LoopClock(), []
    gc.freeze()  # as a server does once it has started
    try:
        for name, path, document in shapes(given.mib << 20):
            if given.only and given.only not in name:
                continue
            body = json.dumps(document).encode()
            del document
            pieces = messages(body)
            await asyncio.sleep(0)  # what stands above is no work of the server's
            clock.reset()
            began = time.process_time()
            status = await asyncio.create_task(call(app, path, pieces, len(body)))
            rows.append({
                "case": name, "path": path, "mib": round(len(body) / 2**20, 1), "status": status,
                "greatest_ms": round(1e3 * clock.greatest, 1), "where": clock.where,
                "loop_ms": round(1e3 * clock.total, 1),
                "process_ms": round(1e3 * (time.process_time() - began), 1),
            })  # fmt: skip
            print(json.dumps(rows[-1]), flush=True)
    finally:
        services.template.close()
        services.guest_templates.close()
    return rows


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mib", type=int, default=30)
    parser.add_argument("--only", default="")
    parser.add_argument("--write", action="store_true", help="keep the report beside this script")
    given = parser.parse_args()
    rows = asyncio.run(run(given))
    report = {
        "mib": given.mib, "bound_ms": BOUND_MS,
        "load_average": [round(x, 1) for x in os.getloadavg()], "rows": rows,
    }  # fmt: skip
    if given.write:
        Path(__file__).with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
    return (
        1
        if any(
            row["greatest_ms"] > BOUND_MS or (row["status"] >= 500 and row["status"] != NO_MODEL)
            for row in rows
        )
        else 0
    )


if __name__ == "__main__":
    sys.exit(main())
