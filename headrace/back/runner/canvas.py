"""Steps of diffusion language models whose tokens all see each other, those of the prompt the
answer's too (LLaDA, Nie et al. 2025, arXiv:2502.09992; Dream, Ye et al. 2025, arXiv:2508.15487).

Behind a text lies a canvas of masks, as long as the answer may become, at most
`DenoisingSpec.canvas` tokens. Its blocks are decided from left to right, in passes of the model
over all of the text and all of the canvas: nothing stays as it is between passes, so that nothing
is kept. A block is decided when its first token is wanted; behind a full canvas comes another, for
which what was written before is part of the text. So the tokens are those of the published samplers
called with as many new tokens as the canvas has.

R rows of a step, K rows of a pass, B tokens of a block, C entries of several rows, N masks.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from headrace.back.kernels.upload import to_device
from headrace.back.runner.batch import Rows, StepShape
from headrace.back.runner.denoising import DenoisingSteps
from headrace.back.runner.steps import AwaitMasks, StepResources
from headrace.back.sampling.in_step import SamplerInput
from headrace.base.config.denoising import DenoisingSpec
from headrace.base.wire.step import StepPlan


class CanvasSteps(DenoisingSteps):
    """`Steps`; see the top of the file. `max_tokens`: of a pass, unless it has but one row.

    Invariants by row: positions below `_final` have the tokens that they keep; `_limit` is the
    length at which its request ends.
    """

    def __init__(
        self, resources: StepResources, rows: Rows, spec: DenoisingSpec, *, max_tokens: int
    ) -> None:
        super().__init__(resources, rows, spec, max_tokens=max_tokens)
        self._max_tokens = max_tokens
        self._limit = np.zeros(rows.num_prompt.size, np.int64)

    def begin(self, plan: StepPlan, needs: SamplerInput, masks: AwaitMasks) -> StepPlan:
        """See Steps."""
        for start in plan.starts:
            self._limit[start.row] = start.length_limit
        return super().begin(plan, needs, masks)

    def _read(self, row_R: np.ndarray, known_R: np.ndarray) -> None:
        """Nothing: texts are read in every pass."""

    def _decide(self, row_R: np.ndarray, known_R: np.ndarray) -> None:
        length, canvas = self._spec.length, self._spec.canvas
        prompt_R, known_R = self.rows.num_prompt[row_R].astype(np.int64), known_R.astype(np.int64)
        first_R = known_R - (known_R - prompt_R) % length
        end_R = prompt_R + (known_R - prompt_R) // canvas * canvas + canvas
        end_R = np.maximum(np.minimum(end_R, self._limit[row_R]), known_R + 1)
        for part in parts_of(end_R, self._max_tokens):
            self.rows.tokens.reserve(int(end_R[part].max()))
            self._fill(row_R[part], first_R[part], known_R[part], end_R[part])
        self._final[row_R] = np.minimum(first_R + length, end_R)

    def _fill(
        self, row_K: np.ndarray, first_K: np.ndarray, known_K: np.ndarray, end_K: np.ndarray
    ) -> None:
        """The tokens of the blocks from `first_K` on, of canvases that end at `end_K`."""
        position_KB = first_K[:, None] + np.arange(self._spec.length)
        open_KB = position_KB < end_K[:, None]
        reported_KB = self._reported(row_K, position_KB, open_KB & (position_KB < known_K[:, None]))
        self._lay_masks(row_K, first_K, end_K)
        for turn in range(self._spec.steps):
            left_K = open_KB.any(1)
            if not left_K.any():
                return
            row_K, first_K, end_K = row_K[left_K], first_K[left_K], end_K[left_K]
            open_KB, reported_KB = open_KB[left_K], reported_KB[left_K]
            if not self._spec.shares(turn, open_KB.sum(1)).any() and self._spec.threshold >= 1.0:
                continue  # nothing would be decided
            hidden_TE = self.forward(whole_shape(row_K, end_K))
            block_N, place_N = open_KB.nonzero()
            position_N = first_K[block_N] + place_N
            begin_K = np.cumsum(end_K) - end_K
            at_N = begin_K[block_N] + np.maximum(position_N - self._spec.shifted, 0)
            proposals = self._propose(hidden_TE, at_N, row_K[block_N], position_N, turn)
            chosen_KB = self._choose(proposals, row_K, first_K, open_KB, reported_KB, turn)
            open_KB = open_KB & ~chosen_KB

    def _lay_masks(self, row_K: np.ndarray, first_K: np.ndarray, end_K: np.ndarray) -> None:
        count_K = end_K - first_K
        row_C, at_C = np.repeat(row_K, count_K), counted(first_K, count_K)
        mask_C = np.full(at_C.size, self._spec.mask, np.int32)
        self.rows.tokens.put(row_C, at_C, to_device(mask_C, self.rows.device))

    def _places(self, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        places: np.ndarray = (positions - self.rows.num_prompt[rows]) % self._spec.length
        return places


def parts_of(count_R: np.ndarray, most: int) -> Iterator[slice]:
    """Neighbours that have at most so much together, or one alone."""
    begin, total = 0, 0
    for end, count in enumerate(count_R.tolist()):
        if total and total + count > most:
            yield slice(begin, end)
            begin, total = end, 0
        total += count
    if total:
        yield slice(begin, count_R.size)


def counted(first_K: np.ndarray, count_K: np.ndarray) -> np.ndarray:
    """`count_K` numbers from each of `first_K` on, one row of them behind the other, int64."""
    before_K = np.cumsum(count_K) - count_K
    numbers_C: np.ndarray = np.arange(count_K.sum()) + np.repeat(first_K - before_K, count_K)
    return numbers_C


def whole_shape(row_K: np.ndarray, end_K: np.ndarray) -> StepShape:
    """The step over all tokens of K rows, up to these positions."""
    nothing = np.zeros(0, np.int64)
    return StepShape(
        rows=row_K,
        query_start=np.concatenate(([0], np.cumsum(end_K))).astype(np.int32),
        kv_len=end_K.astype(np.int32),
        row_T=np.repeat(row_K, end_K),
        position_T=counted(np.zeros_like(end_K), end_K),
        sampled=nothing,
        sampled_row=nothing,
        sampled_position=nothing,
        place=nothing,
        num_decodes=0,
        max_query_len=int(end_K.max()),
        max_kv_len=int(end_K.max()),
    )
