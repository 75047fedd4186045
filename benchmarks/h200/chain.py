"""A whole decode step without host, sampler or runner: all layers' kernels in one graph, as the layers call them.

"fused": six launches a layer (norm in the products, activation in gate_up, residual added by o and down). "separate":
norms and activation are kernels of their own, products by table. "cublas": the same with the library's products.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from functools import partial
from unittest.mock import patch

import torch
import torch.nn.functional as F

from headrace.back.kernels.attention import triton_attention
from headrace.back.kernels.attention.op import AttentionProblem, SamplePlan, sample_plan
from headrace.back.kernels.fused_linear import triton_fused_linear
from headrace.back.kernels.fused_linear.op import FusedLinearProblem
from headrace.back.kernels.gated_act import triton_gated_act
from headrace.back.kernels.gated_act.op import GatedActProblem
from headrace.back.kernels.greedy import triton_greedy
from headrace.back.kernels.greedy.op import GreedyProblem
from headrace.back.kernels.linear import triton_linear
from headrace.back.kernels.linear.op import LinearProblem
from headrace.back.kernels.qk_rope_write import triton_qk_rope_write
from headrace.back.kernels.qk_rope_write.op import QKRopeWriteProblem
from headrace.back.kernels.rms_norm import triton_rms_norm
from headrace.back.kernels.rms_norm.op import RMSNormProblem
from headrace.back.kernels.triton import wrap
from headrace.back.kernels.triton.timing import graph_of, replay_us

Stages = Generator[None, None, tuple[torch.Tensor, torch.Tensor]]
CUDA = {"device": "cuda", "dtype": torch.bfloat16}
VOCABULARY = 151936


@dataclass(frozen=True, kw_only=True)
class Model:
    """Sizes of a dense decoder."""

    name: str
    layers: int
    width: int
    heads: int
    kv_heads: int
    inner: int

    @property
    def weight_bytes(self) -> int:
        """What a step reads of weights, the head included."""
        qkv = (self.heads + 2 * self.kv_heads) * 128
        layer = self.width * (qkv + self.heads * 128 + 3 * self.inner)
        return 2 * (self.layers * layer + VOCABULARY * self.width)


MODELS = (
    Model(name="0.6B", layers=28, width=1024, heads=16, kv_heads=8, inner=3072),
    Model(name="8B", layers=36, width=4096, heads=32, kv_heads=8, inner=12288),
)


@dataclass(frozen=True, kw_only=True)
class StepInputs:
    """What rows decode from: `start` [rows, width] behind the embedding, kv [layers, blocks, 2, kv_heads, 16, 128]."""

    plan: SamplePlan
    kv: torch.Tensor
    start: torch.Tensor


def end_of(stages: Stages) -> tuple[torch.Tensor, torch.Tensor]:
    """What it returns once it has passed all stops."""
    while True:
        try:
            next(stages)
        except StopIteration as end:
            return end.value


class Step:
    """The tensors and kernels of one model."""

    def __init__(self, model: Model) -> None:
        self.model = model
        sizes = {
            "qkv": ((model.heads + 2 * model.kv_heads) * 128, model.width),
            "o": (model.width, model.heads * 128),
            "gate_up": (2 * model.inner, model.width),
            "down": (model.width, model.inner),
        }
        self.weights = [
            {name: torch.randn(o, i, **CUDA).mul_(0.5 * i**-0.5) for name, (o, i) in sizes.items()}
            for _ in range(model.layers)
        ]
        self.head = torch.randn(VOCABULARY, model.width, **CUDA).mul_(model.width**-0.5)
        self.norm_weight = torch.ones(model.width, device="cuda")
        head_weight = torch.ones(128, device="cuda")
        heads = {
            "heads": model.heads,
            "kv_heads": model.kv_heads,
            "head_dim": 128,
            "block_tokens": 16,
        }
        self.rope = triton_qk_rope_write.bind(
            QKRopeWriteProblem(**CUDA, **heads, rotary_dim=128, eps=1e-6), head_weight, head_weight
        )
        self.attention = AttentionProblem(**CUDA, **heads, scale=128**-0.5)
        self.act = triton_gated_act.bind(
            GatedActProblem(**CUDA, width=model.inner, activation="silu")
        )
        norm = RMSNormProblem(**CUDA, width=model.width, eps=1e-6)
        self.norm = triton_rms_norm.bind_norm(norm, self.norm_weight)
        self.add_norm = triton_rms_norm.bind_add_norm(norm, self.norm_weight)
        self.greedy = triton_greedy.bind(GreedyProblem(device="cuda"))
        self.table = torch.randn(4096, 128, device="cuda")

    def fused(self) -> list[Callable[..., torch.Tensor]]:
        """Per layer: qkv, o, gate_up, down."""
        extra = {
            "qkv": {"eps": 1e-6},
            "o": {"add": True},
            "gate_up": {"eps": 1e-6, "activation": "silu"},
            "down": {"add": True},
        }
        return [
            {
                name: triton_fused_linear.bind(
                    FusedLinearProblem(**CUDA, inputs=weight.shape[1], outputs=weight.shape[0], **extra[name]),
                    weight, None, self.norm_weight if "eps" in extra[name] else None,
                )
                for name, weight in layer.items()
            }
            for layer in self.weights
        ]  # fmt: skip

    def plain(self, library: bool) -> list[dict[str, Callable[..., torch.Tensor]]]:
        """The same, products alone."""
        if library:
            return [
                {n: (lambda x, w=w: F.linear(x, w)) for n, w in layer.items()}
                for layer in self.weights
            ]
        return [
            {
                n: triton_linear.bind(
                    LinearProblem(**CUDA, inputs=w.shape[1], outputs=w.shape[0]), w, None
                )
                for n, w in layer.items()
            }
            for layer in self.weights
        ]

    def inputs(self, lengths: list[int]) -> StepInputs:
        """Rows of so many tokens each."""
        plan, blocks = sample_plan(
            [(1, length) for length in lengths], block_tokens=16, window=None, device="cuda"
        )
        shape = (self.model.layers, blocks, 2, self.model.kv_heads, 16, 128)
        start = torch.randn(len(lengths), self.model.width, **CUDA)
        return StepInputs(plan=plan, kv=torch.zeros(shape, **CUDA), start=start)

    def call(
        self, kind: str, inputs: StepInputs
    ) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
        """Launches the step; the logits of its rows and their best tokens."""
        stages = self.stages(kind, inputs)
        return lambda: end_of(stages())

    def stages(self, kind: str, inputs: StepInputs) -> Callable[[], Stages]:
        """Launches the step, but stops before and after the attention of each layer."""
        plan, caches = replace(inputs.plan), inputs.kv.unbind()  # lists of work are kept by plan
        positions = plan.kv_len_R.long() - 1
        layers = self.fused() if kind == "fused" else self.plain(kind == "cublas")
        attends = [triton_attention.bind(self.attention) for _ in caches]
        head = triton_linear.bind(
            LinearProblem(**CUDA, inputs=self.model.width, outputs=VOCABULARY), self.head, None
        )
        if kind == "cublas":
            head = partial(F.linear, weight=self.head)

        def step() -> Stages:
            residual = inputs.start.clone()
            branch = None
            for layer, attend, kv in zip(layers, attends, caches, strict=True):
                if kind == "fused":
                    q = self.rope(layer["qkv"](residual), positions, self.table, kv, plan.slot_T)
                    yield
                    attended = attend(q, kv, plan)
                    yield
                    layer["o"](attended.flatten(1), residual)
                    layer["down"](layer["gate_up"](residual), residual)
                    continue
                x = self.norm(residual) if branch is None else self.add_norm(branch, residual)
                q = self.rope(layer["qkv"](x), positions, self.table, kv, plan.slot_T)
                x = self.add_norm(layer["o"](attend(q, kv, plan).flatten(1)), residual)
                branch = layer["down"](self.act(layer["gate_up"](x)))
            x = self.norm(residual) if branch is None else self.add_norm(branch, residual)
            logits = head(x)
            return logits, self.greedy(logits)[0]

        return step

    def us(self, kind: str, rows: int, length: int) -> float:
        """Microseconds of a step of `rows` decode rows with `length` tokens each."""
        call = self.call(kind, self.inputs([length] * rows))  # which keeps what the graph reads
        return replay_us(graph_of([call]), replays=9)

    def report(self, rate: float, sizes: list[tuple[int, int]]) -> list[dict[str, object]]:
        """Every kind and size, with the floor of weights and cache."""
        found = []
        for rows, length in sizes:
            kv_bytes = self.model.layers * rows * length * 2 * self.model.kv_heads * 128 * 2
            floor = (self.model.weight_bytes + kv_bytes) / rate * 1e6
            row: dict[str, object] = {
                "model": self.model.name,
                "rows": rows,
                "length": length,
                "floor_us": round(floor, 1),
            }
            for kind in ("fused", "separate", "cublas"):
                row[kind] = round(self.us(kind, rows, length), 1)
            with patch.object(wrap, "has_dependent_launch", lambda device: False):
                row["fused_without_dependent_launch"] = round(self.us("fused", rows, length), 1)
            found.append(row)
            print(row, flush=True)
        return found
