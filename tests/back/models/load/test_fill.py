"""Two ranks together hold exactly what one rank holds, from safetensors and GGUF; damaged GGUF
models never crash."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, cast

import gguf
import pytest
import torch

from headrace.back.models.load import load_model, open_source
from headrace.back.models.load.fill import check, fill
from headrace.back.models.registry import build_model
from headrace.back.models.weights import Param, WeightPiece, WeightPlan
from headrace.back.parallel.mesh import Axis, Mesh
from headrace.base.config.gguf import read_gguf
from headrace.base.config.gguf_config import gguf_config
from headrace.base.config.resolved import ModelSpec
from headrace.base.errors import CheckpointError, ConfigError
from headrace.front.text.gguf_tokenizer import gguf_tokenizer
from tests.back.models.load.checkpoints import (
    MODELS,
    save,
    spec_of,
    spec_of_folder,
    tiny_model,
    write_gguf,
)

CPU = torch.device("cpu")


def filled(spec: ModelSpec, mesh: Mesh) -> dict[str, Param]:
    model = build_model(spec, mesh=mesh, device=CPU, block_tokens=16)
    for param in model.weights.params:
        assert param.tensor is not None
        param.tensor.fill_(float("nan"))
    source = open_source(spec)
    check(model.weights, source)
    fill(model.weights, source)
    source.close()
    return {param.name: param for param in model.weights.params}


def gguf_spec(path: Path) -> ModelSpec:
    return spec_of(path, gguf_config(read_gguf(path)))


@pytest.mark.parametrize("architecture", sorted(MODELS))
@pytest.mark.parametrize("form", ["safetensors", "gguf"])
def test_slices_of_two_ranks_are_those_of_one(architecture: str, form: str, tmp_path: Path) -> None:
    model = tiny_model(architecture)
    kind = gguf.GGMLQuantizationType.Q8_0
    if form == "gguf":
        path = write_gguf(
            tmp_path / "m.gguf",
            architecture,
            model,
            quantize=lambda name, values: (gguf.quants.quantize(values, kind), kind),
        )
        spec = gguf_spec(path)
    else:
        spec = spec_of_folder(save(model, tmp_path))
    whole = filled(spec, Mesh())
    for rank in (0, 1):
        axis = Axis(size=2, rank=rank, group=cast(Any, object()))
        for name, param in filled(spec, Mesh(tp=axis)).items():
            assert param.tensor is not None and torch.isfinite(param.tensor).all(), name
            one = whole[name].tensor
            assert one is not None
            if param.shard is None:
                torch.testing.assert_close(param.tensor, one, rtol=0, atol=0)
            for span in param.spans:
                here = param.tensor.narrow(cast(Any, param.shard).dim, span.local, span.size)
                there = one.narrow(cast(Any, param.shard).dim, span.start, span.size)
                torch.testing.assert_close(here, there, rtol=0, atol=0)


def plan_of(*names: str, optional: bool) -> WeightPlan:
    param = Param(
        name="p",
        shape=(2, 64),
        dtype=torch.float32,
        pieces=tuple(
            WeightPiece(name=name, shape=(1, 64), offset=i) for i, name in enumerate(names)
        ),
        tensor=torch.full((2, 64), float("nan")),
        optional=optional,
        init="zeros",
    )
    return WeightPlan(params=(param,), ignored=(".*",))


def test_an_optional_parameter_may_lack_all_its_pieces_but_not_some(tmp_path: Path) -> None:
    source = open_source(spec_of_folder(save(tiny_model("llama"), tmp_path)))
    plan = plan_of("absent.a", "absent.b", optional=True)
    check(plan, source)
    fill(plan, source)
    tensor = plan.params[0].tensor
    assert tensor is not None and (tensor == 0).all()
    with pytest.raises(CheckpointError, match=r"absent\.b \[1, 64\]"):
        check(plan_of("model.norm.weight", "absent.b", optional=True), source)
    with pytest.raises(CheckpointError, match=r"2 tensors are missing: absent\.a"):
        check(plan_of("absent.a", "absent.b", optional=False), source)


def test_many_faults_are_reported_at_once_and_counted(tmp_path: Path) -> None:
    spec = spec_of_folder(save(tiny_model("llama"), tmp_path))
    wider = {**spec.config, "vocab_size": 97, "num_hidden_layers": 4}
    with pytest.raises(CheckpointError) as caught:
        load_model(
            spec_of(tmp_path, wider, format="safetensors"),
            mesh=Mesh(),
            device=CPU,
            block_tokens=16,
        )
    message = caught.value.message
    assert "18 tensors are missing: model.layers.2." in message and "and 12 more" in message
    assert "embed_tokens.weight in" in message and "has the shape [96, 64], not [97, 64]" in message


def add_vocabulary(writer: gguf.GGUFWriter) -> None:
    writer.add_tokenizer_model("llama")
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{n:02X}>" for n in range(60)), "a", "b", "ab"]
    writer.add_token_list(tokens)
    writer.add_token_scores([-float(n) for n in range(len(tokens))])
    writer.add_token_types([2, 3, 3, *[6] * 60, 1, 1, 1])


@pytest.mark.parametrize("count", [250, pytest.param(1000, marks=pytest.mark.slow)])
def test_damaged_gguf_models_load_or_are_refused(count: int, tmp_path: Path) -> None:
    """Whole way: metadata, model, weights, tokenizer. Only CheckpointError and ConfigError may come
    out."""
    small = {"vocab_size": 66, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    kind = gguf.GGMLQuantizationType.Q4_0
    path = write_gguf(
        tmp_path / "m.gguf",
        "llama",
        tiny_model("llama", **small, num_attention_heads=2),
        quantize=lambda name, values: (gguf.quants.quantize(values, kind), kind),
        extra=add_vocabulary,
    )
    sound = path.read_bytes()
    header = min(tensor.offset for tensor in read_gguf(path).tensors.values())
    rng, num_loaded, num_refused = random.Random(7), 0, 0
    for _ in range(count):
        data = bytearray(sound)
        for _ in range(rng.randint(1, 3)):
            data[rng.randrange(24, header)] = rng.choice([0, 1, 2, 16, 127, 128, 255])
        path.write_bytes(data)
        try:
            gguf_tokenizer(str(path)).encode("ab a")
            spec = gguf_spec(path)
            load_model(spec, mesh=Mesh(), device=CPU, block_tokens=16)
            num_loaded += 1
        except (CheckpointError, ConfigError):
            num_refused += 1
    assert num_loaded > count // 50 and num_refused > 0.3 * count
