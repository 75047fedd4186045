"""`headrace pull HUB_ID[:TAG]`: fetches a model into the local cache."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from headrace.base.errors import ConfigError
from headrace.cli.downloading import download
from headrace.launch.hub import REVISION, is_hub_id


def main(argv: Sequence[str]) -> int:
    """Downloads what is missing; a model that is there already is left as it is."""
    parser = argparse.ArgumentParser(
        prog="headrace pull",
        description="Fetch a model into the local cache: safetensors or GGUF, JSON and tokenizer "
        "files, checked by size and digest. What was cut off goes on where it stopped. HF_ENDPOINT "
        "names another hub, HF_HOME another cache; HF_HUB_OFFLINE forbids it.",
    )
    parser.add_argument(
        "model",
        metavar="HUB_ID[:TAG]",
        help="such as org/name; of a repository of GGUF files the tag names one (org/name:Q8_0)",
    )
    parser.add_argument("--revision", default="main", help="branch, tag or commit [main]")
    arguments = parser.parse_args(argv)
    check_hub_id(arguments.model)
    if REVISION.fullmatch(arguments.revision) is None:
        raise ConfigError(f"--revision {arguments.revision!r} is not a branch, tag or commit")
    print(download(arguments.model, arguments.revision))
    return 0


def check_hub_id(model: str) -> None:
    """ConfigError for what no hub has."""
    if not is_hub_id(model):
        raise ConfigError(f"{model!r:.200} is not a hub id such as org/name or org/name:TAG")
