"""The fused op's reference does, head by head, what norm, rotation and KV write do one after the other."""

from __future__ import annotations

import pytest
import torch

from headrace.back.kernels.qk_rope_write.op import OP, QKRopeWriteProblem

HEADS, KV_HEADS, HEAD_DIM, BLOCK_TOKENS = 4, 2, 16, 4


def normed(x: torch.Tensor, weight: torch.Tensor | None, eps: float | None) -> torch.Tensor:
    if eps is None or weight is None:
        return x
    return x / (x.pow(2).mean() + eps).sqrt() * weight


def rotated(x: torch.Tensor, row: torch.Tensor, rotary: int, layout: str) -> torch.Tensor:
    y, half = x.clone(), rotary // 2
    for i in range(half):
        a, b = (i, i + half) if layout == "half" else (2 * i, 2 * i + 1)
        cos, sin = row[i], row[half + i]
        y[a], y[b] = x[a] * cos - x[b] * sin, x[b] * cos + x[a] * sin
    return y


@pytest.mark.parametrize("eps", [None, 1e-3])
@pytest.mark.parametrize(
    ("rotary", "layout"), [(0, "half"), (16, "half"), (8, "half"), (16, "pairs"), (4, "pairs")]
)
def test_equals_the_stages_written_out(eps: float | None, rotary: int, layout: str) -> None:
    problem = QKRopeWriteProblem(
        device="cpu", dtype=torch.float32, heads=HEADS, kv_heads=KV_HEADS, head_dim=HEAD_DIM,
        block_tokens=BLOCK_TOKENS, rotary_dim=rotary, layout=layout, eps=eps,
    )  # fmt: skip
    sample = OP.sample(problem)
    qkv, positions, table, kv, slots = sample.arguments
    before, old = qkv.view(3, -1, HEAD_DIM).clone(), kv.clone()
    q = OP.reference.bind(problem, *sample.weights)(*sample.arguments)
    for token, (position, slot) in enumerate(zip(positions.tolist(), slots.tolist(), strict=True)):
        for head in range(HEADS + KV_HEADS):
            weight = sample.weights[0 if head < HEADS else 1]
            want = normed(before[token, head], weight, eps)
            want = rotated(want, table[position], rotary, layout)
            block, offset = divmod(slot, BLOCK_TOKENS)
            got = q[token, head] if head < HEADS else kv[block, 0, head - HEADS, offset]
            torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
        written = kv[block, 1, :, offset]
        assert torch.equal(written, before[token, HEADS + KV_HEADS :])
        old[block, :, :, offset] = kv[block, :, :, offset]
    assert torch.equal(kv, old), "a place that no slot names was written"
    assert q.data_ptr() == qkv.data_ptr()
    assert torch.equal(qkv.view(3, -1, HEAD_DIM)[:, HEADS:], before[:, HEADS:])
