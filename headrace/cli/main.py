"""Entry point of `headrace COMMAND ...`. Each command is a module with `main(argv) -> int`,
imported on use.

Exit status: 0 done, 1 the work failed, 2 wrong options, checkpoint or machine, 130 interrupted.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Sequence

from headrace import __version__
from headrace.base.errors import HeadraceError, StartError
from headrace.base.gc_pause import collection_paused
from headrace.base.registry import Registry
from headrace.launch.prestart import CORE_MODULE, discard_prestarted, prestart

SUMMARIES = {
    "serve": "serve a model over HTTP (OpenAI-compatible)",
    "pull": "fetch a model of a hub into the local cache",
    "list": "the models in the local cache",
    "rm": "remove models from the local cache",
    "run": "answer a prompt or chat; a model that is not there is fetched",
    "ps": "the models of a running server: which are loaded, and until when",
    "stop": "have a running server unload a model",
    "render": "tokenize and render prompts over HTTP and gRPC, without a model's weights",
    "route": "have some servers compute prompts, and others answer them",
    "chat": "chat with a model in the terminal",
    "generate": "continue prompts from the command line or a file",
    "batch": "answer a file of requests; repeated, it goes on where it ended",
    "eval": "score a model on the demo models' held-out tasks",
    "bench": "measure: serve, sweep, latency, throughput, startup, mm-processor",
    "plan": "whether a model fits a device, and how fast it would run",
    "quantize": "write a checkpoint with quantized weights, which other engines load too",
    "replay": "run one layer again on what went into it, as other schemes hold it",
    "shard": "write what each rank of a tensor-parallel group holds, for fast starts",
    "merge-adapter": "write a plain checkpoint with a low-rank adapter merged in",
    "build-kernels": "compile a model's GPU kernels ahead, and measure its GEMMs",
    "doctor": "check this machine and say what to mend",
    "admin": "ask or change a running server: pause, reload, sleep, queue, config",
    "env": "versions, devices and environment variables",
}

Command = Callable[[Sequence[str]], int]
COMMANDS: Registry[Command] = Registry(
    "command", {name: f"headrace.cli.{name.replace('-', '_')}:main" for name in SUMMARIES}
)
WITH_CORE = ("serve",)
"""Commands that always start an engine core: its process is prestarted beside their imports."""


def usage() -> str:
    """The list of commands."""
    lines = [
        f"headrace {__version__}: LLM inference and serving",
        "",
        "usage: headrace COMMAND [options]",
        "",
    ]
    lines += [f"  {name:14} {summary}" for name, summary in SUMMARIES.items()]
    return "\n".join([*lines, "", "headrace COMMAND --help shows a command's options."])


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if words else 2
    if words[0] in ("-V", "--version", "version"):
        print(f"headrace {__version__}")
        return 0
    if words[0] not in COMMANDS:
        near = difflib.get_close_matches(words[0], SUMMARIES, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        print(f"headrace: unknown command {words[0]!r}{hint}\n\n{usage()}", file=sys.stderr)
        return 2
    if words[0] in WITH_CORE and not {"-h", "--help"} & set(words):
        prestart(CORE_MODULE)
    with collection_paused():
        command = COMMANDS.load(words[0])
    return _run(command, words[1:])


def _run(command: Command, words: Sequence[str]) -> int:
    try:
        return command(words)
    except StartError as error:
        print(f"headrace: error: {error.message}", file=sys.stderr)
        return 2
    except HeadraceError as error:
        print(f"headrace: error: {error.message}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        return 0
    finally:
        discard_prestarted()


if __name__ == "__main__":
    sys.exit(main())
