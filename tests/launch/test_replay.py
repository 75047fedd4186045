"""One layer run again on what went into it. QNT-11."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch

from headrace.base.errors import ConfigError
from headrace.cli.replay import main
from headrace.launch.locate import bundled_model
from headrace.launch.replay import capture, replay
from tests.models.oracle import model_spec, oracle_logits, save_oracle
from tests.models.test_parity import tiny_config

MODULE = "model.layers.1.mlp.down_proj"
IDS = [5, 9, 60, 2, 33, 7, 8]


@pytest.mark.parametrize("name", ["qwen3", "deepseek-v3"])
def test_the_same_configuration_is_exact_and_schemes_lose_what_they_lose(
    name: str, tmp_path: Path
) -> None:
    oracle = save_oracle(tiny_config(name), tmp_path)
    module = MODULE if name == "qwen3" else "model.layers.1.self_attn.o_proj"
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    oracle.get_submodule(module).register_forward_hook(lambda _, x, y: seen.append((x[0][0], y[0])))
    oracle_logits(oracle, [IDS])
    spec = model_spec(tmp_path)
    captured = capture(spec, module, IDS)
    ((names, y_TO),) = captured.outputs.items()
    assert names == (f"{module}.weight",)
    torch.testing.assert_close(y_TO, seen[0][1], rtol=1e-4, atol=1e-5)
    plain, int8, int4 = (replay(spec, captured, scheme)[names] for scheme in (None, "int8", "int4"))
    assert plain.largest == 0.0
    assert 0 < int8.mean <= int8.largest and 0 < int8.relative < 0.03
    assert int8.relative < int4.relative < 0.3


@pytest.mark.parametrize("module", ["self_attn", "mlp"])
def test_a_whole_module_is_replayed_and_what_stands_before_it_is_as_it_was(
    module: str, tmp_path: Path
) -> None:
    """Its first layer reads the same inputs, so it loses what it loses alone; latent attention too."""
    save_oracle(tiny_config("deepseek-v3"), tmp_path)
    spec, layer = model_spec(tmp_path), "model.layers.0"
    captured = capture(spec, f"{layer}.{module}", IDS)
    assert len(captured.outputs) > 1
    assert all(
        name.startswith(f"{layer}.{module}.") for names in captured.outputs for name in names
    )
    assert all(errors.largest == 0.0 for errors in replay(spec, captured, None).values())
    errors = replay(spec, captured, "int4")
    first, *_, last = errors
    alone = replay(spec, capture(spec, first[0].removesuffix(".weight"), IDS), "int4")
    assert alone[first] == errors[first] and 0 < errors[first].relative < 0.3
    assert 0 < errors[last].relative < 0.6


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_layers_on_a_gpu_give_what_they_gave_on_the_cpu(tmp_path: Path) -> None:
    save_oracle(tiny_config("qwen3"), tmp_path)
    spec = model_spec(tmp_path)
    half = msgspec.structs.replace(spec, dtype="bfloat16")
    for of, scheme, most in ((spec, None, 1e-4), (half, None, 0.02), (half, "int8", 0.1)):
        captured = capture(of, MODULE, IDS)
        errors = replay(of, captured, scheme, torch.device("cuda"))
        assert set(errors) == set(captured.outputs)
        assert all(one.relative < most for one in errors.values()), (scheme, errors)


def test_products_elsewhere_take_and_give_tensors_of_the_cpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The other device is played by the CPU under another name."""
    save_oracle(tiny_config("qwen3"), tmp_path)
    spec = model_spec(tmp_path)
    captured = capture(spec, MODULE, IDS)
    monkeypatch.setattr("headrace.launch.replay.CPU", torch.device("cpu", 0))
    ((_, errors),) = replay(spec, captured, None, torch.device("cpu")).items()
    assert errors.largest == 0.0


def test_a_layer_that_is_not_there_is_refused_with_names(tmp_path: Path) -> None:
    save_oracle(tiny_config("qwen3"), tmp_path)
    with pytest.raises(
        ConfigError, match=r"--module x\.down_proj: not among.*layers\.0\.mlp\.down"
    ):
        capture(model_spec(tmp_path), "x.down_proj", IDS)


def test_the_command_prints_a_row_for_each_scheme(capsys: pytest.CaptureFixture[str]) -> None:
    model = str(bundled_model())
    assert main([model, "--module", MODULE, "--schemes", "int8,int4-g64"]) == 0
    words = capsys.readouterr().out
    assert "as it ran" in words and "int8" in words and "int4-g64" in words
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="--on cuda: PyTorch finds no CUDA GPU"):
            main([model, "--module", MODULE, "--on", "cuda"])
    with pytest.raises(ConfigError, match="--schemes: 'int3'"):
        main([model, "--module", MODULE, "--schemes", "int3"])
