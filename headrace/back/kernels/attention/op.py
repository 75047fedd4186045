"""Attention of a step's queries over the paged KV cache.

`bind(problem)` returns `f(q_THD, kv, plan, lse_TH=None) -> out_THD`. T query tokens, H query heads,
K KV heads (query head h reads KV head h // (H/K)), D head_dim; kv [num_blocks, 2, K, block_tokens,
D], the step's own KV already written. The queries of a row are its last tokens: the one at position
p sees positions max(0, p - window + 1) .. p, or with `chunk` C, p // C * C .. p (Llama 4). With
`causal=False` every query of a row sees all of its `kv_len` positions, or with a window those from
p - window + 1 on; there may be none: the result is then zeros. scores = scale * q.k; with `softcap`
c they become c * tanh(scores / c) (Gemma 2). With `sinks`, `bind(problem, sinks_H)` takes a float32
per query head: a score beside those of the positions that takes its share of the softmax and has no
value (gpt-oss). With `slopes` the score of position s for the query at p becomes its capped one
plus slope * (s - p) (ALiBi, Press et al. 2022). With `bias_width` W, `bind(problem, sinks_H or
None, bias_HW)` takes a float32 table of what is added to the scaled score of a key, by how many
positions it stands before its query, from W-1 on the same (Raffel et al. 2020, section 2.1). With
`late_length` L the capped scores of the query at p > L are multiplied by log p / log L (Grok 2).

`lse_TH`, float32 [T, H] and contiguous, is filled with the natural logarithm of each query's sum of
exp(scores), the sink's among them; -Inf of a query that sees nothing. With it the results over
disjoint positions make the whole (kernels/merge_attention): a shared prefix, KV split over devices,
or a long prompt in chunks; of such parts one alone is bound with the sinks. Without it kernels are
those of before: no store, no register.

Which file serves what, of the dtypes of q and forms of the cache (of q's dtype, int8 or fp8). A
test holds the table to the kernels and to what they support:

    file                         hardware  dtypes          caches      rows
    reference.py                 any       fp32 fp16 bf16  q int8 fp8  any, in PyTorch
    native.py                    CPU       fp32 fp16 bf16  q int8 fp8  any; WHOLE: bits of any chunk
    triton_attention.py          GPU       fp32 fp16 bf16  q int8 fp8  any, by the files below
    triton_decode.py             GPU       fp32 fp16 bf16  q int8 fp8  up to 16 queries, KV splits
    triton_prefill.py            GPU       fp32 fp16 bf16  q int8 fp8  with more queries
    triton_cascade.py            GPU       fp32 fp16 bf16  q int8 fp8  of one query, a shared prefix
    triton_decode_hopper.py      Hopper    fp16 bf16       q int8 fp8  of one query, or of drafts,
                                                                       8 rows or more
    triton_prefill_hopper.py     Hopper    fp16 bf16       q           with more queries
    triton_prefill_quantized.py  Hopper    bf16            int8 fp8    with more queries
    triton_fixed.py              GPU       fp32 fp16 bf16  q           any; bits of any step

The other forms of a cache: reference.py, native.py, and triton_attention.py by those of its files
that ask for no Hopper, numbers of less than a byte through triton_narrow.py.

Rules every kernel keeps:
- rows are independent: NaN in one row's KV, or in the unused tail of a block, or in the null block,
  touches no other row;
- table entries wholly below a row's lowest visible position are not read (freed window blocks are
  the null block 0);
- rows with one query token come first: `plan.num_decodes` of them; T = query_start[R]; padding
  after it is not computed.

And a kernel may rely on this: what a row with one query sees was written by earlier steps, but for
its own position; or the plan is a step's rest (back/attention/plan.py), which one layer alone asks
for, so that its lists are made after all that was written.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from headrace.back.kernels.attention.reference import bind_reference
from headrace.back.kernels.attention.stripes import Stripes
from headrace.back.kernels.kv_write.quantized import random_quantized_cache, values_and_scales
from headrace.back.kernels.op import (
    Kernel,
    Op,
    Sample,
    float_tolerance,
    random_tensor,
    sample_generator,
)


class Plan(Protocol):
    """What a kernel reads of `back/attention/plan.py: AttentionPlan`; the fields are described
    there."""

    query_start_R1: torch.Tensor
    kv_len_R: torch.Tensor
    block_table_RB: torch.Tensor
    slot_T: torch.Tensor
    host_query_start: np.ndarray
    host_kv_len: np.ndarray
    num_decodes: int
    max_query_len: int
    max_kv_len: int


class AttentionFunction(Protocol):
    """What `bind` returns."""

    def __call__(
        self,
        q_THD: torch.Tensor,
        kv: torch.Tensor,
        plan: Plan,
        lse_TH: torch.Tensor | None = None,
        states_THR: torch.Tensor | None = None,
        /,
    ) -> torch.Tensor:
        """out_THD; fills `lse_TH`."""
        ...


def check_lse(lse_TH: torch.Tensor, q_THD: torch.Tensor) -> None:
    """Asserts that the log-sum-exps of these queries fit in `lse_TH`."""
    assert lse_TH.shape == q_THD.shape[:2] and lse_TH.dtype == torch.float32, lse_TH.shape
    assert lse_TH.is_contiguous() and lse_TH.device == q_THD.device, lse_TH.stride()


def check_bias(problem: AttentionProblem, bias_HW: torch.Tensor | None) -> None:
    """Asserts that the position bias is there if the problem has one, with its shape."""
    assert (bias_HW is not None) == bool(problem.bias_width), problem
    if bias_HW is not None:
        lines = problem.bias_rank or problem.heads
        assert bias_HW.shape == (lines, problem.bias_width), bias_HW.shape


def check_states(
    problem: AttentionProblem, states_THR: torch.Tensor | None, q_THD: torch.Tensor
) -> None:
    """Asserts that these queries' states are there if the problem's bias follows from them."""
    assert (states_THR is not None) == bool(problem.bias_rank), problem
    if states_THR is not None:
        assert states_THR.shape == (*q_THD.shape[:2], problem.bias_rank), states_THR.shape
        assert states_THR.dtype == torch.float32 and states_THR.is_contiguous(), states_THR.stride()


@dataclass(frozen=True, kw_only=True)
class AttentionProblem:
    """`dtype` is that of q, the output and, unless it is `quantized` (values and
    scales, kernels/kv_write/quantized.py), the cache. `window`, `chunk` and `softcap` are None
    where the layer has none. With `sinks` the kernel is bound with them. `verify_queries`:
    query tokens of a row at most in steps that verify drafts, for which there may be plans of their
    own; 1: none do.

    `slopes`: of ALiBi, one per query head; none: there is no bias. `bias_width`: distances in the
    table of a position bias, which does not go with a soft cap; 0: there is none. `bias_rank`:
    numbers in the state of a query and head that the bias follows from; 0: it follows from the
    head alone. `late_length`: goes with a soft cap, and with no bias; without a cap queries are
    scaled instead; 0: scores do not grow. `stripes`: which blocks are seen; None: all.

    Without `causal` there is neither chunk, slopes nor position bias: they are counted from a
    query's own position, which need not be among those it sees. With a window it is."""

    device: str
    dtype: torch.dtype
    heads: int
    kv_heads: int
    head_dim: int
    block_tokens: int
    scale: float
    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    quantized: str | None = None
    sinks: bool = False
    causal: bool = True
    verify_queries: int = 1
    slopes: tuple[float, ...] = ()
    bias_width: int = 0
    bias_rank: int = 0
    late_length: int = 0
    stripes: Stripes | None = None

    def __post_init__(self) -> None:
        assert self.causal or not (self.chunk or self.slopes or self.bias_width), self
        assert len(self.slopes) in (0, self.heads), self
        assert not (self.bias_width and self.softcap), self
        assert self.bias_width or not self.bias_rank, self
        if self.late_length:
            assert self.late_length > 1 and self.softcap and self.causal and not self.slopes, self
        assert self.window is None or self.chunk is None, self
        if self.stripes is not None:
            assert self.causal and len(self.stripes.phases) == self.heads, self

    @property
    def reach(self) -> int:
        """What kernels take as their window: -C for chunks of C, 0 for neither."""
        return -self.chunk if self.chunk else self.window or 0

    def slopes_tensor(self) -> torch.Tensor | None:
        """The slopes as float32 [H]; None where there are none."""
        if not self.slopes:
            return None
        return torch.tensor(self.slopes, dtype=torch.float32, device=self.device)


@dataclass(frozen=True, kw_only=True)
class SamplePlan:
    """A plan for self-checks and tests; the fields of `Plan`."""

    query_start_R1: torch.Tensor
    kv_len_R: torch.Tensor
    block_table_RB: torch.Tensor
    slot_T: torch.Tensor
    host_query_start: np.ndarray
    host_kv_len: np.ndarray
    num_decodes: int
    max_query_len: int
    max_kv_len: int


def sample_plan(
    rows: list[tuple[int, int]],
    *,
    block_tokens: int,
    window: int | None,
    chunk: int | None = None,
    device: str,
) -> tuple[SamplePlan, int]:
    """A plan for `rows` of (query tokens, kv length), and the number of blocks it needs.

    Blocks are dealt backwards from the highest id, so that neighbours in a sequence are not
    neighbours in memory; blocks wholly outside the window or chunk are the null block.
    """
    counts = [-(-kv_len // block_tokens) for _, kv_len in rows]
    table = np.zeros((len(rows), max(counts)), np.int32)
    slots: list[int] = []
    next_block = sum(counts)
    for i, (num_query, kv_len) in enumerate(rows):
        lowest = max(0, kv_len - num_query - window + 1) if window else 0
        if chunk:
            lowest = (kv_len - num_query) // chunk * chunk
        for j in range(lowest // block_tokens, counts[i]):
            table[i, j] = next_block
            next_block -= 1
        for position in range(kv_len - num_query, kv_len):
            slots.append(
                int(table[i, position // block_tokens]) * block_tokens + position % block_tokens
            )
    query_len = np.array([num_query for num_query, _ in rows], np.int32)
    query_start = np.concatenate([[0], np.cumsum(query_len)]).astype(np.int32)
    kv_len_R = np.array([kv_len for _, kv_len in rows], np.int32)
    plan = SamplePlan(
        query_start_R1=torch.from_numpy(query_start).to(device),
        kv_len_R=torch.from_numpy(kv_len_R).to(device),
        block_table_RB=torch.from_numpy(table).to(device),
        slot_T=torch.tensor(slots, dtype=torch.int64, device=device),
        host_query_start=query_start,
        host_kv_len=kv_len_R,
        num_decodes=int((query_len == 1).sum()),
        max_query_len=int(query_len.max()),
        max_kv_len=int(kv_len_R.max()),
    )
    return plan, sum(counts) + 1


DECODES = (8, 64, 200)
"""Rows of the steps without any other than decodes that a GPU's kernels are checked with: each may
go another way."""
LONG = 600
"""KV length of a row that kernels cut into splits."""


def _steps(problem: AttentionProblem) -> list[list[tuple[int, int]]]:
    """Rows (query tokens, KV length) of the steps that kernels are checked with, one for each way
    they may go: prompts beside decodes; a few queries in every row, as when drafts are verified;
    and on GPUs decodes alone, few and many."""
    block = problem.block_tokens
    mixed = [(1, 1), (1, block + 3), (1, LONG), (3, 3), (20, 20 + block)]
    few = [(1, block), (2, 2), (6, LONG), (4, 4 + block)]
    if problem.device == "cpu":
        return [mixed, few]
    decodes = [[(1, LONG), *((1, 1 + 7 * i % 50) for i in range(1, rows))] for rows in DECODES]
    return [mixed, few, *decodes]


def _sample(problem: AttentionProblem) -> Sample:
    plans = [
        sample_plan(
            rows,
            block_tokens=problem.block_tokens,
            window=problem.window,
            chunk=problem.chunk,
            device=problem.device,
        )
        for rows in _steps(problem)
    ]
    return sample_of(problem, [plan for plan, _ in plans], max(blocks for _, blocks in plans))


def sample_of(problem: AttentionProblem, plans: list[SamplePlan], num_blocks: int) -> Sample:
    """Inputs of a step for each plan, over one cache of so many blocks, the null block NaN."""
    generator = sample_generator()
    new = {"dtype": problem.dtype, "device": problem.device, "generator": generator}
    tokens = [int(plan.host_query_start[-1]) for plan in plans]
    q_THD = random_tensor(max(tokens), problem.heads, problem.head_dim, **new)
    shape = (num_blocks, problem.kv_heads, problem.block_tokens, problem.head_dim)
    if problem.quantized:
        kv = random_quantized_cache(
            shape, generator=generator, device=problem.device, form=problem.quantized
        )
        values_and_scales(kv)[1][0] = float("nan")
    else:
        kv = random_tensor(shape[0], 2, *shape[1:], **new)
        kv[0] = float("nan")
    sinks_H = torch.linspace(-1.0, 2.0, problem.heads, device=problem.device)
    weights: tuple[torch.Tensor | None, ...] = (sinks_H,) if problem.sinks else ()
    if problem.bias_width:
        table_HW = random_tensor(
            problem.bias_rank or problem.heads,
            problem.bias_width,
            **{**new, "dtype": torch.float32},
        )
        weights = (sinks_H if problem.sinks else None, table_HW)
    states_THR = random_tensor(
        max(tokens), problem.heads, problem.bias_rank, **{**new, "dtype": torch.float32}
    )
    arguments, *further = (
        (q_THD[:count], kv, plan, *((None, states_THR[:count]) if problem.bias_rank else ()))
        for count, plan in zip(tokens, plans, strict=True)
    )
    return Sample(
        problem=problem,
        weights=weights,
        arguments=arguments,
        further=tuple(further),
    )


OP: Op[AttentionProblem] = Op(
    name="attention",
    reference=Kernel(
        name="torch", supports=lambda problem: None, bind=bind_reference, reads_host=True
    ),
    kernels=(
        "headrace.back.kernels.attention.native:KERNEL",
        "headrace.back.kernels.attention.native:WHOLE",
        "headrace.back.kernels.attention.triton_attention:KERNEL",
        "headrace.back.kernels.attention.triton_fixed:KERNEL",
    ),
    sample=_sample,
    tolerance=lambda problem: float_tolerance(problem.dtype),
)
