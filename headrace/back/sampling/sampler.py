"""From logits to tokens. One table says what is done in which order:

    step                     rows that do it              file
    1  finite?               all                          op greedy (for free where it can)
    2  raw logprobs          logprobs, named ids          logprobs.py (processed ones: after 10, by
       processed.py)
    3  penalties             repetition, presence, ...    penalties.py
    4  logit bias            logit_bias                   logit_masks.py
    5  DRY                   dry_multiplier > 0           dry.py
       functions             logits_processors            processors.py
    6  masks                 allowed ids, min_tokens,     logit_masks.py
                             bad words, grammar           (comes with the step)
    7  argmax                temperature 0                op greedy
    8  temperature           the others                   random_rows.py; on a device op sample
       (in_step.py) does 8 to 11
    9  top_k, typical_p, top_p, min_p                     truncation.py
   10  XTC                   xtc_probability > 0          truncation.py
       what is left          sampling_mask                processed.py
       8 to 11 otherwise     chains of their own          chains.py
   11  noise and argmax      the others                   op gumbel, random_rows.py

Penalties come before the bias, so that a bias of +-100 stays what the user wrote; masks come last,
so that nothing lifts them. Temperature comes before truncation: top_p is over the tempered
distribution.

Cost: a step whose rows are all greedy and ask for nothing is one argmax, to which log-probabilities
add no second. On a device op `sample` is part of the step itself, and so are, in decodes, penalties
and up to 20 raw log-probabilities (in_step.py), beside prompts launched behind it. Masks and biases
are part of the step on every device (op logit_masks); on a CPU only where the other rows are
greedy. The rest is a handful of launches behind the step. On a CPU a step whose rows are greedy or
have a small top_k reads each row's best tokens alone (top_candidates.py). Others pay for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from headrace.back.kernels.greedy.op import OP as GREEDY
from headrace.back.kernels.greedy.op import Argmax, GreedyProblem
from headrace.back.kernels.gumbel.op import OP as GUMBEL
from headrace.back.kernels.gumbel.op import GumbelProblem
from headrace.back.kernels.logit_masks.op import OP as LOGIT_MASKS
from headrace.back.kernels.logit_masks.op import LogitMasksProblem
from headrace.back.kernels.nucleus.op import OP as NUCLEUS
from headrace.back.kernels.nucleus.op import NucleusProblem
from headrace.back.kernels.op import KernelChoice, decisions
from headrace.back.kernels.penalties.op import OP as PENALTIES
from headrace.back.kernels.penalties.op import PenaltiesProblem
from headrace.back.kernels.sample.op import OP as SAMPLE
from headrace.back.kernels.sample.op import SampleProblem
from headrace.back.kernels.token_scores.op import OP as TOKEN_SCORES
from headrace.back.kernels.token_scores.op import TokenScoresProblem
from headrace.back.kernels.upload import to_device
from headrace.back.sampling.chains import SamplerChains
from headrace.back.sampling.dry import Dry
from headrace.back.sampling.features import (
    BEYOND,
    IN_STEP,
    MASKED_BY_OP,
    SAMPLED_BY_OP,
    TRUNCATES,
    FeatureRows,
    LogitFeature,
    RowNumbers,
    Sampled,
    Use,
    alternatives,
    rows_at,
    zero_failed,
)
from headrace.back.sampling.in_step import (
    ALTERNATIVES,
    DeviceRows,
    HeadOutput,
    InStepSampler,
    InStepSampling,
    SamplerInput,
    SamplingTable,
)
from headrace.back.sampling.logit_masks import (
    AllowedIds,
    BadWords,
    GrammarMask,
    LogitBias,
    MinTokens,
    RowMasks,
)
from headrace.back.sampling.logprobs import SampledLogprobs, Scores, score
from headrace.back.sampling.penalties import Penalties
from headrace.back.sampling.processed import ProcessedRows
from headrace.back.sampling.processors import RowProcessors
from headrace.back.sampling.random_rows import sample_random
from headrace.back.sampling.top_candidates import TopCandidates, needs, sample_candidates
from headrace.base.wire.grammar import NOTHING
from headrace.base.wire.step import RowStart


def choose_kernels(device: torch.device) -> tuple[KernelChoice[Any], ...]:
    """What samplers are made of on a device: greedy, gumbel, nucleus, token scores, penalties,
    logit masks, and sample where it is used."""
    sample = () if device.type == "cpu" else (SAMPLE.choose(SampleProblem(device=device.type)),)
    return (
        GREEDY.choose(GreedyProblem(device=device.type)),
        GUMBEL.choose(GumbelProblem(device=device.type)),
        NUCLEUS.choose(NucleusProblem(device=device.type)),
        TOKEN_SCORES.choose(TokenScoresProblem(device=device.type)),
        PENALTIES.choose(PenaltiesProblem(device=device.type)),
        LOGIT_MASKS.choose(LogitMasksProblem(device=device.type)),
        *sample,
    )


class Sampler:
    """Samples one token per row; holds what the rows asked for."""

    def __init__(
        self,
        *,
        max_rows: int,
        logits_width: int,
        device: torch.device,
        on_device: bool | None = None,
        drafted_places: int = 0,
        max_places: int = 0,
    ) -> None:
        """`on_device`: whether op `sample` takes the rows it can, as on all devices but CPUs.
        `drafted_places`: tokens that a step with drafts samples, `max_places` with its padding."""
        self._width = logits_width
        self.numbers = RowNumbers(max_rows)
        self._alternatives: dict[int, tuple[int, tuple[int, ...]]] = {}
        self._processed = ProcessedRows()
        choices = choose_kernels(device)[:6]
        greedy, gumbel, _, token_scores, _, _ = choices
        self.greedy, chains = greedy.bind(), SamplerChains(device)
        self._random = gumbel.bind(), chains
        self.decisions = decisions(choices)
        tables: dict[str, Any] = {"max_rows": max_rows, "width": logits_width, "device": device}
        self._penalties = Penalties(**tables)
        self.table = SamplingTable(self.numbers, device)
        self.device_rows: DeviceRows | None = None
        if on_device if on_device is not None else device.type != "cpu":
            self.device_rows = DeviceRows(self.table, device)
            self.decisions += self.device_rows.decisions
        self._masks = RowMasks(**tables, masks=drafted_places, places=max_places)
        self.in_step_sampler = InStepSampler(
            device_rows=self.device_rows,
            penalties=self._penalties,
            masks=self._masks,
            greedy=self.greedy,
            token_scores=token_scores.bind(),
        )
        self._grammar = GrammarMask(**tables)
        self._processors = RowProcessors()
        self._features: tuple[tuple[Use, LogitFeature], ...] = (
            (Use.PENALTIES, self._penalties),
            (Use.BIAS, LogitBias(device)),
            (Use.DRY, Dry(device)),
            (Use.PROCESSORS, self._processors),
            (Use.ALLOWED, AllowedIds(device)),
            (Use.MIN_TOKENS, MinTokens(max_rows=max_rows, device=device)),
            (Use.BAD_WORDS, BadWords(device)),
            (Use.GRAMMAR, self._grammar),
            (Use.CHAIN, chains),
        )

    def end(self, rows: np.ndarray) -> None:
        """The rows are given back."""
        for row in rows.tolist():
            for use, feature in self._features:
                if self.numbers.use[row] & use:
                    feature.end(row)
            if self.numbers.use[row] & MASKED_BY_OP:
                self._masks.end(row)
            self.numbers.use[row] = 0
            self._alternatives.pop(row, None)
            self._processed.pop(row, None)

    def start(self, start: RowStart) -> None:
        """A request takes a row."""
        used = self.numbers.start(start, self._width)
        for use, feature in self._features:
            if use in used:
                feature.start(start)
        if used & MASKED_BY_OP:
            self._masks.start(start)
        if Use.LOGPROBS in used:
            self._alternatives[start.row] = start.sampling.logprobs or 0, start.sampling.logprob_ids
            self.numbers.alternatives[start.row] = alternatives(start.sampling)
            self._processed.start(start.row, start.sampling)

    def needs(self, rows: np.ndarray, *, grammar: bool = False) -> SamplerInput:
        """The least a step has to leave for these rows; `grammar`: masks come with it."""
        if not grammar and not np.count_nonzero(self.numbers.use[rows]):
            return HeadOutput.ARGMAX
        return self._needs(rows, grammar)

    def _needs(self, rows: np.ndarray, grammar: bool) -> SamplerInput:
        """The same of rows that are not all greedy. The tables that a step reads are up to date
        then."""
        use_N = self.numbers.use[rows]
        used = int(np.bitwise_or.reduce(use_N))
        masks = grammar or bool(used & MASKED_BY_OP)
        if masks and not self._masks.crowded.isdisjoint(rows.tolist()):
            return HeadOutput.LOGITS
        if self.device_rows is None:
            if masks and not used & ~MASKED_BY_OP:
                return InStepSampling(masks=True, grammar=grammar, samples=False)
            return HeadOutput.LOGITS if grammar else needs(self.numbers, rows)
        if used & ~IN_STEP:
            return HeadOutput.LOGITS
        logprobs = None
        if used & Use.LOGPROBS:
            asked_N = np.where(use_N & Use.LOGPROBS, self.numbers.alternatives[rows], 0)
            most = int(asked_N.max())
            if most == BEYOND:
                return HeadOutput.LOGITS
            logprobs = min(next(count for count in ALTERNATIVES if count >= most), self._width)
        self.device_rows.refresh()
        penalties = self._penalties.num_slots if used & Use.PENALTIES else 0
        return InStepSampling(
            penalties=penalties, alternatives=logprobs, masks=masks, grammar=grammar
        )

    def take_masks(self, payload: memoryview, rows: np.ndarray, places: np.ndarray) -> None:
        """The grammar's masks of a step that samples itself (InStepSampling): see RowMasks."""
        self._masks.take(payload, rows, places)

    def logprobs(self, scores: Scores, rows: np.ndarray, index: np.ndarray) -> SampledLogprobs:
        """The log-probabilities of rows whose scores a step has made: those of rows[i] are at
        index[i]."""
        scored = np.flatnonzero(self.numbers.use[rows] & Use.LOGPROBS)
        kept = [1 + self._alternatives[row][0] for row in rows[scored].tolist()]
        return SampledLogprobs(index=scored, kept=kept, scores=scores, named={}, at=index[scored])

    def sample(
        self,
        logits_NV: torch.Tensor,
        argmax: Argmax,
        *,
        rows: np.ndarray,
        positions: np.ndarray,
        tokens: torch.Tensor,
        masks: memoryview = NOTHING,
    ) -> Sampled:
        """Samples the token at `positions[i]` of `rows[i]` from logits_NV[i] (float32, may be
        overwritten).

        `argmax`: what `greedy` finds in these logits. `tokens` [max_rows, columns]: the rows'
        tokens so far, at their positions. `masks`: the grammar's payload of this step.
        """
        use_N = self.numbers.use[rows]
        if masks:
            use_N = use_N | self._grammar.take(masks, rows, positions) * np.int64(Use.GRAMMAR)
        used = int(np.bitwise_or.reduce(use_N))
        token_N, max_logit_N = argmax
        if not used:
            return Sampled(token_N=token_N, max_logit_N=max_logit_N)
        scored = np.flatnonzero(use_N & Use.LOGPROBS)
        if (
            used == Use.LOGPROBS and not self._processed
        ):  # the argmax stands, and the logits as they are
            every = scored.size == len(rows)
            scored_MV = logits_NV if every else rows_at(logits_NV, scored)
            logprobs = self._score(scored_MV, token_N, rows, scored)
            return Sampled(token_N=token_N, max_logit_N=max_logit_N, logprobs=logprobs)
        feature_rows = FeatureRows(
            rows=rows,
            positions=positions,
            num_output=positions - self.numbers.num_prompt[rows],
            tokens=tokens,
        )
        zero_failed(logits_NV, max_logit_N)
        scored_MV = rows_at(logits_NV, scored)
        self.apply(logits_NV, use_N, feature_rows)
        masks_MV = {}
        if self._processed:
            some = feature_rows.take(scored)
            masks_MV = self._processed.see(
                scored_MV, rows_at(logits_NV, scored), self.numbers, some
            )
        token_N, chosen_logit_N = self.choose(logits_NV, use_N, feature_rows)
        self._notify(token_N, use_N, feature_rows)
        return Sampled(
            token_N=token_N,
            max_logit_N=max_logit_N,
            chosen_logit_N=chosen_logit_N,
            logprobs=self._score(scored_MV, token_N, rows, scored, masks_MV),
            errors=self._processors.take_errors(rows) if used & Use.PROCESSORS else {},
        )

    def sample_candidates(
        self,
        top_candidates: TopCandidates,
        logits: Callable[[np.ndarray], torch.Tensor],
        *,
        rows: np.ndarray,
        positions: np.ndarray,
        tokens: torch.Tensor,
    ) -> Sampled:
        """What `sample` gives, of rows that need no more than their top candidates; `logits`:
        indices into the rows -> their logits, for those whose top candidates do not suffice."""
        num_output = positions - self.numbers.num_prompt[rows]
        feature_rows = FeatureRows(
            rows=rows, positions=positions, num_output=num_output, tokens=tokens
        )
        token_N, max_logit_N, unproven = sample_candidates(
            top_candidates, self.numbers, feature_rows
        )
        if unproven.size:
            logits_KV, some = logits(unproven), feature_rows.take(unproven)
            sampled = self.sample(
                logits_KV,
                self.greedy(logits_KV),
                rows=some.rows,
                positions=some.positions,
                tokens=tokens,
            )
            token_N[unproven], max_logit_N[unproven] = sampled.token_N, sampled.max_logit_N
        return Sampled(token_N=token_N, max_logit_N=max_logit_N)

    def apply(self, logits_NV: torch.Tensor, use_N: np.ndarray, feature_rows: FeatureRows) -> None:
        """Rewrites the logits in place, as the rows' features (`use_N`) say."""
        for use, feature in self._features:
            index = np.flatnonzero(use_N & use)
            if index.size == len(use_N):
                feature.apply(logits_NV, feature_rows)
            elif index.size:
                part = rows_at(logits_NV, index)
                feature.apply(part, feature_rows.take(index))
                logits_NV.index_copy_(0, to_device(index, part.device), part)

    def choose(
        self, logits_NV: torch.Tensor, use_N: np.ndarray, feature_rows: FeatureRows
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Each row's token int64 [N] from rewritten logits, and its logit, perhaps tempered."""
        if self.device_rows is None and (use_N & Use.RANDOM).all():
            return sample_random(logits_NV, self.numbers, feature_rows, *self._random)
        token_N, max_logit_N, index = self._choose_by_op(logits_NV, use_N, feature_rows)
        if index.size:
            at = to_device(index, token_N.device)
            part, some = logits_NV.index_select(0, at), feature_rows.take(index)
            token_K, best_K = sample_random(part, self.numbers, some, *self._random)
            token_N.index_copy_(0, at, token_K)
            max_logit_N.index_copy_(0, at, best_K)
        return token_N, max_logit_N

    def _choose_by_op(
        self, logits_NV: torch.Tensor, use_N: np.ndarray, feature_rows: FeatureRows
    ) -> tuple[torch.Tensor, torch.Tensor, np.ndarray]:
        """The choice, and the rows for which it is still to be made."""
        token_N, max_logit_N = self.greedy(logits_NV)
        random = np.flatnonzero(use_N & Use.RANDOM)
        if self.device_rows is None or not random.size:
            return token_N, max_logit_N.to(torch.float64), random
        self.device_rows.refresh()
        at = [
            to_device(one, logits_NV.device) for one in (feature_rows.rows, feature_rows.positions)
        ]
        token_N, max_logit_N = self.device_rows.sample_random(
            logits_NV, (token_N, max_logit_N), *at
        )
        return token_N, max_logit_N, np.flatnonzero(use_N & TRUNCATES & ~SAMPLED_BY_OP)

    def _notify(self, token_N: torch.Tensor, use_N: np.ndarray, feature_rows: FeatureRows) -> None:
        for use, feature in self._features:
            index = np.flatnonzero(use_N & use)
            if index.size == len(use_N):
                feature.sampled(token_N, feature_rows)
            elif index.size:
                feature.sampled(rows_at(token_N, index), feature_rows.take(index))

    def _score(
        self,
        logits_MV: torch.Tensor,
        token_N: torch.Tensor,
        rows: np.ndarray,
        scored: np.ndarray,
        masks_MV: Mapping[int, np.ndarray] | None = None,
    ) -> SampledLogprobs | None:
        if not scored.size:
            return None
        asked = [self._alternatives[int(row)] for row in rows[scored]]
        most = max(self._width if count < 0 else count for count, _ in asked)
        token_M = token_N if scored.size == len(rows) else rows_at(token_N, scored)
        return SampledLogprobs(
            index=scored,
            kept=[1 + (self._width if count < 0 else count) for count, _ in asked],
            scores=score(logits_MV, token_M, alternatives=most),
            named={
                m: score(logits_MV[m : m + 1], token_M[m : m + 1], alternatives=0, named=named)
                for m, (_, named) in enumerate(asked)
                if named
            },
            masks=masks_MV or {},
        )
