"""Native paged attention against the reference in float32: decode and prefill rows together, windows, caps, NaN."""

from dataclasses import replace

import pytest
import torch

from headrace.back.kernels.attention.native import KERNEL, bind_with
from headrace.back.kernels.attention.op import OP, AttentionProblem, sample_plan
from headrace.back.kernels.attention.reference import bind_reference
from headrace.back.kernels.merge_attention.native import bind_with as merge_with
from headrace.back.kernels.native.library import NativeError
from tests.kernels.partial_attention import check_merged

pytestmark = pytest.mark.usefixtures("poisoned")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ROWS = [(1, 1), (1, 37), (1, 1100), (3, 3), (40, 95), (2, 130)]
# heads, KV heads, head_dim, block_tokens, window (negative: chunk), soft cap
SHAPES = [
    (1, 1, 16, 1, None, None),
    (4, 2, 40, 7, 3, None),
    (6, 1, 64, 16, None, 5.0),
    (7, 7, 72, 4, 20, 2.0),
    (40, 1, 80, 16, 1, None),
    (8, 2, 128, 64, 50, None),
    (2, 1, 256, 16, None, None),
    (6, 2, 64, 16, -24, None),
    (4, 1, 40, 7, -1024, None),
]


def reach(window):
    chunk = -window if window and window < 0 else None
    return {"window": None if chunk else window, "chunk": chunk}


def case(dtype, heads, kv_heads, head_dim, block_tokens, window, softcap, rows, seed=0):
    problem = AttentionProblem(
        device="cpu", dtype=dtype, heads=heads, kv_heads=kv_heads, head_dim=head_dim,
        block_tokens=block_tokens, scale=head_dim**-0.5, softcap=softcap, **reach(window),
    )  # fmt: skip
    plan, blocks = sample_plan(rows, block_tokens=block_tokens, **reach(window), device="cpu")
    generator = torch.Generator().manual_seed(seed)
    tokens = sum(queries for queries, _ in rows)
    q = torch.randn(tokens, heads, head_dim, generator=generator).to(dtype)
    kv = torch.randn(blocks, 2, kv_heads, block_tokens, head_dim, generator=generator).to(dtype)
    return problem, q, kv, plan


def exact(problem, q, kv, plan):
    wide = AttentionProblem(**{**vars(problem), "dtype": torch.float32})
    return bind_reference(wide)(q.float(), kv.float(), plan)


def poison_unused(kv, plan, block_tokens):
    """NaN in the null block and in every place no row has written."""
    used = torch.zeros(kv.shape[0], block_tokens, dtype=torch.bool)
    for row, length in enumerate(plan.host_kv_len):
        for position in range(length):
            block = plan.block_table_RB[row, position // block_tokens]
            used[block, position % block_tokens] = True
    used[0] = False
    kv.movedim(3, 1)[~used] = float("nan")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_the_reference_and_reads_no_unused_place(library, dtype, shape):
    problem, q, kv, plan = case(dtype, *shape, ROWS)
    poison_unused(kv, plan, problem.block_tokens)
    out, expected = bind_with(library, problem)(q, kv, plan), exact(problem, q, kv, plan)
    bound = {torch.float32: 2e-6, torch.bfloat16: 6e-3, torch.float16: 1e-3}[dtype]
    assert (out.float() - expected).abs().max() <= bound * expected.abs().max()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "window"), [(4, 2, None), (12, 1, None), (40, 1, 300), (2, 2, 600)]
)
def test_a_shared_prefix_gives_every_row_the_bits_it_has_alone(
    library, dtype, heads, kv_heads, window, sinks
):
    """Rows that begin in the same blocks, some beside rows that do not, and of lengths around the ends of the parts."""
    lengths = [700, 513, 512, 511, 900, 257, 769, 40, 650, 300, 1300, 1300, 700]
    prefixes = [600, 600, 512, 511, 600, 256, 600, 32, 0, 288, 1296, 1296, 600]
    rows = [(1, length) for length in lengths] + [(3, 30)]
    problem, q, _, _ = case(dtype, heads, kv_heads, 32, 16, window, None, rows)
    full, _ = sample_plan(rows, block_tokens=16, window=None, device="cpu")
    shared, blocks = full.block_table_RB[10].clone(), int(full.block_table_RB.max()) + 1
    for row, prefix in enumerate(prefixes):
        full.block_table_RB[row, : prefix // 16] = shared[: prefix // 16]
    kv = torch.randn(blocks, 2, kv_heads, 16, 32, generator=torch.Generator().manual_seed(1)).to(
        dtype
    )
    kv[0] = float("nan")
    problem = AttentionProblem(**{**vars(problem), "sinks": sinks})
    given = torch.linspace(-1, 2, heads) if sinks else None
    attention = bind_with(library, problem, given)
    together = attention(q, kv, full)
    wide = AttentionProblem(**{**vars(problem), "dtype": torch.float32})
    expected = bind_reference(wide, given)(q.float(), kv.float(), full)
    bound = {torch.float32: 4e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}[dtype]
    assert (together.float() - expected).abs().max() <= bound * expected.abs().max()
    library.set_threads(1)
    for row in range(len(lengths)):
        alone, _ = sample_plan(rows[row : row + 1], block_tokens=16, window=None, device="cpu")
        width = alone.block_table_RB.shape[1]
        alone.block_table_RB.copy_(full.block_table_RB[row : row + 1, :width])
        assert torch.equal(attention(q[row : row + 1], kv, alone)[0], together[row]), row


@pytest.mark.parametrize("head_dim", range(16, 257, 8))
def test_every_head_size(library, head_dim):
    dtype = torch.bfloat16 if head_dim % 16 == 0 else torch.float32
    problem, q, kv, plan = case(dtype, 4, 2, head_dim, 16, None, None, [(1, 70), (17, 40)])
    poison_unused(kv, plan, 16)
    out, expected = bind_with(library, problem)(q, kv, plan), exact(problem, q, kv, plan)
    bound = 4e-6 if dtype == torch.float32 else 6e-3
    assert (out.float() - expected).abs().max() <= bound * expected.abs().max()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_sinks_take_their_share_once(library, dtype, shape):
    """Also where a row is cut into parts, or sees nothing but itself; -Inf is no sink, a great one leaves no weight."""
    problem, q, kv, plan = case(dtype, *shape, ROWS)
    poison_unused(kv, plan, problem.block_tokens)
    heads = problem.heads
    sinks = torch.linspace(-2.0, 4.0, heads)
    with_sinks = AttentionProblem(**{**vars(problem), "sinks": True})
    wide = AttentionProblem(**{**vars(with_sinks), "dtype": torch.float32})
    out = bind_with(library, with_sinks, sinks)(q, kv, plan)
    expected = bind_reference(wide, sinks)(q.float(), kv.float(), plan)
    bound = {torch.float32: 2e-6, torch.bfloat16: 6e-3, torch.float16: 1e-3}[dtype]
    assert (out.float() - expected).abs().max() <= bound * expected.abs().max()
    assert not torch.equal(out, bind_with(library, problem)(q, kv, plan))
    none = bind_with(library, with_sinks, torch.full((heads,), float("-inf")))(q, kv, plan)
    assert torch.equal(none, bind_with(library, problem)(q, kv, plan))
    great = bind_with(library, with_sinks, torch.full((heads,), 1e4))(q, kv, plan)
    assert not great.any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_alibi_goes_onto_the_scores_of_every_part(library, dtype, shape):
    problem, q, kv, plan = case(dtype, *shape, ROWS)
    poison_unused(kv, plan, problem.block_tokens)
    sloped = replace(problem, slopes=tuple(0.5 ** (i % 5 + 1) for i in range(problem.heads)))
    out = bind_with(library, sloped)(q, kv, plan)
    expected = exact(sloped, q, kv, plan)
    bound = {torch.float32: 2e-6, torch.bfloat16: 6e-3, torch.float16: 1e-3}[dtype]
    assert (out.float() - expected).abs().max() <= bound * expected.abs().max()
    whole = bind_with(library, sloped, whole=True)(q, kv, plan)
    assert (whole.float() - expected).abs().max() <= bound * expected.abs().max()


def test_a_sink_is_one_more_score_of_the_softmax():
    """The definition, written out for one row (independently of both kernels)."""
    problem, q, kv, plan = case(torch.float32, 4, 2, 16, 16, None, None, [(1, 9)])
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0])
    wide = AttentionProblem(**{**vars(problem), "sinks": True})
    out = bind_reference(wide, sinks)(q, kv, plan)
    block = int(plan.block_table_RB[0, 0])
    for head in range(4):
        k, v = kv[block, 0, head // 2, :9], kv[block, 1, head // 2, :9]
        scores = torch.cat((k @ q[0, head] * problem.scale, sinks[head : head + 1]))
        torch.testing.assert_close(out[0, head], scores.softmax(0)[:9] @ v)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_decode_row_does_not_depend_on_the_others_nor_on_the_threads(library, dtype):
    rows = [(1, 3000), (1, 1025), (1, 9), (5, 400)]
    problem, q, kv, plan = case(dtype, 6, 2, 48, 16, None, None, rows)
    attention = bind_with(library, problem)
    together = attention(q, kv, plan)
    library.set_threads(1)
    for row in range(3):
        alone, _ = sample_plan(rows[row : row + 1], block_tokens=16, window=None, device="cpu")
        alone.block_table_RB.copy_(
            plan.block_table_RB[row : row + 1, : alone.block_table_RB.shape[1]]
        )
        assert torch.equal(attention(q[row : row + 1], kv, alone)[0], together[row])


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_in_one_row_touches_no_other(newest, dtype):
    problem, q, kv, plan = case(dtype, 4, 2, 32, 4, None, None, [(1, 11), (1, 20), (6, 6)])
    attention = bind_with(newest, problem)
    clean = attention(q, kv, plan)
    kv[plan.block_table_RB[1, 2].item()] = float("nan")
    out = attention(q, kv, plan)
    assert out[1].isnan().all()
    assert torch.equal(out[[0, *range(2, 8)]], clean[[0, *range(2, 8)]])


@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_beyond_the_range_of_exp_stay_finite(library, dtype):
    problem, q, kv, plan = case(dtype, 2, 2, 16, 16, None, None, [(1, 100), (70, 70)])
    q, kv = q * 200, kv * 50
    out, expected = bind_with(library, problem)(q, kv, plan), exact(problem, q, kv, plan)
    assert out.isfinite().all()
    bound = {torch.float32: 2e-3, torch.bfloat16: 2e-2, torch.float16: 4e-3}[
        dtype
    ]  # scores of 1e5: float32 leaves 1e-2 of them
    assert (out.float() - expected).abs().max() <= bound * expected.abs().max()


def test_strided_queries_and_a_strided_cache(newest):
    problem, q, kv, plan = case(torch.bfloat16, 4, 2, 32, 8, 12, None, [(1, 30), (9, 21)])
    merged = torch.randn(len(q), 9, 32).bfloat16()
    merged[:, 2:6] = q
    layers = torch.zeros(kv.shape[0], 3, *kv.shape[1:], dtype=kv.dtype)
    layers[:, 1] = kv
    attention = bind_with(newest, problem)
    assert torch.equal(attention(merged[:, 2:6], layers[:, 1], plan), attention(q, kv, plan))


def test_padding_tokens_are_zero(newest):
    problem, q, kv, plan = case(torch.float32, 2, 1, 16, 4, None, None, [(1, 5), (2, 4)])
    padded = torch.cat((q, torch.full((4, 2, 16), float("nan"))))
    out = bind_with(newest, problem)(padded, kv, plan)
    assert torch.equal(out[:3], bind_with(newest, problem)(q, kv, plan)) and not out[3:].any()


@pytest.mark.parametrize("block", [-1, 1_000_000])
def test_a_block_outside_the_cache_is_refused(newest, block):
    problem, q, kv, plan = case(torch.float32, 2, 1, 16, 4, None, None, [(1, 9)])
    plan.block_table_RB[0, 1] = block
    with pytest.raises(NativeError, match="index out of range"):
        bind_with(newest, problem)(q, kv, plan)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_self_check_accepts_it(newest, dtype):
    for shape in SHAPES[1:]:  # the sample needs blocks of at least 3 tokens
        problem = case(dtype, *shape, [(1, 1)])[0]
        assert OP.error(KERNEL, problem) <= OP.tolerance(problem)


def test_a_head_that_is_too_large_is_refused_with_the_limit(newest):
    problem = case(torch.float32, 1, 1, 512, 4, None, None, [(1, 1)])[0]
    assert KERNEL.supports(problem) == "head_dim 512 is above 256"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window, softcap", [(None, None), (70, None), (-70, None), (None, 5.0)])
def test_whole_rows_give_a_position_the_same_bits_in_any_step(library, dtype, window, softcap):
    """ENG-05, ENG-17: as a decode, in chunks, and in the whole prompt, also beyond where decodes are cut."""
    length, begin = 1300, 1190
    rows = [(length - begin, length)]
    problem, q, kv, plan = case(dtype, 6, 2, 64, 16, window, softcap, rows)
    attention = bind_with(library, problem, whole=True)
    whole = attention(q, kv, plan)
    for first, last in [(0, 1), (109, 110), (3, 20), (20, 90), (63, 65)]:
        part, _ = sample_plan(
            [(last - first, begin + last)], block_tokens=16, **reach(window), device="cpu"
        )
        part.block_table_RB[0] = plan.block_table_RB[0, : part.block_table_RB.shape[1]]
        assert torch.equal(attention(q[first:last], kv, part), whole[first:last]), (first, last)


LONG = [(1, 700), (300, 300), (150, 1210), (33, 600), (129, 577)]
LONG_SHAPES = [
    (4, 2, 64, 16, None, None),
    (4, 2, 64, 16, 200, None),
    (6, 2, 96, 32, None, 5.0),
    (2, 1, 256, 16, 700, None),
    (40, 1, 32, 16, None, None),
    (3, 3, 128, 16, 63, 2.0),
    (4, 4, 40, 8, None, None),
]


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("shape", LONG_SHAPES)
def test_long_chunks_equal_the_reference_on_any_number_of_threads(library, shape, whole):
    """Hundreds of query rows, behind a cached prefix too: what is beside them or unused is NaN."""
    problem, q, kv, plan = case(torch.bfloat16, *shape, LONG)
    poison_unused(kv, plan, problem.block_tokens)
    sinks = torch.linspace(-2, 4, problem.heads) if problem.heads % 2 == 0 else None
    problem = AttentionProblem(**{**vars(problem), "sinks": sinks is not None})
    attention = bind_with(library, problem, sinks, whole=whole)
    out = attention(q, kv, plan)
    wide = AttentionProblem(**{**vars(problem), "dtype": torch.float32})
    expected = bind_reference(wide, sinks)(q.float(), kv.float(), plan)
    assert (out.float() - expected).abs().max() <= 6e-3 * expected.abs().max()
    for threads in (1, 8):
        library.set_threads(threads)
        assert torch.equal(attention(q, kv, plan), out), threads


def test_nan_in_one_long_chunk_touches_no_other(newest):
    problem, q, kv, plan = case(torch.bfloat16, 4, 2, 64, 16, None, None, [(200, 300), (150, 600)])
    attention = bind_with(newest, problem)
    clean = attention(q, kv, plan)
    kv[plan.block_table_RB[0, 15].item(), 1, 0, 3] = float("nan")  # of position 243
    out = attention(q, kv, plan)
    assert out[143:200, :2].isnan().all() and not out[:, 2:].isnan().any()
    assert torch.equal(out[200:], clean[200:])


PARTIAL = [(1, 700), (1, 12), (1, 300), (3, 3), (40, 300), (2, 530)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("shape", [(4, 2, 40, 8), (6, 1, 64, 16), (40, 1, 32, 16)])
def test_halves_merge_to_the_whole(library, dtype, shape, sinks):
    """Log-sum-exps of decode rows, cut or not, of rows with few queries and of prompts; some rows
    have nothing in the first half."""
    softcap = 5.0 if shape[0] == 6 else None
    problem, q, kv, plan = case(dtype, *shape, None, softcap, PARTIAL)
    poison_unused(kv, plan, problem.block_tokens)
    problem = replace(problem, sinks=sinks)
    sinks_H = torch.linspace(-1, 3, problem.heads) if sinks else None
    bound = {torch.float32: 4e-6, torch.bfloat16: 1.2e-2, torch.float16: 2e-3}[dtype]

    def attention(problem, *weights):
        return bind_with(library, problem, *weights)

    check_merged(
        attention, lambda problem: merge_with(library, problem), problem, q, kv, plan,
        bound=bound, sinks_H=sinks_H,
    )  # fmt: skip


def test_halves_of_scores_beyond_the_range_of_exp_merge_to_the_whole(library):
    problem, q, kv, plan = case(torch.float32, 4, 2, 40, 8, None, None, PARTIAL)

    def attention(problem, *weights):
        return bind_with(library, problem, *weights)

    merge = lambda problem: merge_with(library, problem)  # noqa: E731 (bound where it is used)
    check_merged(attention, merge, problem, q * 1000, kv, plan, bound=1e-3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "window"),
    [(4, 2, None), (7, 1, None), (40, 1, None), (4, 2, 300), (2, 2, 40), (4, 2, -300)],
)
def test_rows_with_few_queries_equal_the_reference(library, dtype, heads, kv_heads, window):
    """As when drafts are verified: rows long enough to be cut beside short ones, each query causal."""
    rows = [(1, 900), (2, 600), (16, 520), (5, 257), (4, 256), (3, 3), (9, 1100)]
    problem, q, kv, plan = case(dtype, heads, kv_heads, 64, 16, window, None, rows)
    poison_unused(kv, plan, 16)
    out, expected = bind_with(library, problem)(q, kv, plan), exact(problem, q, kv, plan)
    bound = {torch.float32: 4e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}[dtype]
    assert (out.float() - expected).abs().max() <= bound * expected.abs().max()
    library.set_threads(1)
    assert torch.equal(bind_with(library, problem)(q, kv, plan), out)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_query_among_few_has_the_bits_of_its_decode(library, dtype):
    """What verified drafts stand on: a position attends alike however many queries are beside it."""
    rows = [(5, 900), (16, 520), (2, 258), (3, 40)]
    problem, q, kv, plan = case(dtype, 8, 2, 64, 16, None, None, rows)
    attend = bind_with(library, problem)
    together = attend(q, kv, plan)
    for row, (queries, length) in enumerate(rows):
        for query in range(queries):
            token = int(plan.host_query_start[row]) + query
            seen = length - queries + query + 1
            alone, _ = sample_plan([(1, seen)], block_tokens=16, window=None, device="cpu")
            width = alone.block_table_RB.shape[1]
            alone.block_table_RB.copy_(plan.block_table_RB[row : row + 1, :width])
            assert torch.equal(attend(q[token : token + 1], kv, alone)[0], together[token]), token


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window, softcap", [(300, None), (40, 5.0), (None, None)])
@pytest.mark.parametrize("whole", [False, True])
def test_queries_that_see_each_other_look_back_as_far_as_the_window(
    library, dtype, window, softcap, whole
):
    rows = [(1, 900), (2, 600), (16, 520), (3, 3), (100, 700), (40, 40)]
    problem, q, kv, plan = case(dtype, 4, 2, 64, 16, window, softcap, rows)
    problem = replace(problem, causal=False)
    poison_unused(kv, plan, 16)
    out = bind_with(library, problem, whole=whole)(q, kv, plan)
    expected = exact(problem, q, kv, plan)
    bound = {torch.float32: 4e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}[dtype]
    assert (out.float() - expected).abs().max() <= bound * expected.abs().max()
