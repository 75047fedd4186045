"""KV caches of every quantized form against their references, and against the unquantized cache (QNT-18)."""

from dataclasses import replace

import pytest
import torch

from headrace.back.kernels.attention import native as attention_native
from headrace.back.kernels.attention.op import OP as ATTENTION
from headrace.back.kernels.attention.op import AttentionProblem, sample_plan
from headrace.back.kernels.attention.reference import bind_reference
from headrace.back.kernels.kv_write import native as write_native
from headrace.back.kernels.kv_write.op import OP as KV_WRITE
from headrace.back.kernels.kv_write.op import KVWriteProblem
from headrace.back.kernels.kv_write.op import bind_reference as bind_write
from headrace.back.kernels.kv_write.quantized import (
    ROTATED,
    SCALE_BYTES,
    dequantize,
    quantize,
    unfit,
    value_bytes,
    values_and_scales,
)
from headrace.back.kernels.merge_attention.native import bind_with as merge_with
from headrace.back.kernels.native.library import NativeError
from tests.kernels.partial_attention import check_merged

pytestmark = pytest.mark.usefixtures("poisoned")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ROWS = [(1, 1), (1, 37), (1, 1100), (3, 3), (40, 95), (2, 130)]
# heads, KV heads, head_dim, block_tokens, window, soft cap
SHAPES = [
    (1, 1, 16, 8, None, None),
    (4, 2, 40, 8, 3, None),
    (6, 1, 64, 16, None, 5.0),
    (7, 7, 72, 16, 20, 2.0),
    (8, 2, 128, 64, 50, None),
    (2, 1, 256, 16, None, None),
]
NARROW = ("nvfp4", *ROTATED)
CODES = pytest.mark.parametrize(
    "code",
    [
        *("int8", "fp8", "fp8_e5m2", "int4"),
        *(pytest.param(code, marks=pytest.mark.slow) for code in NARROW),
    ],
)


def as_read(dtype, code):
    """The type that the values of the cache have in products."""
    return dtype if code == "int4" or code.startswith("nvfp4") else torch.float32


def fitting(head_dim, code):
    """A rotated head's size is a power of two."""
    return 64 if unfit(code, head_dim) else head_dim


def write_problem(dtype, kv_heads, head_dim, block_tokens, code="int8"):
    return KVWriteProblem(
        device="cpu", dtype=dtype, kv_heads=kv_heads, head_dim=head_dim,
        block_tokens=block_tokens, quantized=code,
    )  # fmt: skip


def empty_cache(blocks, kv_heads, block_tokens, head_dim, code="int8"):
    """Codes of anything, scales of NaN: what nobody has written must not be read."""
    width = value_bytes(head_dim, code) + SCALE_BYTES
    kv = torch.full((blocks, 2, kv_heads, block_tokens, width), 77, dtype=torch.int8)
    values_and_scales(kv)[1].fill_(float("nan"))
    return kv


def case(
    dtype, heads, kv_heads, head_dim, block_tokens, window, softcap, rows, code="int8", sinks=False
):
    """A problem, queries, the plain cache in float32, the quantized one, and the plan."""
    problem = AttentionProblem(
        device="cpu", dtype=dtype, heads=heads, kv_heads=kv_heads, head_dim=head_dim, quantized=code,
        block_tokens=block_tokens, scale=head_dim**-0.5, window=window, softcap=softcap, sinks=sinks,
    )  # fmt: skip
    plan, blocks = sample_plan(rows, block_tokens=block_tokens, window=window, device="cpu")
    generator = torch.Generator().manual_seed(0)
    tokens = sum(queries for queries, _ in rows)
    q = torch.randn(tokens, heads, head_dim, generator=generator).to(dtype)
    plain = torch.randn(blocks, 2, kv_heads, block_tokens, head_dim, generator=generator)
    quantized = empty_cache(blocks, kv_heads, block_tokens, head_dim, code)
    codes, scales = values_and_scales(quantized)
    for row, length in enumerate(plan.host_kv_len):
        for position in range(length):
            at = int(plan.block_table_RB[row, position // block_tokens]), position % block_tokens
            if at[0]:
                codes[at[0], :, :, at[1]], scales[at[0], :, :, at[1]] = quantize(
                    plain[at[0], :, :, at[1]], code
                )
    return problem, q, plain, quantized, plan


@CODES
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_attention_equals_the_reference_and_reads_no_unused_place(library, dtype, shape, code):
    sinks = torch.linspace(-3, 3, shape[0]) if shape[0] % 2 == 0 else None
    shape = (*shape[:2], fitting(shape[2], code), *shape[3:])
    problem, q, _, quantized, plan = case(dtype, *shape, ROWS, code, sinks is not None)
    out = attention_native.bind_with(library, problem, sinks)(q, quantized, plan)
    wide = AttentionProblem(**{**vars(problem), "dtype": torch.float32, "quantized": None})
    expected = bind_reference(wide, sinks)(
        q.float(), dequantize(quantized, as_read(dtype, code), code).float(), plan
    )
    bound = {torch.float32: 4e-6, torch.bfloat16: 6e-3, torch.float16: 1e-3}[dtype]
    bound *= 2 if code in ROTATED else 1  # queries and values are rounded where they are rotated
    assert (out.float() - expected).abs().max() <= bound * expected.abs().max()


@pytest.mark.parametrize(
    "code",
    [
        pytest.param(code, marks=pytest.mark.slow if code == "turboquant-4bit" else ())
        for code in NARROW
    ],
)
def test_narrow_forms_are_written_and_read_by_the_reference(newest, code):
    """The others of these tests are slow for them."""
    shape = (8, 2, 128, 64, 50, None)
    test_attention_equals_the_reference_and_reads_no_unused_place(
        newest, torch.bfloat16, shape, code
    )
    test_write_is_the_reference_bit_for_bit_and_leaves_the_rest(newest, torch.bfloat16, 128, code)


@CODES
@pytest.mark.parametrize("heads", [2, 8])
def test_halves_merge_to_the_whole(library, heads, code):
    rows = [(1, 700), (1, 12), (3, 3), (70, 300), (2, 530)]
    problem, q, _, quantized, plan = case(torch.bfloat16, heads, 2, 64, 16, None, None, rows, code)
    check_merged(
        lambda problem: attention_native.bind_with(library, problem),
        lambda problem: merge_with(library, problem), problem, q, quantized, plan, bound=1.2e-2,
    )  # fmt: skip


@CODES
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize(
    ("heads", "window", "softcap"),
    [(2, None, None), (4, 200, 5.0), (8, None, None), (8, 100, None)],
)
def test_long_chunks_equal_the_reference(library, heads, window, softcap, whole, code):
    """One, two and four query heads to a KV head, hundreds of query rows, behind a prefix too."""
    rows = [(1, 300), (140, 140), (70, 640)]
    problem, q, _, quantized, plan = case(
        torch.bfloat16, heads, 2, 64, 16, window, softcap, rows, code
    )
    out = attention_native.bind_with(library, problem, whole=whole)(q, quantized, plan)
    wide = AttentionProblem(**{**vars(problem), "dtype": torch.float32, "quantized": None})
    meaning = dequantize(quantized, as_read(problem.dtype, code), code).float()
    expected = bind_reference(wide)(q.float(), meaning, plan)
    assert (out.float() - expected).abs().max() <= 6e-3 * expected.abs().max()


@pytest.mark.parametrize(
    ("code", "bound"),
    [
        ("int8", 0.02),
        ("fp8", 0.06),
        ("fp8_e5m2", 0.12),
        ("int4", 0.2),
        ("nvfp4", 0.25),
        ("nvfp4-4over6", 0.2),
        pytest.param("int4-rotated", 0.2, marks=pytest.mark.slow),
        ("int3-rotated", 0.4),
        pytest.param("turboquant-4bit", 0.2, marks=pytest.mark.slow),
        pytest.param("turboquant-3bit", 0.35, marks=pytest.mark.slow),
    ],
)
def test_attention_is_near_that_over_the_plain_cache(newest, code, bound):
    problem, q, plain, quantized, plan = case(torch.float32, 8, 2, 64, 16, None, None, ROWS, code)
    out = attention_native.bind_with(newest, problem)(q, quantized, plan)
    wide = AttentionProblem(**{**vars(problem), "quantized": None})
    expected = bind_reference(wide)(q, plain, plan)
    assert 0 < (out - expected).norm() / expected.norm() < bound


@CODES
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [16, 40, 72, 128, 256])
def test_write_is_the_reference_bit_for_bit_and_leaves_the_rest(library, dtype, head_dim, code):
    head_dim = fitting(head_dim, code)
    problem = write_problem(dtype, 3, head_dim, 16, code)
    both = torch.randn(5, 6, head_dim, generator=torch.Generator().manual_seed(0)).to(dtype)
    both[1, 0] = 0
    both[2, 4, 3], both[3, 1, head_dim - 1] = float("nan"), float("-inf")
    slots = torch.tensor([0, 15, 16, 33, 79])
    caches = []
    for write in (write_native.bind_with(library, problem), bind_write(problem)):
        kv = empty_cache(5, 3, 16, head_dim, code)
        write(both[:, :3], both[:, 3:], kv, slots)
        caches.append(kv)
    ours, scales = values_and_scales(caches[0])
    theirs, expected = values_and_scales(caches[1])
    assert torch.equal(ours, theirs) and torch.equal(scales.isnan(), expected.isnan())
    torch.testing.assert_close(scales.nan_to_num(), expected.nan_to_num(), rtol=2e-7, atol=0)
    assert scales[1, 1, 1, 0].isnan() and scales[2, 0, 1, 1].isnan()


def test_scales_that_are_fixed_are_written_and_bound_the_values(library):
    """QNT-13."""
    problem = replace(write_problem(torch.float32, 2, 80, 16, "fp8"), fixed=True)
    generator = torch.Generator().manual_seed(3)
    k, v = torch.randn(2, 5, 2, 80, generator=generator)
    k[1, 0, 3] = float("nan")
    scales = torch.tensor([[0.37, 0.001], [0.02, 0.5]])
    slots = torch.tensor([16, 17, 31, 32, 40])
    caches = [empty_cache(3, 2, 16, 80, "fp8") for _ in range(2)]
    write_native.bind_with(library, problem, scales)(k, v, caches[0], slots)
    bind_write(problem, scales)(k, v, caches[1], slots)
    assert torch.equal(*(cache.nan_to_num() for cache in caches))
    _, written = values_and_scales(caches[0])
    assert torch.equal(
        written[1, :, :, 1].nan_to_num(7.0), torch.tensor([[7.0, 0.001], [0.02, 0.5]])
    )
    values = dequantize(caches[0], torch.float32, "fp8")
    assert values[2, 0, 1, 0].abs().max() == pytest.approx(0.448)


def test_every_e4m3_code_is_read_as_torch_reads_it(library):
    codes = torch.tensor([c for c in range(256) if c & 0x7F != 0x7F], dtype=torch.uint8)
    values = codes.view(torch.float8_e4m3fn).float()
    problem, q, _, quantized, plan = case(torch.float32, 1, 1, 16, 16, None, None, [(1, 1)], "fp8")
    attention = attention_native.bind_with(library, problem)
    places, scales = values_and_scales(quantized)
    block = int(plan.block_table_RB[0, 0])
    scales[block] = 1.0
    for first in range(0, len(codes), 16):
        part = codes[first : first + 16]
        places[block, :, 0, 0, : len(part)] = part.view(torch.int8)
        assert torch.equal(
            attention(q, quantized, plan)[0, 0, : len(part)], values[first : first + 16]
        )


def test_e4m3_rounds_to_even_at_every_midpoint(library):
    """A head whose largest value is 448 has the scale 1: codes are the roundings themselves."""
    exact = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middle = (exact[1:] + exact[:-1]) / 2
    values = torch.cat((exact, middle, middle.nextafter(torch.tensor(0.0)), -middle))
    values = torch.nn.functional.pad(values, (0, -len(values) % 15)).view(-1, 1, 15)
    x = torch.nn.functional.pad(values, (0, 1), value=448.0)
    kv = empty_cache(len(x) // 16 + 2, 1, 16, 16)
    write = write_native.bind_with(library, write_problem(torch.float32, 1, 16, 16, "fp8"))
    write(x, x, kv, torch.arange(len(x)))
    codes = values_and_scales(kv)[0].transpose(2, 3)
    for row in range(len(x)):
        found = codes[row // 16, 0, row % 16, 0]
        assert torch.equal(
            found.view(torch.float8_e4m3fn).float(), x[row, 0].to(torch.float8_e4m3fn).float()
        )


def test_a_slot_outside_the_cache_is_refused(newest):
    write = write_native.bind_with(newest, write_problem(torch.float32, 1, 16, 8))
    x = torch.ones(1, 1, 16)
    for slot in (-1, 16):
        with pytest.raises(NativeError, match="index out of range"):
            write(x, x, empty_cache(2, 1, 8, 16), torch.tensor([slot]))


@CODES
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_self_checks_accept_it(newest, dtype, code):
    for shape in SHAPES:
        shape = (*shape[:2], fitting(shape[2], code), *shape[3:])
        problem = case(dtype, *shape, [(1, 1)], code)[0]
        assert ATTENTION.error(attention_native.KERNEL, problem) <= ATTENTION.tolerance(problem)
        asked = write_problem(dtype, shape[1], shape[2], shape[3], code)
        assert KV_WRITE.error(write_native.KERNEL, asked) <= 1e-6


def test_memory_is_about_half(newest):
    from headrace.back.attention.forms import HeadsForm
    from headrace.back.runner.kv_layout import lay_out

    def block_bytes(quantized, head_dim):
        forms = [
            HeadsForm(cache=i, kv_heads=8, head_dim=head_dim, quantized=quantized) for i in range(4)
        ]
        return lay_out(forms, block_tokens=16, dtype=torch.bfloat16).slab_bytes

    assert block_bytes(None, 64) / block_bytes("fp8", 64) == pytest.approx(128 / 68)
    assert block_bytes(None, 128) / block_bytes("int8", 128) == pytest.approx(256 / 132)
    assert block_bytes(None, 128) / block_bytes("int4", 128) == pytest.approx(256 / 68)


def test_a_failed_rows_blocks_are_clean_for_their_next_owner():
    from headrace.back.attention.forms import HeadsForm
    from headrace.back.runner.kv_layout import lay_out
    from headrace.back.runner.memory import KVCounts, KVMemory

    forms = [HeadsForm(cache=0, kv_heads=2, head_dim=16, quantized="int8")]
    layout = lay_out(forms, block_tokens=8, dtype=torch.bfloat16)
    memory = KVMemory(layout, KVCounts(num_blocks=4), device=torch.device("cpu"))
    scales = values_and_scales(memory.caches[0])[1]
    scales[1:3] = float("nan")
    scales[2, 0, 0, 0] = 5.0
    memory.scrub(0, torch.tensor([2]))
    assert scales[1].isnan().all() and scales[2].isfinite().all() and scales[2, 0, 0, 0] == 5.0


@CODES
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "window"), [(4, 2, None), (40, 1, 300)])
def test_a_shared_prefix_of_codes_gives_every_row_the_bits_it_has_alone(
    library, code, dtype, heads, kv_heads, window
):
    """Rows that begin in the same blocks, some beside rows that do not, of lengths around the ends of the parts."""
    lengths = [700, 513, 512, 900, 257, 40, 650, 1300, 1300]
    prefixes = [600, 512, 512, 600, 256, 32, 0, 1296, 1296]
    rows = [(1, length) for length in lengths]
    problem = case(dtype, heads, kv_heads, 32, 16, window, None, [(1, 1)], code)[0]
    plan, blocks = sample_plan(rows, block_tokens=16, window=None, device="cpu")
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(len(rows), heads, 32, generator=generator).to(dtype)
    quantized = empty_cache(blocks, kv_heads, 16, 32, code)
    for place, values in zip(
        values_and_scales(quantized),
        quantize(torch.randn(blocks - 1, 2, kv_heads, 16, 32, generator=generator), code),
        strict=True,
    ):
        place[1:] = values
    shared = plan.block_table_RB[7].clone()
    for row, prefix in enumerate(prefixes):
        plan.block_table_RB[row, : prefix // 16] = shared[: prefix // 16]
    attention = attention_native.bind_with(library, problem)
    together = attention(q, quantized, plan)
    wide = replace(problem, dtype=torch.float32, quantized=None)
    meaning = dequantize(quantized, as_read(problem.dtype, code), code).float()
    expected = bind_reference(wide)(q.float(), meaning, plan)
    bound = {torch.float32: 4e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}[dtype]
    assert (together.float() - expected).abs().max() <= bound * expected.abs().max()
    library.set_threads(1)
    for row, length in enumerate(lengths):
        alone, _ = sample_plan([(1, length)], block_tokens=16, window=None, device="cpu")
        width = alone.block_table_RB.shape[1]
        alone.block_table_RB.copy_(plan.block_table_RB[row : row + 1, :width])
        assert torch.equal(attention(q[row : row + 1], quantized, alone)[0], together[row]), row
