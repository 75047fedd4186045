"""A tiny causal model for tests of the runner and the executors: real attention over the paged KV cache, in plain
PyTorch, one sequence at a time. It is not a model family; its weights are seeded random numbers.

Its logits depend on every token before, on positions and on the KV written by earlier steps, so that a wrong slot, a
stale block or a token fed from the wrong row changes what comes out.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from headrace.back.attention.forms import HeadsForm
from headrace.back.attention.plan import AttentionPlan, Batch
from headrace.back.models.load import LoadReport
from headrace.back.parallel.mesh import Mesh
from headrace.base.config.resolved import (
    DeviceSpec,
    EngineSpec,
    KVSpec,
    ModelSpec,
    SchedulerSpec,
)

WIDTH = 61
HIDDEN = 16
HEADS = 2
HEAD_DIM = 8


class TinyModel:
    """`windows`: one layer per entry, None for full attention.

    A token id of `poison` anywhere in the context makes the hidden states of its row NaN; `explode` raises; `hang`
    never returns.
    """

    generates = True
    attention_heads = 0
    encoder_tokens = 0
    state = "plain"
    host_kernels = ("attention in plain torch",)
    host_pairs: int | None = None
    adapters = None
    media = None

    def __init__(
        self,
        windows: Sequence[int | None] = (None, None),
        *,
        seed: int = 0,
        width: int = WIDTH,
        poison: int | None = None,
        explode: int | None = None,
        hang: int | None = None,
        damaged: bool = False,
    ) -> None:
        g = torch.Generator().manual_seed(seed)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=g) / math.sqrt(shape[-1])

        self.kv_forms = tuple(
            HeadsForm(
                cache=i,
                kind="window" if window else "full",
                span=window,
                kv_heads=HEADS,
                head_dim=HEAD_DIM,
            )
            for i, window in enumerate(windows)
        )
        self.logits_width = width
        self.poison, self.explode, self.hang = poison, explode, hang
        self.embed = random(width, HIDDEN) * 4
        self.place = random(8192, HIDDEN) * 4
        self.qkv = [random(3, HEADS * HEAD_DIM, HIDDEN) for _ in windows]
        self.out = [random(HIDDEN, HEADS * HEAD_DIM) for _ in windows]
        self.head = random(width, HIDDEN) * 3
        if damaged:
            self.head[:, 0] = torch.nan

    def forward(self, batch: Batch) -> torch.Tensor:
        """Hidden states [T, E], or [N, E] where the last layer goes on with the batch's rest."""
        if self.explode is not None and bool((batch.token_ids_T == self.explode).any()):
            raise RuntimeError("the tiny model exploded")
        if self.hang is not None and bool((batch.token_ids_T == self.hang).any()):
            threading.Event().wait()
        x_TE = self.embed[batch.token_ids_T] + self.place[batch.positions_T]
        if self.poison is not None:
            x_TE = torch.where((batch.token_ids_T == self.poison)[:, None], torch.nan, x_TE)
        for layer in range(len(self.kv_forms)):
            kv, q = batch.kv[layer], self._query(layer, x_TE, batch)
            if layer == len(self.kv_forms) - 1 and batch.last_token_batch is not None:
                at_N, batch = batch.logits_at_N, batch.last_token_batch
                q, x_TE = q[at_N], x_TE[at_N]
            x_TE = x_TE + self._attend(layer, q, batch.plans[batch.group_of_layer[layer]], kv)
        return x_TE / x_TE.norm(dim=-1, keepdim=True) * 4

    argmax = None
    top_candidates = None

    def classify(self, hidden_NE: torch.Tensor) -> torch.Tensor:
        """Two labels: the sums of the halves of a hidden state."""
        return hidden_NE.float().unflatten(-1, (2, -1)).sum(-1)

    def logits(self, hidden_NE: torch.Tensor) -> torch.Tensor:
        """Logits [N, V]."""
        return (hidden_NE.float() @ self.head.T).float()

    def _query(self, layer: int, x_TE: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Queries; keys and values are in the cache."""
        q, k, v = (x_TE @ w.T for w in self.qkv[layer])
        plan, kv = batch.plans[batch.group_of_layer[layer]], batch.kv[layer]
        tokens = kv.shape[3]
        block, offset = plan.slot_T // tokens, plan.slot_T % tokens
        kv[block, 0, :, offset] = k.view(-1, HEADS, HEAD_DIM)
        kv[block, 1, :, offset] = v.view(-1, HEADS, HEAD_DIM)
        return q

    def _attend(
        self, layer: int, q: torch.Tensor, plan: AttentionPlan, kv: torch.Tensor
    ) -> torch.Tensor:
        out = torch.empty_like(q)
        for row in range(plan.kv_len_R.numel()):
            start, end = plan.query_start_R1[row], plan.query_start_R1[row + 1]
            length = int(plan.kv_len_R[row])
            keys, values = self._read(kv, plan.block_table_RB[row], length)
            query = q[start:end].view(-1, HEADS, HEAD_DIM)
            scores = torch.einsum("qhd,khd->hqk", query, keys) / math.sqrt(HEAD_DIM)
            at = torch.arange(length - (end - start), length)[:, None]
            past = torch.arange(length)[None]
            seen = past <= at
            window = self.kv_forms[layer].span
            if window is not None:
                seen &= past > at - window
            weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
            values = torch.where(seen.any(0)[:, None, None], values, 0.0)
            out[start:end] = torch.einsum("hqk,khd->qhd", weights, values).flatten(1)
        return out @ self.out[layer].T

    @staticmethod
    def _read(
        kv: torch.Tensor, blocks: torch.Tensor, length: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = kv.shape[3]
        used = kv[blocks[: -(-length // tokens)].long()]
        flat = used.permute(1, 0, 3, 2, 4).flatten(1, 2)[:, :length]
        return flat[0], flat[1]


def load_tiny(
    spec: ModelSpec, *, mesh: Mesh, device: torch.device, block_tokens: int, verify_queries: int
) -> tuple[TinyModel, LoadReport]:
    """A loader for executors: `spec.config` holds the arguments of TinyModel."""
    return TinyModel(**spec.config), LoadReport(weight_bytes=4)


class ParallelTinyModel(TinyModel):
    """Two ranks: each adds half of the logits' inner sum. Only rank 1 explodes."""

    def __init__(self, mesh: Mesh, **config: Any) -> None:
        super().__init__(**config)
        self.mesh = mesh
        if mesh.tp.rank == 0:
            self.explode = None

    def logits(self, hidden_NE: torch.Tensor) -> torch.Tensor:
        """Logits [N, V], summed over the ranks."""
        half = HIDDEN // 2
        mine = slice(self.mesh.tp.rank * half, (self.mesh.tp.rank + 1) * half)
        part_NV = hidden_NE[:, mine] @ self.head[:, mine].T
        dist.all_reduce(part_NV, group=self.mesh.tp.group)
        return part_NV


def load_tiny_parallel(
    spec: ModelSpec, *, mesh: Mesh, device: torch.device, block_tokens: int, verify_queries: int
) -> tuple[TinyModel, LoadReport]:
    """A loader for two ranks."""
    return ParallelTinyModel(mesh, **spec.config), LoadReport(weight_bytes=4)


def tiny_spec(
    *,
    executor: str = "inline",
    tensor_parallel: int = 1,
    num_blocks: int = 64,
    block_tokens: int = 8,
    max_running: int = 8,
    max_step_tokens: int = 64,
    config: dict[str, object] | None = None,
) -> EngineSpec:
    """An EngineSpec for a TinyModel."""
    return EngineSpec(
        model=ModelSpec(
            path=os.devnull,
            name="tiny",
            format="dummy",
            family="tiny",
            dtype="float32",
            max_model_len=4096,
            logits_width=WIDTH,
            eos_ids=(0,),
            config=config or {},
        ),
        kv=KVSpec(block_tokens=block_tokens, prefix_caching=True, num_blocks=num_blocks),
        scheduler=SchedulerSpec(max_step_tokens=max_step_tokens, max_running=max_running),
        device=DeviceSpec(device="cpu", executor=executor, tensor_parallel=tensor_parallel),
    )
