"""Molmo 1 (MOD-02), which transformers has no class for: an independent reference of its eyes and its squares, before
Qwen 2 and OLMo 2 under its names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from headrace.base.errors import CheckpointError
from headrace.front.media.placeholders import expanded
from headrace.front.media.preparation import _prepared
from headrace.front.media.processors.molmo import tiling
from tests.front.media.pictures import picture
from tests.models.oracle import load_ours, model_spec, randomize
from tests.models.sight import agree, processed, prompt_of, read_spec, write_checkpoint
from tests.models.test_towers import TEXT
from tests.references import molmo

MARKS = {
    **{"<im_patch>": 121, "<im_start>": 122, "<im_end>": 123, "<im_col>": 124, "<|image|>": 125},
    "<|endoftext|>": 2,
}
VISION: dict[str, Any] = {
    **{"image_default_input_size": [48, 48], "image_patch_size": 4, "image_emb_dim": 16},
    **{"image_num_heads": 2, "image_mlp_dim": 24, "image_num_layers": 9},
}
"""Squares of 12 x 12 patches, 4 apart."""
KEYS = {
    "Qwen2": {"qkv_bias": True},
    "Olmo2": {"attention_layer_norm": True, "norm_after": True},
}


def encode(text: str) -> list[int]:
    ids = []
    while text:
        mark = next(one for one in MARKS if text.startswith(one))
        ids.append(MARKS[mark])
        text = text[len(mark) :]
    return ids


def olmo_names(tensors: dict[str, torch.Tensor], layers: int) -> dict[str, torch.Tensor]:
    """As Molmo's checkpoints have a decoder of transformers."""
    at = "model.transformer"
    names = {"embed_tokens": "wte.embedding", "norm": "ln_f.weight"}
    found = {f"{at}.{new}": tensors[f"model.{old}.weight"] for old, new in names.items()}
    found[f"{at}.ff_out.weight"] = tensors["lm_head.weight"]
    for i in range(layers):
        old, new = f"model.layers.{i}.", f"{at}.blocks.{i}."
        part = {n.removeprefix(old): t for n, t in tensors.items() if n.startswith(old)}
        for kind in ("weight", "bias"):
            if f"self_attn.q_proj.{kind}" in part:
                qkv = [part[f"self_attn.{one}_proj.{kind}"] for one in "qkv"]
                found[f"{new}att_proj.{kind}"] = torch.cat(qkv)
        ups = [part[f"mlp.{one}_proj.weight"] for one in ("up", "gate")]
        found[f"{new}ff_proj.weight"] = torch.cat(ups)
        found[f"{new}ff_out.weight"] = part["mlp.down_proj.weight"]
        found[f"{new}attn_out.weight"] = part["self_attn.o_proj.weight"]
        after = "post_feedforward_layernorm.weight" in part
        first = "post_attention" if after else "input"
        second = "post_feedforward" if after else "post_attention"
        found[f"{new}attn_norm.weight"] = part[f"{first}_layernorm.weight"]
        found[f"{new}ff_norm.weight"] = part[f"{second}_layernorm.weight"]
        for one in ("q_norm", "k_norm"):
            if f"self_attn.{one}.weight" in part:
                found[f"{new}{one}.weight"] = part[f"self_attn.{one}.weight"]
    return found


def checkpoint(folder: Path, kind: str = "Qwen2", **keys: Any) -> tuple[Any, molmo.Eyes]:
    text = transformers.AutoConfig.for_model(kind.lower(), **{**TEXT, "tie_word_embeddings": False})
    text._attn_implementation = "eager"
    torch.manual_seed(5)
    decoder = getattr(transformers, f"{kind}ForCausalLM")(text).eval()
    eyes = molmo.Eyes(VISION, text.hidden_size, text.intermediate_size).eval()
    randomize(decoder)
    randomize(eyes, seed=7)
    tensors = olmo_names(decoder.state_dict(), text.num_hidden_layers)
    more = torch.randn(128, text.hidden_size)
    tensors["model.transformer.wte.new_embedding"] = more
    tensors |= {f"model.vision_backbone.{n}": t for n, t in eyes.state_dict().items()}
    table = torch.cat((decoder.model.embed_tokens.weight.data, more))
    decoder.model.embed_tokens = torch.nn.Embedding.from_pretrained(table)
    config = {
        **{"architectures": ["MolmoForCausalLM"], "model_type": "molmo", "layer_norm_type": "rms"},
        **{"hidden_size": text.hidden_size, "intermediate_size": 2 * text.intermediate_size},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2},
        **{"vocab_size": text.vocab_size, "embedding_size": text.vocab_size},
        **{"layer_norm_eps": text.rms_norm_eps, "rope_theta": text.rope_parameters["rope_theta"]},
        **{"max_position_embeddings": 512, "vision_backbone": VISION, **KEYS[kind], **keys},
    }
    files = {"preprocessor_config": {"max_crops": 6}}
    files["tokenizer_config"] = {"bos_token": None, "eos_token": "<|endoftext|>"}
    write_checkpoint(folder, tensors, config, files=files, marks=MARKS)
    return decoder, eyes


def fitted(one: Image.Image, height: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    scale = min(height / one.height, width / one.width)
    high, wide = int(one.height * scale), int(one.width * scale)
    top, left = (height - high) // 2, (width - wide) // 2
    whole, seen = np.zeros((height, width, 3)), np.zeros((height, width), bool)
    small = np.asarray(one.resize((wide, high), Image.Resampling.BILINEAR)) / 255
    whole[top : top + high, left : left + wide] = small
    seen[top : top + high, left : left + wide] = True
    return whole, seen


@pytest.mark.parametrize("kind", ["Qwen2", pytest.param("Olmo2", marks=pytest.mark.slow)])
def test_pictures_are_seen_as_by_the_reference(kind: str, tmp_path: Path) -> None:
    """The first is 2 x 3 squares, the second one: both with black beside it."""
    decoder, eyes = checkpoint(tmp_path, kind)
    table, rows = decoder.model.embed_tokens.weight, []
    pictures = [picture(78, 50, 0), picture(40, 45, 1)]
    with torch.inference_mode():
        for one, (down, across) in zip(pictures, ((2, 3), (1, 1)), strict=True):
            small, _ = fitted(one, 48, 48)
            large, seen = fitted(one, 32 + 16 * down, 32 + 16 * across)
            rows.append(eyes(small, large, seen) + table[MARKS["<im_patch>"]])

    def decode(_: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = decoder(inputs_embeds=x).logits
        return torch.nn.functional.pad(logits, (0, 128), value=-1e30)

    rows_MF = torch.cat(rows)
    agree(tmp_path, decoder, pictures, rows_MF, encode=encode, decode=decode, step_tokens=17)


def test_images_of_messages_stand_before_all_text(tmp_path: Path) -> None:
    checkpoint(tmp_path)
    spec = read_spec(tmp_path)
    media = processed(spec, [picture(40, 45, 1)])
    marked = prompt_of(spec, media, encode).ids
    assert marked[3:6] == [122, 121, 121] and marked.count(124) == 12 and marked.count(121) == 72
    prepared = [_prepared(media[0], "image", b"", 0, 2)]
    for ids in ([7, 8, 9], [2, 7, 8, 9]):  # the text's own beginning is not written twice
        whole, (first, second) = expanded(ids, prepared, spec, encode, field="prompt")
        assert whole == [2, *marked[3:-3], 7, 8, 9]
        assert (first.offset, second.offset) == (2, 46)


@pytest.mark.parametrize(
    ("height", "width", "squares"),
    [(10, 10, (1, 1)), (16, 17, (1, 2)), (33, 30, (3, 2)), (500, 40, (6, 1)), (90, 100, (2, 3))],
)
def test_a_picture_gets_the_squares_that_enlarge_it_least(
    height: int, width: int, squares: tuple[int, int]
) -> None:
    assert tiling(height, width, 16, 6) == squares


@pytest.mark.parametrize(
    ("file", "key", "value"),
    [
        ("preprocessor_config", "overlap_margins", [2, 2]),
        ("preprocessor_config", "max_crops", 50),
        ("config", "layer_norm_type", "default"),
    ],
)
def test_what_is_not_read_is_refused_by_key(
    file: str, key: str, value: Any, tmp_path: Path
) -> None:
    checkpoint(tmp_path, **({key: value} if file == "config" else {}))
    if file != "config":
        (tmp_path / f"{file}.json").write_text(f'{{"{key}": {value}}}')
    with pytest.raises(CheckpointError) as caught:
        read_spec(tmp_path)
        load_ours(model_spec(tmp_path))
    assert caught.value.field == key
