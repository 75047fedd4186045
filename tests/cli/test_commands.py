"""Every command from the outside: real processes, the bundled model (API-25)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.bench.held_out import read_items, write_items
from headrace.cli.bench import ABOUT
from headrace.cli.main import COMMANDS, SUMMARIES, main

SHAPE = ("--input-len", "32", "--output-len", "8", "--max-model-len", "256")


def headrace(*words: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "headrace", *words],
        capture_output=True,
        text=True,
        input=stdin,
    )


def document(*words: str) -> dict[str, Any]:
    done = headrace(*words)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))


def test_every_command_is_listed_and_loads() -> None:
    shown = headrace("--help").stdout
    for name in SUMMARIES:
        assert name in shown
        assert callable(COMMANDS.load(name))


@pytest.mark.parametrize("name", [*SUMMARIES, *(f"bench {kind}" for kind in ABOUT)])
def test_help_needs_no_model(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """In this process: thirty starts of Python would be most of the time of this file."""
    try:
        status: int | str | None = main([*name.split(), "--help"])
    except SystemExit as end:
        status = end.code
    assert status == 0 and f"usage: headrace {name}" in capsys.readouterr().out


def test_help_is_an_end_without_an_error() -> None:
    done = headrace("serve", "--help")
    assert done.returncode == 0 and "usage: headrace serve" in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("serv",), "did you mean 'serve'"),
        (("serve", "--prot", "1"), "did you mean --port"),
        (("serve", "/nowhere/at/all"), "/nowhere/at/all"),
        (("serve", "--policy", "lifo"), "fcfs, priority, fair"),
        (("bench", "speed"), "name one of"),
        (("eval", "--tasks", "magic"), "unknown task 'magic'"),
        (("plan", "--device", "tpu9"), "unknown device 'tpu9'"),
        (("generate",), "--prompt"),
        (("chat", "a", "--model", "b"), "two models"),
    ],
)
def test_a_mistake_is_one_clear_line_and_status_2(
    words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process, as above."""
    try:
        status: int | str | None = main([*words])
    except SystemExit as end:
        status = end.code
    assert status == 2 and said in capsys.readouterr().err


def test_a_mistake_ends_the_process_with_status_2_and_no_traceback() -> None:
    done = headrace("serve", "/nowhere/at/all")
    assert done.returncode == 2
    assert "/nowhere/at/all" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.slow
def test_bench_throughput_prints_one_object() -> None:
    result = document("bench", "throughput", "--json", "--num-requests", "4", *SHAPE)
    rates = [float(str(result[k])) for k in ("output_tok_s", "total_tok_s", "req_s")]
    assert all(rate > 0 for rate in rates)


@pytest.mark.slow
def test_bench_latency_prints_one_object_for_a_configuration_without_weights(
    tmp_path: Path,
) -> None:
    config = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 300, "hidden_size": 64,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "intermediate_size": 96, "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "rope_theta": 1e4,
        "tie_word_embeddings": True, "hidden_act": "silu", "dtype": "bfloat16",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    result = document(
        "bench", "latency", "--json", "--model", str(tmp_path), "--load-format", "dummy", "--dtype", "bfloat16",
        "--batch-size", "2", "--iterations", "1", *SHAPE,
    )  # fmt: skip
    names = {"prefill_tok_s", "decode_step_ms", "decode_tok_s", "start_s", "device", "versions"}
    assert names <= set(result) and result["dtype"] == "bfloat16"
    assert float(str(result["decode_step_ms"])) > 0


def test_generate_answers_in_order() -> None:
    done = headrace(
        "generate",
        "--chat",
        "--prompt",
        "What is 17 + 25?",
        "--prompt",
        "What is 30 + 9?",
        "--temperature",
        "0",
        "--json",
    )
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line)["text"] for line in done.stdout.splitlines()]
    assert "42" in answers[0] and "39" in answers[1]


@pytest.mark.slow
def test_chat_keeps_the_conversation_until_the_end_of_input() -> None:
    done = headrace(
        "chat", "--temperature", "0", stdin="What is 17 + 25?\n/stats\n/new\nHello!\n/quit\n"
    )
    assert done.returncode == 0, done.stderr
    assert "42" in done.stdout and "tokens/s" in done.stdout


@pytest.mark.slow
def test_eval_reaches_the_bar_on_a_task() -> None:
    done = headrace("eval", "--tasks", "copy", "--count", "4", "--bar", "0.9", "--json")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_eval_below_the_bar_is_status_1(tmp_path: Path) -> None:
    item = msgspec.structs.replace(read_items()["copy"][0], expected="something else")
    write_items(tmp_path / "items", [item], seed=0)
    done = headrace("eval", "--items", str(tmp_path / "items"), "--bar", "0.5", "--json")
    assert done.returncode == 1, done.stdout + done.stderr
    assert json.loads(done.stdout) == {"copy": {"share": 0.0, "count": 1}}


def test_doctor_and_env_describe_the_machine() -> None:
    checks = [json.loads(line) for line in headrace("doctor", "--json").stdout.splitlines()]
    assert {"Python", "PyTorch", "C++ compiler"} <= {c["what"] for c in checks}
    assert "torch" in json.dumps(document("env", "--json")["packages"])
