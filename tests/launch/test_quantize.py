"""`headrace quantize`: what it writes are the scheme's numbers, loads back kept as it is, and by
compressed-tensors where that is installed."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import headrace.back.models.load as loading
import headrace.launch.calibrate as calibrating
import headrace.launch.quantize as writing
from headrace.back.models.load import load_model, open_source
from headrace.back.parallel.mesh import Mesh
from headrace.back.quant.compressed import WRITTEN
from headrace.back.quant.scheme import SCHEMES
from headrace.base.errors import ConfigError
from headrace.cli.quantize import main
from headrace.launch.fold import Folds, source_of
from headrace.launch.locate import bundled_model
from headrace.launch.quantize import linear_weights, quantize_checkpoint
from tests.models.oracle import BLOCK_TOKENS, model_spec, save_oracle
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
    (source / "model.safetensors.xz").write_bytes(b"the weights, packed")
    monkeypatch.setattr(writing, "SHARD_BYTES", 100_000)
    quantize_checkpoint(model_spec(source), tmp_path / "out", "int8")
    index = json.loads((tmp_path / "out" / writing.INDEX).read_text())
    assert len(set(index["weight_map"].values())) > 2
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    assert not (tmp_path / "out" / "model.safetensors.xz").exists()
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


@pytest.mark.filterwarnings("ignore:You passed .quantization_config.")
@pytest.mark.parametrize("method", ["", "gptq", "awq"])
@pytest.mark.parametrize("scheme", ["int4-g64", "int4-asym-g64", "int8-g128", "int8", "fp8"])
def test_transformers_reads_the_same_weights(scheme: str, method: str, tmp_path: Path) -> None:
    """By compressed-tensors itself, where it is installed."""
    pytest.importorskip("compressed_tensors")
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    source = plain(tmp_path / "plain")
    by = {"texts": texts(), "method": method} if method else {}
    quantize_checkpoint(model_spec(source), tmp_path / "out", scheme, **by)
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out",
        quantization_config=CompressedTensorsConfig(run_compressed=False),
        dtype=torch.float32,
    ).state_dict()
    names = linear_weights(model_spec(source))
    with closing(open_source(model_spec(tmp_path / "out"))) as files:
        for name in names:
            shape = files.entries[name].shape
            read = torch.empty(shape)
            files.copy(name, shape, tuple(slice(0, size) for size in shape), read)
            torch.testing.assert_close(theirs[name].float(), read, rtol=1e-2, atol=1e-6)


def texts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(0, 97, (64,), generator=generator).tolist() for _ in range(4)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["qwen3-moe", *(pytest.param(n, marks=pytest.mark.slow) for n in ("qwen3", "gemma2"))]
)
def test_a_calibration_text_makes_outputs_better(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of layers taken in parts, too: no more than one matrix of sums at a time."""
    source = plain(tmp_path / "plain", name)
    spec = model_spec(source)
    nearest = quantize_checkpoint(spec, tmp_path / "nearest", "int4-g64")
    ours = quantize_checkpoint(spec, tmp_path / "gptq", "int4-g64", texts=texts())
    assert ours.quantized == nearest.quantized and ours.after == nearest.after
    experts = sum(".experts." in one for one in linear_weights(spec))
    assert ours.by_text == ours.quantized - experts and 0 < ours.output_loss < 0.2
    monkeypatch.setattr(calibrating, "BUDGET_BYTES", 1)
    parts = quantize_checkpoint(spec, tmp_path / "parts", "int4-g64", texts=texts())
    assert parts.output_error == pytest.approx(ours.output_error)

    def change(folder: str) -> float:
        kept, _ = load(tmp_path / folder)
        whole, _ = load(source)
        mine, theirs = (
            torch.cat(teacher_forced(one, texts(), block_tokens=BLOCK_TOKENS, dtype=torch.float32))
            for one in (kept, whole)
        )
        return float((mine - theirs).norm() / theirs.norm())

    assert change("gptq") < change("nearest")


def test_the_sums_are_those_of_what_goes_into_the_layers(tmp_path: Path) -> None:
    source = plain(tmp_path / "plain")
    sums = dict(calibrating.hessians(model_spec(source), texts()))
    import transformers

    oracle = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    seen: dict[str, torch.Tensor] = {}

    def hook(name: str, x: torch.Tensor) -> None:
        rows = x.flatten(0, 1)
        seen[name] = seen.get(name, 0) + rows.t() @ rows

    for name, module in oracle.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(lambda _, x, name=name: hook(name, x[0]))
    with torch.no_grad():
        for text in texts():
            oracle(torch.tensor([text]))
    names = {one.removesuffix(".weight"): total for ones, total in sums.items() for one in ones}
    assert set(names) == set(seen) - {"lm_head"}
    for name, total in names.items():
        torch.testing.assert_close(total, seen[name], rtol=1e-3, atol=1e-3 * float(total.max()))


def test_a_calibration_text_that_says_too_little_is_refused(tmp_path: Path) -> None:
    folder = bundled_model()
    (tmp_path / "short.txt").write_text("A few words.")
    for name, message in (("short.txt", "at least 512"), ("none.txt", "cannot be read")):
        with pytest.raises(ConfigError, match=message) as seen:
            main([str(folder), str(tmp_path / "out"), "--calibration", str(tmp_path / name)])
        assert seen.value.field == "--calibration"


@pytest.mark.parametrize("name", ["qwen3", "qwen2"])
def test_scales_folded_into_what_makes_inputs_change_nothing(name: str, tmp_path: Path) -> None:
    """AWQ's, without rounding: norms, values of grouped heads, and the MLP's other branch."""
    source = plain(tmp_path / "plain", name)
    file = source / "model.safetensors"
    before, folds = load_file(file), Folds()
    shapes = {name: tuple(tensor.shape) for name, tensor in before.items()}
    generator, found = torch.Generator().manual_seed(4), 0
    for names in dict(calibrating.hessians(model_spec(source), texts()[:1])):
        place = source_of(names, shapes, head_dim=32)
        assert place is not None, names
        scales = torch.rand(shapes[names[0]][1], generator=generator) + 0.5
        if place.shared is not None:
            runs = scales.view(-1, place.shared.repeats, place.shared.size)
            scales = runs[:, :1].expand_as(runs).reshape(-1)
            found += 1
        folds.add(names, place, scales)
    assert found == 3  # a layer's two KV heads for four query heads
    model, _ = load(source)
    expected = teacher_forced(model, ROWS, block_tokens=BLOCK_TOKENS, dtype=torch.float32)
    save_file({name: folds.apply(name, tensor) for name, tensor in before.items()}, file)
    model, _ = load(source)
    folded = teacher_forced(model, ROWS, block_tokens=BLOCK_TOKENS, dtype=torch.float32)
    for mine, theirs in zip(folded, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


def test_awq_loses_less_where_some_inputs_are_large(tmp_path: Path) -> None:
    source = plain(tmp_path / "plain")
    file = source / "model.safetensors"
    tensors = load_file(file)
    for name in tensors:
        if name.endswith("layernorm.weight"):
            tensors[name][::16] *= 20
    save_file(tensors, file)
    spec = model_spec(source)
    nearest = quantize_checkpoint(spec, tmp_path / "nearest", "int4-g64")
    ours = quantize_checkpoint(spec, tmp_path / "awq", "int4-g64", texts=texts(), method="awq")
    assert ours.quantized == nearest.quantized == ours.by_text and ours.after == nearest.after

    def change(folder: str) -> float:
        whole, kept = load(source)[0], load(tmp_path / folder)[0]
        mine, theirs = (
            torch.cat(teacher_forced(one, texts(), block_tokens=BLOCK_TOKENS, dtype=torch.float32))
            for one in (kept, whole)
        )
        return float((mine - theirs).norm() / theirs.norm())

    assert change("awq") < 0.8 * change("nearest")


def test_awq_is_refused_where_scales_cannot_be_folded(tmp_path: Path) -> None:
    spec = model_spec(plain(tmp_path / "plain", "gemma2"))
    with pytest.raises(ConfigError, match="not of gemma2; use gptq"):
        quantize_checkpoint(spec, tmp_path / "out", "int4", texts=texts(), method="awq")
    with pytest.raises(ConfigError, match="--method round: one of gptq, awq"):
        quantize_checkpoint(spec, tmp_path / "out", "int4", texts=texts(), method="round")
