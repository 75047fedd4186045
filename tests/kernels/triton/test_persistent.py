"""The step as one kernel (benchmarks/lab/persistent_kernel.py), a phase at a time: the interpreter runs programs one
after the other, so that none can wait for another."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

triton = pytest.importorskip("triton")

from benchmarks.lab.persistent_decode import PlainDecoder, in_order
from benchmarks.lab.persistent_kernel import DecoderWeights, PersistentDecoder, Sizes
from headrace.back.kernels.triton.wrap import interpreted

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not interpreted(), reason="on a GPU: benchmarks.lab.persistent_decode"),
]
SIZES = Sizes(
    layers=2, width=64, heads=2, kv_heads=1, head_dim=16, inner=96, vocabulary=300, programs=4,
    positions=16,
)  # fmt: skip
TOLERANCE = 2e-5
"""Float32 sums of at most 96 products of about 1 each, in another order."""


def _weights(sizes: Sizes, dtype: torch.dtype) -> DecoderWeights:
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * scale

    def weight(*shape: int) -> torch.Tensor:
        return random(*shape, scale=shape[-1] ** -0.5).to(dtype)

    s, layers = sizes, sizes.layers
    columns = (s.heads + 2 * s.kv_heads) * s.head_dim
    return DecoderWeights(
        embedding=weight(s.vocabulary, s.width),
        input_norm=1 + random(layers, s.width, scale=0.1),
        qkv=weight(layers, columns, s.width),
        q_norm=1 + random(layers, s.head_dim, scale=0.1),
        k_norm=1 + random(layers, s.head_dim, scale=0.1),
        o=weight(layers, s.width, s.heads * s.head_dim),
        mlp_norm=1 + random(layers, s.width, scale=0.1),
        gate_up=weight(layers, 2 * s.inner, s.width),
        down=weight(layers, s.width, s.inner),
        final_norm=1 + random(s.width, scale=0.1),
        head=weight(s.vocabulary, s.width),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("splits", "tiles", "length"), [(1, 2, 30), (1, 1, 1), (4, 1, 50), (4, 2, 81)]
)
def test_each_phase_equals_plain_operations(
    splits: int, tiles: int, length: int, dtype: torch.dtype
) -> None:
    sizes = replace(SIZES, splits=splits, tiles=tiles)
    weights, generator = _weights(sizes, dtype), torch.Generator().manual_seed(2)
    blocks = -(-length // 16)
    shape = (sizes.layers, blocks + 1, 2, sizes.kv_heads, 16, sizes.head_dim)
    kv = torch.randn(shape, generator=generator).to(dtype)
    rope = torch.randn(length, sizes.head_dim, generator=generator)
    table, kv_len = torch.arange(blocks, 0, -1, dtype=torch.int32), torch.tensor([length]).int()
    decoder = PersistentDecoder(sizes, weights, kv=kv, table=table, kv_len=kv_len, rope=rope)
    plain = PlainDecoder(sizes, weights, rope[length - 1])
    close = {"atol": TOLERANCE, "rtol": 1e-4}
    if dtype is torch.bfloat16:  # the new key and value are rounded
        close = {"atol": 1e-2, "rtol": 2**-7}
    decoder.token.fill_(7)
    decoder.launch(first=0, last=0, layers=(0, 0))
    assert torch.equal(decoder.x[0], weights.embedding[7].float())
    x, middle = decoder.x
    for layer in range(sizes.layers):
        one, before = (layer, layer + 1), x.clone()
        decoder.qkv.fill_(float("nan"))
        decoder.launch(first=1, last=1, layers=one)
        torch.testing.assert_close(decoder.qkv, plain.qkv(layer, before), **close)
        cached = in_order(kv[layer], table, length - 1)
        attended, new = plain.attention(layer, before, decoder.qkv, cached)
        decoder.parts.fill_(float("nan"))
        decoder.scores.fill_(float("nan"))
        apart(decoder, (2, 3), one)
        torch.testing.assert_close(middle, attended, **close)
        written = in_order(kv[layer], table, length)[:, :, -1]
        torch.testing.assert_close(written.float(), new, **close)
        decoder.inner.fill_(float("nan"))
        before = middle.clone()
        apart(decoder, (4, 5), one)
        torch.testing.assert_close(x, plain.mlp(layer, before), **close)
    decoder.launch(first=6, last=6, layers=(0, 0))
    torch.testing.assert_close(decoder.logits, plain.logits(x), **close)
    decoder.launch(first=7, last=7, layers=(0, 0))
    assert int(decoder.token) == int(decoder.logits.argmax())


def apart(decoder: PersistentDecoder, phases: tuple[int, ...], layers: tuple[int, int]) -> None:
    """A launch for each of them."""
    for phase in phases:
        decoder.launch(first=phase, last=phase, layers=layers)
