"""Masks and biases of tokens that a request names, and the masks of grammars.

    bias        adds a number to the logits of the tokens that are named
    allowed     nothing but the ids named may be sampled
    min_tokens  stop tokens cannot be sampled before so many tokens are out
    bad words   the last id of a sequence is forbidden while the ids before it are the row's last
                tokens; the prompt counts: a word that the prompt has begun may not be finished
    grammar     what may follow, a bit per token id, made by the core while the step computes.
                Unlike the others, a row has a mask in some steps only (not while it reasons), and
                it is new each time: the rows are told with the masks, and no row keeps anything

K rows with a feature, V vocabulary, M ids of all these rows.
"""

from __future__ import annotations

import numpy as np
import torch

from headrace.back.kernels.logit_masks.op import (
    HEADER,
    OP,
    LogitMasksProblem,
    MaskTables,
    packed_mask,
    packed_rules,
)
from headrace.back.kernels.op import decisions
from headrace.back.kernels.upload import to_device
from headrace.back.sampling.features import FeatureRows
from headrace.base.wire.grammar import unpack_masks
from headrace.base.wire.step import RowStart


class RaggedRows:
    """Per row an int64 array [M, columns] (M differs by row); `join` concatenates the arrays of
    some rows."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._rows: dict[int, np.ndarray] = {}
        self._asked = b""
        self._joined: tuple[torch.Tensor, torch.Tensor] | None = None

    def put(self, row: int, entries: np.ndarray) -> None:
        """Sets the entries of a row, [M, columns]."""
        self._rows[row] = entries
        self._joined = None

    def drop(self, row: int) -> None:
        """Forgets a row."""
        self._rows.pop(row, None)
        self._joined = None

    def join(self, rows: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """(index [M] of the row within `rows`, entries [M, columns]), on the device."""
        asked = rows.tobytes()
        if self._joined is None or asked != self._asked:
            parts = [self._rows[int(row)] for row in rows]
            index = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
            columns = max(part.shape[1] for part in parts)
            parts = [
                np.pad(p, ((0, 0), (columns - p.shape[1], 0)), constant_values=-1) for p in parts
            ]
            self._asked = asked
            self._joined = (
                to_device(index, self._device),
                to_device(np.concatenate(parts), self._device),
            )
        return self._joined


class LogitBias:
    """Entries (token id, bits of the float64 bias)."""

    def __init__(self, device: torch.device) -> None:
        self._entries = RaggedRows(device)
        self._split: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None

    def start(self, start: RowStart) -> None:
        """Keeps the row's pairs."""
        bias = start.sampling.logit_bias
        values = np.fromiter(bias.values(), np.float64, len(bias))
        ids = np.fromiter(bias.keys(), np.int64, len(bias))
        self._entries.put(start.row, np.stack([ids, values.view(np.int64)], axis=1))

    def end(self, row: int) -> None:
        """Forgets them."""
        self._entries.drop(row)

    def apply(self, logits_KV: torch.Tensor, feature_rows: FeatureRows) -> None:
        """Adds the biases. A row names an id once, so that no sum over equal places is needed."""
        index_M, entries_M2 = self._entries.join(feature_rows.rows)
        if self._split is None or self._split[0] is not entries_M2:
            id_M, bits_M = (column.contiguous() for column in entries_M2.unbind(1))
            self._split = entries_M2, id_M, bits_M.view(torch.float64).to(logits_KV.dtype)
        _, id_M, value_M = self._split
        logits_KV[index_M, id_M] += value_M

    def sampled(self, token_K: torch.Tensor, feature_rows: FeatureRows) -> None:
        """Nothing to count."""


class AllowedIds:
    """Sets every logit but those of the allowed ids to -Inf."""

    def __init__(self, device: torch.device) -> None:
        self._ids = RaggedRows(device)

    def start(self, start: RowStart) -> None:
        """Keeps the row's ids."""
        self._ids.put(start.row, np.array(start.sampling.allowed_ids, np.int64).reshape(-1, 1))

    def end(self, row: int) -> None:
        """Forgets them."""
        self._ids.drop(row)

    def apply(self, logits_KV: torch.Tensor, feature_rows: FeatureRows) -> None:
        """Masks what is not allowed."""
        index_M, ids_M1 = self._ids.join(feature_rows.rows)
        kept_M = logits_KV[index_M, ids_M1[:, 0]]
        logits_KV.fill_(-torch.inf)
        logits_KV.index_put_((index_M, ids_M1[:, 0]), kept_M)

    def sampled(self, token_K: torch.Tensor, feature_rows: FeatureRows) -> None:
        """Nothing to count."""


class MinTokens:
    """Sets the suppressed ids of rows with fewer than `min_tokens` output tokens to -Inf."""

    def __init__(self, *, max_rows: int, device: torch.device) -> None:
        self._min_tokens = np.zeros(max_rows, np.int64)
        self._ids = RaggedRows(device)

    def start(self, start: RowStart) -> None:
        """Keeps the row's bound and ids."""
        self._min_tokens[start.row] = start.sampling.min_tokens
        self._ids.put(start.row, np.array(start.sampling.suppressed_ids, np.int64).reshape(-1, 1))

    def end(self, row: int) -> None:
        """Forgets them."""
        self._ids.drop(row)

    def apply(self, logits_KV: torch.Tensor, feature_rows: FeatureRows) -> None:
        """Masks the ids of the rows that are still short."""
        short_K = feature_rows.num_output < self._min_tokens[feature_rows.rows]
        if not short_K.any():
            return
        index_M, ids_M1 = self._ids.join(feature_rows.rows)
        mask_K = np.where(short_K, -np.inf, 0.0).astype(np.float32)
        mask_M = to_device(mask_K, logits_KV.device)[index_M]
        logits_KV.index_put_((index_M, ids_M1[:, 0]), mask_M, accumulate=True)

    def sampled(self, token_K: torch.Tensor, feature_rows: FeatureRows) -> None:
        """Nothing to count."""


class BadWords:
    """Sequences right-aligned in a table, -1 where a shorter one has nothing: -1 matches any token,
    or none."""

    def __init__(self, device: torch.device) -> None:
        self._words = RaggedRows(device)

    def start(self, start: RowStart) -> None:
        """Keeps the row's sequences."""
        words = [word for word in start.sampling.bad_words if word]
        table = np.full((len(words), max(len(word) for word in words)), -1, np.int64)
        for i, word in enumerate(words):
            table[i, table.shape[1] - len(word) :] = word
        self._words.put(start.row, table)

    def end(self, row: int) -> None:
        """Forgets them."""
        self._words.drop(row)

    def apply(self, logits_KV: torch.Tensor, feature_rows: FeatureRows) -> None:
        """Masks the last ids of the sequences that are about to be completed."""
        device = logits_KV.device
        index_M, words_ML = self._words.join(feature_rows.rows)
        before_ML, last_M = words_ML[:, :-1], words_ML[:, -1]
        length = before_ML.shape[1]
        row_M1 = to_device(feature_rows.rows, device)[index_M][:, None]
        start_M1 = to_device(feature_rows.positions, device)[index_M][:, None] - length
        column_ML = start_M1 + torch.arange(length, device=device)
        history_ML = feature_rows.tokens[row_M1, column_ML.clamp(min=0)]
        matches_ML = ((history_ML == before_ML) & (column_ML >= 0)) | (before_ML < 0)
        mask_M = torch.where(matches_ML.all(1), -torch.inf, 0.0).to(logits_KV.dtype)
        logits_KV.index_put_((index_M, last_M), mask_M, accumulate=True)

    def sampled(self, token_K: torch.Tensor, feature_rows: FeatureRows) -> None:
        """Nothing to count."""


class RowMasks:
    """The same of all rows in tables, and masks of grammars as they come: what op `logit_masks`
    reads in a recorded step. `crowded`: rows whose lists the tables have no room for."""

    def __init__(
        self,
        *,
        max_rows: int,
        width: int,
        device: torch.device,
        masks: int = 0,
        places: int = 0,
    ) -> None:
        """`masks`, `places`: see MaskTables.empty."""
        choice = OP.choose(LogitMasksProblem(device=device.type))
        self.decisions = decisions((choice,))
        self._mask_logits = choice.bind()
        self._tables = MaskTables.empty(
            max_rows=max_rows, width=width, device=device, masks=masks, places=places
        )
        self._first_M = np.zeros(max_rows, np.int64)
        self._width = width
        self._device = device
        self.crowded: set[int] = set()

    def start(self, start: RowStart) -> None:
        """Writes the row's lists, before its first step."""
        s = start.sampling
        row = packed_rules(
            biases=s.logit_bias,
            suppressed=s.suppressed_ids if s.min_tokens else (),
            until=start.num_prompt + s.min_tokens,
            words=[word for word in s.bad_words if word],
            masked=s.allowed_ids is not None,
        )
        if row is None:
            self.crowded.add(start.row)
            return
        self._tables.rules_MW[start.row, : row.size] = to_device(row, self._device)
        if s.allowed_ids is not None:
            mask = packed_mask(s.allowed_ids, self._width)
            self._tables.allowed_MB[start.row] = to_device(mask, self._device)

    def end(self, row: int) -> None:
        """The row has no rules."""
        self.crowded.discard(row)
        self._tables.rules_MW[row, :HEADER].zero_()

    def take(self, payload: memoryview, rows: np.ndarray, places: np.ndarray) -> None:
        """The grammar masks of this step, on a device behind what it was given so far. The step
        samples at `places` [N] tokens of `rows` [N], a row's in order and side by side; masks of
        tokens that it does not sample are left out."""
        masks = unpack_masks(payload)
        row_P = np.full(len(self._tables.grammar_at_P) + 1, -1, np.int64)
        row_P[places] = rows
        self._first_M[rows[::-1]] = places[::-1]
        place_K = np.minimum(self._first_M[masks.rows] + masks.offsets, len(row_P) - 1)
        index_K = np.flatnonzero(row_P[place_K] == masks.rows)
        at_P = np.full(len(row_P) - 1, -1, np.int32)
        at_P[place_K[index_K]] = np.arange(index_K.size, dtype=np.int32)
        self._tables.grammar_at_P.copy_(to_device(at_P, self._device))
        if not index_K.size:
            return
        whole = np.zeros((index_K.size, self._tables.grammar_GB.shape[1]), np.int32)
        num_words = min(whole.shape[1], masks.masks.shape[1])
        whole[:, :num_words] = masks.masks[index_K, :num_words]
        self._tables.grammar_GB[: index_K.size].copy_(to_device(whole, self._device))

    def apply(
        self,
        logits_KV: torch.Tensor,
        tokens_MC: torch.Tensor,
        row_K: torch.Tensor,
        position_K: torch.Tensor,
        *,
        grammar: bool,
    ) -> None:
        """See the op; all tensors are on the device."""
        self._mask_logits(logits_KV, self._tables, tokens_MC, row_K, position_K, grammar)


class GrammarMask:
    """Sets every logit to -Inf that the row's grammar does not allow."""

    def __init__(self, *, max_rows: int, width: int, device: torch.device) -> None:
        self._width = width
        self._device = device
        self._first = np.zeros(max_rows, np.int64)
        self._place = np.full((max_rows, 1), -1, np.int64)
        self._masks = np.zeros((0, 0), np.int32)
        self._shifts = torch.arange(8, dtype=torch.uint8, device=device)

    def take(self, payload: memoryview, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Takes over the masks of a step that samples the tokens at `positions` [N] of `rows` [N],
        a row's in order; whether each has one, bool [N]."""
        keyed, self._masks, offsets = unpack_masks(payload)
        most = int(offsets.max(initial=0))
        if most >= self._place.shape[1]:
            self._place = np.empty((len(self._place), most + 1), np.int64)
        self._place.fill(-1)
        self._place[keyed, offsets] = np.arange(len(keyed))
        self._first[rows[::-1]] = positions[::-1]
        return self._places(rows, positions) >= 0

    def _places(self, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Which mask each token has; -1: none."""
        offset = positions - self._first[rows]
        within = offset < self._place.shape[1]
        return np.where(within, self._place[rows, np.where(within, offset, 0)], -1)

    def start(self, start: RowStart) -> None:
        """Nothing is kept."""

    def end(self, row: int) -> None:
        """Nothing is kept."""

    def apply(self, logits_KV: torch.Tensor, feature_rows: FeatureRows) -> None:
        """Masks what is not allowed; ids beyond the mask are not."""
        place = self._places(feature_rows.rows, feature_rows.positions)
        packed = ~self._masks[place].view(np.uint8)
        width = min(self._width, packed.shape[1] * 8)
        if self._device.type == "cpu":
            bits = np.unpackbits(packed, axis=1, count=width, bitorder="little")
            forbidden_KV = torch.from_numpy(bits).view(torch.bool)
        else:
            sent_KB = to_device(packed, self._device)
            bits_KBS = (sent_KB[:, :, None] >> self._shifts) & 1
            forbidden_KV = bits_KBS.view(len(packed), -1)[:, :width].bool()
        logits_KV[:, :width].masked_fill_(forbidden_KV, -torch.inf)
        logits_KV[:, width:] = -torch.inf

    def sampled(self, token_K: torch.Tensor, feature_rows: FeatureRows) -> None:
        """Nothing to count."""
