"""What a request asks for, and the messages between a front process and an engine core.

`SamplingParams` is public. The front checks it, resolves every text to token ids and every default
to a number, and splits it: `StopRules` is what the core needs to end a request, `RowSampling` what
the sampler needs for one row.

Front to core: `EngineRequest`, `AbortRequests`, `Call`. Core to front: `Hello`, `TokenBatch`,
`Load`, `Reply` (control.py). A front numbers its requests with random 63-bit ids of its own making;
ids from clients are labels only.

The core publishes its `Load` while requests wait. Whoever refuses a request by the time it would
take predicts it here: an API process at once, by the request's headers, and the core for good.
"""

from __future__ import annotations

import math
from bisect import bisect_right

import msgspec
import numpy as np

from headrace.base.errors import InvalidRequest, WireError
from headrace.base.wire.control import Call, Hello, Reply
from headrace.base.wire.grammar import StructuredOutputs
from headrace.base.wire.media import MediaInput
from headrace.base.wire.pooling import Pooled, RowPooling
from headrace.base.wire.repetition import RepetitionDetection
from headrace.base.wire.sampler_chain import CHAIN_BOUNDS, ChainNumbers

LOGPROBS_MODES = ("raw", "processed")
MARGIN = 1.1
"""A request is taken if so many times the predicted time is within its deadline."""
ORDER_S = 10.0
"""Requests start in the order in which they are due, one without a deadline after so long: nobody
is overtaken by one that comes more than this much later."""
QUANTILES = 16


class Bound(msgspec.Struct, frozen=True):
    """The finite numbers a parameter may be; with `above` the least itself is not one of them."""

    least: float
    greatest: float
    above: bool = False

    def holds(self, value: float) -> bool:
        """Whether `value` is allowed; NaN is not."""
        high_enough = value > self.least if self.above else value >= self.least
        return high_enough and value <= self.greatest and not math.isinf(value)

    def check(self, name: str, value: float) -> None:
        """Refuses what is not allowed, by the name of its field."""
        if not self.holds(value):
            raise InvalidRequest(f"{name} is {value}, allowed is {self}", field=name)

    def __str__(self) -> str:
        start = "above" if self.above else "from"
        return f"a finite number {start} {self.least:g} to {self.greatest:g}"

    def meta(self, *, greatest: float | None = None) -> msgspec.Meta:
        """It as the constraint of a field; `greatest` where a dialect allows less."""
        most = self.greatest if greatest is None else min(greatest, self.greatest)
        if self.above:
            return msgspec.Meta(gt=self.least, le=most)
        return msgspec.Meta(ge=self.least, le=most)


def check_between(name: str, value: int, low: int, high: int) -> None:
    """Refuses a whole number outside `low` .. `high`; the last word of `name` is its field."""
    if not low <= value <= high:
        raise InvalidRequest(
            f"{name} is {value}, allowed is {low} .. {high}", field=name.split()[-1]
        )


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
    control_vectors: dict[str, float] = {}  # by name, their factors


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


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="add"):
    """One sequence to generate. `prompt` is little-endian int32 token ids, 4 bytes each.

    `label` is the id shown to people (`chatcmpl-...`), `external_id` the one the client chose
    (x-request-id). `tenant` shares fairly with other tenants in proportion to `weight`; a lower
    `priority` goes first. `deadline_s` counts from arrival. `cache_salt` separates prefix caches.
    `extra_keys` enter the hash of every block (adapter, media). `hook_payloads`: by hook name.
    `adapter` names the low-rank adapter it runs with, "" none.
    `pooling` asks for hidden states instead of tokens; `stop.max_tokens` is 0 then. `prediction`:
    what the answer may be, as ids like the prompt's. `media`: in the order of their placeholders.
    `encoder`: what an encoder-decoder's encoder reads, ids like what its decoder begins with.
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


class Captured(msgspec.Struct, frozen=True):
    """Attention weights of one layer, float32 [Q, H, S]: queries at positions `start` .., heads as
    asked for, positions up to the last query, or of the encoder. Of ROUTED_EXPERTS int32 [Q, layers
    with experts, K], -1 where a layer chooses fewer; of HIDDEN_STATES uint8, their file's path."""

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


def order_s(deadline_s: float | None) -> float:
    """Seconds from its arrival by which a request's place in the queue is determined."""
    return ORDER_S if deadline_s is None else min(deadline_s, ORDER_S)


class Load(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="load"):
    """`waiting` requests with `waiting_tokens` prompt tokens wait for one of `rows` rows, of which
    `running` are taken; `rows` are those that KV blocks are there for.

    `prefill_token_s`, `decode_step_s`: measured seconds that a prompt's token and a step of decodes
    take; 0 until they are known. `prompt_tokens`, `output_tokens`: of a request lately, on average,
    the first without those found in the cache; `computed_share`: what these are of whole prompts.
    `steps_ahead`: steps that are submitted before one is done: so many pass from a request's start
    to its first step, and from its last one until its row is free.
    `dues`: quantiles of the times in seconds at which the waiting ones are due (see ORDER_S); none
    where they start in another order."""

    waiting: int = 0
    waiting_tokens: int = 0
    running: int = 0
    rows: int = 0
    prefill_token_s: float = 0.0
    decode_step_s: float = 0.0
    prompt_tokens: float = 0.0
    output_tokens: float = 0.0
    computed_share: float = 1.0
    steps_ahead: int = 0
    dues: tuple[float, ...] = ()

    @property
    def is_full(self) -> bool:
        """Whether a request that comes now has to wait."""
        return self.waiting >= self.rows - self.running

    def ahead(self, deadline_s: float) -> float:
        """How many of the waiting ones start before a request with this deadline, by `dues`."""
        return self.waiting * bisect_right(self.dues, order_s(deadline_s)) / len(self.dues)

    def wait_s(self, ahead: float) -> float:
        """Seconds until a request starts that has so many of the waiting ones before it: the rows
        become free in turn, one whenever a request's share of the engine's time has passed."""
        behind = ahead - max(self.rows - self.running, 0)
        if behind < 0:
            return 0.0
        prompt = self.prompt_tokens
        if self.waiting:
            prompt = self.computed_share * self.waiting_tokens / self.waiting
        steps = self.output_tokens + self.steps_ahead if self.output_tokens else 0.0
        decode_s = steps * self.decode_step_s / max(self.running, 1)
        return (behind + 1) * (prompt * self.prefill_token_s + decode_s)

    def service_s(self, *, num_prompt: float, output_tokens: float) -> float:
        """Seconds from its start to its end: its prompt, its steps, and the prompts of those that
        start meanwhile."""
        ahead_s = self.steps_ahead * self.decode_step_s
        prompt_s = ahead_s + self.computed_share * num_prompt * self.prefill_token_s
        if not self.output_tokens:
            return prompt_s + output_tokens * self.decode_step_s
        beside_s = self.running * self.prompt_tokens * self.prefill_token_s / self.output_tokens
        return prompt_s + output_tokens * (self.decode_step_s + beside_s)

    def output_of(self, *, min_tokens: int, max_tokens: int) -> float:
        """How many tokens such a request is expected to generate."""
        return max(min_tokens, min(max_tokens, self.output_tokens))


ToCore = EngineRequest | AbortRequests | Call
ToFront = Hello | TokenBatch | Load | Reply
