"""What a generation is, and the events it answers with: the seam between clients of the engine
(HTTP dialects, LLM, bench, chat) and the engine client.

A full answer is the fold of its events; every dialect encodes the same ones. Order per choice:
deltas, then exactly one `Ended`. `Started` comes once, first. An error ends the iteration by an
exception of `base/errors.py`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Protocol

import msgspec
import numpy as np

from headrace.base.wire.grammar import Node, ReasoningRule
from headrace.base.wire.media import MediaInput
from headrace.base.wire.pooling import RowPooling
from headrace.base.wire.request import SamplingParams
from headrace.base.wire.retention import EngineHints
from headrace.base.wire.transfer import KVTransferParams


class Generation(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt and how to continue it. `label` is the public id; `tenant` the fair-share key and
    cache tenant.

    `pieces`: what each token adds to the text, where that is not the tokenizer's own table.
    `grammar` is what the answer must look like where `params` do not say it (tool calls);
    `grammar_field` is what its errors name. `reasoning`: how the model reasons before it answers; a
    grammar holds from behind that on.

    `media`: what placeholders in the prompt stand for, in their order. `prompt_field` is what
    errors about the prompt name. `predicted_ids`: what the answer may be.
    `on_queued` is called when the engine has taken the request in and lets it wait; where it starts
    at once, or may still be refused, it is not.

    `decoder_ids`: what the decoder of an encoder-decoder begins with, where it is not what its
    checkpoint says; the prompt is what its encoder reads. `encoder`: the spectrogram (float32, band
    by band) that an encoder of speech reads; the prompt is then what its decoder begins with.
    `adapter` names the low-rank adapter it runs with, "" none. `hints`: what else the
    engine is told: of KV that passes between servers, or is worth keeping.

    With `pooling` nothing is generated (`params.max_tokens` is 0): the events are `Started`,
    `PooledPart`s, `Ended`."""

    prompt_ids: list[int]
    params: SamplingParams
    label: str = ""
    external_id: str = ""
    tenant: str = ""
    weight: float = 1.0
    priority: int = 0
    deadline_s: float | None = None
    cache_salt: str = ""
    pieces: Mapping[int, str | bytes] | None = None
    grammar: Node | None = None
    grammar_field: str = "structured_outputs"
    reasoning: ReasoningRule | None = None
    pooling: RowPooling | None = None
    media: tuple[MediaInput, ...] = ()
    prompt_field: str = "prompt"
    predicted_ids: Sequence[int] = ()
    on_queued: Callable[[], None] | None = None
    decoder_ids: tuple[int, ...] = ()
    adapter: str = ""
    encoder: bytes = b""
    hints: KVTransferParams | EngineHints | None = None


class TokenScore(msgspec.Struct, frozen=True):
    """One token and its log-probability; `text` is its own text ("" inside a character)."""

    id: int
    logprob: float
    text: str
    data: bytes
    rank: int | None = None


class ScoredToken(msgspec.Struct, frozen=True):
    """A token and its alternatives: `top` in falling order, `named` for ids asked for by name,
    `drawn_among` the ids it was drawn among, where its request asks for its sampling mask."""

    token: TokenScore
    top: list[TokenScore] = []
    named: list[TokenScore] = []
    drawn_among: list[int] = []


class Started(msgspec.Struct, frozen=True):
    """The request was accepted; so many tokens of its prompt are known to have been found in the
    cache, and so many stand for media, so many of these for sound."""

    num_prompt: int
    num_cached: int = 0
    num_media: int = 0
    num_audio: int = 0


class PromptScored(msgspec.Struct, frozen=True):
    """Scores of all prompt tokens, once, before the first delta of choice 0; entry 0 is None."""

    scores: list[ScoredToken | None]


class PooledPart(msgspec.Struct, frozen=True):
    """Pooled hidden states, float32 [rows, width]; with "tokens" row i belongs to prompt token
    `start` + i."""

    start: int
    values: np.ndarray


class AttentionWeights(msgspec.Struct, frozen=True):
    """Attention weights of choice 0, before its end: layer -> float32 [T, H, T], T the tokens whose
    successor was computed: prompt and answer but for the last. `routed`: the experts of each of
    them, int32 [T, layers, K], where they were asked for. `states_path`: the file with the hidden
    states of a choice, where there are any; "": it could not be written."""

    num_prompt: int
    layers: dict[int, np.ndarray]
    routed: np.ndarray | None = None
    states_path: str | None = None


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """New text of choice `index`; never half a character, never text that may still become a stop
    string. `last`: its end follows at once."""

    index: int
    text: str
    token_ids: list[int] = []
    scores: list[ScoredToken] | None = None
    last: bool = False


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """The end of choice `index`. `reason`: stop, length, repetition or abort. `stop`: the text or
    id that matched.

    Times are seconds since the engine took the request: first scheduled, first token, preempted,
    ended; None where a stop string ended the choice before the engine knew. `hook_wait_s`: how long
    its grammar held it back. `num_drafted`, `num_accepted`: drafts of a choice whose answer was
    predicted. `weights_version`: of the weights it ran with, "" where nobody has named one."""

    index: int
    reason: str
    stop: str | int | None = None
    num_output: int = 0
    num_cached: int = 0
    cumulative_logprob: float | None = None
    scheduled_s: float | None = None
    first_token_s: float | None = None
    total_s: float | None = None
    num_preemptions: int = 0
    preempted_s: tuple[float, ...] = ()
    hook_wait_s: float = 0.0
    num_drafted: int = 0
    num_accepted: int = 0
    weights_version: str = ""


Event = Started | PromptScored | PooledPart | AttentionWeights | Delta | Ended
Events = AsyncGenerator[Event, None]
"""Those of one request, of all its choices, as they come."""


class WrittenAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What one choice wrote; `logprob`: of all its tokens, 0 where that was not asked for, as
    `scores` are empty then."""

    text: str
    token_ids: list[int]
    logprob: float
    scores: list[ScoredToken] = []

    @property
    def mean_logprob(self) -> float:
        """Of a token, the one at which it ends counted."""
        return self.logprob / (len(self.token_ids) + 1)


async def fold_written(events: Events) -> WrittenAnswer:
    """The fold of the events of a generation of one choice."""
    text, logprob = "", 0.0
    token_ids, scores = list[int](), list[ScoredToken]()
    async with aclosing(events):
        async for event in events:
            if isinstance(event, Delta):
                text += event.text
                token_ids += event.token_ids
                scores += event.scores or ()
            elif isinstance(event, Ended):
                logprob = event.cumulative_logprob or 0.0
    return WrittenAnswer(text=text, token_ids=token_ids, logprob=logprob, scores=scores)


class EngineClient(Protocol):
    """What front/server, LLM, bench and chat use. Implemented by front/client/engine.py:
    AsyncLLM."""

    def generate(self, generation: Generation) -> Events:
        """Checks and runs one generation. Closing the iterator aborts whatever still runs of it.

        Raises RequestError for what the caller did wrong (before the first event), OverloadError
        when full or draining, EngineError when the engine failed."""
        ...

    def check_queue(self, deadline_s: float | None = None) -> None:
        """Raises Unavailable where one more request, which has so much time, would surely be
        refused, before any work is done for it."""
        ...

    async def explain(self, label: str, *, tenant: str | None = None) -> dict[str, object]:
        """Where the request with this public id, or this id of its client's, is and why it waits;
        of one tenant, if one is named. NotFound if it is not in flight."""
        ...

    async def call(self, operation: str, **arguments: object) -> list[object]:
        """A control call (see wire.request.Call) to every engine core; the replies in order."""
        ...

    async def call_each(self, operation: str, **arguments: object) -> list[object]:
        """As `call`; a core that fails or is away has its error in the place of a reply."""
        ...

    @property
    def adapters(self) -> Sequence[str]:
        """The names of the adapters that requests may name."""
        ...

    @property
    def weights_version(self) -> str:
        """That of the weights now; of cores that differ, each, with commas between them."""
        ...

    @property
    def context_tokens(self) -> int:
        """The most tokens that one request can ever hold: by the model and by the KV pool."""
        ...

    @property
    def held(self) -> str:
        """Why healthy engines answer nothing: "asleep" or "paused", as an administrator wants it;
        "" while one of them works."""
        ...

    @property
    def connected(self) -> tuple[int, int]:
        """How many engine cores are connected, and how many there are."""
        ...

    @property
    def degraded(self) -> bool:
        """Whether some of the engine cores cannot serve now."""
        ...

    @property
    def stalled(self) -> bool:
        """Whether nothing has run for long on an engine core although requests wait."""
        ...

    @property
    def window(self) -> int:
        """How many generations one request of many parts keeps in flight: enough that the engine
        never waits."""
        ...

    @property
    def window_tokens(self) -> int:
        """The same in prompt tokens."""
        ...

    @property
    def ready(self) -> bool:
        """Whether requests can be served now."""
        ...

    @property
    def trouble(self) -> str:
        """Why an engine core can serve nothing although it lives, or ""."""
        ...

    @property
    def cached_block_tokens(self) -> int:
        """A prompt's whole blocks of so many tokens are kept as prefixes; 0: none."""
        ...

    @property
    def alive(self) -> bool:
        """Whether at least one engine core answers its heartbeat and serves."""
        ...
