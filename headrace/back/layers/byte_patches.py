"""Patches of bytes (Byte Latent Transformer, Pagnoni et al. 2024, arXiv:2412.09871): which of a
step's bytes end one, where each lies, and the cross-attention between bytes and patches.

A patch is known once its last byte is; until then nobody reads it. A byte reads the newest patch
that has ended at it or before it.

T bytes of a step, R rows, C patches that end in it, X bytes of these, S vectors of a patch, H
heads, K KV heads, D head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from headrace.back.attention.plan import AttentionPlan
from headrace.back.kernels.upload import to_device
from headrace.back.layers.linear import WholeLinear
from headrace.back.layers.norm import RMS
from headrace.back.layers.scope import Scope


@dataclass(frozen=True, kw_only=True)
class EndedPatches:
    """The patches that end in a step, on the host, int64. Those of rows that end just one come
    first, then those of the others, row by row.

    number_C   which of its row's patches it is, from 0
    row_C      of the step
    first_C, last_C   positions of its first and last byte
    source_T   the newest patch at each byte: a row's from before the step, by its place among the
               step's rows, or R and the patch's place here
    count_T, open_T   patches of the row that have ended at each byte, and where the next one begins
    """

    number_C: np.ndarray
    row_C: np.ndarray
    first_C: np.ndarray
    last_C: np.ndarray
    source_T: np.ndarray
    count_T: np.ndarray
    open_T: np.ndarray

    def bytes_within(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Of each of their bytes, int64 [X]: its row of the step, its position, and the patch."""
        size_C = self.last_C - self.first_C + 1
        patch_X = np.repeat(np.arange(size_C.size), size_C)
        before_C = np.cumsum(size_C) - size_C
        at_X = np.arange(patch_X.size) + (self.first_C - before_C)[patch_X]
        return self.row_C[patch_X], at_X, patch_X

    def global_plan(self, plan: AttentionPlan) -> AttentionPlan:
        """The plan of a pass over these patches, the n-th of a row as its n-th token, by that of
        the step's bytes, whose blocks they lie in."""
        device, bytes_of = plan.slot_T.device, np.bincount(self.row_C)
        rows = self.row_C[np.sort(np.unique(self.row_C, return_index=True)[1])]
        query_start = np.concatenate(([0], np.cumsum(bytes_of[rows]))).astype(np.int32)
        kv_len = (self.number_C[query_start[1:] - 1] + 1).astype(np.int32)
        return replace(
            plan,
            query_start_R1=to_device(query_start, device),
            kv_len_R=to_device(kv_len, device),
            block_table_RB=plan.block_table_RB.index_select(0, to_device(rows, device)),
            host_query_start=query_start,
            host_kv_len=kv_len,
            num_decodes=int((bytes_of[rows] == 1).sum()),
            max_query_len=int(bytes_of.max()),
            max_kv_len=int(kv_len.max()),
        )


def ended_patches(
    ends_T: np.ndarray,
    query_start: np.ndarray,
    kv_len: np.ndarray,
    *,
    count_R: np.ndarray,
    open_R: np.ndarray,
) -> EndedPatches:
    """By which bytes end one, the step's rows, and what each row has before the step: patches that
    have ended, and where the next one begins."""
    size_R = np.diff(query_start)
    num_rows, start_R = size_R.size, query_start[:-1].astype(np.int64)
    row_T = np.repeat(np.arange(num_rows), size_R)
    position_T = np.arange(row_T.size) + (kv_len - size_R - start_R)[row_T]
    ended_T = np.cumsum(ends_T)
    within_T = ended_T - (ended_T - ends_T)[start_R][row_T]
    open_T = np.where(ends_T, position_T + 1, 0)
    open_T[start_R] = np.maximum(open_T[start_R], open_R)
    apart = int(kv_len.max()) + 1  # more than any position: rows stay in their order
    open_T = np.maximum.accumulate(open_T + row_T * apart) - row_T * apart
    begun_T = np.concatenate(([0], open_T[:-1]))
    begun_T[start_R] = open_R
    count_T = count_R[row_T] + within_T
    at_C = np.flatnonzero(ends_T)
    several_C = np.bincount(row_T[at_C], minlength=num_rows)[row_T[at_C]] > 1
    order_C = np.argsort(several_C, kind="stable")
    place_C = np.argsort(order_C)
    source_T = row_T.copy()
    seen_T = within_T > 0
    source_T[seen_T] = num_rows + place_C[ended_T[seen_T] - 1]
    at_C = at_C[order_C]
    return EndedPatches(
        number_C=count_T[at_C] - 1,
        row_C=row_T[at_C],
        first_C=begun_T[at_C],
        last_C=position_T[at_C],
        source_T=source_T,
        count_T=count_T,
        open_T=open_T,
    )


def slots_of(plan: AttentionPlan, row_X: np.ndarray, at_X: np.ndarray, tokens: int) -> torch.Tensor:
    """Where positions of the step's rows lie, int64 [X], in a cache of blocks of so many tokens."""
    device = plan.slot_T.device
    row, block = to_device(row_X, device), to_device(at_X // tokens, device)
    block_X = plan.block_table_RB[row, block].long()
    return block_X * tokens + to_device(at_X % tokens, device)


class PatchAttention:
    """Between bytes and patches, of `heads` (each KV head is that of heads / kv_heads neighbours).
    What it gives has its input added. `scope` is its own."""

    def __init__(
        self, scope: Scope, width: int, *, heads: int, kv_heads: int, head_dim: int, eps: float
    ) -> None:
        self._heads, self._head_dim, self._scale = heads, head_dim, head_dim**-0.5
        self._kv_heads = kv_heads
        self._q_norm = RMS.build(scope / "q_norm", width, eps=eps)
        self._k_norm = RMS.build(scope / "k_norm", width, eps=eps)
        self._q = WholeLinear(scope / "q_proj", width, heads * head_dim)
        self._k = WholeLinear(scope / "k_proj", width, kv_heads * head_dim)
        self._v = WholeLinear(scope / "v_proj", width, kv_heads * head_dim)
        self._out = WholeLinear(scope / "o_proj", heads * head_dim, width)

    def of_patches(
        self, x_CSE: torch.Tensor, bytes_XE: torch.Tensor, patch_X: torch.Tensor
    ) -> torch.Tensor:
        """y_CSE: a patch reads its own bytes; patch_X int64 [X]: whose they are."""
        q_CSHD = self._queries(x_CSE.flatten(0, 1)).unflatten(0, x_CSE.shape[:2])
        k_XHD, v_XHD = self._keys_values(bytes_XE)
        scores_XSH = (q_CSHD[patch_X] * k_XHD[:, None]).sum(3).float() * self._scale
        shape = (len(x_CSE), *scores_XSH.shape[1:])
        index_XSH = patch_X[:, None, None].expand_as(scores_XSH)
        most_CSH = scores_XSH.new_zeros(shape).scatter_reduce(
            0, index_XSH, scores_XSH, "amax", include_self=False
        )
        weight_XSH = (scores_XSH - most_CSH[patch_X]).exp()
        sum_CSH = weight_XSH.new_zeros(shape).index_add_(0, patch_X, weight_XSH)
        share_XSH = (weight_XSH / sum_CSH[patch_X]).to(v_XHD.dtype)
        y_CSHD = torch.zeros_like(q_CSHD)
        y_CSHD.index_add_(0, patch_X, share_XSH[..., None] * v_XHD[:, None])
        return x_CSE + self._out.project(y_CSHD.flatten(0, 1).flatten(1)).view_as(x_CSE)

    def of_bytes(
        self, x_TE: torch.Tensor, patches_PSE: torch.Tensor, source_T: torch.Tensor
    ) -> torch.Tensor:
        """y_TE: a byte reads the vectors of one of P patches, source_T int64 [T]."""
        q_THD = self._queries(x_TE)
        k_YHD, v_YHD = self._keys_values(patches_PSE.flatten(0, 1))
        k_PSHD, v_PSHD = (part.unflatten(0, patches_PSE.shape[:2]) for part in (k_YHD, v_YHD))
        scores_TSH = (q_THD[:, None] * k_PSHD[source_T]).sum(3).float() * self._scale
        share_TSH = scores_TSH.softmax(1).to(q_THD.dtype)
        y_THD = (share_TSH[..., None] * v_PSHD[source_T]).sum(1)
        return x_TE + self._out.project(y_THD.flatten(1))

    def _queries(self, x_NE: torch.Tensor) -> torch.Tensor:
        return self._q.project(self._q_norm.norm(x_NE)).unflatten(1, (self._heads, -1))

    def _keys_values(self, x_NE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of all heads, each KV head repeated."""
        normed_NE, repeats = self._k_norm.norm(x_NE), self._heads // self._kv_heads
        k_NHD, v_NHD = (
            linear.project(normed_NE)
            .unflatten(1, (self._kv_heads, -1))
            .repeat_interleave(repeats, dim=1)
            for linear in (self._k, self._v)
        )
        return k_NHD, v_NHD
