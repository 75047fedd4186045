"""CLIP, SigLIP and SigLIP 2 over a real socket: vectors of images and of texts are those of transformers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil
from transformers.models.siglip2.image_processing_pil_siglip2 import Siglip2ImageProcessorPil

from tests.api.serving import Served, serving
from tests.api.test_late_vision import url
from tests.front.media.folders import write_tokenizer
from tests.front.media.pictures import picture
from tests.models.media import save_media_oracle

SIZES = {
    **{"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2},
    **{"num_attention_heads": 2},
}
LONGEST = 24
SQUARE = {"height": 16, "width": 16}
TEXTS = ("the quick fox", "a mill wheel turns in the headrace", "fox")
BODY = {"encoding_format": "float", "model": None}


@dataclass(frozen=True)
class Towers:
    name: str
    served: Served
    oracle: Any
    tokenizer: Any
    processor: Any
    eos: int

    def text(self, text: str) -> np.ndarray:
        ids = self.tokenizer.encode(text)
        if "clip" not in self.name:
            ids += [self.eos] * (LONGEST - len(ids))
        with torch.inference_mode():
            return unit(self.oracle.get_text_features(input_ids=torch.tensor([ids])))

    def image(self, image: Image.Image) -> np.ndarray:
        with torch.inference_mode():
            given = self.processor(image, return_tensors="pt")
            return unit(self.oracle.get_image_features(**given))

    def vectors(self, path: str, *inputs: Any) -> np.ndarray:
        answer = httpx.post(f"{self.served.url}{path}", json={"input": list(inputs)}, timeout=300)
        assert answer.status_code == 200, answer.text
        return np.array([one.get("embedding", one.get("data")) for one in answer.json()["data"]])


SLOW = ("siglip", "siglip2", "metaclip2")


def unit(features: Any) -> np.ndarray:
    features = features if isinstance(features, torch.Tensor) else features.pooler_output
    return torch.nn.functional.normalize(features[0], dim=-1).numpy()


def write(folder: Path, name: str) -> tuple[Any, Any, int]:
    """The checkpoint, its oracle, the processor of its images and the token that ends a text."""
    ids = write_tokenizer(folder)
    eos = ids["<|vision_end|>"]
    file = str(folder / "tokenizer.json")
    tokenizer = Tokenizer.from_file(file)
    around = [(one, ids[one]) for one in ("<|im_start|>", "<|vision_end|>")]
    form = "<|im_start|> $A <|vision_end|>" if "clip" in name else "$A <|vision_end|>"
    tokenizer.post_processor = TemplateProcessing(single=form, special_tokens=around)
    tokenizer.save(file)
    text = {**SIZES, "vocab_size": ids[""], "max_position_embeddings": LONGEST}
    text |= {"eos_token_id": eos, "pad_token_id": eos, "bos_token_id": None}
    vision = {**SIZES, "image_size": 16, "patch_size": 4}
    if name == "metaclip2":
        config = transformers.MetaClip2Config(
            text_config=text, vision_config=vision, projection_dim=20
        )
        files = {"size": {"shortest_edge": 16}, "crop_size": SQUARE}
        model, processor = transformers.MetaClip2Model, CLIPImageProcessorPil(**files)
    elif name == "clip":
        config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=20)
        files = {"size": {"shortest_edge": 16}, "crop_size": SQUARE}
        model, processor = transformers.CLIPModel, CLIPImageProcessorPil(**files)
    elif name == "siglip":
        config = transformers.SiglipConfig(text_config=text, vision_config=vision)
        files = {"size": SQUARE}
        model, processor = transformers.SiglipModel, SiglipImageProcessorPil(**files)
    else:
        vision = {**SIZES, "num_patches": 36, "patch_size": 4}
        config = transformers.Siglip2Config(text_config=text, vision_config=vision)
        files = {"max_num_patches": 30, "patch_size": 4}
        model, processor = transformers.Siglip2Model, Siglip2ImageProcessorPil(**files)
    (folder / "preprocessor_config.json").write_text(json.dumps(files))
    return save_media_oracle(model, config, folder), processor, eos


@pytest.fixture(
    scope="module",
    params=["clip", *(pytest.param(one, marks=pytest.mark.slow) for one in SLOW)],
)
def towers(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Towers]:
    name = request.param
    folder = tmp_path_factory.mktemp("towers") / name
    oracle, processor, eos = write(folder, name)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    options = ("--threads", "1", "--max-running", "4", "--dtype", "float32")
    with serving(None, str(folder), *options) as served:
        yield Towers(name, served, oracle, tokenizer, processor, eos)


def test_texts_and_images_are_the_reference_s(towers: Towers) -> None:
    pictures = [picture(40, 24, 1), picture(17, 50, 2), picture(16, 16, 3)]
    images = [{"image": url(one)} for one in pictures]
    vectors = towers.vectors("/v1/embeddings", TEXTS[0], *images[:2], *TEXTS[1:], images[2])
    expected = [
        *(towers.text(TEXTS[0]), towers.image(pictures[0]), towers.image(pictures[1])),
        *(towers.text(TEXTS[1]), towers.text(TEXTS[2]), towers.image(pictures[2])),
    ]
    assert np.abs(vectors - np.stack(expected)).max() < 1e-4
    again = towers.vectors("/pooling", images[1], TEXTS[0])
    again /= np.linalg.norm(again, axis=1, keepdims=True)
    assert np.abs(again - np.stack([expected[2], expected[0]])).max() < 1e-4


def test_a_text_is_scored_against_images(towers: Towers) -> None:
    pictures = [picture(40, 24, 1), picture(17, 50, 2)]
    body = {"text_1": TEXTS[0], "text_2": [{"image": url(one)} for one in pictures]}
    answer = httpx.post(f"{towers.served.url}/score", json=body, timeout=300)
    assert answer.status_code == 200, answer.text
    scores = [one["score"] for one in answer.json()["data"]]
    expected = [float(towers.text(TEXTS[0]) @ towers.image(one)) for one in pictures]
    assert np.allclose(scores, expected, atol=1e-4)


def test_a_text_beyond_the_tower_is_refused(towers: Towers) -> None:
    body = {"input": "fox " * (2 * LONGEST)}
    answer = httpx.post(f"{towers.served.url}/v1/embeddings", json=body, timeout=300)
    assert answer.status_code == 400, answer.text
    assert str(LONGEST) in answer.json()["error"]["message"]
