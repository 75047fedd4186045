"""Sampling flags shared by `chat` and `generate`."""

from __future__ import annotations

import argparse

from headrace.base.wire.params import SamplingParams


def add_sampling_flags(parser: argparse.ArgumentParser, *, max_tokens: int) -> None:
    """--temperature, --top-p, --top-k, --max-tokens, --stop, --sampling-seed."""
    parser.add_argument("--temperature", type=float, help="0 is greedy [the model's default]")
    parser.add_argument("--top-p", type=float, help="nucleus [the model's default]")
    parser.add_argument("--top-k", type=int, help="most likely tokens kept [the model's default]")
    parser.add_argument(
        "--max-tokens", type=int, default=max_tokens, help=f"longest answer [{max_tokens}]"
    )
    parser.add_argument("--stop", action="append", default=[], help="stop string; may be repeated")
    parser.add_argument("--sampling-seed", type=int, help="same seed, same answer")


def sampling_of(own: argparse.Namespace, defaults: dict[str, float | int]) -> SamplingParams:
    """The parameters from the flags over the model's own defaults."""
    given = {"temperature": own.temperature, "top_p": own.top_p, "top_k": own.top_k}
    chosen = {k: defaults.get(k) if v is None else v for k, v in given.items()}
    return SamplingParams(
        **{k: v for k, v in chosen.items() if v is not None},
        max_tokens=own.max_tokens,
        stop=tuple(own.stop),
        seed=own.sampling_seed,
    )
