"""Masks and biases of a step's rows, in place, from tables of all rows: what a recorded step reads
without a word from the host (sampling/logit_masks.py says what they mean).

`bind(problem)` returns `f(logits_KV, tables, tokens_MC, row_K, position_K, grammar) -> None`.

    logits_KV    float32, V contiguous
    tables       `MaskTables`: the rules of all rows, M of them and one that is nobody's
    tokens_MC    int32: the rows' tokens at their positions
    row_K        int32: the row of each of the K
    position_K   int32: the position of the token to be sampled
    grammar      whether the step has masks of grammars

Of each row, in an order that no result depends on: what its masks do not allow becomes -Inf; biases
are added; below position `until` the suppressed ids become -Inf; so does the last id of a banned
word whose other ids are the row's last tokens. A logit that is NaN or +Inf stays, so that a row
whose logits have failed is still known by its argmax.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from headrace.back.kernels.op import Kernel, Op, Sample, random_tensor, sample_generator

WORDS = 2048
"""int32 of a row's rules: 8 KiB, enough for 1,000 biases."""
HEADER = 8
BIASES, SUPPRESSED, UNTIL, BANNED, MASKED = range(5)
"""Of a row's header: numbers of biases, of suppressed ids, the position until which these are, the
number of banned words, whether the row has a mask of its own. The entries follow: (id, bits of a
float32) of each bias, the suppressed ids, (length, ids) of each word."""
LARGEST = 1e38
"""Of a bias, up or down: within single precision."""
LONGEST = 64
"""Ids of a banned word at most."""


@dataclass(frozen=True, kw_only=True)
class MaskTables:
    """rules int32 [M+1, WORDS]; allowed int32 [M+1, B], a bit per id, lowest first: the rows' own
    masks; grammar int32 [G, B]: those of this step; grammar_at int32 [P]: which of these each of
    the K places has, P >= K; -1: none."""

    rules_MW: torch.Tensor
    allowed_MB: torch.Tensor
    grammar_GB: torch.Tensor
    grammar_at_P: torch.Tensor

    @staticmethod
    def empty(
        *, max_rows: int, width: int, device: torch.device, masks: int = 0, places: int = 0
    ) -> MaskTables:
        """No rules. `masks`, `places`: of a step at most, where these may be more than rows. On a
        CPU pages that nobody has written cost no memory."""

        def zeros(*shape: int) -> torch.Tensor:
            if device.type == "cpu":
                return torch.from_numpy(np.zeros(shape, np.int32))
            return torch.zeros(shape, dtype=torch.int32, device=device)

        rows, num_words = max_rows + 1, -(-width // 32)
        return MaskTables(
            rules_MW=zeros(rows, WORDS),
            allowed_MB=zeros(rows, num_words),
            grammar_GB=zeros(max(rows, masks), num_words),
            grammar_at_P=zeros(max(rows, places)),
        )


LogitMasks = Callable[
    [torch.Tensor, MaskTables, torch.Tensor, torch.Tensor, torch.Tensor, bool], None
]


@dataclass(frozen=True, kw_only=True)
class LogitMasksProblem:
    """The same for every width and number of rows."""

    device: str


def packed_rules(
    *,
    biases: Mapping[int, float],
    suppressed: Sequence[int],
    until: int,
    words: Sequence[Sequence[int]],
    masked: bool,
) -> np.ndarray | None:
    """A row of `rules_MW` up to its last entry; None if the table has not room enough, or if a bias
    is beyond single precision."""
    parts = [np.zeros(HEADER, np.int32)]
    if not all(abs(bias) <= LARGEST for bias in biases.values()):
        return None
    parts[0][[BIASES, SUPPRESSED, UNTIL]] = len(biases), len(suppressed), until
    parts[0][[BANNED, MASKED]] = len(words), masked
    pairs = np.empty((len(biases), 2), np.int32)
    pairs[:, 0] = list(biases)
    pairs[:, 1] = np.array(list(biases.values()), np.float32).view(np.int32)
    parts += [pairs.ravel(), np.array(suppressed, np.int32)]
    parts += [np.array([len(word), *word], np.int32) for word in words]
    row = np.concatenate(parts)
    fits = row.size <= WORDS and max(map(len, words), default=0) <= LONGEST
    return row if fits else None


def packed_mask(ids: Sequence[int], width: int) -> np.ndarray:
    """The mask that allows these ids, int32 [B]."""
    bits = np.zeros(-(-width // 32) * 32, np.uint8)
    bits[list(ids)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def bind_reference(problem: LogitMasksProblem) -> LogitMasks:
    """The reference, a row at a time on the host."""

    def logit_masks(
        logits_KV: torch.Tensor,
        tables: MaskTables,
        tokens_MC: torch.Tensor,
        row_K: torch.Tensor,
        position_K: torch.Tensor,
        grammar: bool,
    ) -> None:
        for k, (row, position) in enumerate(zip(row_K.tolist(), position_K.tolist(), strict=True)):
            rules = tables.rules_MW[row].cpu().numpy()
            masks = []
            if rules[MASKED]:
                masks.append(tables.allowed_MB[row])
            if grammar and tables.grammar_at_P[k] >= 0:
                masks.append(tables.grammar_GB[tables.grammar_at_P[k]])
            for mask in masks:
                _forbid(logits_KV[k], _forbidden_ids(mask, logits_KV.shape[1]))
            history = tokens_MC[row, :position].cpu().numpy()
            _follow_rules(logits_KV[k], rules, history)

    return logit_masks


def _follow_rules(logits_V: torch.Tensor, rules: np.ndarray, history: np.ndarray) -> None:
    num_biases, num_suppressed, until, num_words = rules[[BIASES, SUPPRESSED, UNTIL, BANNED]]
    pairs = torch.from_numpy(rules[HEADER : HEADER + 2 * num_biases].reshape(-1, 2))
    ids, bits = (column.contiguous().to(logits_V.device) for column in pairs.unbind(1))
    logits_V[ids.long()] += bits.view(torch.float32)
    at = HEADER + 2 * num_biases
    if len(history) < until:
        _forbid(logits_V, rules[at : at + num_suppressed])
    at += num_suppressed
    for _ in range(num_words):
        length = int(rules[at])
        before, last = rules[at + 1 : at + length], rules[at + length]
        starts = len(history) - len(before)
        if starts >= 0 and np.array_equal(history[starts:], before):
            _forbid(logits_V, np.array([last]))
        at += 1 + length


def _forbidden_ids(mask_B: torch.Tensor, width: int) -> np.ndarray:
    bits = np.unpackbits(mask_B.cpu().numpy().view(np.uint8), bitorder="little")[:width]
    return np.flatnonzero(bits == 0)


def _forbid(logits_V: torch.Tensor, ids: np.ndarray) -> None:
    at = torch.from_numpy(ids.astype(np.int64)).to(logits_V.device)
    values = logits_V[at]
    logits_V[at] = torch.where(values < torch.inf, -torch.inf, values)


def _sample(problem: LogitMasksProblem) -> Sample:
    """Rows with every rule, with none, with both masks, with logits that have failed; padding."""
    width, generator = 1003, sample_generator()
    logits = random_tensor(6, width, dtype=torch.float32, device="cpu", generator=generator)
    logits[3, [5, 900]] = torch.tensor([torch.nan, torch.inf])
    tables = MaskTables.empty(max_rows=7, width=width, device=torch.device("cpu"))
    words = [(9,), (1, 2, 30), (3, 4, 31), (4, 5, 32), (1, 2, 3, 4, 33), (0, 1, 2, 3, 4, 34)]
    for row, until in ((0, 9), (2, 4), (6, 5)):
        packed = packed_rules(
            biases={i: 0.25 * i - 90.0 for i in range(0, width, 7)},
            suppressed=tuple(range(600, 900, 3)),
            until=until,
            words=words,
            masked=row != 6,
        )
        assert packed is not None
        tables.rules_MW[row, : packed.size] = torch.from_numpy(packed)
        allowed = torch.from_numpy(packed_mask(range(row, width, 2), width))
        tables.allowed_MB[row] = allowed
    tables.grammar_GB.random_(-(2**31), 2**31 - 1, generator=generator)
    tables.grammar_at_P[:6] = torch.tensor([-1, 2, -1, 0, -1, -1])
    tokens = torch.arange(8 * 16, dtype=torch.int32).view(8, 16) % 16
    row_K = torch.tensor([2, 0, 5, 3, 6, 7], dtype=torch.int32)
    position_K = torch.tensor([5, 5, 5, 2, 5, 0], dtype=torch.int32)
    device = problem.device
    tables = MaskTables(
        rules_MW=tables.rules_MW.to(device),
        allowed_MB=tables.allowed_MB.to(device),
        grammar_GB=tables.grammar_GB.to(device),
        grammar_at_P=tables.grammar_at_P.to(device),
    )
    tensors = (one.to(device) for one in (tokens, row_K, position_K))
    return Sample(
        problem=problem, weights=(), arguments=(logits.to(device), tables, *tensors, True)
    )


OP: Op[LogitMasksProblem] = Op(
    name="logit_masks",
    reference=Kernel(
        name="torch", supports=lambda problem: None, bind=bind_reference, invariant=True
    ),
    kernels=(
        "headrace.back.kernels.logit_masks.native:KERNEL",
        "headrace.back.kernels.logit_masks.triton_logit_masks:KERNEL",
    ),
    sample=_sample,
    tolerance=lambda problem: 0.0,
    outputs=lambda sample: [sample.arguments[0]],
)
