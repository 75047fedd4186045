"""The bundled model as a GGUF file, vocabulary and template included, answers as the folder it was made from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers

from headrace.cli.generate import main as generate
from headrace.launch.locate import bundled_model
from tests.back.models.load.checkpoints import write_gguf

PROMPTS = ["What is 12 + 30?", "Repeat after me: purple otter 7431"]


def add_tokenizer(writer: gguf.GGUFWriter) -> None:
    """Writes the folder's tokenizer.json and chat template as GGUF metadata."""
    folder = bundled_model()
    document = json.loads((folder / "tokenizer.json").read_text())
    config = json.loads((folder / "tokenizer_config.json").read_text())
    vocabulary: dict[str, int] = dict(document["model"]["vocab"])
    kinds = {token["content"]: 3 if token["special"] else 4 for token in document["added_tokens"]}
    vocabulary |= {token["content"]: token["id"] for token in document["added_tokens"]}
    tokens = sorted(vocabulary, key=lambda token: vocabulary[token])
    merges = document["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([kinds.get(token, 1) for token in tokens])
    writer.add_token_merges([one if isinstance(one, str) else " ".join(one) for one in merges])
    writer.add_chat_template(config["chat_template"])


def quantized(name: str, values: Any) -> tuple[Any, Any]:
    kind = gguf.GGMLQuantizationType.BF16
    return gguf.quants.quantize(values, kind), kind


def answers(model: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    command = [model, "--chat", "--json"]
    for prompt in PROMPTS:
        command += ["--prompt", prompt]
    assert (
        generate([*command, "--temperature", "0", "--max-tokens", "24", "--dtype", "float32"]) == 0
    )
    told = capsys.readouterr().out
    return [json.loads(line)["text"] for line in told.splitlines() if line.startswith("{")]


@pytest.fixture
def gguf_path(tmp_path: Path) -> Path:
    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(bundled_model(), dtype=torch.float32)
    return write_gguf(
        tmp_path / "demo.gguf", "qwen3", model, quantize=quantized, extra=add_tokenizer
    )


@pytest.mark.slow
def test_the_bundled_model_answers_alike_as_gguf(
    gguf_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = answers(str(bundled_model()), capsys)
    assert len(wanted) == len(PROMPTS) and "42" in wanted[0]
    assert answers(str(gguf_path), capsys) == wanted
