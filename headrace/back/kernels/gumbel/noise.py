"""The noise of sampling: a pure function of (seed, position, token id), so that a token depends
neither on the rest of the batch nor on how often its row was preempted.

    mix(x)              the finaliser of SplitMix64 (base/splitmix.py), modulo 2^64
    key                 mix(mix(seed + G) ^ position * H)
    bits(id)            mix(key + (id + 1) * G): the SplitMix64 stream that starts at key
    u                   ((bits >> 1) + 1/2) / 2^63, at most 1 - 2^-53
    exponential         -log1p(-u), in 2^-64 .. 36.8; its -log is Gumbel noise, which reaches 44

Argmax of z - log(exponential) samples from softmax(z). Winners have small u, where doubles are
dense: a token 40 nats below the best is still sampled as often as it should be. All in 64 bits:
31-bit noise ends 21 nats up.
"""

from __future__ import annotations

import numpy as np
import torch

from headrace.base import splitmix

_G = splitmix.GAMMA
_H = 0xD1B54A32D192ED03
_LARGEST_U = 1.0 - 2.0**-53
XTC_ID = -1
"""The "token id" of the one random number per token that decides whether XTC acts; no token has
it."""


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def _shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift of int64."""
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _mix_(x: torch.Tensor) -> torch.Tensor:
    """mix, in place, on int64."""
    x ^= _shift(x, 30)
    x *= _signed(splitmix.M1)
    x ^= _shift(x, 27)
    x *= _signed(splitmix.M2)
    x ^= _shift(x, 31)
    return x


def keys(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """The key of each row's noise: uint64 seeds [K], positions [K] -> uint64 [K]."""
    inner = splitmix.mix_all(seeds + np.uint64(_G))
    return splitmix.mix_all(inner ^ (positions.astype(np.uint64) * np.uint64(_H)))


def keys_on_device(mixed_K: torch.Tensor, position_K: torch.Tensor) -> torch.Tensor:
    """`keys`, int64 on the device, from mix(seed + G) and positions, both int64."""
    return _mix_(mixed_K ^ (position_K * _signed(_H)))


def bits_host(keys: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """The bits of keys and ids (uint64, broadcast), as uint64."""
    return splitmix.mix_all((ids + np.uint64(1)) * np.uint64(_G) + keys)


def exponential_host(keys_M: np.ndarray, ids_M: np.ndarray) -> np.ndarray:
    """Exponential noise of pairs of keys (uint64 [M]) and ids (int64 [M]), float64 [M]; equal to
    `exponential`."""
    bits_M = torch.from_numpy(bits_host(keys_M, ids_M.astype(np.uint64)).view(np.int64))
    return _exponential(from_bits(bits_M)).numpy()


def uniform(keys_K: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """u in (0, 1), float64 [K, C]; keys int64 [K] (the bits of uint64), ids int64 [C] or [K, C]."""
    return from_bits(_mix_((ids + 1) * _signed(_G) + keys_K[:, None]))


def from_bits(bits: torch.Tensor) -> torch.Tensor:
    """u of 64 random bits, float64; neither 0 nor 1."""
    u = _shift(bits, 1).to(torch.float64)
    return u.add_(0.5).mul_(2.0**-63).clamp_(max=_LARGEST_U)


def exponential(keys_K: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Exponential noise of rate 1, float64 [K, C]."""
    return _exponential(uniform(keys_K, ids))


def _exponential(u: torch.Tensor) -> torch.Tensor:
    return u.neg_().log1p_().neg_()
