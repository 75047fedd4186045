"""One split cuts every tensor of a quantized weight: what a rank loads means its slice of the
whole."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import save_file

from headrace.back.kernels.linear_blocks.layout import LAYOUTS
from headrace.back.layers.moe.split import ExpertSizes
from headrace.back.layers.scope import Ledger, Scope
from headrace.back.models.load.fill import check, fill
from headrace.back.models.load.safetensors import SafetensorsSource
from headrace.back.models.weights import WeightPlan
from headrace.back.parallel.bundle import Dim, Member, Number, Zeros
from headrace.back.parallel.mesh import Axis, Mesh
from headrace.back.parallel.param import Param, WeightPiece, copies
from headrace.back.parallel.shard import Part, Shard
from headrace.back.quant.stored import blocks_of
from headrace.base.errors import CheckpointError, ConfigError
from tests.back.parallel.stored_forms import FORMS, StoredForm

GROUP = cast(Any, SimpleNamespace())
PLACED = [form for form in FORMS if not form.bundle.form.ordered]
placed = {"argvalues": PLACED, "ids": [form.name for form in PLACED]}
by_name = {"argvalues": FORMS, "ids": [form.name for form in FORMS]}


def scope_of(axis: Axis) -> Scope:
    return Scope(
        ledger=Ledger(),
        mesh=Mesh(**{axis.name: axis}),
        device=torch.device("cpu"),
        dtype=torch.float32,
        block_tokens=16,
        max_positions=8,
    )


def rank(index: int, size: int, name: str = "tp") -> Axis:
    return Axis(name=name, size=size, rank=index, group=GROUP if size > 1 else None)


def param_of(
    form: StoredForm,
    axis: Axis,
    shape: tuple[int, int],
    shard: Shard,
    pieces: tuple[WeightPiece, ...],
) -> Param:
    return scope_of(axis).param("weight", shape, pieces=pieces, shard=shard, bundle=form.bundle)


def load(param: Param, checkpoint: dict[str, torch.Tensor]) -> None:
    for copy in copies(param):
        assert checkpoint[copy.name].shape == copy.shape, copy
        param.target(copy).copy_(checkpoint[copy.name][copy.source])


def stored(
    form: StoredForm, name: str, shape: tuple[int, int], seed: int
) -> dict[str, torch.Tensor]:
    return {f"{name}.{leaf}": t for leaf, t in form.random(shape, seed).items()}


def meaning(form: StoredForm, checkpoint: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    prefix = f"{name}."
    mine = {n.removeprefix(prefix): t for n, t in checkpoint.items() if n.startswith(prefix)}
    return form.dequantize(mine)


def shape_of(form: StoredForm, ranks: int) -> tuple[int, int]:
    """A weight that `ranks` can share either way; act-order forms have 4 groups in all."""
    outputs = form.units[0] * ranks * 2
    return (outputs, 32) if form.bundle.form.ordered else (outputs, form.units[1] * ranks * 2)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("form", **by_name)
def test_what_a_rank_loads_means_its_slice(form: StoredForm, dim: int, ranks: int) -> None:
    shape = shape_of(form, ranks)
    units = form.units[dim]
    checkpoint = stored(form, "p", shape, seed=1)
    whole = meaning(form, checkpoint, "p")
    assert whole.shape == shape and whole.isfinite().all()
    shard = Shard(axis="tp", dim=dim, parts=(Part("rows", shape[dim], shape[dim] // units),))
    for index in range(ranks):
        piece = WeightPiece(name="p.weight", shape=shape)
        param = param_of(form, rank(index, ranks), shape, shard, (piece,))
        load(param, checkpoint)
        expected = whole.chunk(ranks, dim)[index]
        assert torch.equal(form.dequantize(param.take_members()), expected)


@pytest.mark.parametrize("form", **placed)
def test_merged_weights_share_their_tensors_part_by_part(form: StoredForm) -> None:
    """Query, key and value in one parameter: each part is split by itself."""
    inputs = form.units[1] * 2
    rows = [4 * form.units[0], 2 * form.units[0]]
    pieces, checkpoint, offset = [], {}, 0
    for i, size in enumerate(rows):
        pieces.append(WeightPiece(name=f"{i}.weight", shape=(size, inputs), offset=offset))
        checkpoint |= stored(form, str(i), (size, inputs), seed=i)
        offset += size
    if form.name == "nvfp4":  # its meaning below takes the first part's scale for all
        checkpoint["1.weight_scale_2"] = checkpoint["0.weight_scale_2"]
    parts = tuple(Part(f"part {i}", size, size // form.units[0]) for i, size in enumerate(rows))
    shard = Shard(axis="tp", dim=0, parts=parts)
    for index in range(2):
        param = param_of(form, rank(index, 2), (offset, inputs), shard, tuple(pieces))
        load(param, checkpoint)
        wholes = [meaning(form, checkpoint, str(i)).chunk(2, 0)[index] for i in range(2)]
        assert torch.equal(form.dequantize(param.take_members()), torch.cat(wholes))


def test_a_scale_of_a_whole_tensor_is_kept_for_each_part() -> None:
    nvfp4 = next(form for form in FORMS if form.name == "nvfp4")
    pieces = tuple(WeightPiece(name=f"{i}.weight", shape=(4, 16), offset=4 * i) for i in range(2))
    shard = Shard(axis="tp", dim=0, parts=(Part("a", 4, 4), Part("b", 4, 4)))
    param = param_of(nvfp4, rank(1, 2), (8, 16), shard, pieces)
    checkpoint = stored(nvfp4, "0", (4, 16), 0) | stored(nvfp4, "1", (4, 16), 1)
    load(param, checkpoint)
    each = [checkpoint[f"{i}.weight_scale_2"] for i in range(2)]
    assert param.members["weight_scale_2"].tolist() == torch.stack(each).tolist()


@pytest.mark.parametrize(
    "form", [f for f in FORMS if f.units[1] > 1], ids=lambda form: cast(StoredForm, form).name
)
def test_a_split_that_cuts_a_group_is_refused_with_its_numbers(form: StoredForm) -> None:
    unit = max(d.per for m in form.bundle.members for d in m.dims if d.of == 1)
    shape = (form.units[0], unit * 3)
    piece = WeightPiece(name="layer.p.weight", shape=shape)
    shard = Shard(axis="tp", dim=1, parts=(Part("inputs", shape[1], shape[1]),))
    param = param_of(form, rank(1, 2), shape, shard, (piece,))
    with pytest.raises(
        ConfigError, match=r"--tensor-parallel gives a rank inputs .* cuts a"
    ) as caught:
        list(copies(param))
    assert caught.value.field == "tensor_parallel"
    assert "layer.p.weight" in caught.value.message and f"group of {unit}" in caught.value.message


def test_a_last_group_may_be_short_and_belongs_to_the_last_rank() -> None:
    fp8 = next(form for form in FORMS if form.name == "fp8 128x128")
    shape = (256 + 8, 128)
    checkpoint = stored(fp8, "p", shape, seed=2)
    shard = Shard(axis="tp", dim=0, parts=(Part("a", 128, 1), Part("b", 136, 1)))
    whole = meaning(fp8, checkpoint, "p")
    param = param_of(fp8, rank(0, 1), shape, shard, (WeightPiece(name="p.weight", shape=shape),))
    load(param, checkpoint)
    assert torch.equal(fp8.dequantize(param.take_members()), whole)


@pytest.mark.parametrize("form", **placed)
@pytest.mark.parametrize("axis", ["tp", "ep"])
def test_experts_are_split_by_the_same_shard_whole_or_each(form: StoredForm, axis: str) -> None:
    experts, ranks = 4, 2
    rows, inputs = 2 * form.units[0], 2 * form.units[1]
    checkpoint: dict[str, torch.Tensor] = {}
    pieces = []
    for e in range(experts):
        checkpoint |= stored(form, f"experts.{e}.up", (rows, inputs), seed=9)
        name = f"experts.{e}.up.weight"
        pieces.append(WeightPiece(name=name, shape=(rows, inputs), offset=e * rows))
    each = Part("up", rows, rows // form.units[0])
    sizes = ExpertSizes(experts=experts, width=inputs, inner=rows, axis=axis)
    shard = sizes.split(Shard(axis="tp", dim=0, parts=(each,) * experts), rows=rows)
    assert shard is not None
    whole = [meaning(form, checkpoint, f"experts.{e}.up") for e in range(experts)]
    for index in range(ranks):
        param = param_of(
            form, rank(index, ranks, axis), (experts * rows, inputs), shard, tuple(pieces)
        )
        load(param, checkpoint)
        ours = [w.chunk(ranks, 0)[index] for w in whole] if axis == "tp" else whole[2 * index :][:2]
        assert torch.equal(form.dequantize(param.take_members()), torch.cat(ours))


def test_the_loader_checks_and_fills_every_tensor_of_a_bundle(tmp_path: Path) -> None:
    form = next(form for form in FORMS if form.name == "gptq v1 act-order")
    shape = (16, 32)
    checkpoint = stored(form, "p", shape, seed=3)
    shard = Shard(axis="tp", dim=0, parts=(Part("rows", 16, 2),))
    param = param_of(form, rank(1, 2), shape, shard, (WeightPiece(name="p.weight", shape=shape),))
    plan = WeightPlan(params=(param,))
    save_file(checkpoint, tmp_path / "model.safetensors")
    source = SafetensorsSource(tmp_path)
    check(plan, source)
    fill(plan, source)
    source.close()
    assert torch.equal(form.dequantize(param.take_members()), meaning(form, checkpoint, "p")[8:])

    del checkpoint["p.g_idx"]
    checkpoint["p.scales"] = checkpoint["p.scales"].to(torch.int16)
    checkpoint["p.qzeros"] = checkpoint["p.qzeros"][:, :1].contiguous()
    save_file(checkpoint, tmp_path / "model.safetensors")
    source = SafetensorsSource(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        check(plan, source)
    source.close()
    for part in ("p.g_idx [32]", "p.qzeros in", "p.scales in", "I16"):
        assert part in caught.value.message, part


def test_gguf_blocks_are_cut_by_the_same_rule() -> None:
    blocks: Member = blocks_of(LAYOUTS["Q4_K"])
    assert blocks.shape((8, 1024)) == (8, 4 * 144)
    assert blocks.cut((slice(2, 4), slice(256, 1024)), (8, 1024)) == (
        slice(2, 4),
        slice(144, 4 * 144),
    )
    with pytest.raises(ValueError, match="cut a group of 256; 1024 are 4 groups"):
        blocks.cut((slice(0, 8), slice(128, 1024)), (8, 1024))


def test_a_form_says_what_a_layouts_numbers_mean() -> None:
    q4_k, int4, iq4 = LAYOUTS["Q4_K"].form, LAYOUTS["int4-g64"].form, LAYOUTS["IQ4_NL"].form
    assert (q4_k.bits, q4_k.group, q4_k.outer, q4_k.zeros) == (4, (1, 32), (1, 256), Zeros.MINIMUM)
    assert (int4.number, int4.group, int4.outer) == (Number.INT, (1, 64), None)
    assert iq4.number is Number.TABLE and int4.scale_dtype is torch.bfloat16
    assert str(FORMS[3].bundle.form) == "8-bit float8_e4m3fn, a scale for 128x128 outputs x inputs"


def test_a_dimension_that_is_not_the_weights_is_never_split() -> None:
    assert Dim(None, width=16).cut((slice(0, 4),), (8,)) == slice(0, 16)
    assert Dim(0, per=0, width=3).cut((slice(2, 4),), (8,)) == slice(0, 3)
    assert Dim(0, per=3).size((8,)) == 3 and Dim(0, per=3).cut((slice(6, 8),), (8,)) == slice(2, 3)
