"""`headrace quantize`: what it writes are the scheme's numbers, loads back kept as it is, and by
compressed-tensors where that is installed."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import headrace.back.models.load as loading
import headrace.launch.quantize as writing
from headrace.back.models.load import load_model, open_source
from headrace.back.parallel.mesh import Mesh
from headrace.back.quant.compressed import WRITTEN
from headrace.back.quant.scheme import SCHEMES
from headrace.base.errors import ConfigError
from headrace.cli.quantize import main
from headrace.launch.quantize import linear_weights, quantize_checkpoint
from tests.models.oracle import BLOCK_TOKENS, model_spec, oracle_logits, save_oracle
from tests.models.paged import teacher_forced
from tests.models.test_parity import tiny_config

ROWS = [list(range(3, 30)), [5, 1, 2]]


def plain(folder: Path, name: str = "qwen3") -> Path:
    config = tiny_config(name)
    config.hidden_size, config.intermediate_size, config.head_dim = 128, 256, 32
    config.num_attention_heads, config.num_key_value_heads = 4, 2
    if name == "qwen3-moe":
        config.moe_intermediate_size = 128
    save_oracle(config, folder)
    return folder


def load(folder: Path) -> Any:
    return load_model(
        model_spec(folder), mesh=Mesh(), device=torch.device("cpu"), block_tokens=BLOCK_TOKENS
    )


@pytest.mark.parametrize("scheme", WRITTEN)
def test_what_is_read_back_is_what_the_scheme_says(scheme: str, tmp_path: Path) -> None:
    source = plain(tmp_path / "plain")
    report = quantize_checkpoint(model_spec(source), tmp_path / "out", scheme)
    assert report.quantized == 21 and not report.left
    before = load_file(source / "model.safetensors")
    names = linear_weights(model_spec(source))
    assert all("embed" not in name and "lm_head" not in name for name in names)
    step = {"fp8": 0.07, "int8": 0.02}.get(scheme, 0.3 if scheme.startswith("int4") else 0.02)
    assert 0 < report.loss <= report.worst[0] < step
    total = torch.zeros(())
    with closing(open_source(model_spec(tmp_path / "out"))) as files:
        for name in names:
            shape = tuple(before[name].shape)
            read = torch.empty(shape)
            files.copy(name, shape, tuple(slice(0, size) for size in shape), read)
            values, scales, minima = SCHEMES[scheme].quantize(before[name])
            if minima is None:
                floats = (
                    values.view(torch.float8_e4m3fn).float() if scheme == "fp8" else values.float()
                )
                wide = scales.repeat_interleave(shape[1] // scales.shape[1], 1)
                assert torch.equal(read, floats * wide), name
            total += (read - before[name]).square().sum()
    assert total.item() == pytest.approx(report.error, rel=1e-4)


@pytest.mark.parametrize("name", ["qwen3", "qwen3-moe"])
@pytest.mark.parametrize("scheme", ["int4-g64", "int4-asym", "int8"])
def test_it_loads_as_it_is_stored_and_answers_like_the_plain_one(
    name: str, scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = plain(tmp_path / "plain", name)
    quantize_checkpoint(model_spec(source), tmp_path / "out", scheme)
    model, report = load(tmp_path / "out")
    kept = next(one for one in report.decisions if one.field == "weights")
    assert kept.chosen != "floats" and "dequantized" not in kept.why
    monkeypatch.setattr(loading, "unsupported", lambda device, dtype: "is not built")
    exact, _ = load(tmp_path / "out")
    ours, theirs = (
        teacher_forced(one, ROWS, block_tokens=BLOCK_TOKENS, dtype=torch.float32)
        for one in (model, exact)
    )
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.nn.functional.cosine_similarity(mine, other).mean() > 0.98


def test_shards_have_an_index_and_other_files_are_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = plain(tmp_path / "plain")
    (source / "tokenizer.json").write_text("{}")
    monkeypatch.setattr(writing, "SHARD_BYTES", 100_000)
    quantize_checkpoint(model_spec(source), tmp_path / "out", "int8")
    index = json.loads((tmp_path / "out" / writing.INDEX).read_text())
    assert len(set(index["weight_map"].values())) > 2
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    load(tmp_path / "out")


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    source = plain(tmp_path / "plain")
    spec = model_spec(source)
    with pytest.raises(ConfigError, match="--scheme int3: one of int4, "):
        quantize_checkpoint(spec, tmp_path / "out", "int3")
    with pytest.raises(ConfigError, match="not an empty folder"):
        quantize_checkpoint(spec, source, "int8")
    quantize_checkpoint(spec, tmp_path / "out", "int8")
    with pytest.raises(ConfigError, match="quantized already"):
        quantize_checkpoint(model_spec(tmp_path / "out"), tmp_path / "again", "int8")


def test_matrices_that_groups_do_not_divide_stay_plain(tmp_path: Path) -> None:
    config = tiny_config("qwen3")
    save_oracle(config, tmp_path / "plain")
    report = quantize_checkpoint(model_spec(tmp_path / "plain"), tmp_path / "out", "int4-g128")
    assert report.quantized == 0 and len(report.left) == 21
    model, _ = load(tmp_path / "out")
    assert model.weights.params


def test_the_command_says_size_and_loss(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = plain(tmp_path / "plain")
    assert main([str(source), str(tmp_path / "out"), "--scheme", "int8"]) == 0
    assert "21 matrices in int8, relative error 0." in " ".join(capsys.readouterr().out.split())


def test_transformers_reads_it(tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    from transformers import AutoModelForCausalLM

    source = plain(tmp_path / "plain")
    quantize_checkpoint(model_spec(source), tmp_path / "out", "int4-g64")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    ours, _ = load(tmp_path / "out")
    mine = teacher_forced(ours, ROWS, block_tokens=BLOCK_TOKENS, dtype=torch.float32)
    for row, other in zip(mine, oracle_logits(theirs, ROWS), strict=True):
        assert torch.nn.functional.cosine_similarity(row, other).mean() > 0.95
