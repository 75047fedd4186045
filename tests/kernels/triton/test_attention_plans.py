"""Start-up checks each plan of Triton attention by itself, and goes on without one that fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

triton = pytest.importorskip("triton")

from headrace.back.kernels import op
from headrace.back.kernels.attention import (
    cascade,
    hopper,
    hopper_decode,
    triton_attention,
    triton_decode,
    triton_fixed,
    triton_plans,
)
from headrace.back.kernels.attention.op import OP, AttentionProblem
from headrace.back.kernels.attention.triton_lists import Tiles
from headrace.back.kernels.op import KernelChoice, Op
from headrace.back.kernels.triton.wrap import interpreted

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (interpreted() or torch.cuda.is_available()),
        reason="no CUDA device here; test_interpreter.py runs these tests in the interpreter",
    ),
]
PROBLEM = AttentionProblem(
    device="cpu" if interpreted() else "cuda",
    dtype=torch.float16,
    heads=2,
    kv_heads=1,
    head_dim=16,
    block_tokens=16,
    scale=0.25,
    softcap=30.0,  # which Hopper's own kernels do not know
)
LARGE = Tiles(m=16, n=64, num_warps=4, num_stages=3)
SMALL = Tiles(m=16, n=32, num_warps=4, num_stages=2)


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No plan has failed yet; two tiles, few rows and short prefixes are enough."""
    monkeypatch.setattr(triton_plans, "_skipped", {})
    monkeypatch.setattr(op, "GPU_MODULES", "of a CPU none")
    monkeypatch.setattr(triton_attention, "CHECKED_ROWS", (1, 9, 10))
    monkeypatch.setattr(cascade, "LEAST_ROWS", 10)
    monkeypatch.setattr(cascade, "MIN_TOKENS", 64)
    monkeypatch.setattr(triton_plans, "SHARED_TOKENS", 80)
    monkeypatch.setattr(triton_plans, "LONG", 150)

    def tiles(problem: AttentionProblem, rows: int = 1, queries: int = 1) -> Tiles:
        return LARGE if rows >= 9 else SMALL

    monkeypatch.setattr(triton_attention, "decode_tiles", tiles)
    yield


def names(problem: AttentionProblem = PROBLEM) -> list[str]:
    return [check.name for check in triton_attention.plans(problem)]


def choose() -> KernelChoice[AttentionProblem]:
    """As at load, where there is no other kernel."""
    only = Op(
        name="attention",
        reference=OP.reference,
        kernels=("headrace.back.kernels.attention.triton_attention:KERNEL",),
        sample=OP.sample,
        tolerance=OP.tolerance,
    )
    return only.choose(PROBLEM)


class Refusing:
    """A kernel that does not compile for some launches."""

    def __init__(self, kernel: object, refuses: Callable[[dict[str, object]], bool]) -> None:
        self.kernel, self.refuses = kernel, refuses

    def __getitem__(self, grid: object) -> Callable[..., None]:
        def launch(*arguments: object, **constants: object) -> None:
            if self.refuses(constants):
                raise RuntimeError("out of resource: shared memory")
            self.kernel[grid](*arguments, **constants)

        return launch


SMALL_NAME, LARGE_NAME = (triton_attention.decode_name(tiles) for tiles in (SMALL, LARGE))
ALL = [SMALL_NAME, LARGE_NAME, "shared prefix", "few queries a row", "prompts beside decodes"]


def test_every_plan_agrees_with_the_reference_and_none_is_skipped() -> None:
    assert names() == ALL
    assert OP.failures(triton_attention.KERNEL, PROBLEM) == []
    assert "shared prefix" not in names(replace(PROBLEM, window=40))


def test_the_step_that_checks_shared_prefixes_reads_one_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counts = []
    lists = cascade._lists

    def counted(*arguments: object) -> cascade.PrefixLists:
        result = lists(*arguments)
        counts.append(int(result.items[0]))
        return result

    monkeypatch.setattr(cascade, "_lists", counted)
    (check,) = [one for one in triton_attention.plans(PROBLEM) if one.name == "shared prefix"]
    assert OP._error(check.bind, check.sample) < 1e-2
    assert counts[0] > 0


def test_without_a_shared_prefixs_kernel_each_row_reads_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cascade, "prefix_kernel", Refusing(cascade.prefix_kernel, lambda _: True))
    choice = choose()
    assert choice.kernel is triton_attention.KERNEL
    assert choice.rejected == (
        ("triton shared prefix", "self-check failed: RuntimeError: out of resource: shared memory"),
    )
    assert names() == [name for name in ALL if name != "shared prefix"]
    assert OP.failures(triton_attention.KERNEL, PROBLEM) == []


def test_tiles_that_do_not_compile_are_replaced_by_the_smallest_which_are_checked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Larger steps, and few queries a row, are not touched."""
    refusing = Refusing(triton_decode.decode_kernel, lambda constants: constants["N"] == LARGE.n)
    monkeypatch.setattr(triton_attention, "decode_kernel", refusing)
    choice = choose()
    assert choice.kernel is triton_attention.KERNEL
    assert choice.rejected[0][0] == f"triton {LARGE_NAME}"
    smallest = triton_attention.decode_name(replace(LARGE, n=16, num_stages=1))
    assert names()[:2] == [SMALL_NAME, smallest]
    assert OP.failures(triton_attention.KERNEL, PROBLEM) == []


def test_where_not_even_the_smallest_tiles_agree_the_kernel_is_passed_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refusing = Refusing(triton_decode.decode_kernel, lambda constants: True)
    monkeypatch.setattr(triton_attention, "decode_kernel", refusing)
    choice = choose()
    assert choice.kernel is not triton_attention.KERNEL
    assert "out of resource" in dict(choice.rejected)["triton_attention"]


def test_few_queries_go_the_way_of_prompts_where_their_tiles_are_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    of_few = triton_attention.few_queries_tiles
    monkeypatch.setattr(
        triton_attention,
        "few_queries_tiles",
        lambda problem, plan: (tiles := of_few(problem, plan)) and replace(tiles, n=48),
    )
    (one,) = OP.failures(triton_attention.KERNEL, PROBLEM)
    assert one[0] == "few queries a row"
    assert OP.failures(triton_attention.KERNEL, PROBLEM) == []


def test_of_fixed_order_decodes_take_the_tile_of_all_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small = triton_fixed.FixedAttentionTile(m=16, n=48, warps=2, stages=1)
    monkeypatch.setattr(triton_fixed, "decode_tile", lambda problem: small)
    failures = OP.failures(triton_fixed.KERNEL, PROBLEM)
    assert [name for name, _ in failures] == ["decodes in the small tile"]
    assert OP.failures(triton_fixed.KERNEL, PROBLEM) == []
    checks = triton_fixed.plans(PROBLEM)
    assert [check.name for check in checks] == ["prompts beside decodes"]


def test_on_hopper_each_stream_is_a_plan_whose_place_the_generic_kernels_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in (hopper, hopper_decode):
        monkeypatch.setattr(module, "unfit", lambda problem: None)
    monkeypatch.setattr(triton_attention, "CHECKED_ROWS", (1, 8, 64, 200))
    few, medium, many = (hopper_decode.plan_name(PROBLEM, rows) for rows in (8, 64, 200))
    others = ["few queries a row", "prefill by TMA", "prompts beside decodes"]
    assert names() == [SMALL_NAME, few, "shared prefix", "shared prefix", *others]
    skip(few, "prefill by TMA", "shared prefix")
    others.remove("prefill by TMA")
    assert names() == [SMALL_NAME, medium, many, *others]
    skip(medium)
    assert names() == [SMALL_NAME, LARGE_NAME, many, *others]


def test_on_hopper_steps_that_verify_drafts_are_plans_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in (hopper, hopper_decode):
        monkeypatch.setattr(module, "unfit", lambda problem: None)
    problem = replace(PROBLEM, verify_queries=4)
    streams = [
        hopper_decode.plan_name(problem, rows, queries) for rows in (8, 64) for queries in (2, 4)
    ]
    generic = ["few queries a row", "few queries a row"]
    few = [name for name in names(problem) if "quer" in name]
    assert few == [*generic, *streams] and len(set(streams)) == 4
    (one,) = [one for one in triton_attention.plans(problem) if one.name == streams[0]]
    assert one.skip is not None
    one.skip("it is wrong")
    assert [name for name in names(problem) if "quer" in name] == [*generic, *streams[1:]]
    assert hopper_decode.verified_queries(problem, rows=64, queries=3) == 4
    assert hopper_decode.verified_queries(problem, rows=65, queries=3) is None
    assert hopper_decode.verified_queries(problem, rows=8, queries=5) is None
    assert hopper_decode.verified_queries(PROBLEM, rows=8, queries=2) is None
    wide = replace(problem, heads=32, kv_heads=1)
    assert hopper_decode.verified_queries(wide, rows=8, queries=4) is None


def skip(*plans: str) -> None:
    for check in {check.name: check for check in triton_attention.plans(PROBLEM)}.values():
        if check.name in plans:
            check.skip("it is wrong")
