"""`headrace plan`: whether a model fits, what would be decided on a device that is not there, and why."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from headrace.base.config.resolved import Decision
from headrace.cli.plan import _without_other_devices, main

Captured = pytest.CaptureFixture[str]
TOO_SMALL = ("--device", "l4", "--gpu-memory", "2GiB")


def document(capsys: Captured, *words: str, status: int = 0) -> dict[str, Any]:
    """The object it prints."""
    assert main([*words, "--json"]) == status
    return dict(json.loads(capsys.readouterr().out))


def printed(capsys: Captured, *words: str, status: int = 0) -> str:
    """What it prints, without the table's lines and breaks."""
    assert main(words) == status
    return re.sub(r"[\s│]+", " ", capsys.readouterr().out)


def test_it_decides_as_the_named_device_would_have_it_decided(capsys: Captured) -> None:
    """BEY-56: what this machine would choose for itself is no answer."""
    plan = document(capsys, "--device", "h200")
    assert plan["fits"] is True and plan["device"] == "h200"
    decided = {d[0]: d[2] for d in plan["decisions"]}
    assert decided["--max-running"] == "256" and decided["--max-step-tokens"] == "8192"
    assert decided["--gpu-memory"] == "128.8GiB" and "--threads" not in decided
    assert decided["kernel.attention"] == decided["kernel.fused_linear"] == "triton"


VLLM = ("--max-num-seqs", "8", "--gpu-memory-utilization", "0.9", "--api-key", "k")


def test_a_command_line_of_vllms_is_understood(capsys: Captured) -> None:
    plan = document(capsys, "--device", "h200", *VLLM)
    decided = {d[0]: d[2] for d in plan["decisions"]}
    assert decided["--max-num-seqs"] == "--max-running 8" and decided["--api-key"] == "left out"


def test_it_measures_this_machine(capsys: Captured) -> None:
    here = {d[0]: d[2] for d in document(capsys, *VLLM[2:])["decisions"]}
    assert here["--gpu-memory-utilization"] == "left out"
    assert any(name.startswith("kernel.") for name in here)
    assert here["--max-running"] == "64" and "--gpu-memory" not in here


def test_models_with_an_encoder_are_foretold_without_a_run(capsys: Captured) -> None:
    """A run of their decoder alone is no measure, and was refused: they read speech."""
    plan = document(capsys, "--demo", "speech")
    assert plan["fits"] is True and plan["decode"][0]["decode_tok_s"] > 0


def test_it_says_what_is_missing_where_a_model_does_not_fit(capsys: Captured) -> None:
    plan = document(capsys, *TOO_SMALL, status=1)
    assert plan["fits"] is False
    assert "0.0 GiB more are needed; raise --gpu-memory" in plan["shortfall"], plan["shortfall"]
    assert "does not fit" in printed(capsys, *TOO_SMALL, status=1)


def test_a_stated_length_beyond_the_stated_memory_does_not_fit(capsys: Captured) -> None:
    words = ("--device", "h200", "--kv-memory", "1MiB", "--max-model-len")
    assert document(capsys, *words, "16")["fits"] is True
    plan = document(capsys, *words, "2048", status=1)
    assert plan["shortfall"].startswith("--max-model-len 2048 takes"), plan["shortfall"]


def test_kernels_of_other_devices_are_named_with_explain_alone(capsys: Captured) -> None:
    assert "CPU only" not in printed(capsys, "--device", "h200")
    assert "native: runs on the CPU only" in printed(capsys, "--device", "h200", "--explain")


def test_other_reasons_stay() -> None:
    why = "2 shapes; native: runs on the CPU only; triton: has a bias; mkldnn: runs on the CPU only"
    decision = Decision("kernel.linear", "auto", "torch", why)
    assert _without_other_devices(decision).why == "2 shapes; triton: has a bias"
