"""Control calls and their replies, and what an engine core says of itself (see request.py for the
other messages between it and a front process)."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from headrace.base.errors import WireError
from headrace.base.wire.media import MediaForm

PING = "ping"
Argument: TypeAlias = int | float | str | bool | list[int | str] | None


class Call(msgspec.Struct, frozen=True, kw_only=True, tag="call"):
    """A control call; answered by a `Reply` with the same number once it is complete.

    Operations: "status" {}, "explain" {ids: [int]}, "pause" {mode: abort|wait|keep, clear_cache:
    bool}, "resume" {}, "is_paused" {}, "reset_prefix_cache" {running: bool}, "metrics" {}, "drain"
    {timeout_s: float}, "abort" {labels: [str], tenant: str}, "log_level" {level: str}, "wake"
    {parts: [str]}. PING is answered by the core's IO thread at once, also while a step takes long:
    only a process that is stopped or gone leaves it without an answer.
    """

    number: int
    operation: str
    arguments: dict[str, Argument] = {}


class Reply(msgspec.Struct, frozen=True, kw_only=True, tag="reply"):
    """The answer to a `Call`: a msgpack value, or an error."""

    number: int
    result: msgspec.Raw = msgspec.Raw(b"\xc0")
    error: WireError | None = None


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag="hello"):
    """The first message of a core that is ready, and again when it changes: what the front must
    know to check requests.

    `logits_width` bounds every token id; `capacity_tokens` is the most tokens one request can ever
    hold in the KV pool; `max_model_len` its bound by the model. `max_in_flight`: requests that may
    run and wait together; None where a more urgent one still gets in. `step_tokens`: the most of
    one step. `trouble`: why nothing can be served, or ""; `failing`: why answers are not to be
    expected although requests are there, or ""; `stalled`: why nothing runs although requests wait.
    `held`: "asleep" or "paused" while an administrator wants nothing to be answered, or "".
    `cached_block_tokens`: whole blocks of so many tokens are kept as prefixes; 0: none.
    `adapters`: the names of those that requests may name.
    `weights_version`: that of the weights now. `log_level`: what an administrator wants every
    process to log, or "". `start_s` breaks the start-up time down by phase. `media`: the kinds of
    input beside text (none: empty), of which a request may have `media_tokens` tokens together.
    """

    logits_width: int
    max_model_len: int
    capacity_tokens: int
    max_running: int
    step_tokens: int = 8192
    max_in_flight: int | None = None
    num_blocks: int
    block_tokens: int
    cached_block_tokens: int = 0
    trouble: str = ""
    failing: str = ""
    stalled: str = ""
    held: str = ""
    log_level: str = ""
    weights_version: str = ""
    adapters: tuple[str, ...] = ()
    start_s: dict[str, float] = {}
    decisions: list[tuple[str, str, str, str]] = []
    media: tuple[MediaForm, ...] = ()
    media_tokens: int = 0
