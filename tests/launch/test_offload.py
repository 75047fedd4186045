"""Weights in host memory: what is asked for, what is refused, and what `headrace plan` foretells (BEY-42, BEY-43)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from headrace.base.config.options import CommandLine
from headrace.base.config.resolved import OffloadSpec, Resolved
from headrace.base.errors import ConfigError
from headrace.cli import plan
from headrace.launch.facts import resolve_options
from headrace.launch.locate import bundled_model
from headrace.launch.performance_model import ModelCost, known_device, predict_step
from headrace.launch.topology import planned_facts

CONFIG = {
    **{"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]},
    **{"hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768},
    **{"num_hidden_layers": 24, "num_attention_heads": 32, "num_key_value_heads": 4},
    **{"head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "vocab_size": 4096},
    **{"norm_topk_prob": True, "max_position_embeddings": 4096, "torch_dtype": "bfloat16"},
}


def resolved(device: str, *words: str) -> Resolved:
    line = CommandLine("test", "", groups=("model", "kv", "scheduler", "device", "adapters"))
    given = ["--model", str(bundled_model()), "--device", device, "--threads", "1", *words]
    options = line.parse(given)[1]
    if device == "cpu":
        return resolve_options(options)
    return resolve_options(options, planned_facts("h200", options.device))


@pytest.mark.parametrize("what", ["layers", "experts"])
def test_what_is_asked_for_reaches_the_workers(what: str) -> None:
    model = resolved("cuda", f"--offload-{what}", "5").engine.model
    assert model.offload == OffloadSpec(what=what, count=5)
    model = resolved("cuda", f"--offload-{what}", "auto", "--kv-memory", "10GiB").engine.model
    assert model.offload is not None and model.offload.count is None
    memory = resolved("cuda").engine.device.memory_bytes
    assert memory is not None and model.offload.room_bytes == memory - (12 << 30)
    assert resolved("cuda").engine.model.offload is None


@pytest.mark.parametrize(
    ("device", "words", "message"),
    [
        ("cpu", ["--offload-layers", "4"], "in host memory already"),
        ("cuda", ["--offload-layers", "4", "--offload-experts", "4"], "one of them"),
        ("cuda", ["--offload-experts", "auto", "--enable-lora"], "does not go with --enable-lora"),
        ("cuda", ["--offload-layers", "4", "--family", "transformers"], "headrace's own families"),
        ("cuda", ["--offload-layers", "-1"], "offload-layers"),
    ],
)
def test_what_cannot_be_is_refused_by_name(device: str, words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolved(device, *words)


def test_the_link_bounds_a_step_of_experts_by_those_that_are_chosen() -> None:
    h200 = known_device("h200")
    cost = ModelCost(
        weight_bytes=1, read_bytes=10**9, multiplied=1, kv_layers=(), host_bytes=64 * 10**9,
        host_routed=(128, 8),
    )  # fmt: skip
    assert h200.link == pytest.approx(54.4e9)
    one = predict_step(cost, h200, batch=1, context=1)
    assert one.bound == "link to host memory"
    assert one.decode_step_ms == pytest.approx(64 / 16 / 54.4 * 1e3)
    many = predict_step(cost, h200, batch=64, context=1)
    assert many.decode_step_ms == pytest.approx(64 / 54.4 * 1e3)


def test_plan_offers_what_makes_a_model_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """27 GiB of experts do not fit into 23 GiB."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    for file in bundled_model().glob("tokenizer*"):
        shutil.copy(file, tmp_path)
    words = [str(tmp_path), "--load-format", "dummy", "--device", "rtx4090", "--json"]
    words += ["--kv-memory", "1GiB"]
    assert plan.main(words) == 1
    offers = json.loads(capsys.readouterr().out)["offers"]
    assert [offer["option"] for offer in offers] == [
        "--offload-experts auto",
        "--offload-layers auto",
    ]
    experts, layers = offers
    assert experts["decode_tok_s"] > 5 * layers["decode_tok_s"] > 0
    assert plan.main([*words, "--offload-experts", "auto"]) == 0
    there = json.loads(capsys.readouterr().out)
    why = next(why for field, *_, why in there["decisions"] if field == "--offload-experts")
    assert "GiB in host memory" in why and there["weight_bytes"] < 20 << 30
