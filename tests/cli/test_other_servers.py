"""Command lines for other servers: known flags become ours with a decision, or are refused with a hint."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.base.config.options import CommandLine
from headrace.base.errors import ConfigError
from headrace.cli.model_argument import add_model_argument
from headrace.cli.other_servers import LLAMA, ONE, OTHERS, SEVERAL, VLLM, translated
from tests.api.model_folder import write_model_folder
from tests.api.serving import serving

GROUPS = ("model", "kv", "scheduler", "device", "adapters", "server")


def line() -> CommandLine:
    line = CommandLine("headrace serve", "", groups=GROUPS)
    add_model_argument(line)
    return line


@pytest.mark.parametrize(
    ("typed", "ours"),
    [
        ("M --max-num-seqs 64", "M --max-running 64"),
        ("M --max_num_seqs=64 --max_model_len 512", "M --max-running 64 --max-model-len 512"),
        ("M -tp 2 --enforce-eager", "M --tensor-parallel 2"),
        ("M --trust-remote-code --dtype auto", "M --dtype auto"),
        ("M --served-model-name a b --port 1", "M --served-model-name a,b --port 1"),
        ("--served-model-name a M", "--served-model-name a M"),
        ("M --api-key k1 k2", "M --api-keys k1,k2"),
        ("M --uds /x.sock", "M --host unix:/x.sock"),
        ("M --kv-cache-dtype fp8", "M --kv-dtype fp8"),
        ("M --kv-cache-dtype fp8_e5m2", "M --kv-dtype fp8_e5m2"),
        ("M --kv-cache-dtype int4_per_token_head", "M --kv-dtype int4"),
        ("M --kv-cache-dtype nvfp4", "M --kv-dtype nvfp4"),
        ("M --kv-cache-dtype-skip-layers 0", "M --kv-dtype-skip-layers 0"),
        (
            'M --pooler-config {"enable_chunked_processing":true,"max_embed_len":3000}',
            "M --max-embed-tokens 3000",
        ),
        ("M --no-enable-prefix-caching", "M --no-prefix-caching"),
        (
            "-m f.gguf -c 0 -ngl 99 -fa on -np 4",
            "--model f.gguf --max-model-len auto --max-running 4",
        ),
        ("-m f.gguf -ngl 0 -fa -a name", "--model f.gguf --device cpu --served-model-name name"),
        ("-hf a/b:Q4_K_M", "--model a/b --allow-download"),
        (
            "--scheduler.max_running 4 --model.dtype auto",
            "--scheduler.max_running 4 --model.dtype auto",
        ),
        ("M --no-such-flag 4", "M --no-such-flag 4"),
    ],
)
def test_flags_become_ours(typed: str, ours: str) -> None:
    words, _ = translated(typed.split(), line().flags)
    assert words == ours.split()


def test_what_a_command_has_no_option_for_is_left_out() -> None:
    """A command line of vLLM's is the same for serve, plan and render."""
    render = CommandLine("headrace render", "", groups=("model", "server"))
    typed = ["M", "--max-num-seqs", "64", "--tool-call-parser", "hermes"]
    words, notes = translated(typed, render.flags)
    assert words == ["M", "--tool-parser", "hermes"]
    assert [(note.field, note.chosen) for note in notes] == [
        ("--max-num-seqs", "left out"),
        ("--tool-call-parser", "--tool-parser hermes"),
    ]
    words, _ = translated(["M", "--enable-lora", "--lora-modules", "a=x", "b=y"], render.flags)
    assert words == ["M"]
    with pytest.raises(ConfigError, match="expert"):
        translated(["M", "--enable-expert-parallel"], render.flags)


def test_adapters_may_be_words_of_their_own() -> None:
    typed = ["M", "--enable-lora", "--lora-modules", "a=x", "b=y", "--max-loras", "2"]
    words, notes = translated(typed, line().flags)
    assert words == ["M", "--enable-lora", "--lora-modules", "a=x,b=y", "--max-loras", "2"]
    assert notes == []


def test_each_flag_that_is_not_ours_is_a_decision() -> None:
    _, notes = translated(
        ["M", "--max-num-seqs", "64", "--enforce-eager", "--port", "1"], line().flags
    )
    assert [(note.field, note.requested, note.chosen) for note in notes] == [
        ("--max-num-seqs", "64", "--max-running 64"),
        ("--enforce-eager", "", "left out"),
    ]
    assert all(note.why.startswith("vLLM's flag: ") for note in notes)


@pytest.mark.parametrize(
    ("typed", "hint"),
    [
        ("--pipeline-parallel-size 2", "--tensor-parallel"),
        ("--ssl-keyfile k.pem", "proxy"),
        (
            "--kv-cache-dtype turboquant_4bit_nc",
            "allowed: auto, fp8.*turboquant types are not built",
        ),
        ("--kv-cache-dtype turboquant_k8v4", "int3-rotated"),
        ("-ngl 20", "whole on the GPU"),
        ("--temp 0.7", "with each request"),
        ("--max-num-seqs", "a value is needed"),
    ],
)
def test_what_cannot_be_honoured_is_refused_with_a_hint(typed: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=hint) as caught:
        translated(["M", *typed.split()], line().flags)
    assert typed.split()[0] in caught.value.message


def test_every_row_leads_to_flags_that_exist() -> None:
    known = line().flags
    for flag, (_, row) in OTHERS.items():
        words = row.words(["1"] if row.arity in (ONE, SEVERAL) else []) or []
        assert {word for word in words if word.startswith("--")} <= known.keys(), flag
        assert row.why, flag
    assert not VLLM.keys() & LLAMA.keys()


def test_a_vllm_command_line_for_a_plain_model_serves(tmp_path: Path) -> None:
    model = write_model_folder(tmp_path / "tiny")
    words = (
        "--tensor-parallel-size 1 --max-model-len 256 --gpu-memory-utilization 0.9 --dtype auto "
        "--max-num-seqs 8 --max-num-batched-tokens 256 --enable-prefix-caching --enforce-eager "
        "--trust-remote-code --served-model-name one two --api-key secret --disable-log-requests "
        "--enable-chunked-prefill --block-size 16 --seed 0 --uvicorn-log-level info"
    )
    with serving(model, *words.split()) as served:
        models = served.get("/v1/models", authorization="Bearer secret").json()["data"]
        assert [one["id"] for one in models] == ["one", "two"]
        assert models[0]["max_model_len"] == 256
        assert served.get("/v1/models").status_code == 401
        shown = "".join(served.lines)
        assert "--max-num-seqs" in shown and "left out" in shown
        assert served.stop() == 0
