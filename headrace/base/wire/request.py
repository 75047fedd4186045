"""What a request asks for, and the messages between a front process and an engine core.

`SamplingParams` is public. The front checks it, resolves every text to token ids and every default
to a number, and splits it: `StopRules` is what the core needs to end a request, `RowSampling` what
the sampler needs for one row.

Front to core: `EngineRequest`, `AbortRequests`, `Call`. Core to front: `Hello`, `TokenBatch`,
`Load`, `Reply`. A front numbers its requests with random 63-bit ids of its own making; ids from
clients are labels only.
"""

from __future__ import annotations

import math
from typing import TypeAlias

import msgspec
import numpy as np

from headrace.base.errors import WireError
from headrace.base.wire.grammar import StructuredOutputs
from headrace.base.wire.load import Load
from headrace.base.wire.media import MediaForm, MediaInput
from headrace.base.wire.repetition import RepetitionDetection
from headrace.base.wire.sampler_chain import CHAIN_BOUNDS, ChainNumbers

LOGPROBS_MODES = ("raw", "processed")


class Bound(msgspec.Struct, frozen=True):
    """The finite numbers a parameter may be; with `above` the least itself is not one of them."""

    least: float
    greatest: float
    above: bool = False

    def holds(self, value: float) -> bool:
        """Whether `value` is allowed; NaN is not."""
        high_enough = value > self.least if self.above else value >= self.least
        return high_enough and value <= self.greatest and not math.isinf(value)

    def __str__(self) -> str:
        start = "above" if self.above else "from"
        return f"a finite number {start} {self.least:g} to {self.greatest:g}"

    def meta(self, *, greatest: float | None = None) -> msgspec.Meta:
        """It as the constraint of a field; `greatest` where a dialect allows less."""
        most = self.greatest if greatest is None else min(greatest, self.greatest)
        if self.above:
            return msgspec.Meta(gt=self.least, le=most)
        return msgspec.Meta(ge=self.least, le=most)


BOUNDS = {
    "temperature": Bound(0.0, 100.0),
    "top_p": Bound(0.0, 1.0, above=True),
    "min_p": Bound(0.0, 1.0),
    "typical_p": Bound(0.0, 1.0, above=True),
    "repetition_penalty": Bound(0.0, 100.0, above=True),
    "presence_penalty": Bound(-2.0, 2.0),
    "frequency_penalty": Bound(-2.0, 2.0),
    "length_penalty": Bound(-10.0, 10.0),
    "dry_multiplier": Bound(0.0, 100.0),
    "dry_base": Bound(1.0, 100.0),
    "xtc_probability": Bound(0.0, 1.0),
    "xtc_threshold": Bound(0.0, 1.0),
    "logit_bias": Bound(-100.0, 100.0),
    **{name: Bound(least, most) for name, (least, most) in CHAIN_BOUNDS.items()},
}
"""The one table of what the numbers of sampling may be: server, client and core check against
it."""
ROW_BOUNDS = {k: v for k, v in BOUNDS.items() if k not in ("logit_bias", "length_penalty")}
"""The part of it that the sampler sees as one number per row."""
_GREATEST = (1 << 63) - 1
ROW_INTEGERS = (
    ("seed", -_GREATEST - 1, _GREATEST),
    ("top_k", -1, _GREATEST),
    ("min_tokens", 0, _GREATEST),
    ("mirostat", 0, 2),
)
"""Whole numbers that it sees, from the least to the greatest."""
ROUTED_EXPERTS = -1  # in `capture_layers`: which experts the routers of all layers choose


class SamplingNumbers(ChainNumbers, frozen=True, kw_only=True, omit_defaults=True):
    """What users write and the sampler takes as it is. `capture_heads`: of each of
    `capture_layers`, which may then occur several times, the head that is told; empty: all."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_range: int = 0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    min_tokens: int = 0
    logit_bias: dict[int, float] = {}
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprobs_mode: str = "raw"
    capture_layers: tuple[int, ...] = ()
    capture_heads: tuple[int, ...] = ()
    logits_processors: tuple[str, ...] = ()
    sampling_mask: bool = False


class SamplingParams(SamplingNumbers, frozen=True, kw_only=True, omit_defaults=True):
    """How to sample one prompt. Defaults leave the model's distribution unchanged (temperature 1).

    `temperature` 0 is greedy. `top_k` 0 or -1, `top_p` 1, `min_p` 0, `typical_p` 1 are off. `n`
    answers come out of `best_of` (ranked by mean log-probability). `beam_width` turns beam search
    on. `logprobs`, `prompt_logprobs`: alternatives beside the token (0: its own score; -1: all).
    `logprobs_mode` "raw" scores by the model's own distribution, "processed" by the one drawn from:
    after penalties, bias, masks, temperature, truncation. Prompt tokens are not drawn: always raw.
    `logits_processors`: extensions. `sampling_mask`: tells what each token was drawn among.
    `samplers`: which steps are taken, in this order (of SAMPLERS; none named: all). `mirostat` 1 or
    2, `adaptive_target` from 0 on, `top_n_sigma` above 0, `dynatemp_range` above 0 turn theirs on
    (docs/SAMPLING.md)."""

    n: int = 1
    best_of: int | None = None
    beam_width: int | None = None
    length_penalty: float = 1.0
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    bad_words: tuple[str, ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    seed: int | None = None
    logprob_token_ids: tuple[int, ...] = ()
    skip_special_tokens: bool = True
    structured_outputs: StructuredOutputs | None = None
    repetition_detection: RepetitionDetection | None = None


class StopRules(msgspec.Struct, frozen=True, kw_only=True):
    """When the core ends a request. `stop_ids` holds the end-of-sequence ids too, unless they are
    ignored.

    `max_tokens` is at least 0 and already bounded by the context; stop ids count only from
    `min_tokens` on. 0 means the prompt is only scored: the request ends ("length") when its prompt
    is computed.
    """

    max_tokens: int
    min_tokens: int = 0
    stop_ids: tuple[int, ...] = ()
    repetition: RepetitionDetection | None = None


class RowSampling(SamplingNumbers, frozen=True, kw_only=True, omit_defaults=True):
    """What the sampler needs for one row; every number resolved, every text already token ids.

    `seed` is always set (random if the user gave none): the noise of a token is a function of
    (seed, position, id). `suppressed_ids` may not be sampled while fewer than `min_tokens` tokens
    are out (stop and eos ids). `bad_words` are token-id sequences whose last id is forbidden when
    the others precede it.
    """

    dry_breaker_ids: tuple[int, ...] = ()
    suppressed_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    allowed_ids: tuple[int, ...] | None = None
    seed: int = 0
    logprob_ids: tuple[int, ...] = ()

    @property
    def greedy(self) -> bool:
        """Whether the token is the argmax of the processed logits."""
        return self.temperature == 0.0


POOLINGS = ("cls", "last", "mean", "tokens", "lexical")


class RowPooling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a request that is pooled instead of continued wants of its hidden states.

    `how`: the first token's, the last one's, the mean from token `first` on, every token's, or
    "lexical": how much each word of the vocabulary weighs. `head`: one logit per label, by the
    model's head. `second_at`: where a pair's second text begins, for models with token types."""

    how: str = "last"
    head: bool = False
    second_at: int = 0
    first: int = 0

    @property
    def from_last(self) -> bool:
        """Whether the last token is enough, so that a cached prefix needs no computing."""
        return self.how == "last"


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="add"):
    """One sequence to generate. `prompt` is little-endian int32 token ids, 4 bytes each.

    `label` is the id shown to people (`chatcmpl-...`), `external_id` the one the client chose
    (x-request-id). `tenant` shares fairly with other tenants in proportion to `weight`; a lower
    `priority` goes first. `deadline_s` counts from arrival. `cache_salt` separates prefix caches.
    `extra_keys` enter the hash of every block (adapter, media). `hook_payloads`: by hook name.
    `adapter` names the low-rank adapter it runs with, "" none.
    `pooling` asks for hidden states instead of tokens; `stop.max_tokens` is 0 then. `prediction`:
    what the answer may be, as token ids like the prompt's. `media`: in the order of their
    placeholders in the prompt. `encoder`: what an encoder-decoder's encoder reads, token
    ids like the prompt's, which is then what its decoder begins with.
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
    prediction: bytes = b""
    media: tuple[MediaInput, ...] = ()
    encoder: bytes = b""
    adapter: str = ""

    def prompt_ids(self) -> np.ndarray:
        """The prompt as an int32 array (a read-only view)."""
        return np.frombuffer(self.prompt, dtype="<i4")


class AbortRequests(msgspec.Struct, frozen=True, tag="abort"):
    """Ends the requests with reason "abort"; unknown ids (just finished?) are ignored."""

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


class TokenLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities of one position. Entry 0 is the token itself, then the alternatives in
    falling order, then the ids asked for by name. `rank`: the token's 1-based rank. `drawn_among`:
    the ids that it was drawn among, rising."""

    ids: np.ndarray
    values: np.ndarray
    rank: int
    drawn_among: np.ndarray | None = None


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
    request, heads in the order asked for, positions up to the last query, or of the encoder. Of
    ROUTED_EXPERTS int32 [Q, layers with experts, K], -1 where a layer chooses fewer."""

    layer: int
    start: int
    values: np.ndarray


class Finished(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The end of one request, sent exactly once. `reason`: stop, length, repetition, abort or
    error.

    `stop_id` is the stop token that ended it (it is the last token sent). Times are seconds since
    arrival in the core; `hook_wait_s` is how long a hook held it back (a grammar that was being
    compiled). `num_drafted`, `num_accepted`: drafts of a request that came with a prediction.
    `weights_version`: of the weights it ran with; of several, in order, with commas between them.
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
    num_drafted: int = 0
    num_accepted: int = 0
    weights_version: str = ""


class TokenBatch(msgspec.Struct, kw_only=True, omit_defaults=True, tag="tokens"):
    """What one step produced for one front: pairs (ids[i], tokens[i]) in order, and what ended.

    An id may occur several times (speculation). `logprobs` is empty or parallel to `tokens`.
    `cached`: (id, prompt tokens found in the cache), with a request's first token: a stop string
    may end its answer elsewhere. `queued`: requests that nothing refuses any more, and that wait.
    """

    ids: np.ndarray
    tokens: np.ndarray
    logprobs: list[TokenLogprobs | None] = []
    prompt_logprobs: list[tuple[int, PromptLogprobs]] = []
    pooled: list[tuple[int, Pooled]] = []
    captured: list[tuple[int, Captured]] = []
    cached: list[tuple[int, int]] = []
    queued: list[int] = []
    finished: list[Finished] = []


class Reply(msgspec.Struct, frozen=True, kw_only=True, tag="reply"):
    """The answer to a `Call`: a msgpack value, or an error."""

    number: int
    result: msgspec.Raw = msgspec.Raw(b"\xc0")
    error: WireError | None = None


ToCore = EngineRequest | AbortRequests | Call
ToFront = Hello | TokenBatch | Load | Reply
