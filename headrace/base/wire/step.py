"""Messages between the engine core and the workers: the plan of a step and its result.

A *row* is a permanent slot of the runner; a request owns one row from its first scheduled step until it ends or is
preempted. A plan lists changes to the rows and the rows that run; it never repeats what the runner already knows,
so its size does not depend on context lengths. Plans are executed strictly in the order in which they are submitted.
"""

from __future__ import annotations

import msgspec
import numpy as np

from headrace.base.errors import WireError
from headrace.base.wire.params import RowPooling, RowSampling
from headrace.base.wire.request import Captured, Pooled, PromptLogprobs


class KVGroup(msgspec.Struct, frozen=True, kw_only=True):
    """A set of layers that share block tables. `kind`: "full", or "window" with its size in tokens.

    The i-th layer of every group lives in the same KV tensor, so that one pool of blocks serves all groups: each group
    of a request takes its own blocks from it.
    """

    kind: str
    layers: tuple[int, ...]
    window: int | None = None


class WorkerFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What the workers state once they are loaded. Block 0 is the null block and belongs to nobody.

    `groups` is empty for encoders, which keep no KV. `generates`: there is a language-model head; without one
    requests can only be pooled. Attention weights can be had of `capture_layers` layers with `capture_heads` heads; 0
    where they cannot.
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
    weight_bytes: int = 0
    kv_bytes: int = 0
    start_s: dict[str, float] = {}
    decisions: list[tuple[str, str, str, str]] = []


class RowStart(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A request takes a row. `tokens` (int32) are all its known tokens: the prompt, then outputs after a preemption.

    `num_prompt` of them are the prompt. The first `num_computed` have KV already (prefix hit). Block ids follow in the
    plan's `block_*` arrays.
    """

    row: int
    request: int
    tokens: np.ndarray
    num_prompt: int
    num_computed: int
    sampling: RowSampling
    pooling: RowPooling | None = None


class RowFeed(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Tokens (int32) of a running row at positions from `start` on, which the core has decided itself."""

    row: int
    start: int
    tokens: np.ndarray


class StepPlan(msgspec.Struct, frozen=True, kw_only=True, tag="plan"):
    """One step. Applied in this order: `ends`, `starts`, `feeds`, block updates, then the rows run.

    ends [E]             rows given back
    starts               rows taken
    feeds                tokens of rows, in the place of what was sampled there
    block_group/row/index/id [U]   block_table[group][row, index] = id
    rows [R]             rows that run; those with exactly one token come first
    num_tokens [R]       query tokens of each (>= 1)
    num_computed [R]     tokens that have KV before this step = position of the first query token
    sample [R] bool      whether the last query token's logits are sampled (false inside a prompt)
    All arrays int32 unless said otherwise. With the overlapped loop, a row's input token may still be unknown to the
    core: the runner feeds the token it sampled itself. `gates` carries payloads of optional gates by name; those of
    the gates in `late` come after the plan, in a `Supply`, and are waited for before anything is sampled.
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
    feeds: list[RowFeed] = []
    gates: dict[str, bytes] = {}
    late: tuple[str, ...] = ()


class Supply(msgspec.Struct, frozen=True, tag="supply"):
    """The late payloads of a step, by gate name; decoded they lie in the frame they came in."""

    step: int
    gates: dict[str, memoryview]


class RowLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities of the token sampled for batch index `index`: see TokenLogprobs."""

    index: int
    ids: np.ndarray
    values: np.ndarray
    rank: int


class StepResult(msgspec.Struct, frozen=True, kw_only=True, tag="result"):
    """What a step produced; index i is plan.rows[i].

    tokens [R] int32     the sampled token, -1 where nothing was sampled
    failed               (index, error): this row alone failed (non-finite logits); it has no token
    """

    step: int
    tokens: np.ndarray
    logprobs: list[RowLogprobs] = []
    prompt_logprobs: list[tuple[int, PromptLogprobs]] = []
    pooled: list[tuple[int, Pooled]] = []
    captured: list[tuple[int, Captured]] = []
    failed: list[tuple[int, WireError]] = []
