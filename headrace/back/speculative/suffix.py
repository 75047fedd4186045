"""Drafts from all that was said: what followed a request's newest tokens earlier in it, or in
earlier requests (Oliaro et al. 2024, "SuffixDecoding"). The longest suffix that stood somewhere
before counts; of what came behind all its places the most frequent token is drafted, then, of the
places that go on with it, the next, while the share of places that go so far is great enough.

The places are found by comparing whole texts, some microseconds for tens of thousands of tokens:
an automaton over them would have to grow with every token. CPUs only, where the host knows the
rows' texts before the step.
"""

from __future__ import annotations

from collections import deque

import numpy as np
import torch

from headrace.back.kernels.step_inputs.op import StepTables
from headrace.back.speculative.drafter import TextDrafter
from headrace.base.config.resolved import Decision, SpeculationSpec

CORPUS_TOKENS = 65536
NOTHING = -1


class Corpus:
    """The texts of earlier requests, one behind another: int32 [CORPUS_TOKENS], each with NOTHING
    behind it. The oldest make room."""

    def __init__(self, max_texts: int) -> None:
        self.tokens = np.full(CORPUS_TOKENS, NOTHING, np.int32)
        self._max_texts = max_texts
        self._spans: deque[tuple[int, int]] = deque()
        self._end = 0

    def add(self, text: np.ndarray) -> None:
        """Keeps a text, or as much of its end as there is room for."""
        text = text[1 - CORPUS_TOKENS :]
        if not self._max_texts or not text.size:
            return
        if self._end + text.size + 1 > CORPUS_TOKENS:
            self._end = 0
        begin, end = self._end, self._end + text.size + 1
        while self._spans and (
            len(self._spans) >= self._max_texts
            or (self._spans[0][0] < end and begin < self._spans[0][1])
        ):
            first, last = self._spans.popleft()
            self.tokens[first:last] = NOTHING
        self.tokens[begin : end - 1] = text
        self._spans.append((begin, end))
        self._end = end


class SuffixDrafter(TextDrafter):
    """See the top of the file."""

    def __init__(self, spec: SpeculationSpec, device: torch.device) -> None:
        assert device.type == "cpu" and spec.suffix is not None, device
        self.max_drafts = spec.num_tokens
        self._suffix = spec.suffix
        self._corpus = Corpus(spec.suffix.max_cached_requests)
        self._texts: dict[int, list[np.ndarray]] = {}

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """See Drafter."""
        return ()

    def start(self, row: int) -> None:
        """See Drafter: what the row held before is kept."""
        text = self._texts.pop(row, None)
        if text:
            self._corpus.add(np.concatenate(text))

    def propose(
        self,
        row_R: torch.Tensor,
        query_start_R1: torch.Tensor,
        tables: StepTables,
        count_M: torch.Tensor,
        most: int,
    ) -> None:
        """See Drafter."""
        assert tables.length_M is not None
        tokens_MC, length_M = tables.tokens_MC.numpy(), tables.length_M.numpy()
        wanted_R = np.diff(query_start_R1.numpy()) - 1
        for row, wanted in zip(row_R.tolist(), wanted_R.tolist(), strict=True):
            length = int(length_M[row])
            text = tokens_MC[row, :length]
            known = self._texts.setdefault(row, [])
            known.append(text[sum(map(len, known)) :].copy())
            drafts = self.drafts(text, wanted) if wanted > 0 and length else []
            tokens_MC[row, length : length + len(drafts)] = drafts
            count_M[row] = len(drafts)

    def drafts(self, text: np.ndarray, most: int) -> list[int]:
        """Behind a text of at least one token."""
        sources = [text, self._corpus.tokens]
        matches = [self._places(source, text) for source in sources]
        longest = max(match for _, match in matches)
        if not longest:
            return []
        behind = [
            _behind(source, places, most)
            for source, (places, match) in zip(sources, matches, strict=True)
            if match == longest
        ]
        going = np.concatenate(behind)
        whole, drafts = len(going), []
        for place in range(min(most, max(1, int(longest * self._suffix.max_spec_factor)))):
            going = going[going[:, place] != NOTHING]
            if not len(going):
                break
            values, counts = np.unique(going[:, place], return_counts=True)
            best = int(counts.argmax())
            if counts[best] < self._suffix.min_token_prob * whole:
                break
            drafts.append(int(values[best]))
            going = going[going[:, place] == values[best]]
        return drafts

    def _places(self, source: np.ndarray, text: np.ndarray) -> tuple[np.ndarray, int]:
        """Where the longest suffix of the text ends in a source, but for its very end; and how many
        tokens it has."""
        places, match = np.flatnonzero(source[:-1] == text[-1]), 0
        while places.size:
            match += 1
            if match == min(len(text), self._suffix.max_tree_depth):
                break
            further = places[places >= match]
            further = further[source[further - match] == text[-1 - match]]
            if not further.size:
                break
            places = further
        return places, match


def _behind(source: np.ndarray, places: np.ndarray, most: int) -> np.ndarray:
    """The tokens behind places, int32 [places, most]; NOTHING from where a text ends."""
    at = places[:, None] + 1 + np.arange(most)
    tokens = np.where(at < len(source), source[np.minimum(at, len(source) - 1)], NOTHING)
    ended = np.maximum.accumulate(tokens == NOTHING, axis=1)
    return np.where(ended, NOTHING, tokens)
