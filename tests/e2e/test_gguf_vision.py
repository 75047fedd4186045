"""The bundled model that sees, as a GGUF file with its tower beside it, answers as the folder it was made from
(QNT-16)."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import pytest
import transformers
from PIL import Image, ImageDraw
from safetensors.torch import load_file

from headrace import LLM, SamplingParams
from headrace.launch.locate import bundled_model
from tests.back.models.load.checkpoints import write_gguf
from tests.models.test_gguf_vision import CASES, write_tower

TEXT = "model.language_model."


def write_pair(folder: Path) -> Path:
    """The model's file; the one of its tower lies beside it."""
    source = bundled_model("vision")
    keys = json.loads((source / "config.json").read_text())
    stored = {name: one.float() for name, one in load_file(source / "model.safetensors").items()}
    config = transformers.AutoConfig.from_pretrained(source)
    text, vision = config.text_config, config.vision_config
    text.pad_token_id, text.tie_word_embeddings = 0, True
    generation = json.loads((source / "generation_config.json").read_text())
    ends = generation["eos_token_id"]
    text.eos_token_id = ends[0] if isinstance(ends, list) else ends
    own = {
        "model." + name.removeprefix(TEXT): one
        for name, one in stored.items()
        if name.startswith(TEXT)
    }

    def extra(writer: gguf.GGUFWriter) -> None:
        add_tokenizer(writer, source, keys["text_config"]["vocab_size"])
        writer.add_rope_dimension_sections([*text.rope_parameters["mrope_section"], 0])

    model = SimpleNamespace(config=text, state_dict=lambda: own)
    path = write_gguf(folder / "model.gguf", "qwen3vl", model, extra=extra)
    case = SimpleNamespace(vision=keys["vision_config"], norm=((0.5,) * 3, (0.5,) * 3))
    merge = keys["vision_config"]["spatial_merge_size"]
    written = replace(CASES["qwen3-vl"], case=case, merge=merge)
    write_tower(folder / "mmproj-model.gguf", written, vision, stored, text.hidden_size)
    return path


def add_tokenizer(writer: gguf.GGUFWriter, source: Path, size: int) -> None:
    document = json.loads((source / "tokenizer.json").read_text())
    vocabulary: dict[str, int] = dict(document["model"]["vocab"])
    added = document["added_tokens"]
    vocabulary |= {token["content"]: token["id"] for token in added}
    kinds = {token["content"]: 3 if token["special"] else 4 for token in added}
    tokens = sorted(vocabulary, key=lambda token: vocabulary[token])
    tokens += [f"[unused{i}]" for i in range(len(tokens), size)]
    merges = document["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([kinds.get(token, 1) for token in tokens])
    writer.add_token_merges([one if isinstance(one, str) else " ".join(one) for one in merges])
    template = json.loads((source / "tokenizer_config.json").read_text())["chat_template"]
    writer.add_chat_template(template)


def circles(count: int) -> Image.Image:
    picture = Image.new("RGB", (200, 120), "white")
    for i in range(count):
        ImageDraw.Draw(picture).ellipse((15 + 60 * i, 40, 45 + 60 * i, 70), fill="red")
    return picture


def answers(model: str) -> list[str]:
    texts = []
    with LLM(model, dtype="float32", device="cpu", kv_blocks=64) as llm:
        for count in (1, 3):
            content: list[dict[str, Any]] = [
                {"type": "image_pil", "image_pil": circles(count)},
                {"type": "text", "text": "How many red circles are there?"},
            ]
            message = {"role": "user", "content": content}
            params = SamplingParams(max_tokens=8, temperature=0)
            (output,) = llm.chat([message], params, progress=False)
            texts.append(output.outputs[0].text)
    return texts


@pytest.mark.slow
def test_the_bundled_model_sees_alike_as_gguf(tmp_path: Path) -> None:
    wanted = answers(str(bundled_model("vision")))
    assert wanted == ["1", "3"]
    assert answers(str(write_pair(tmp_path))) == wanted
