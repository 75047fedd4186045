"""What one step's attention needs to know, per KV group; built by the runner, read by every
attention layer.

Shapes: T query tokens of the step, R rows in it, B blocks of the longest row. Rows with exactly one
query token come first (`num_decodes` of them). Host copies (numpy) spare kernels a device-to-host
read.

A step that may be replayed from a graph (runner/buckets.py) has no host copies: its tensors are
static and padded to a bucket, and the numbers beside them are the bucket's, not the step's. Padding
rows have no query and no KV, padding tokens write to slot 0; table entries past a row's length are
stale.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
import torch

from headrace.back.kernels.attention.op import AttentionProblem
from headrace.back.kernels.gated_scan.op import StateTrail

RecordedRun: TypeAlias = Callable[
    [tuple[Hashable, ...], int, torch.Tensor, Callable[[torch.Tensor], torch.Tensor]], torch.Tensor
]


@dataclass(frozen=True, kw_only=True)
class AttentionPlan:
    """The step as one KV group sees it.

    query_start_R1   int32 [R+1]  first query token of each row
    kv_len_R         int32 [R]    tokens in the KV cache once this step's are written
    block_table_RB   int32 [R,B]  block ids; entries past a row's length, and freed window blocks,
    are 0 (null block)
    slot_T           int64 [T]    block * block_tokens + offset where each query token's KV is
    written
    host_*           None in steps of a bucket, where num_decodes is R if the bucket is for decodes
    alone, else 0;
                     max_query_len is 1 or T, and max_kv_len the capacity of the tables
    mutual           where tokens see those behind them, the same step in two parts (exact steps
    only)
    whole_prompts    in steps of a bucket: rows with several query tokens have none before them
    """

    query_start_R1: torch.Tensor
    kv_len_R: torch.Tensor
    block_table_RB: torch.Tensor
    slot_T: torch.Tensor
    host_query_start: np.ndarray | None
    host_kv_len: np.ndarray | None
    num_decodes: int
    max_query_len: int
    max_kv_len: int
    mutual: MutualPlans | None = None
    whole_prompts: bool = False


@dataclass(frozen=True, kw_only=True)
class PlanPart:
    """Some of a step's query tokens, at_T int64, and the plan that has them alone."""

    at_T: torch.Tensor
    plan: AttentionPlan


@dataclass(frozen=True, kw_only=True)
class MutualPlans:
    """A step whose tokens are in two parts: those that see what is before them, if there are any,
    and those that see the others of their span too (mutual.py)."""

    causal: PlanPart | None
    mutual: PlanPart


class AttentionProbe(Protocol):
    """Looks at the attention of a step, and at its routers between `begin` and `end`. `taps`: at
    its hidden states."""

    @property
    def taps(self) -> HiddenTaps | None: ...

    def begin(self) -> None:
        """The step's forward pass is about to run."""
        ...

    def end(self) -> None:
        """It has run."""
        ...

    def see(
        self,
        layer: int,
        problem: AttentionProblem,
        q_THD: torch.Tensor,
        kv: torch.Tensor,
        plan: AttentionPlan,
    ) -> None:
        """A layer has its queries, rotated, and has written its keys."""
        ...


LAST = -1
"""Behind the last layer and its norm."""


class HiddenTaps(Protocol):
    """Sees hidden states of a step. `layers`: in front of which layers, and LAST."""

    layers: frozenset[int]

    def see(
        self, layer: int, hidden_TE: torch.Tensor, branch_TE: torch.Tensor | None = None
    ) -> None:
        """The residual in front of a layer, with the branch that is still to be added to it, or
        what goes into the head; neither is to be changed."""
        ...


@dataclass(frozen=True, kw_only=True)
class EncodedTokens:
    """Rows of an encoder that stand for some of a step's tokens.

    at_M int64 [M]: indices of query tokens; rows_ME: their embeddings; layers: for each of the
    first decoder layers, what is added to the residual of these tokens behind it, [M, E]. adds: the
    rows are added to the tokens' own embeddings."""

    at_M: torch.Tensor
    rows_ME: torch.Tensor
    layers: tuple[torch.Tensor, ...] = ()
    adds: bool = False

    @property
    def num_layers(self) -> int:
        """Decoder layers behind which something is added."""
        return len(self.layers)

    def put(self, x_TE: torch.Tensor) -> torch.Tensor:
        """The embeddings of the step's tokens, with these among them; x_TE is overwritten."""
        put = x_TE.index_add_ if self.adds else x_TE.index_copy_
        return put(0, self.at_M, self.rows_ME)

    def add(self, layer: int, x_TE: torch.Tensor) -> None:
        """What comes behind a layer, added to the residual."""
        x_TE.index_add_(0, self.at_M, self.layers[layer])

    def marked(self, ids_T: torch.Tensor, mark: int) -> torch.Tensor:
        """Ids with `mark` in the place of these tokens'."""
        return ids_T.index_fill(0, self.at_M, mark)


@dataclass(frozen=True, kw_only=True)
class EncodedInPlace:
    """The same for steps that are recorded, in which any token may be of an input: slot_T int64
    [T]: what stands for each token, a row of arena_CW; of text the last one, which is zero. `width`
    E: of a part of such a row."""

    arena_CW: torch.Tensor
    slot_T: torch.Tensor
    width: int
    adds: bool = False

    @property
    def num_layers(self) -> int:
        """See EncodedTokens."""
        return self.arena_CW.shape[1] // self.width - 1

    def put(self, x_TE: torch.Tensor) -> torch.Tensor:
        """See EncodedTokens."""
        rows_TE = self._part(0)
        return x_TE.add_(rows_TE) if self.adds else torch.where(self._seen_T1, rows_TE, x_TE)

    def add(self, layer: int, x_TE: torch.Tensor) -> None:
        """See EncodedTokens."""
        x_TE.add_(self._part(1 + layer))

    def marked(self, ids_T: torch.Tensor, mark: int) -> torch.Tensor:
        """See EncodedTokens."""
        return ids_T.masked_fill(self._seen_T1[:, 0], mark)

    @property
    def _seen_T1(self) -> torch.Tensor:
        return (self.slot_T < self.arena_CW.shape[0] - 1)[:, None]

    def _part(self, index: int) -> torch.Tensor:
        first = index * self.width
        return self.arena_CW[:, first : first + self.width].index_select(0, self.slot_T)


@dataclass(frozen=True, kw_only=True)
class EncoderBatch:
    """What the encoder of an encoder-decoder reads ahead of a step: S tokens of texts end to end.

    token_ids_S, positions_S: int64 [S], positions from the beginning of each text; query_start:
    host int32, first token of each text, and S; slots_GS: int64 [S] for each KV group, where the
    keys and values of each token go, empty for those that are not cross caches. spectrograms:
    float32 [texts, bands, frames], of an encoder that reads these instead of tokens, of which
    there are as many as positions. sounds: float32 [frames of each], of one that reads these.
    recorded: runs what reads spectrograms in graphs by size (runner/encoder_graphs.py); None: there
    are none. seen: rows of images that stand for some of the tokens.
    """

    token_ids_S: torch.Tensor
    positions_S: torch.Tensor
    query_start: np.ndarray
    slots_GS: tuple[torch.Tensor, ...]
    spectrograms: torch.Tensor | None = None
    sounds: tuple[torch.Tensor, ...] = ()
    recorded: RecordedRun | None = None
    seen: EncodedTokens | None = None


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One step's input to a model: an argument of `forward`, never ambient.

    token_ids_T  int64 [T]; positions_T int64 [T]; plans: one per KV group; group_of_layer: layer ->
    index into plans;
    kv: layer -> its KV cache [num_blocks, 2, kv_heads, block_tokens, head_dim] (0 = keys, 1 =
    values); logits_at_N int64 [N]: query tokens whose logits are wanted.
    row_R: int32 or int64 [R], the runner's row of each row of the step; padding: the row behind the
    last. For recurrent state.
    query_start: host int32 [R+1], first query token of each row, for encoders, which attend inside
    rows.
    encoder: passes of the encoder that come first, in steps in which requests of an
    encoder-decoder begin (exact steps only); they are gone through once.
    segments_T: int64 [T], which text of a pair a token belongs to; None but for models that ask.
    probe: sees what the attention of decoders is computed from, in steps in which somebody looks
    (exact steps only).
    slot_T: int32 [T], the adapter slot of each query token's row (0: none); None: no row has one.
    steered_T: int64 [T], the row of the tables of directions of each query token's row (0: none);
    None: no row has one.
    last_token_batch: what is left of the step once the last layer has written its KV, if nobody
    asks for the hidden states of other
    tokens than those at logits_at_N: plans with one query in each of N rows (which may be padding).
    None: all of it.
    rope_table_TR: cosines and sines of each query token, where its position has several axes; then
    positions_T are places in this table. None: those of a model's own table.
    encoded: what an encoder gives in place of tokens' embeddings. encoded_behind: gives the same
    for the token behind each of a step's (exact steps only), for drafters that read it; None:
    nothing.
    media_T: bool [T], tokens of a prompt up to its last input, of models that ask (the same steps).
    taps: sees hidden states of all tokens. None: nobody does.
    trail: of steps that verify drafts, where recurrent layers leave the state behind each token.
    """

    token_ids_T: torch.Tensor
    positions_T: torch.Tensor
    plans: tuple[AttentionPlan, ...]
    group_of_layer: tuple[int, ...]
    kv: tuple[torch.Tensor, ...]
    logits_at_N: torch.Tensor
    row_R: torch.Tensor | None = None
    query_start: np.ndarray | None = None
    segments_T: torch.Tensor | None = None
    probe: AttentionProbe | None = None
    slot_T: torch.Tensor | None = None
    steered_T: torch.Tensor | None = None
    encoder: Iterable[EncoderBatch] = ()
    last_token_batch: Batch | None = None
    rope_table_TR: torch.Tensor | None = None
    encoded: EncodedTokens | EncodedInPlace | None = None
    encoded_behind: Callable[[], EncodedTokens | None] | None = None
    media_T: torch.Tensor | None = None
    taps: HiddenTaps | None = None
    trail: StateTrail | None = None
