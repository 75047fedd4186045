"""A draw from softmax(logits / temperature): `bind(problem)` returns `f(logits_KV, temperature_K, key_K) -> (token_K,
z_K)`.

logits_KV float32 (-Inf masks a token), temperature_K float64 above 0, key_K int64 (the bits of a uint64, made
from seed and position). token_K int64: argmax of z - log(exponential), z = logit / temperature in float64,
equal scores: the lowest id. z_K float64: z of the chosen token, -Inf if every token is masked. The noise is that
of back/sampling/noise.py:

    mix(x)        the finaliser of SplitMix64 (Steele, Lea, Flood 2014), modulo 2^64
    bits(id)      mix(key + (id + 1) * G): the SplitMix64 stream that starts at key
    u             ((bits >> 1) + 1/2) / 2^63, at most 1 - 2^-53
    exponential   -log1p(-u)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from headrace.back.kernels.op import Kernel, Op, Sample, random_tensor, sample_generator

Gumbel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
_G = 0x9E3779B97F4A7C15 - (1 << 64)
_M1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_M2 = 0x94D049BB133111EB - (1 << 64)


@dataclass(frozen=True, kw_only=True)
class GumbelProblem:
    """The same for every width and number of rows."""

    device: str


def _shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift of int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _exponential(key_K: torch.Tensor, width: int) -> torch.Tensor:
    ids_V = torch.arange(1, width + 1, device=key_K.device)
    x = key_K[:, None] + ids_V * _G
    x = (x ^ _shift(x, 30)) * _M1
    x = (x ^ _shift(x, 27)) * _M2
    bits = _shift(x ^ _shift(x, 31), 1)
    u = ((bits.to(torch.float64) + 0.5) * 2.0**-63).clamp(max=1.0 - 2.0**-53)
    return -torch.log1p(-u)


def bind_reference(problem: GumbelProblem) -> Gumbel:
    """The reference: every score of every row."""

    def gumbel(
        logits_KV: torch.Tensor, temperature_K: torch.Tensor, key_K: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        z_KV = logits_KV.to(torch.float64) / temperature_K[:, None]
        score_KV = z_KV - _exponential(key_K, logits_KV.shape[1]).log()
        token_K = score_KV.argmax(dim=1)
        return token_K, z_KV.gather(1, token_K[:, None])[:, 0]

    return gumbel


def _sample(problem: GumbelProblem) -> Sample:
    generator = sample_generator()
    logits = random_tensor(6, 1003, dtype=torch.float32, device=problem.device, generator=generator)
    temperature = torch.linspace(0.1, 2.0, 6, dtype=torch.float64, device=problem.device)
    keys = torch.randint(-(1 << 62), 1 << 62, (6,), generator=generator).to(problem.device)
    return Sample(problem=problem, weights=(), arguments=(3 * logits, temperature, keys))


OP: Op[GumbelProblem] = Op(
    name="gumbel",
    reference=Kernel(name="torch", supports=lambda problem: None, bind=bind_reference),
    kernels=("headrace.back.kernels.gumbel.native:KERNEL",),
    sample=_sample,
    tolerance=lambda problem: 0.0,
)
