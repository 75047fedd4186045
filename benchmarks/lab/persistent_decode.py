"""A decode step of one row as one kernel (persistent_kernel.py) beside the recorded step of the engine's own kernels
(chain.py), on the shape of Qwen3-0.6B.

    python -m benchmarks.lab.persistent_decode [--contexts 128,2048] [--out persistent.json]

First whether they agree: logits of both against float32, and the best token. Then microseconds of a step, medians of
rounds in which all ways take turns: "recorded", and the kernel as it is, without weights asked for before a barrier,
without what it asks for into the second-level cache, with neither, and with a launch for each phase; its barriers and
its head alone; and each phase of all layers, a launch for each.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks.h200.chain import MODELS, VOCABULARY, Model, Step
from benchmarks.h200.shapes import BYTES_PER_S, device_name
from benchmarks.lab.persistent_kernel import PHASES, DecoderWeights, PersistentDecoder, Sizes
from headrace.back.kernels.triton.ahead import compiling
from headrace.back.kernels.triton.timing import graph_of, replay_us

ROUNDS = 5
TOKEN = 4711
"""Whose step it is."""
WAYS: dict[str, dict[str, Any]] = {
    "persistent": {},
    "nothing ahead into the cache": {"ahead": False},
    "nothing before a barrier": {"early": False},
    "16 warps": {"warps": 16},
    "neither": {"early": False, "ahead": False},
}


class PlainDecoder:
    """The step in plain PyTorch and float32, a phase at a time; rope [D] of the new token."""

    def __init__(
        self, sizes: Sizes, weights: DecoderWeights, rope_D: torch.Tensor, eps: float = 1e-6
    ) -> None:
        self.sizes, self.weights, self.rope_D, self.eps = sizes, weights, rope_D, eps

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * weight

    def _rotated(self, x_HD: torch.Tensor) -> torch.Tensor:
        a, b = x_HD.chunk(2, dim=-1)
        cos, sin = self.rope_D.chunk(2)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)

    def qkv(self, layer: int, x_E: torch.Tensor) -> torch.Tensor:
        """The projection of the normed residual."""
        w = self.weights
        return w.qkv[layer].float() @ self._norm(x_E, w.input_norm[layer])

    def attention(
        self, layer: int, x_E: torch.Tensor, qkv: torch.Tensor, kv_2KTD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The residual behind it, and the new key and value [2, K, D]; kv is of the tokens before."""
        w, s = self.weights, self.sizes
        q, k, v = qkv.view(-1, s.head_dim).split([s.heads, s.kv_heads, s.kv_heads])
        q = self._rotated(self._norm(q, w.q_norm[layer]))
        new = torch.stack([self._rotated(self._norm(k, w.k_norm[layer])), v])
        keys, values = torch.cat([kv_2KTD.float(), new[:, :, None]], dim=2)
        group = s.heads // s.kv_heads
        out = F.scaled_dot_product_attention(
            q[:, None], keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
        )
        return x_E + w.o[layer].float() @ out.flatten(), new

    def mlp(self, layer: int, x_E: torch.Tensor) -> torch.Tensor:
        """The residual behind it."""
        w = self.weights
        x = self._norm(x_E, w.mlp_norm[layer])
        gate, up = (w.gate_up[layer].float() @ x).chunk(2)
        return x_E + w.down[layer].float() @ (F.silu(gate) * up)

    def logits(self, x_E: torch.Tensor) -> torch.Tensor:
        """Of the last residual."""
        return self.weights.head.float() @ self._norm(x_E, self.weights.final_norm)

    def step(self, x_E: torch.Tensor, kv_L2KTD: torch.Tensor) -> torch.Tensor:
        """The logits of a whole step."""
        for layer in range(self.sizes.layers):
            x_E, _ = self.attention(layer, x_E, self.qkv(layer, x_E), kv_L2KTD[layer])
            x_E = self.mlp(layer, x_E)
        return self.logits(x_E)


def in_order(kv: torch.Tensor, table_B: torch.Tensor, length: int) -> torch.Tensor:
    """The first `length` tokens of a row's cache [..., blocks, 2, K, 16, D] as [..., 2, K, length, D]."""
    blocks = kv.index_select(-5, table_B.long())
    return blocks.movedim(-5, -3).flatten(-3, -2)[..., :length, :]


def stacked(step: Step) -> DecoderWeights:
    """The same weights as the engine's kernels have."""
    layers = step.model.layers
    found = {name: torch.stack([one[name] for one in step.weights]) for name in step.weights[0]}
    width = step.norm_weight.expand(layers, -1).contiguous()
    head = torch.ones(layers, 128, device="cuda")
    return DecoderWeights(
        embedding=step.head, input_norm=width, qkv=found["qkv"], q_norm=head, k_norm=head,
        o=found["o"], mlp_norm=width, gate_up=found["gate_up"], down=found["down"],
        final_norm=step.norm_weight, head=step.head,
    )  # fmt: skip


def sizes_of(model: Model, length: int) -> Sizes:
    """The kernel's."""
    return Sizes(
        layers=model.layers, width=model.width, heads=model.heads, kv_heads=model.kv_heads,
        head_dim=128, inner=model.inner, vocabulary=VOCABULARY,
    ).of_context(length)  # fmt: skip


def agreement(logits: torch.Tensor, exact: torch.Tensor, token: int) -> dict[str, Any]:
    """Of one way with float32: relative distance, the best token, and how far its exact logit is from the best."""
    error = (logits.float() - exact).norm() / exact.norm()
    below = exact.max() - exact[token]
    return {"error": float(error), "token": token, "below_the_best": float(below)}


class Comparison:
    """One context: the ways to run its step."""

    def __init__(self, step: Step, weights: DecoderWeights, length: int) -> None:
        torch.manual_seed(length)
        self.inputs = step.inputs([length])
        self.inputs.kv.normal_()
        self.inputs.start.copy_(step.head[TOKEN])
        self.step, self.length = step, length
        self.table = self.inputs.plan.block_table_RB[0].contiguous()
        self.decoder = PersistentDecoder(
            sizes_of(step.model, length), weights, kv=self.inputs.kv, table=self.table,
            kv_len=self.inputs.plan.kv_len_R, rope=step.table,
        )  # fmt: skip
        self.recorded = step.call("fused", self.inputs)
        self.launches = {"a launch for each phase": self.decoder.launch_apart}
        self.launches |= {name: partial(self.decoder.launch, **more) for name, more in WAYS.items()}

    def exact(self) -> torch.Tensor:
        """The logits in float32."""
        decoder, step = self.decoder, self.step
        plain = PlainDecoder(decoder.sizes, decoder.weights, step.table[self.length - 1])
        cached = in_order(self.inputs.kv, self.table, self.length - 1)
        return plain.step(step.head[TOKEN].float(), cached)

    def run(self) -> dict[str, Any]:
        """Whether the ways agree, and their times."""
        exact, decoder = self.exact(), self.decoder
        row: dict[str, Any] = {"context": self.length, "best": int(exact.argmax())}
        logits, best = self.recorded()
        row["recorded"] = agreement(logits[0], exact, int(best))
        print(json.dumps({"recorded": row["recorded"]}), flush=True)
        graphs = {"recorded": graph_of([self.recorded])}
        for name, launch in self.launches.items():
            decoder.token.fill_(TOKEN)
            decoder.logits.fill_(float("nan"))
            launch()
            row[name] = agreement(decoder.logits, exact, int(decoder.token))
            print(json.dumps({name: row[name]}), flush=True)
            graphs[name] = graph_of([launch])
        alone = {"barriers alone": decoder.launch_barriers, "head alone": decoder.launch_head}
        phases = range(1, 6) if decoder.sizes.splits > 1 else (1, 2, 4, 5)
        alone |= {f"{PHASES[i]} alone": partial(decoder.launch_phase, i) for i in phases}
        for name, launch in alone.items():
            graphs[name], row[name] = graph_of([launch]), {}
        times = [[replay_us(graph, replays=9) for graph in graphs.values()] for _ in range(ROUNDS)]
        for name, us in zip(graphs, np.median(times, axis=0).round(1).tolist(), strict=True):
            row[name]["us"] = us
        model = self.step.model
        kv_bytes = 4 * model.layers * self.length * model.kv_heads * 128
        row["floor_us"] = round((model.weight_bytes + kv_bytes) / BYTES_PER_S * 1e6, 1)
        return row


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--contexts", default="128,2048")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    step = Step(next(model for model in MODELS if model.name == "0.6B"))
    weights = stacked(step)
    lengths = [int(length) for length in given.contexts.split(",")]
    with compiling():
        for length in lengths:
            comparison = Comparison(step, weights, length)
            decoder = comparison.decoder
            alone = (decoder.launch_barriers, decoder.launch_head)
            for launch in (comparison.recorded, *alone, *comparison.launches.values()):
                launch()
    rows = []
    for length in lengths:
        rows.append(device_name() | Comparison(step, weights, length).run())
        print(json.dumps(rows[-1]), flush=True)
        if given.out:
            given.out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
