"""The options of low-rank adapters (LoRA)."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from headrace.base.config.bounds import Auto

KINDS = ("magnitudes", "tables", "experts")
"""What adapters may hold beside the matrices of linear layers, where slots have room for it."""


class AdapterOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Low-rank adapters beside the model."""

    enable_lora: Annotated[
        bool,
        Meta(
            description="Requests may name low-rank adapters (LoRA) as their model; on with --lora-modules "
            "or --lora-folders."
        ),
    ] = False
    lora_modules: Annotated[
        tuple[str, ...],
        Meta(description="Adapters loaded at start, as NAME=FOLDER in PEFT's layout."),
    ] = ()
    lora_folders: Annotated[
        tuple[str, ...],
        Meta(
            description="Folders below which adapters may be loaded while the server runs "
            "(POST /v1/load_lora_adapter). None: only those of --lora-modules."
        ),
    ] = ()
    lora_resolver_folders: Annotated[
        tuple[str, ...],
        Meta(
            description="Folders whose subfolders are adapters, served by their names; one that comes "
            "later is found within a second. Each is read when a request first names it."
        ),
    ] = ()
    default_mm_loras: Annotated[
        tuple[str, ...],
        Meta(
            description="Adapters that requests with media run with unless they name another, as "
            "KIND=NAME: of image, video or audio, and of --lora-modules. Of several kinds in one "
            "request the first listed counts."
        ),
    ] = ()
    max_loras: Annotated[
        int,
        Meta(
            ge=1,
            le=256,
            description="Adapters on the device beside each other; requests of more wait for a slot.",
        ),
    ] = 4
    max_lora_rank: Annotated[
        int,
        Meta(ge=1, le=512, description="Greatest rank of an adapter; each slot has room for it."),
    ] = 64
    lora_kinds: Annotated[
        tuple[Literal["magnitudes", "tables", "experts"], ...] | Auto,
        Meta(
            description="What adapters may hold beside the matrices of linear layers, for which slots get "
            "room: magnitudes (DoRA), tables (of tokens, and output heads), experts; auto: what those of "
            "--lora-modules hold."
        ),
    ] = "auto"
    max_cpu_loras: Annotated[
        Annotated[int, Meta(ge=1, le=4096)] | Auto,
        Meta(
            description="Adapters kept in host memory, beyond which those not needed lately are read "
            "from disk again; auto: 32, and as many as --max-loras."
        ),
    ] = "auto"
