"""PAR-09: ranks that keep a part of the residual's rows give the logits of ranks that keep all of it,
and send as many bytes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from headrace.back.layers.attention import AttentionSpec
from headrace.back.layers.mlp import GatedMLPSpec
from headrace.back.layers.norm import SANDWICH
from headrace.back.models.decoder_layer import LayerSpec
from headrace.back.models.sequence_layer import adds_shares, in_parts
from headrace.back.parallel.collectives import own_rows, rows_of_rank
from headrace.back.parallel.mesh import Axis, Mesh
from headrace.base.errors import ConfigError
from tests.models.oracle import save_oracle
from tests.models.sequence_rank import TOKENS
from tests.models.test_tensor_parallel import configuration
from tests.rank_processes import run_ranks

NAMES = ("llama", "qwen3", "qwen2-moe", "mistral-window")


def axis(rank: int, size: int) -> Axis:
    return Axis(size=size, rank=rank, group=object())


def test_each_rank_has_its_rows_and_the_last_ones_pad() -> None:
    x_TE = torch.arange(10.0).view(5, 2)
    assert rows_of_rank(5, axis(0, 2)) == 3 and rows_of_rank(6, axis(0, 3)) == 2
    assert own_rows(x_TE, axis(0, 2)).tolist() == x_TE[:3].tolist()
    assert own_rows(x_TE, axis(1, 2)).tolist() == [*x_TE[3:].tolist(), [0.0, 0.0]]
    assert own_rows(x_TE, axis(3, 4)).tolist() == [[0.0, 0.0]] * 2


def test_branches_that_are_no_plain_sums_are_told_apart() -> None:
    """Norms or biases behind a branch; in a model they are refused."""
    mixer = AttentionSpec(width=8, heads=2, kv_heads=1, head_dim=4, scale=0.5, rope=None)
    plain = LayerSpec(mixer=mixer)
    assert adds_shares(plain)
    others = (
        replace(plain, placement=SANDWICH),
        replace(plain, branch_scale=0.5),
        replace(plain, mixer=replace(mixer, out_bias=True)),
        replace(plain, feed_forward=GatedMLPSpec(bias=True)),
        replace(plain, feed_forward=None),
    )
    assert [adds_shares(one) for one in others] == [False] * 5
    mesh = Mesh(tp=axis(0, 2), sequence_rows=4)
    scope = SimpleNamespace(mesh=mesh)
    with pytest.raises(ConfigError, match="--sequence-parallel: a layer of the model adds"):
        in_parts([object(), object()], scope, [plain, others[0]])
    whole = [object(), object()]
    assert in_parts(whole, SimpleNamespace(mesh=Mesh()), others) is whole


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("count", "names"), [(2, NAMES), (4, NAMES[:1])], ids=["2", "4"])
def test_parts_of_the_rows_give_the_same_logits_and_send_as_much(
    count: int, names: tuple[str, ...], tmp_path: Path
) -> None:
    folders = [tmp_path / name for name in names]
    for name, folder in zip(names, folders, strict=True):
        save_oracle(configuration(name, count), folder)
    run_ranks("tests.models.sequence_rank", count, tmp_path / "store", *folders)
    for folder in folders:
        for rank in range(count):
            found = torch.load(folder / f"rank{rank}.pt")
            whole, parts, short = (found[name] for name in ("whole", "parts", "short"))
            assert torch.equal(short["logits"], whole["logits"])
            torch.testing.assert_close(parts["logits"], whole["logits"], atol=1e-5, rtol=1e-5)
            own = -(-TOKENS // count)
            first, *between, last = parts["rows"]
            assert (first, last) == (TOKENS, TOKENS) and set(between) == {own}
            assert whole["rows"] == [TOKENS] * len(parts["rows"])
            padding = own * count / TOKENS
            assert whole["bytes"] <= parts["bytes"] <= whole["bytes"] * padding
