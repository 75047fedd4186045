"""A sample from softmax(logits / temperature): `bind(problem)` returns `f(logits_KV, temperature_K,
key_K) -> (token_K, z_K)`.

logits_KV float32 (-Inf masks a token), temperature_K float64 above 0, key_K int64 (the bits of a
uint64, made from seed and position). token_K int64: argmax of z - log(exponential), z = logit /
temperature in float64, equal scores: the lowest id. z_K float64: z of the chosen token, -Inf if
every token is masked. The noise is defined in noise.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from headrace.back.kernels.gumbel import noise
from headrace.back.kernels.op import Kernel, Op, Sample, random_tensor, sample_generator

Gumbel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
CHUNK = 1 << 18
"""Logits the reference works on at a time on a CPU: its intermediate results stay in the
second-level cache."""
DEVICE_CHUNK = 1 << 26
"""The same on other devices, where it only bounds memory."""


@dataclass(frozen=True, kw_only=True)
class GumbelProblem:
    """The same for every width and number of rows."""

    device: str


def bind_reference(problem: GumbelProblem) -> Gumbel:
    """The reference: every score of every row, some rows at a time."""
    chunk = CHUNK if problem.device == "cpu" else DEVICE_CHUNK

    def gumbel(
        logits_KV: torch.Tensor, temperature_K: torch.Tensor, key_K: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        step = max(1, chunk // logits_KV.shape[1])
        parts = zip(
            logits_KV.split(step), temperature_K.split(step), key_K.split(step), strict=True
        )
        ids, z = zip(*(_sampled(*part) for part in parts), strict=True)
        return torch.cat(ids), torch.cat(z)

    return gumbel


def _sampled(
    logits_KV: torch.Tensor, temperature_K: torch.Tensor, key_K: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    z_KV = logits_KV.to(torch.float64).div_(temperature_K[:, None])
    ids_V = torch.arange(logits_KV.shape[1], device=logits_KV.device)
    score_KV = z_KV - noise.exponential(key_K, ids_V).log_()
    token_K = score_KV.argmax(dim=1)
    return token_K, z_KV.gather(1, token_K[:, None])[:, 0]


def _sample(problem: GumbelProblem) -> Sample:
    generator = sample_generator()
    logits = random_tensor(6, 1003, dtype=torch.float32, device=problem.device, generator=generator)
    temperature = torch.linspace(0.1, 2.0, 6, dtype=torch.float64, device=problem.device)
    keys = torch.randint(-(1 << 62), 1 << 62, (6,), generator=generator).to(problem.device)
    return Sample(problem=problem, weights=(), arguments=(3 * logits, temperature, keys))


OP: Op[GumbelProblem] = Op(
    name="gumbel",
    reference=Kernel(name="torch", supports=lambda problem: None, bind=bind_reference),
    kernels=(
        "headrace.back.kernels.gumbel.native:KERNEL",
        "headrace.back.kernels.gumbel.race:KERNEL",
        "headrace.back.kernels.gumbel.triton_gumbel:KERNEL",
    ),
    sample=_sample,
    tolerance=lambda problem: 0.0,
)
