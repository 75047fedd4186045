"""Messages between a front process and an engine core.

Front to core: `AddRequest`, `AbortRequests`, `Call`. Core to front: `Hello`, `TokenBatch`, `Reply`.
A front numbers its requests with random 63-bit ids of its own making; ids from clients are labels
only.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec
import numpy as np

from headrace.base.errors import WireError
from headrace.base.wire.params import RowPooling, RowSampling, StopRules


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="add"):
    """One sequence to generate. `prompt` is little-endian int32 token ids, 4 bytes each.

    `label` is the id shown to people (`chatcmpl-...`), `external_id` the one the client chose
    (x-request-id). `tenant` shares fairly with other tenants in proportion to `weight`; a lower
    `priority` goes first. `deadline_s` counts from arrival. `cache_salt` separates prefix caches.
    `extra_keys` enter the hash of every block (adapter, media). `hook_payloads`: by hook name.
    `pooling` asks for hidden states instead of tokens; `stop.max_tokens` is 0 then.
    """

    id: int
    prompt: bytes
    stop: StopRules
    sampling: RowSampling
    label: str = ""
    external_id: str = ""
    tenant: str = ""
    weight: float = 1.0
    priority: int = 0
    deadline_s: float | None = None
    cache_salt: str = ""
    extra_keys: tuple[bytes, ...] = ()
    hook_payloads: dict[str, msgspec.Raw] = {}
    pooling: RowPooling | None = None

    def prompt_ids(self) -> np.ndarray:
        """The prompt as an int32 array (a read-only view)."""
        return np.frombuffer(self.prompt, dtype="<i4")


class AbortRequests(msgspec.Struct, frozen=True, tag="abort"):
    """Ends the requests with reason "abort"; unknown ids are ignored (they may just have
    finished)."""

    ids: tuple[int, ...]


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


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag="hello"):
    """The first message of a core that is ready, and again when it changes: what the front must
    know to check requests.

    `logits_width` bounds every token id; `capacity_tokens` is the most tokens one request can ever
    hold in the KV pool; `max_model_len` its bound by the model. `max_in_flight`: requests that may
    run and wait together; None where a more urgent one still gets in. `trouble`: why nothing can be
    served, or ""; `failing`: why answers are not to be expected although steps run, or "".
    `log_level`: what an administrator wants every process to log, or "". `start_s` breaks the
    start-up time down by phase.
    """

    logits_width: int
    max_model_len: int
    capacity_tokens: int
    max_running: int
    max_in_flight: int | None = None
    num_blocks: int
    block_tokens: int
    trouble: str = ""
    failing: str = ""
    log_level: str = ""
    start_s: dict[str, float] = {}
    decisions: list[tuple[str, str, str, str]] = []


class TokenLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities of one position. Entry 0 is the token itself, then the alternatives in
    falling order, then the ids that were asked for by name. `rank` is the token's 1-based rank."""

    ids: np.ndarray
    values: np.ndarray
    rank: int


class PromptLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities of prompt tokens `start ..` (position 0 has none). Row i belongs to token
    start + i; column 0 is the prompt token itself."""

    start: int
    ids: np.ndarray
    values: np.ndarray
    ranks: np.ndarray


class Pooled(msgspec.Struct, frozen=True):
    """Hidden states of a request after pooling, float32 [rows, width]. With "tokens", row i belongs
    to the prompt's token `start` + i and a prompt may come in several parts; otherwise there is one
    row and `start` is 0."""

    start: int
    values: np.ndarray


class Captured(msgspec.Struct, frozen=True):
    """Attention weights of one layer, float32 [Q, H, S]: queries at positions `start` .. of a
    request, every head, all positions up to the last of these queries."""

    layer: int
    start: int
    values: np.ndarray


class Finished(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The end of one request, sent exactly once. `reason`: stop, length, repetition, abort or
    error.

    `stop_id` is the stop token that ended it (it is the last token sent). Times are seconds since
    arrival in the core; `hook_wait_s` is how long a hook held it back (a grammar that was being
    compiled).
    """

    id: int
    reason: str
    stop_id: int | None = None
    error: WireError | None = None
    num_cached: int = 0
    num_preemptions: int = 0
    preempted_s: tuple[float, ...] = ()
    hook_wait_s: float = 0.0
    scheduled_s: float | None = None
    first_token_s: float | None = None
    total_s: float = 0.0


class TokenBatch(msgspec.Struct, kw_only=True, omit_defaults=True, tag="tokens"):
    """What one step produced for one front: pairs (ids[i], tokens[i]) in order, and what ended.

    An id may occur several times (speculation). `logprobs` is empty or parallel to `tokens`.
    `cached`: (id, prompt tokens found in the cache), with a request's first token: a stop string
    may end its answer elsewhere.
    """

    ids: np.ndarray
    tokens: np.ndarray
    logprobs: list[TokenLogprobs | None] = []
    prompt_logprobs: list[tuple[int, PromptLogprobs]] = []
    pooled: list[tuple[int, Pooled]] = []
    captured: list[tuple[int, Captured]] = []
    cached: list[tuple[int, int]] = []
    finished: list[Finished] = []


class Reply(msgspec.Struct, frozen=True, kw_only=True, tag="reply"):
    """The answer to a `Call`: a msgpack value, or an error."""

    number: int
    result: msgspec.Raw = msgspec.Raw(b"\xc0")
    error: WireError | None = None


ToCore = EngineRequest | AbortRequests | Call
ToFront = Hello | TokenBatch | Reply
