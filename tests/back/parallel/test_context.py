"""A sequence over several ranks: where tokens lie, by brute force; partial results against a whole softmax in float64,
empty parts among them; both exchanges; whole models on ranks that share out the KV (PAR-01, PAR-02, PAR-03, PAR-04)."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.back.attention.forms import HeadsForm, LatentForm
from headrace.back.attention.plan import AttentionPlan
from headrace.back.layers.attention import AttentionSpec
from headrace.back.layers.decode_context import split_context
from headrace.back.layers.heads_cache import bind_kv_write
from headrace.back.layers.mutual_attention import bind_attention
from headrace.back.layers.scope import Ledger, Scope
from headrace.back.parallel.context import (
    EXCHANGES,
    gathered_heads,
    local_lengths,
    local_slots,
    merged,
    own_heads,
)
from headrace.back.parallel.mesh import Axis, ContextSplit, Mesh
from headrace.base.errors import ConfigError
from tests.back.parallel.thread_ranks import run_threads

SPLITS = [(2, 1), (2, 16), (4, 1), (4, 2), (3, 4)]


def split_of(size: int, rank: int, interleave: int) -> ContextSplit:
    group: Any = object()
    return ContextSplit(
        axis=Axis(name="dcp", size=size, rank=rank, group=group), interleave=interleave
    )


@pytest.mark.parametrize(("size", "interleave"), SPLITS)
def test_every_token_lies_on_one_rank_in_its_order(size: int, interleave: int) -> None:
    """PAR-02: lengths and slots by their definition; sequences shorter than the ranks among them."""
    block, lengths = 16, torch.arange(0, 200)
    table = [5, 2, 9, 1, 7, 3, 8]
    slots = torch.tensor(
        [table[p // (block * size)] * block * size + p % (block * size) for p in range(200)]
    )
    for rank in range(size):
        split = split_of(size, rank, interleave)
        mine = [p for p in range(200) if p // interleave % size == rank]
        expected = [sum(p < length for p in mine) for length in lengths.tolist()]
        assert local_lengths(lengths, split).tolist() == expected
        own = local_slots(slots, split, block)
        places = [table[i // block] * block + i % block for i in range(len(mine))]
        assert own[mine].tolist() == places
        assert int(own.count_nonzero()) == len(mine), "those of others go into the null block"


def partials(ranks: int, tokens: int = 5, heads: int = 4, seed: int = 3) -> tuple[Any, ...]:
    """Scores and values of some positions, cut unevenly; one rank has none, and one token sees none."""
    generator = torch.Generator().manual_seed(seed)
    positions = 11
    scores = torch.randn(tokens, heads, positions, generator=generator, dtype=torch.float64) * 4
    values = torch.randn(tokens, heads, positions, 6, generator=generator, dtype=torch.float64)
    owner = torch.arange(positions) % (ranks - 1)  # the last rank has none
    scores[2] = -math.inf
    whole = torch.nan_to_num(scores.softmax(2)[..., None].mul(values).sum(2))
    parts = []
    for rank in range(ranks):
        mine = scores[..., owner == rank], values[:, :, owner == rank]
        out = torch.nan_to_num(mine[0].softmax(2)[..., None].mul(mine[1]).sum(2))
        parts.append((out.float(), mine[0].logsumexp(2).float()))
    return whole, scores.logsumexp(2), parts


def test_parts_make_the_whole_softmax_and_empty_ones_no_nan() -> None:
    """REG-064."""
    whole, whole_lse, parts = partials(3)
    out, lse = (torch.stack(one) for one in zip(*parts, strict=True))
    out[2] = math.nan  # of the rank that saw nothing
    lse[2] = torch.tensor([-math.inf, math.inf, math.nan, -math.inf])
    found, found_lse = merged(out, lse)
    assert (found - whole).abs().max() < 1e-6 and not found[2].any()
    assert torch.equal(found_lse.isinf(), whole_lse.isinf())
    seen = whole_lse.isfinite()
    assert (found_lse - whole_lse)[seen].abs().max() < 1e-5


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_exchanges_hand_each_rank_its_heads(
    exchange: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PAR-03, REG-064: three ranks, one without a position."""
    whole, whole_lse, parts = partials(3, heads=6)

    def rank_main(rank: int, axis: Callable[..., Axis]) -> Any:
        split = ContextSplit(axis=axis("dcp"), exchange=exchange)
        queries = gathered_heads(torch.full((5, 2, 3), float(rank)), split)
        assert queries[0, :, 0].tolist() == [0.0, 0.0, 1.0, 1.0, 2.0, 2.0]
        out, lse = parts[rank]
        return own_heads(out.to(dtype), lse, split)

    found = run_threads(monkeypatch, 3, rank_main)
    out, lse = (torch.cat(one, dim=1) for one in zip(*found, strict=True))
    assert out.dtype == dtype and not out[2].any()
    bound = 1e-6 if dtype is torch.float32 else 2e-2
    assert (out.double() - whole).abs().max() < bound * whole.abs().max()
    assert torch.equal(lse.isinf(), whole_lse.isinf())


HEADS, DIM, BLOCK = 4, 16, 8


def plan_of(lengths: list[tuple[int, int]], tables: list[list[int]], size: int) -> AttentionPlan:
    """Rows of (query tokens, all tokens), whose blocks hold `size` tokens of all ranks."""
    starts = np.cumsum([0, *(queries for queries, _ in lengths)]).astype(np.int32)
    kv_len = np.array([length for _, length in lengths], np.int32)
    slots = [
        table[p // size] * size + p % size
        for table, (queries, length) in zip(tables, lengths, strict=True)
        for p in range(length - queries, length)
    ]
    return AttentionPlan(
        query_start_R1=torch.from_numpy(starts),
        kv_len_R=torch.from_numpy(kv_len),
        block_table_RB=torch.tensor(tables, dtype=torch.int32),
        slot_T=torch.tensor(slots),
        host_query_start=starts,
        host_kv_len=kv_len,
        num_decodes=0,
        max_query_len=max(queries for queries, _ in lengths),
        max_kv_len=int(kv_len.max()),
    )


def attended(mesh: Mesh, sinks_H: torch.Tensor, kv_heads: int = 1) -> torch.Tensor:
    """out_THD of a prompt of 19 tokens and one of one by this rank's heads; the cache was NaN."""
    scope = Scope(
        ledger=Ledger(),
        mesh=mesh,
        device=torch.device("cpu"),
        dtype=torch.float32,
        block_tokens=BLOCK,
        max_positions=64,
    )
    spec = AttentionSpec(
        width=32, heads=HEADS, kv_heads=kv_heads, head_dim=DIM, scale=0.3, rope=None, sinks=True
    )
    first, count = (mesh.tp.rank * HEADS // mesh.tp.size, HEADS // mesh.tp.size)
    mine, context = slice(first, first + count), split_context(scope, kv_heads=kv_heads)
    held = max(1, kv_heads // mesh.tp.size)
    kept = slice(first * kv_heads // HEADS, first * kv_heads // HEADS + held)
    problem = spec.problem(scope, heads=count, kv_heads=held, sinks=True)
    lengths = [(19, 19), (1, 1)]
    tables, size = ([[3, 1, 4], [2, 0, 0]], BLOCK * mesh.dcp.axis.size)
    plan = plan_of(lengths, tables, size)
    generator = torch.Generator().manual_seed(7)
    q_THD, k_TKD, v_TKD = (
        torch.randn(20, heads, DIM, generator=generator) for heads in (HEADS, kv_heads, kv_heads)
    )
    k_TKD, v_TKD = k_TKD[:, kept], v_TKD[:, kept]
    kv = torch.full((5, 2, held, BLOCK, DIM), torch.nan)
    write = bind_kv_write(scope, kv_heads=held, head_dim=DIM)
    if context is None:
        write(k_TKD, v_TKD, kv, plan.slot_T)
        return bind_attention(scope, problem, sinks_H[mine])(q_THD[:, mine].contiguous(), kv, plan)
    write(k_TKD, v_TKD, kv, context.slots(plan))
    attend = context.of_heads(scope, problem, sinks_H[mine])
    return attend(q_THD[:, mine].contiguous(), kv, plan)


@pytest.mark.parametrize(("ranks", "size", "interleave"), [(2, 2, 1), (4, 4, 2), (4, 2, 8)])
def test_attention_over_ranks_that_share_the_context_is_that_of_one(
    ranks: int, size: int, interleave: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PAR-02: a prompt and a row shorter than the ranks, sinks; no NaN of what a rank does not have."""
    sinks_H = torch.tensor([0.5, -1.0, 2.0, 0.0])

    def rank_main(rank: int, axis: Callable[..., Axis]) -> Any:
        split = ContextSplit(axis=axis("dcp", size), interleave=interleave)
        return attended(Mesh(tp=axis("tp"), dcp=split), sinks_H)

    found = torch.cat(run_threads(monkeypatch, ranks, rank_main), dim=1)
    assert (found - attended(Mesh(), sinks_H)).abs().max() < 1e-5


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_two_kv_heads_on_two_ranks_each_are_those_of_one_rank(
    exchange: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """REG-065."""
    sinks_H = torch.tensor([0.5, -1.0, 2.0, 0.0])

    def rank_main(rank: int, axis: Callable[..., Axis]) -> Any:
        split = ContextSplit(axis=axis("dcp", 2), exchange=exchange)
        return attended(Mesh(tp=axis("tp"), dcp=split), sinks_H, 2)

    found = torch.cat(run_threads(monkeypatch, 4, rank_main), dim=1)
    assert (found - attended(Mesh(), sinks_H, 2)).abs().max() < 1e-5


def config_of(name: str, ranks: int) -> Any:
    from tests.models.test_parity import tiny_config

    config = tiny_config(name)
    if name != "deepseek-v3":
        config.num_key_value_heads = 1
    if ranks == 4:
        config.num_attention_heads, config.head_dim = 4, 8
    return config


CASES = [
    ("qwen3", 2, 2, 1, "a2a"),
    ("qwen3", 2, 2, 4, "ag_rs"),
    ("deepseek-v3", 2, 2, 1, "ag_rs"),
    ("deepseek-v3", 2, 2, 4, "a2a"),
    ("qwen3", 4, 2, 1, "a2a"),
    ("qwen3", 4, 4, 2, "a2a"),
    ("gpt-oss", 2, 2, 2, "a2a"),
    ("gemma2", 2, 2, 1, "a2a"),
    ("gemma4-shared", 2, 2, 1, "a2a"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "ranks", "size", "interleave", "exchange"), CASES)
def test_models_over_ranks_that_share_the_context_give_the_logits_of_one(
    name: str,
    ranks: int,
    size: int,
    interleave: int,
    exchange: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Prompts in chunks beside decodes; a row shorter than the ranks; KV bytes of a rank are its share."""
    from tests.models.oracle import BLOCK_TOKENS, load_ours, model_spec, save_oracle
    from tests.models.paged import random_rows, teacher_forced
    from tests.models.test_parity import compare

    save_oracle(config_of(name, ranks), tmp_path)
    spec = model_spec(tmp_path)
    rows = random_rows(spec.logits_width, (19, 1, 11))
    alone = load_ours(spec)
    expected = teacher_forced(alone, rows, block_tokens=BLOCK_TOKENS, dtype=torch.float32)

    def rank_main(rank: int, axis: Callable[..., Axis]) -> Any:
        split = ContextSplit(axis=axis("dcp", size), interleave=interleave, exchange=exchange)
        model = load_ours(spec, mesh=Mesh(tp=axis("tp"), dcp=split))
        for ours, theirs in zip(model.kv_forms, alone.kv_forms, strict=True):
            shared = size if ours.kind in ("full", "latent") else 1
            assert ours.block_ratio(8) == shared
            assert ours.block_bytes(8, torch.float32) == theirs.block_bytes(8, torch.float32)
        return teacher_forced(model, rows, block_tokens=BLOCK_TOKENS, dtype=torch.float32)

    for found in run_threads(monkeypatch, ranks, rank_main):
        compare(found, expected, 2e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "form"), [("deepseek-v3", "fp8"), ("deepseek-v3", "int8"), ("qwen3", "fp8")]
)
def test_quantized_caches_have_the_numbers_of_one_rank(
    name: str, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PAR-04: e4m3 latents and heads over two ranks, which are not what plain ones give."""
    from msgspec.structs import replace

    from tests.models.oracle import BLOCK_TOKENS, load_ours, model_spec, save_oracle
    from tests.models.paged import random_rows, teacher_forced

    save_oracle(config_of(name, 2), tmp_path)
    plain = model_spec(tmp_path)
    spec, rows = replace(plain, kv_dtype=form), random_rows(plain.logits_width, (19, 1, 11))
    run = {"block_tokens": BLOCK_TOKENS, "dtype": torch.float32}
    expected, unquantized = (
        torch.cat(teacher_forced(load_ours(one), rows, **run)) for one in (spec, plain)
    )

    def rank_main(rank: int, axis: Callable[..., Axis]) -> Any:
        mesh = Mesh(tp=axis("tp"), dcp=ContextSplit(axis=axis("dcp")))
        return torch.cat(teacher_forced(load_ours(spec, mesh=mesh), rows, **run))

    differs = (unquantized - expected).abs().max()
    for found in run_threads(monkeypatch, 2, rank_main):
        assert (found - expected).abs().max() <= 1e-3 * expected.abs().max()
        assert (found - expected).abs().max() < differs / 4


def test_stored_scales_of_a_cache_are_those_of_one_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """REG-066: of prompts in chunks and of decodes; other scales give other logits."""
    from msgspec.structs import replace
    from safetensors.torch import load_file, save_file

    from headrace.back.models.load import load_model
    from tests.models.oracle import BLOCK_TOKENS, model_spec, save_oracle
    from tests.models.paged import random_rows, teacher_forced

    config, file = config_of("qwen3", 2), tmp_path / "model.safetensors"
    save_oracle(config, tmp_path)
    plain = load_file(file)
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
    written = {"quant_method": "compressed-tensors", "kv_cache_scheme": scheme}
    spec = replace(model_spec(tmp_path, quantization_config=written), kv_dtype="fp8")
    rows = random_rows(spec.logits_width, (19, 1, 11))

    def logits(mesh: Mesh) -> torch.Tensor:
        cpu = torch.device("cpu")
        model, _ = load_model(spec, mesh=mesh, device=cpu, block_tokens=BLOCK_TOKENS)
        run = {"block_tokens": BLOCK_TOKENS, "dtype": torch.float32}
        return torch.cat(teacher_forced(model, rows, **run))

    def rank_main(rank: int, axis: Callable[..., Axis]) -> Any:
        return logits(Mesh(tp=axis("tp"), dcp=ContextSplit(axis=axis("dcp"))))

    own = logits(Mesh())
    layers = [f"model.layers.{i}.self_attn" for i in range(config.num_hidden_layers)]
    scales = {f"{one}.{half}_scale": torch.tensor([0.37]) for one in layers for half in "kv"}
    save_file({**plain, **scales}, file)
    expected = logits(Mesh())
    differs = (own - expected).abs().max()
    for found in run_threads(monkeypatch, 2, rank_main):
        assert (found - expected).abs().max() < differs / 4


@pytest.mark.slow
def test_what_cannot_be_shared_out_is_refused(tmp_path: Path) -> None:
    from tests.models.oracle import load_ours, model_spec, save_oracle
    from tests.models.test_parity import tiny_config

    group: Any = object()

    def mesh(ranks: int, size: int) -> Mesh:
        tp = Axis(size=ranks, group=group)
        return Mesh(tp=tp, dcp=ContextSplit(axis=Axis(name="dcp", size=size, group=group)))

    save_oracle(tiny_config("qwen3"), tmp_path / "heads")
    with pytest.raises(ConfigError, match=r"2 ranks hold each of 2 KV heads 1 times") as caught:
        load_ours(model_spec(tmp_path / "heads"), mesh=mesh(2, 2))
    assert caught.value.field == "decode_context_parallel_size"
    config = tiny_config("falcon-alibi")
    save_oracle(config, tmp_path / "alibi")
    with pytest.raises(ConfigError, match=r"caches of family falcon are read by attention that"):
        load_ours(model_spec(tmp_path / "alibi"), mesh=mesh(2, 2))


def test_a_block_has_a_share_of_its_tokens_on_each_rank() -> None:
    """KV bytes of a rank are those of all over the ranks."""
    heads = HeadsForm(cache=0, kv_heads=1, head_dim=64, ranks=4)
    assert heads.block_ratio(16) == 4 and heads.shape_beside(16) == (2, 1, 16, 64)
    latents = LatentForm(cache=0, width=40, ranks=2, quantized="fp8")
    assert latents.block_ratio(16) == 2 and latents.shape_beside(16)[0] == 16
