"""Steps of models that write blocks of text by diffusion: the masks of a block become tokens in
several passes of the model over the block (low-confidence remasking, as SDAR, LLaDA 2 and Fast-dLLM
publish it).

    prompt    its whole blocks are read once; their KV is final
    decide    when the first token of a block is wanted: passes over the block, in which what is
              still open is a mask. Each pass decides the tokens whose probability is above the
              threshold, or its share of the block, the likeliest first, where these are fewer. A
              last pass over the decided block leaves its KV
    tell      the tokens of a block are told as plans ask for them (core/scheduler/whole_blocks.py):
              the first alone behind a prompt, else the rest of the block at once

The block that a prompt ends in is decided around the prompt's tokens. So it is behind a preemption:
what was told of it before is decided again, in the same order, as noise depends on seed, position
and pass alone; the tokens stay those that were told, should rounding say others.

Where logits say the token behind theirs (`shifted`), the last ones of a block give the first token
of the next, at once and for good; it is kept by row until its block is wanted.

R rows of a step, K blocks of a pass, B tokens of a block, N masks.
"""

from __future__ import annotations

import numpy as np
import torch

from headrace.back.attention.plan import AttentionProbe
from headrace.back.kernels.upload import to_device, to_host
from headrace.back.runner.batch import Rows, StepShape
from headrace.back.runner.exact_steps import ExactSteps
from headrace.back.runner.steps import (
    AwaitMasks,
    StepOutputs,
    StepResources,
    StepTensors,
    TakeMasks,
)
from headrace.back.sampling.denoising import Proposals, joined, propose
from headrace.back.sampling.in_step import SamplerInput, StepSamples
from headrace.base.config.denoising import DenoisingSpec
from headrace.base.wire.step import StepPlan

MASKS = 256
"""Masks whose logits are there at a time: of 150,000 tokens each 150 MB, and as much again for
every copy that sampling makes."""


class DenoisingSteps(ExactSteps):
    """`Steps`; see the top of the file. `max_tokens`: of a pass.

    Invariants by row: positions below `_final` have the tokens and the KV that they keep; `_final`
    is a multiple of B; the scores of the tokens of the newest block lie in `_max_logit`,
    `_chosen_logit`.
    """

    def __init__(
        self, resources: StepResources, rows: Rows, spec: DenoisingSpec, *, max_tokens: int
    ) -> None:
        super().__init__(resources, rows, "how many passes a block takes, its tokens say")
        num_rows = rows.num_prompt.size
        self._spec = spec
        self._most_blocks = max(1, max_tokens // spec.length)
        self._final = np.zeros(num_rows, np.int64)
        self._max_logit = np.zeros((num_rows, spec.length), np.float32)
        self._chosen_logit = np.zeros((num_rows, spec.length), np.float32)
        self._ahead = _nothing(num_rows)

    def begin(self, plan: StepPlan, needs: SamplerInput, masks: AwaitMasks) -> StepPlan:
        """See Steps."""
        for start in plan.starts:
            self._final[start.row] = start.num_computed
        return super().begin(plan, needs, masks)

    def run(
        self,
        plan: StepPlan,
        shape: StepShape,
        *,
        take_masks: TakeMasks,
        probe: AttentionProbe | None = None,
    ) -> StepOutputs:
        """See Steps."""
        assert probe is None, "no row may be looked into"
        if plan.block_id.size:
            self.rows.update(plan)
        length = self._spec.length
        self.rows.tokens.reserve(shape.max_kv_len + 2 * length)
        known_R = shape.kv_len - plan.drafts if plan.drafts.size else shape.kv_len
        self._read(shape.rows, known_R)
        wanted = plan.sample & (known_R >= self._final[shape.rows])
        self._decide(shape.rows[wanted], known_R[wanted])
        nothing = torch.empty(0, device=self.rows.device)
        samples = self._samples(shape) if shape.sampled.size else None
        return StepOutputs(out=StepTensors(hidden_TE=nothing), samples=samples)

    def _read(self, row_R: np.ndarray, known_R: np.ndarray) -> None:
        """The whole blocks of so many known tokens, as far as they were not read."""
        length = self._spec.length
        stop_R = known_R // length * length
        blocks = [
            (row, first)
            for row, begin, stop in zip(
                row_R.tolist(), self._final[row_R].tolist(), stop_R.tolist(), strict=True
            )
            for first in range(begin, stop, length)
        ]
        for begin in range(0, len(blocks), self._most_blocks):
            row_K, first_K = np.array(blocks[begin : begin + self._most_blocks], np.int64).T
            hidden_TE = self._pass(row_K, first_K)
            ends = dict(zip(row_R.tolist(), known_R.tolist(), strict=True))
            last_K = first_K + length == [ends[row] for row in row_K.tolist()]
            self._look_ahead(hidden_TE, row_K, first_K, last_K)
        self._final[row_R] = np.maximum(self._final[row_R], stop_R)

    def _decide(self, row_R: np.ndarray, known_R: np.ndarray) -> None:
        """The tokens of the blocks that these rows' next ones are in, and their KV."""
        first_R = known_R.astype(np.int64) // self._spec.length * self._spec.length
        for begin in range(0, row_R.size, self._most_blocks):
            part = slice(begin, begin + self._most_blocks)
            self._denoise(row_R[part], first_R[part], known_R[part])
        self._final[row_R] = first_R + self._spec.length

    def _denoise(self, row_K: np.ndarray, first_K: np.ndarray, known_K: np.ndarray) -> None:
        position_KB = first_K[:, None] + np.arange(self._spec.length)
        open_KB = position_KB >= self.rows.num_prompt[row_K][:, None]
        reported_KB = self._reported(row_K, position_KB, open_KB & (position_KB < known_K[:, None]))
        self._put(row_K, first_K, open_KB, np.full(int(open_KB.sum()), self._spec.mask))
        if self._spec.shifted:
            open_KB = self._begin_with_ahead(row_K, first_K, open_KB, reported_KB)
        turn = 0
        while True:
            hidden_TE = self._pass(row_K, first_K)
            left_K = open_KB.any(1)
            self._look_ahead(hidden_TE, row_K, first_K, ~left_K)
            if not left_K.any():
                return
            block_N, place_N = open_KB.nonzero()
            at_N = np.flatnonzero(open_KB) - self._spec.shifted
            places = row_K[block_N], first_K[block_N] + place_N
            proposals = self._propose(hidden_TE, at_N, *places, turn)
            row_K, first_K, open_KB = row_K[left_K], first_K[left_K], open_KB[left_K]
            reported_KB = reported_KB[left_K]
            chosen_KB = self._choose(proposals, row_K, first_K, open_KB, reported_KB, turn)
            open_KB = open_KB & ~chosen_KB
            turn += 1

    def _look_ahead(
        self, hidden_TE: torch.Tensor, row_K: np.ndarray, first_K: np.ndarray, which_K: np.ndarray
    ) -> None:
        """What these blocks, which are final, say of the token behind them."""
        if not self._spec.shifted or not which_K.any():
            return
        length, rows_N = self._spec.length, row_K[which_K]
        at_N = np.flatnonzero(which_K) * length + length - 1
        proposals = self._propose(hidden_TE, at_N, rows_N, first_K[which_K] + length, 0)
        for kept, value in zip(self._ahead.columns, proposals.columns, strict=True):
            kept[rows_N] = value

    def _begin_with_ahead(
        self,
        row_K: np.ndarray,
        first_K: np.ndarray,
        open_KB: np.ndarray,
        reported_KB: np.ndarray,
    ) -> np.ndarray:
        """The first tokens of blocks that begin open are those that the blocks before say; what is
        open then."""
        begins_KB = np.zeros_like(open_KB)
        begins_KB[:, 0] = open_KB[:, 0]
        rows_C, reported_C = row_K[open_KB[:, 0]], reported_KB[begins_KB]
        ahead_C = self._ahead.token[rows_C]
        self._put(row_K, first_K, begins_KB, np.where(reported_C < 0, ahead_C, reported_C))
        self._max_logit[rows_C, 0] = self._ahead.max_logit[rows_C]
        self._chosen_logit[rows_C, 0] = self._ahead.chosen_logit[rows_C]
        return open_KB & ~begins_KB

    def _reported(
        self, row_K: np.ndarray, position_KB: np.ndarray, where_KB: np.ndarray
    ) -> np.ndarray:
        """The tokens that stand at these places, int64 [K, B]; -1 elsewhere."""
        reported_KB = np.full(where_KB.shape, -1, np.int64)
        if where_KB.any():
            block_C, _ = where_KB.nonzero()
            tokens_C = self.rows.tokens.take(row_K[block_C], position_KB[where_KB])
            reported_KB[where_KB] = to_host(tokens_C).numpy()
        return reported_KB

    def _propose(
        self,
        hidden_TE: torch.Tensor,
        at_N: np.ndarray,
        rows_N: np.ndarray,
        positions_N: np.ndarray,
        turn: int,
    ) -> Proposals:
        """For these positions, by the hidden states at these places; MASKS at a time."""
        sampler, model = self._resources.sampler, self._resources.model
        assert sampler is not None
        parts = []
        for begin in range(0, at_N.size, MASKS):
            part = slice(begin, begin + MASKS)
            at_M = to_device(at_N[part], hidden_TE.device)
            proposals = propose(
                sampler,
                model.logits(hidden_TE.index_select(0, at_M)),
                rows=rows_N[part],
                positions=positions_N[part],
                tokens=self.rows.tokens.data,
                turn=turn,
                mask=self._spec.mask,
                order=self._spec.order,
            )
            parts.append(proposals)
        return joined(parts)

    def _choose(
        self,
        proposals: Proposals,
        row_K: np.ndarray,
        first_K: np.ndarray,
        open_KB: np.ndarray,
        reported_KB: np.ndarray,
        turn: int,
    ) -> np.ndarray:
        """Puts the proposals that stand into their rows, or what was told there; bool [K, B]:
        where."""
        confidence_KB = np.full(open_KB.shape, -np.inf)
        confidence_KB[open_KB] = np.nan_to_num(proposals.confidence, nan=0.0)
        part_B = np.arange(self._spec.length) // self._spec.part
        within_KB = part_B == part_B[open_KB.argmax(1)][:, None]  # the first part with open places
        confidence_KB[~within_KB] = -np.inf
        chosen_KB = decided(
            confidence_KB,
            open_KB & within_KB,
            share_K=self._spec.shares(turn, open_KB.sum(1)),
            threshold=self._spec.threshold,
        )
        chosen_N = chosen_KB[open_KB]
        block_C, place_C = chosen_KB.nonzero()
        reported_C = reported_KB[chosen_KB]
        token_C = np.where(reported_C < 0, proposals.token[chosen_N], reported_C)
        self._put(row_K, first_K, chosen_KB, token_C)
        self._max_logit[row_K[block_C], place_C] = proposals.max_logit[chosen_N]
        self._chosen_logit[row_K[block_C], place_C] = proposals.chosen_logit[chosen_N]
        return chosen_KB

    def _put(
        self, row_K: np.ndarray, first_K: np.ndarray, where_KB: np.ndarray, token_C: np.ndarray
    ) -> None:
        """Tokens of blocks, where these are."""
        block_C, place_C = where_KB.nonzero()
        token_C = to_device(token_C.astype(np.int32), self.rows.device)
        self.rows.tokens.put(row_K[block_C], first_K[block_C] + place_C, token_C)

    def _pass(self, row_K: np.ndarray, first_K: np.ndarray) -> torch.Tensor:
        """The model over these blocks, whose KV it writes; hidden states [K * B, E]."""
        return self.forward(block_shape(row_K, first_K, self._spec.length))

    def _places(self, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Where in their blocks these positions are."""
        return positions % self._spec.length

    def _samples(self, shape: StepShape) -> StepSamples:
        """What was decided at the positions that the step asks for."""
        rows, positions = shape.sampled_row, shape.sampled_position
        place = self._places(rows, positions)
        size = int(shape.place[-1]) + 1
        tokens = np.zeros(size, np.int32)
        max_logit, chosen_logit = np.zeros(size, np.float32), np.zeros(size, np.float32)
        tokens[shape.place] = to_host(self.rows.tokens.take(rows, positions)).numpy()
        max_logit[shape.place] = self._max_logit[rows, place]
        chosen_logit[shape.place] = self._chosen_logit[rows, place]
        return StepSamples(tokens=tokens, max_logit=max_logit, chosen_logit=chosen_logit)


def _nothing(count: int) -> Proposals:
    """Proposals that nobody has made yet."""
    zeros = np.zeros(count, np.float32)
    return Proposals(
        token=np.zeros(count, np.int64),
        confidence=np.zeros(count),
        max_logit=zeros.copy(),
        chosen_logit=zeros.copy(),
    )


def decided(
    confidence_KB: np.ndarray, open_KB: np.ndarray, *, share_K: np.ndarray, threshold: float
) -> np.ndarray:
    """Which open places a pass decides, bool [K, B]: those above the threshold if they are the
    block's share or more, else so many most likely ones. Confidence is -inf where nothing is
    open."""
    high_KB = confidence_KB > threshold
    order_KB = np.argsort(-confidence_KB, axis=1, kind="stable")
    best_KB = np.zeros_like(open_KB)
    share_K1 = share_K[:, None]
    np.put_along_axis(best_KB, order_KB, np.arange(open_KB.shape[1]) < share_K1, axis=1)
    enough_K1 = high_KB.sum(1, keepdims=True) >= share_K1
    chosen_KB: np.ndarray = np.where(enough_K1, high_KB, best_KB & open_KB)
    return chosen_KB


def block_shape(row_K: np.ndarray, first_K: np.ndarray, length: int) -> StepShape:
    """The step whose rows are K blocks of `length` tokens, the last of what each knows."""
    num_blocks = row_K.size
    position_T = (first_K[:, None] + np.arange(length)).reshape(-1)
    nothing = np.zeros(0, np.int64)
    kv_len = (first_K + length).astype(np.int32)
    return StepShape(
        rows=row_K,
        query_start=np.arange(0, (num_blocks + 1) * length, length, dtype=np.int32),
        kv_len=kv_len,
        row_T=np.repeat(row_K, length),
        position_T=position_T,
        sampled=nothing,
        sampled_row=nothing,
        sampled_position=nothing,
        place=nothing,
        num_decodes=0,
        max_query_len=length,
        max_kv_len=int(kv_len.max()),
    )
