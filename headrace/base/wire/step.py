"""Messages between the engine core and the workers: the plan of a step and its result.

A *row* is a permanent slot of the runner; a request owns one row from its first scheduled step
until it ends or is preempted. A plan lists changes to the rows and the rows that run; it never
repeats what the runner already knows, so its size does not depend on context lengths. Plans are
executed strictly in the order in which they are submitted.
"""

from __future__ import annotations

import msgspec
import numpy as np

from headrace.base.errors import WireError
from headrace.base.wire.media import MediaForm, MediaSpan
from headrace.base.wire.pooling import Pooled, RowPooling
from headrace.base.wire.request import Captured, PromptLogprobs, RowSampling


class KVGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Caches that share block tables: one kind, and one numbering of blocks.

    kind             full, window, chunked, latent, cross or state (core/kv/kinds)
    caches           ids of its caches; a layer may have several, and several layers one
    span             tokens of a window, of a chunk, or of the longest output of an encoder; else
                     None
    block_ratio      its blocks hold this many times `WorkerFacts.block_tokens`
    block_bytes      bytes of one block over all its caches; state: of one row's state
    blocks_per_slab  its blocks in one slab of the pool
    num_slots        state: slots for snapshots, of which slot 0 is nobody's; else 0
    """

    kind: str
    caches: tuple[int, ...]
    span: int | None = None
    block_ratio: int = 1
    block_bytes: int = 0
    blocks_per_slab: int = 1
    num_slots: int = 0


class RecordedGraphs(msgspec.Struct, frozen=True, kw_only=True):
    """The graphs of steps that are recorded, and the memory they take, as measured when each was
    recorded. `more`: another one is worth recording."""

    count: int = 0
    num_bytes: int = 0
    more: bool = False


class WorkerFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What the workers state once they are loaded. Block 0 of each group is the null block and
    belongs to nobody.

    All groups but those of recurrent state draw from one pool of `num_blocks` slabs. A slab holds
    `blocks_per_slab` blocks of one group at a time: one block of any group where all blocks have
    equal bytes. `groups` is empty for encoders, which keep no KV. `generates`: there is a language-
    model head; without one requests can only be pooled. Attention weights can be had of
    `capture_layers` layers with `capture_heads` heads; 0 where they cannot. `media`:
    the kinds of input beside text; the encoder cache holds `media_tokens` tokens of them, vectors
    of `media_width` numbers each. `media_rows`: by kind, the patches or frames that a pass of the
    encoder takes beside a step without much delay; a kind that is not there is not encoded ahead.
    `encoder_tokens`: the most token ids that the encoder of an encoder-decoder reads; 0: there is
    none that reads tokens. `encoder_vocabulary`, `spectrogram`: see ModelSpec. `routed_experts`:
    layers whose chosen experts can be told, and the most of a token; empty: none. `tells_states`:
    requests have files of their hidden states. `control_vectors`: the names of those that requests
    may ask for. `pools_whole`: tokens of a prompt that is pooled all see each other, so that one
    step computes them.
    `block_length`: a text is written in blocks of so many tokens, which see each other; 0: token by
    token. `canvas_length`: all tokens see each other, up to so many behind what is written; blocks
    are counted from the prompt's end; 0: from the text's beginning.
    """

    num_blocks: int
    block_tokens: int
    groups: tuple[KVGroup, ...]
    logits_width: int
    max_rows: int
    max_model_len: int
    generates: bool = True
    capture_layers: int = 0
    capture_heads: int = 0
    routed_experts: tuple[int, ...] = ()
    tells_states: bool = False
    control_vectors: tuple[str, ...] = ()
    max_drafts: int = 0
    encoder_tokens: int = 0
    encoder_vocabulary: int = 0
    spectrogram: tuple[int, ...] = ()
    weight_bytes: int = 0
    kv_bytes: int = 0
    graphs: RecordedGraphs = RecordedGraphs()
    start_s: dict[str, float] = {}
    decisions: list[tuple[str, str, str, str]] = []
    media: tuple[MediaForm, ...] = ()
    media_tokens: int = 0
    media_width: int = 0
    media_rows: dict[str, int] = {}
    pools_whole: bool = False
    block_length: int = 0
    canvas_length: int = 0


class RowStart(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A request takes a row. `tokens` (int32) are all its known tokens: the prompt, then outputs
    after a preemption.

    `adapter_slot`: that of its adapter; 0: it has none.
    `num_prompt` of them are the prompt. The first `num_computed` have KV already (prefix hit).
    Block ids follow in the plan's `block_*` arrays. `prediction`: what the answer may be,
    little-endian int32 token ids; drafts are looked up in it. `media`: what the prompt's
    placeholders stand for; the content follows in the payload of hook MEDIA_HOOK, unless the
    workers have it. `encoder`: what the encoder of an encoder-decoder reads;
    `cross_tokens`: how many of its outputs the row's cross caches hold. `length_limit`: tokens at
    which the request ends at the latest.
    """

    row: int
    request: int
    tokens: np.ndarray
    num_prompt: int
    num_computed: int
    sampling: RowSampling
    pooling: RowPooling | None = None
    prediction: bytes = b""
    media: tuple[MediaSpan, ...] = ()
    adapter_slot: int = 0
    encoder: bytes = b""
    cross_tokens: int = 0
    length_limit: int = 0


class RowFeed(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Tokens (int32) of a running row at positions from `start` on, which the core has decided
    itself."""

    row: int
    start: int
    tokens: np.ndarray


class AdapterOrder(msgspec.Struct, frozen=True, kw_only=True, tag="adapter"):
    """What the workers do with an adapter, beside the steps. `action`: "read" the one in `folder`
    into host memory under `name`; "place" it in `slot`, which no row has; "drop" it from host
    memory. Orders are carried out one after another."""

    action: str
    name: str
    folder: str = ""
    slot: int = 0


class AdapterReply(msgspec.Struct, frozen=True, kw_only=True, tag="adapted"):
    """What became of it; of one that was read its greatest rank, the bytes of its tensors, and the
    linear layers that it changes."""

    rank: int = 0
    num_bytes: int = 0
    num_modules: int = 0
    error: WireError | None = None


NO_DRAFTS = np.zeros(0, np.int32)


class StepPlan(msgspec.Struct, frozen=True, kw_only=True, tag="plan"):
    """One step. Applied in this order: `ends`, `starts`, `feeds`, block updates, then the rows run.

    ends [E]             rows given back
    starts               rows taken
    feeds                tokens of rows, in the place of what was sampled there
    block_group/row/index/id [U]   block_table[group][row, index] = id
    rows [R]             rows that run; those with exactly one token come first
    num_tokens [R]       query tokens of each (>= 1), the drafts among them
    num_computed [R]     tokens that have KV before this step = position of the first query token;
                         of rows with drafts in flight an upper bound: these begin with their newest
                         token, whose position the runner knows
    drafts [R]           query tokens at the end of each row's that the runner may propose itself
    (it
                         may propose fewer); empty: none. Only rows that decode have any, and only
                         in steps in which all rows decode; then every query token is sampled
    followed             whether what drafts by a network may follow the step
    sample [R] bool      whether the last query token's logits are sampled (false inside a prompt)
    All arrays int32 unless said otherwise. With the overlapped loop, a row's input token may still
    be unknown to the
    core: the runner feeds the token it sampled itself. `hook_payloads`: by name of an admission
    hook; those of the hooks in `deferred` follow in a `DeferredInputs`, and are waited for before
    anything is sampled.
    """

    step: int
    ends: np.ndarray
    starts: list[RowStart]
    block_group: np.ndarray
    block_row: np.ndarray
    block_index: np.ndarray
    block_id: np.ndarray
    rows: np.ndarray
    num_tokens: np.ndarray
    num_computed: np.ndarray
    sample: np.ndarray
    drafts: np.ndarray = NO_DRAFTS
    followed: bool = True
    feeds: list[RowFeed] = []
    hook_payloads: dict[str, bytes] = {}
    deferred: tuple[str, ...] = ()


class DeferredInputs(msgspec.Struct, frozen=True, tag="deferred"):
    """The payloads of a step that follow its plan, by hook name; decoded they are views of their
    frame."""

    step: int
    payloads: dict[str, memoryview]


class RowLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities of the `place`-th token of batch index `index`: see TokenLogprobs."""

    index: int
    ids: np.ndarray
    values: np.ndarray
    rank: int
    place: int = 0
    drawn_among: np.ndarray | None = None


class StepResult(msgspec.Struct, frozen=True, kw_only=True, tag="result"):
    """What a step produced; index i is plan.rows[i].

    tokens [R, W] int32  the tokens each row has gained, first to last, then -1: none where nothing
                         was sampled, one behind a step without drafts, at least one and at most
                         1 + drafts behind one with them
    drafted [R] int32    drafts that were proposed and looked at; empty: none
    proposed [R, D] int32  behind a step with deferred inputs: the drafts of each row's next step,
                         should it have so many, then -1; empty: none
    failed               (index, error): this row alone failed (non-finite logits); it has no
                         token, or, behind accepted drafts, those before the failure
    """

    step: int
    tokens: np.ndarray
    drafted: np.ndarray = NO_DRAFTS
    proposed: np.ndarray = NO_DRAFTS
    logprobs: list[RowLogprobs] = []
    prompt_logprobs: list[tuple[int, PromptLogprobs]] = []
    pooled: list[tuple[int, Pooled]] = []
    captured: list[tuple[int, Captured]] = []
    failed: list[tuple[int, WireError]] = []
