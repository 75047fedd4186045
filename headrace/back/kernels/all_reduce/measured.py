"""Which way the ranks of an axis sum a message: by our kernels or by the group's library, measured
at start.

All ranks come here together. Our kernels are first compared with the library on a message; then
both are timed in graphs over a few sizes, and a message takes what was quickest at the next larger
size. Times are those of the slowest rank, so that all decide alike.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from headrace.back.kernels.all_reduce.triton_all_reduce import MOST_POLLS, PeerSums, memory_bytes
from headrace.back.kernels.op import float_tolerance
from headrace.back.kernels.triton.timing import graph_of, replay_us
from headrace.back.parallel.mesh import Axis
from headrace.back.parallel.peers import PeerMemory, agree

MOST_BYTES = 4 << 20
SIZES = (8 << 10, 32 << 10, 128 << 10, 512 << 10, 1 << 20, 2 << 20, MOST_BYTES)
"""Messages timed, in bytes."""
CALLS = 20


@dataclass(frozen=True)
class Timed:
    """Microseconds of a message of `num_bytes`, by way: "library", "one shot", "two shots"."""

    num_bytes: int
    us: dict[str, float]

    @property
    def best(self) -> str:
        """The quickest way."""
        return min(self.us, key=lambda way: self.us[way])


class MeasuredSums:
    """`Summing` by the quickest of our ways, up to the size where the library is quicker."""

    def __init__(self, sums: PeerSums, timed: tuple[Timed, ...]) -> None:
        self._sums = sums
        own = [one.best != "library" for one in timed]
        taken = own.index(False) if False in own else len(timed)
        self._sizes = [one.num_bytes for one in timed[:taken]]
        self._two_shot = [one.best == "two shots" for one in timed[:taken]]

        self.why = "; ".join(
            f"{one.num_bytes >> 10} KiB: "
            + ", ".join(f"{way} {us:.1f} us" for way, us in one.us.items())
            for one in timed
        )

    @property
    def chosen(self) -> str:
        """For the table of decisions."""
        if not self.most_bytes:
            return "library"
        return f"own kernels up to {self.most_bytes >> 10} KiB, library above"

    @property
    def most_bytes(self) -> int:
        """The longest message that is summed here; 0: none."""
        return self._sizes[-1] if self._sizes else 0

    def takes(self, x: torch.Tensor) -> bool:
        """See Summing."""
        return x.numel() * x.element_size() <= self.most_bytes and self._sums.takes(x)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """See Summing."""
        return self._sums.all_reduce(x, two_shot=self._way(x))

    def add_norm(
        self, x_TE: torch.Tensor, residual_TE: torch.Tensor, weight_E: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """See Summing."""
        return self._sums.add_norm(x_TE, residual_TE, weight_E, eps=eps, two_shot=self._way(x_TE))

    def _way(self, x: torch.Tensor) -> bool:
        return self._two_shot[bisect_left(self._sizes, x.numel() * x.element_size())]


def measured_sums(axis: Axis, device: torch.device, dtype: torch.dtype) -> MeasuredSums:
    """Sums over the axis, checked and timed; PeersUnavailable, on all ranks, where our kernels
    cannot serve."""
    sums = peer_sums(axis, device)
    check(sums, axis, device, dtype)
    return MeasuredSums(sums, measure(sums, axis, device, dtype))


def peer_sums(
    axis: Axis, device: torch.device, *, most_bytes: int = MOST_BYTES, polls: int = MOST_POLLS
) -> PeerSums:
    """Our kernels over memory of all ranks; PeersUnavailable where it cannot be mapped."""
    memory = PeerMemory(axis, device, memory_bytes(axis.size, most_bytes))
    return PeerSums(
        memory.addresses, rank=axis.rank, device=device, most_bytes=most_bytes, polls=polls
    )


def check(sums: PeerSums, axis: Axis, device: torch.device, dtype: torch.dtype) -> None:
    """Compares our sums with the library's; PeersUnavailable on all ranks if one is wrong."""
    generator = torch.Generator(device=device).manual_seed(axis.rank)
    failure = ""
    for two_shot in (False, True):
        mine = torch.randn(3 * 1024 + 8, generator=generator, device=device).to(dtype)
        expected = mine.float()
        dist.all_reduce(expected, group=axis.group)
        error = (sums.all_reduce(mine, two_shot=two_shot).float() - expected).abs().max().item()
        if not error <= float_tolerance(dtype) * expected.abs().max().item():
            failure = f"self-check failed: error {error:.2e}"
    agree(axis, device, failure)


def measure(
    sums: PeerSums, axis: Axis, device: torch.device, dtype: torch.dtype
) -> tuple[Timed, ...]:
    """Times every way at every size."""
    return tuple(_timed(sums, axis, device, dtype, num_bytes) for num_bytes in SIZES)


def _timed(
    sums: PeerSums, axis: Axis, device: torch.device, dtype: torch.dtype, num_bytes: int
) -> Timed:
    x = torch.zeros(num_bytes // dtype.itemsize, dtype=dtype, device=device)
    ways: dict[str, Callable[[], object]] = {
        "library": lambda: dist.all_reduce(x, group=axis.group),
        "one shot": lambda: sums.all_reduce(x, two_shot=False),
    }
    if axis.size > 2:  # with two ranks both shots together carry what one does
        ways["two shots"] = lambda: sums.all_reduce(x, two_shot=True)
    times = []
    for call in ways.values():
        graph = graph_of([call] * CALLS)
        dist.barrier(group=axis.group)
        times.append(replay_us(graph) / CALLS)
    slowest = torch.tensor(times, dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=axis.group)
    return Timed(num_bytes, dict(zip(ways, slowest.tolist(), strict=True)))
