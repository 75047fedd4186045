"""Triton's positions and angles of patches (KRN-12): those of the reference for odd grids, several frames, merges and
types, in one launch each. In the interpreter, or on a GPU."""

from __future__ import annotations

import pytest
import torch

triton = pytest.importorskip("triton")

from headrace.back.kernels.op import float_tolerance
from headrace.back.kernels.patch_places import op, triton_patch_places
from headrace.back.kernels.triton.wrap import interpreted

DEVICE = "cpu" if interpreted() else "cuda"
DTYPES = [torch.float32, torch.float16 if interpreted() else torch.bfloat16]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (interpreted() or torch.cuda.is_available()),
        reason="no CUDA device here; test_interpreter.py runs these tests in the interpreter",
    ),
]
SIZES = (
    [(1, 1, 1), (2, 3, 7), (1, 8, 5)]
    if interpreted()
    else [(1, 1, 1), (2, 3, 7), (1, 64, 64), (3, 33, 60)]
)


@pytest.mark.parametrize(("merge", "dtype"), [(1, DTYPES[1]), (2, DTYPES[0]), (2, DTYPES[1])])
def test_positions(merge: int, dtype: torch.dtype) -> None:
    grids = [(t, h * merge, w * merge) for t, h, w in SIZES]
    count = sum(t * h * w for t, h, w in grids)
    one = op.PatchPositionsProblem(device=DEVICE, dtype=dtype, width=40, merge=merge, side=6)
    generator = torch.Generator().manual_seed(1)
    table = torch.randn(36, 40, generator=generator).to(dtype).to(DEVICE)
    x = torch.randn(count + 2, 44, generator=generator).to(dtype).to(DEVICE)
    got, want = x.clone(), x.clone()
    triton_patch_places.POSITIONS.bind(one)(got[1:-1, :40], table, grids)
    op.bind_positions(one)(want[1:-1, :40], table, grids)
    error = (got.float() - want.float()).abs().max() / want.float().abs().max()
    assert error <= float_tolerance(dtype), error
    assert torch.equal(got[:, 40:], x[:, 40:]) and torch.equal(got[[0, -1]], x[[0, -1]])


@pytest.mark.parametrize(("merge", "head_dim"), [(1, 64), (2, 72), (2, 32)])
def test_angles(merge: int, head_dim: int) -> None:
    grids = [(t, h * merge, w * merge) for t, h, w in SIZES]
    one = op.PatchTurnsProblem(device=DEVICE, head_dim=head_dim, merge=merge, theta=10_000.0)
    got = triton_patch_places.TURNS.bind(one)(grids, torch.device(DEVICE))
    want = op.bind_turns(one)(grids, torch.device(DEVICE))
    torch.testing.assert_close(got, want, rtol=0, atol=2e-5)


def test_the_checks_of_the_ops_pass_and_others_are_refused() -> None:
    positions = op.PatchPositionsProblem(device=DEVICE, dtype=DTYPES[1], width=72, merge=2, side=5)
    turns = op.PatchTurnsProblem(device=DEVICE, head_dim=72, merge=2, theta=10_000.0)
    for each, kernel, problem in (
        (op.OP, triton_patch_places.POSITIONS, positions),
        (op.TURNS_OP, triton_patch_places.TURNS, turns),
    ):
        assert kernel.supports(problem) is None
        assert each.error(kernel, problem) <= each.tolerance(problem)
    other = op.PatchPositionsProblem(
        device=DEVICE,
        dtype=DTYPES[1],
        width=72,
        merge=2,
        side=5,
        taps=lambda *given: op.bilinear(*given),
    )
    assert "corners on corners" in str(triton_patch_places.POSITIONS.supports(other))


@pytest.mark.skipif(interpreted(), reason="counts a GPU's launches")
def test_one_launch_each_where_the_reference_takes_many() -> None:
    from torch.profiler import ProfilerActivity, profile

    grids, device = [(1, 64, 64)], torch.device(DEVICE)
    one = op.PatchPositionsProblem(device=DEVICE, dtype=torch.bfloat16, width=72, merge=2, side=48)
    turn = op.PatchTurnsProblem(device=DEVICE, head_dim=72, merge=2, theta=10_000.0)
    table = torch.randn(48**2, 72, dtype=torch.bfloat16, device=DEVICE)
    x = torch.randn(64**2, 72, dtype=torch.bfloat16, device=DEVICE)
    counts = []
    for add, turns in (
        (op.bind_positions(one), op.bind_turns(turn)),
        (triton_patch_places.POSITIONS.bind(one), triton_patch_places.TURNS.bind(turn)),
    ):
        for number in range(3):
            with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as seen:
                add(x, table, grids)
                turns(grids, device)
                torch.cuda.synchronize()
            if number == 2:
                events = seen.profiler.kineto_results.events()
                counts.append(sum("CUDA" in str(event.device_type()) for event in events))
    assert counts[1] == 2 and counts[0] > 10, counts
