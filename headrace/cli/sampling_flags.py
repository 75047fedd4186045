"""Sampling flags shared by `chat` and `generate`."""

from __future__ import annotations

import argparse

from headrace.base.config.options import CommandLine
from headrace.base.wire.request import BOUNDS, SamplingParams

MAX_TOKENS = 1 << 24
MAX_SEED = (1 << 63) - 1


def add_sampling_flags(line: CommandLine, *, max_tokens: int) -> None:
    """--temperature, --top-p, --top-k, --max-tokens, --stop, --sampling-seed."""
    _add_bounded(line, "--temperature", "temperature", "0 is greedy [the model's default]")
    _add_bounded(line, "--top-p", "top_p", "nucleus [the model's default]")
    line.add_number(
        "--top-k",
        "most likely tokens kept; 0: all [the model's default]",
        default=None,
        least=-1,
        greatest=MAX_TOKENS,
    )
    line.add_number(
        "--max-tokens", "longest answer", default=max_tokens, least=0, greatest=MAX_TOKENS
    )
    line.parser.add_argument(
        "--stop", action="append", default=[], help="stop string; may be repeated"
    )
    line.add_number(
        "--sampling-seed", "same seed, same answer", default=None, least=0, greatest=MAX_SEED
    )


def _add_bounded(line: CommandLine, flag: str, name: str, help_text: str) -> None:
    """A flag with the bounds that requests have."""
    bound = BOUNDS[name]
    line.add_number(
        flag,
        help_text,
        default=None,
        least=bound.least,
        greatest=bound.greatest,
        above=bound.above,
        whole=False,
    )


def sampling_of(own: argparse.Namespace, defaults: dict[str, float | int]) -> SamplingParams:
    """The parameters from the flags over the model's own defaults."""
    typed = {"temperature": own.temperature, "top_p": own.top_p, "top_k": own.top_k}
    values = {**defaults, **{name: value for name, value in typed.items() if value is not None}}
    return SamplingParams(
        **values,
        max_tokens=own.max_tokens,
        stop=tuple(own.stop),
        seed=own.sampling_seed,
    )
