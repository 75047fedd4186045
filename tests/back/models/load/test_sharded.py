"""Sharded state: ranks read files of their own and hold the same as from the checkpoint. QNT-19."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from msgspec.structs import replace
from safetensors.torch import load_file, save_file

import headrace.back.models.load.sharded as sharded
from headrace.back.models.load import load_model
from headrace.back.models.load.fill import fill
from headrace.back.models.load.safetensors import SafetensorsSource
from headrace.back.models.registry import build_model
from headrace.back.parallel.mesh import Axis, Mesh
from headrace.base.config.tree import ModelOptions
from headrace.base.errors import CheckpointError, ConfigError
from headrace.cli.shard import main
from headrace.launch.locate import bundled_model, locate
from headrace.launch.shard import shard_checkpoint
from tests.models.oracle import BLOCK_TOKENS, model_spec, save_oracle
from tests.models.paged import teacher_forced
from tests.models.test_parity import tiny_config

CPU = torch.device("cpu")


def sharded_folder(folder: Path, ranks: int, name: str = "qwen3") -> Path:
    save_oracle(tiny_config(name), folder / "plain")
    shard_checkpoint(model_spec(folder / "plain"), folder / "out", ranks, lambda rank, size: None)
    return folder / "out"


def load(folder: Path, **changes: Any) -> Any:
    spec = replace(model_spec(folder), **changes)
    model, _ = load_model(spec, mesh=Mesh(), device=CPU, block_tokens=BLOCK_TOKENS)
    rows = [list(range(3, 30)), [5, 1, 2]]
    return teacher_forced(model, rows, block_tokens=BLOCK_TOKENS, dtype=torch.float32)


@pytest.mark.parametrize("name", ["qwen3", "qwen3-moe"])
@pytest.mark.parametrize("reader", ["buffered", "direct"])
def test_one_rank_answers_as_from_the_checkpoint(
    name: str, reader: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharded, "PART_BYTES", 20_000)
    out = sharded_folder(tmp_path, 1, name)
    assert len(list(out.glob("model-rank-0-part-*.safetensors"))) > 2
    assert locate(ModelOptions(model=str(out))).format == "sharded_state"
    for quantization in (None, "int8"):
        changes = {"quantization": quantization}
        ours = load(out, format="sharded_state", reader=reader, **changes)
        plain = load(tmp_path / "plain", **changes)
        assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))


def test_each_of_two_ranks_has_its_part(tmp_path: Path) -> None:
    out = sharded_folder(tmp_path, 2)
    spec = model_spec(tmp_path / "plain")
    for rank in range(2):
        group = dist.ProcessGroup(rank, 2)
        mesh = Mesh(tp=Axis(size=2, rank=rank, group=group))
        model = build_model(spec, mesh=mesh, device=CPU, block_tokens=BLOCK_TOKENS)
        fill(model.weights, SafetensorsSource(tmp_path / "plain"))
        stored = load_file(out / f"model-rank-{rank}-part-0.safetensors")
        assert stored.keys() == {param.name for param in model.weights.params}
        for param in model.weights.params:
            assert torch.equal(stored[param.name], param.tensor), param.name


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    out = sharded_folder(tmp_path, 2)
    with pytest.raises(CheckpointError, match=r"shards of ranks 0, 1; --tensor-parallel 1 needs"):
        load(out, format="sharded_state")
    (out / "model-rank-1-part-0.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"\.lm_head|embed|has the shape"):
        load(out, format="sharded_state")
    file = out / "model-rank-0-part-0.safetensors"
    tensors = load_file(file)
    tensors["other"] = tensors.pop(next(iter(tensors)))
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=r"is missing; .*"):
        load(out, format="sharded_state")
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match=r"model-rank-0-part-0.*truncated"):
        load(out, format="sharded_state")
    with pytest.raises(ConfigError, match="not an empty folder"):
        shard_checkpoint(model_spec(tmp_path / "plain"), out, 2, lambda rank, size: None)


def test_the_command_says_what_each_rank_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(bundled_model()), str(tmp_path / "out"), "--tensor-parallel", "2"]) == 0
    words = " ".join(capsys.readouterr().out.split())
    assert "rank 1: " in words and "for 2 ranks" in words
    assert (tmp_path / "out" / "tokenizer.json").is_file()
