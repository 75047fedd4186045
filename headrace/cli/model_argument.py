"""`headrace COMMAND MODEL` and `--model MODEL` are the same; given both, they must agree."""

from __future__ import annotations

import msgspec

from headrace.base.config.options import CommandLine
from headrace.base.config.tree import Options
from headrace.base.errors import ConfigError


def add_model_argument(line: CommandLine) -> None:
    """The positional MODEL, as `path`."""
    line.parser.add_argument(
        "path",
        nargs="?",
        metavar="MODEL",
        help="folder, GGUF file or hub id; default: the bundled model",
    )


def with_model(options: Options, positional: str | None) -> Options:
    """The options with the positional model filled in."""
    if positional is None:
        return options
    if options.model.model not in ("", positional):
        raise ConfigError(
            f"two models given: {positional!r} and --model {options.model.model!r}", field="--model"
        )
    return msgspec.structs.replace(
        options, model=msgspec.structs.replace(options.model, model=positional)
    )
