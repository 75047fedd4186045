"""Pages as images against queries, over a real socket: ColQwen 2, ColPali, ColQwen 3 and ColModernVBERT token by
token, and a model that judges pairs, each against transformers."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import safetensors.torch
import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from headrace.back.models.vlm_inside import MODERNVBERT_IMAGE, QWEN_IMAGE
from headrace.front.server.pooling.judge import TASK
from tests.api.serving import Served, serving
from tests.front.media.folders import write_processors, write_tokenizer
from tests.front.media.pictures import encoded, picture
from tests.models.media import save_media_oracle
from tests.models.test_towers import TEXT, TOWER

BOUNDS = (64, 48 * 48)
DIM = 16
SIZES = ((40, 24), (61, 43))
TEXT_SIZES = {key: value for key, value in TEXT.items() if "token_id" not in key}
TILES = {"do_image_splitting": False, "size": {"longest_edge": 64}, "resample": 1}
MODERNVBERT = (
    *("<image>", "<pad>", "[CLS]", "[SEP]", "<|begin_of_text|>", "<end_of_utterance>"),
    *("<fake_token_around_image>", "<global-img>"),
)
ROPES = {"rope_type": "default", "rope_theta": 1000.0, "mrope_section": [2, 2, 2]}


@dataclass(frozen=True)
class Late:
    """A served model, and what its oracle gives: a unit vector per token of a page or of a query."""

    name: str
    served: Served
    oracle: Any
    tokenizer: Any
    token: int

    def vectors(self, ids: list[int], image: Image.Image | None = None) -> np.ndarray:
        given: dict[str, Any] = {}
        whole = torch.tensor([ids])
        if self.name == "colpali":
            given["token_type_ids"] = torch.zeros_like(whole)
            if image is not None:
                processor = SiglipImageProcessorPil(size={"height": 16, "width": 16})
                given["pixel_values"] = processor(image, return_tensors="pt")["pixel_values"]
        elif self.name != "colmodernvbert" and image is not None:
            processor = qwen_processor(self.name)
            one = processor(image, return_tensors="pt")
            given = {"pixel_values": one["pixel_values"], "image_grid_thw": one["image_grid_thw"]}
        if self.name == "colmodernvbert" and image is not None:
            tiles = Idefics3ImageProcessorPil(**TILES, max_image_size={"longest_edge": 16})
            given["pixel_values"] = tiles([[image]], return_tensors="pt")["pixel_values"]
        model = self.oracle.vlm if self.name != "colqwen3" else self.oracle[0]
        layer = self.oracle.embedding_proj_layer if self.name != "colqwen3" else self.oracle[1]
        if "qwen" in self.name:
            given["mm_token_type_ids"] = (whole == self.token).int()
        with torch.inference_mode():
            hidden = model(input_ids=whole, attention_mask=torch.ones_like(whole), **given)[0]
            return torch.nn.functional.normalize(layer(hidden)[0], dim=-1).numpy()

    def page(self, image: Image.Image) -> np.ndarray:
        if self.name == "colmodernvbert":
            tokens = (
                f"<fake_token_around_image><global-img>{'<image>' * 4}<fake_token_around_image>"
            )
            ids = self.ids(MODERNVBERT_IMAGE.replace("<image>", tokens))
        elif self.name == "colpali":
            ids = self.ids("<image>" * 16 + "<bos>Describe the image.\n")
        else:
            count = int(qwen_processor(self.name)(image)["image_grid_thw"][0].prod()) // 4
            ids = self.ids(QWEN_IMAGE.replace("<|image_pad|>", "<|image_pad|>" * count))
        return self.vectors(ids, image)

    def query(self, text: str) -> np.ndarray:
        if self.name == "colpali":
            return self.vectors(self.ids(f"<bos>Question: {text}{'<pad>' * 10}\n"))
        if self.name == "colmodernvbert":
            return self.vectors(self.ids(f"{text}{'<end_of_utterance>' * 10}"))
        return self.vectors(self.ids(f"Query: {text}{'<|endoftext|>' * 10}\n"))

    def ids(self, text: str) -> list[int]:
        special = self.name == "colmodernvbert"
        return self.tokenizer.encode(text, add_special_tokens=special)

    def post(self, path: str, **body: Any) -> Any:
        answer = httpx.post(f"{self.served.url}{path}", json=body, timeout=300)
        assert answer.status_code == 200, answer.text
        return answer.json()


def qwen_processor(name: str) -> Any:
    size = {"shortest_edge": BOUNDS[0], "longest_edge": BOUNDS[1]}
    norm = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3} if name == "colqwen3" else {}
    return Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, size=size, **norm)


def write_late(folder: Path, name: str) -> tuple[Any, dict[str, int]]:
    """The checkpoint in one of its published layouts, and its oracle."""
    if name == "colmodernvbert":
        return write_colmodernvbert(folder)
    mark = "<image>" if name == "colpali" else "<|vision_start|><|image_pad|><|vision_end|>"
    ids = write_tokenizer(folder, mark=mark, more=("<image>", "<bos>", "<pad>"))
    text = {**TEXT_SIZES, "vocab_size": ids[""], "max_position_embeddings": 512}
    text = {**text, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    if name == "colpali":
        vision = {**TOWER, "model_type": "siglip_vision_model", "vision_use_head": False}
        vlm = {
            **{"model_type": "paligemma", "vision_config": vision, "projection_dim": 48},
            **{"text_config": {**text, "model_type": "gemma"}, "image_token_index": ids["<image>"]},
        }
        config = transformers.ColPaliConfig(vlm_config=vlm, embedding_dim=DIM)
        (folder / "preprocessor_config.json").write_text('{"size": {"height": 16, "width": 16}}')
        return save_media_oracle(transformers.ColPaliForRetrieval, config, folder), ids
    tokens = {"image_token_id": ids["<|image_pad|>"], "video_token_id": ids["<|video_pad|>"]}
    write_processors(folder, 4, BOUNDS, (64, 32 * 32))
    text["rope_parameters"] = ROPES
    if name == "colqwen2":
        vision = {"depth": 2, "embed_dim": 32, "hidden_size": 48, "num_heads": 2, "patch_size": 4}
        vlm = {"model_type": "qwen2_vl", "vision_config": vision, "text_config": text, **tokens}
        config = transformers.ColQwen2Config(vlm_config=vlm, embedding_dim=DIM)
        return save_media_oracle(transformers.ColQwen2ForRetrieval, config, folder), ids
    return write_colqwen3(folder, text, tokens), ids


def write_colmodernvbert(folder: Path) -> tuple[Any, dict[str, int]]:
    """MOD-13: an encoder, whose tokenizer puts tokens of its own around a text."""
    ids = write_tokenizer(folder, mark="<image>", more=MODERNVBERT)
    file = str(folder / "tokenizer.json")
    tokenizer = Tokenizer.from_file(file)
    around = [(one, ids[one]) for one in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=around)
    tokenizer.save(file)
    text = {
        **{"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 3},
        **{"num_attention_heads": 4, "local_attention": 8, "max_position_embeddings": 512},
        **{"vocab_size": ids[""], "model_type": "modernbert", "pad_token_id": ids["<pad>"]},
        **{"cls_token_id": None, "sep_token_id": None, "bos_token_id": None, "eos_token_id": None},
    }
    vision = {**TOWER, "model_type": "siglip_vision_model", "vision_use_head": False}
    config = transformers.ColModernVBertConfig(
        vlm_config={
            **{"model_type": "modernvbert", "text_config": text, "vision_config": vision},
            **{"image_token_id": ids["<image>"], "pixel_shuffle_factor": 2},
        },
        embedding_dim=DIM,
    )
    (folder / "preprocessor_config.json").write_text(json.dumps(TILES))
    return save_media_oracle(transformers.ColModernVBertForRetrieval, config, folder), ids


def write_colqwen3(folder: Path, text: dict[str, Any], tokens: dict[str, int]) -> Any:
    """MOD-14: bare names of the model inside, the projection under its other name, no size stated."""
    vision = {
        **{"depth": 2, "hidden_size": 32, "intermediate_size": 40, "num_heads": 2, "patch_size": 4},
        **{"out_hidden_size": 48, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
    }
    config = transformers.Qwen3VLConfig(
        vision_config=vision, text_config={**text, "head_dim": 12}, **tokens
    )
    model = save_media_oracle(transformers.Qwen3VLModel, config, folder)
    torch.manual_seed(3)
    layer = torch.nn.Linear(48, DIM)
    file = folder / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    tensors = {key.removeprefix("model."): value for key, value in tensors.items()}
    tensors |= {f"custom_text_proj.{key}": value for key, value in layer.state_dict().items()}
    safetensors.torch.save_file(tensors, file, {"format": "pt"})
    document = json.loads((folder / "config.json").read_text())
    document |= {"architectures": ["OpsColQwen3Model"], "model_type": "ops_colqwen3"}
    (folder / "config.json").write_text(json.dumps(document))
    preprocessor = folder / "preprocessor_config.json"
    facts = json.loads(preprocessor.read_text())
    preprocessor.write_text(json.dumps({**facts, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}))
    return torch.nn.ModuleList([model, layer])


@pytest.fixture(
    scope="module",
    params=[
        "colqwen2",
        pytest.param("colpali", marks=pytest.mark.slow),
        pytest.param("colmodernvbert", marks=pytest.mark.slow),
        pytest.param("colqwen3", marks=pytest.mark.slow),
    ],
)
def late(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Late]:
    name = request.param
    folder = tmp_path_factory.mktemp("late") / name
    oracle, ids = write_late(folder, name)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    options = ("--threads", "1", "--max-running", "4", "--dtype", "float32")
    token = ids["<|image_pad|>" if "qwen" in name else "<image>"]
    with serving(None, str(folder), *options) as served:
        yield Late(name, served, oracle, tokenizer, token)


def url(image: Image.Image) -> str:
    return "data:image/png;base64," + base64.b64encode(encoded(image)).decode()


def test_pages_and_queries_are_the_reference_s(late: Late) -> None:
    """MOD-14, MUL-08: unit vectors per token, MaxSim of them, the order of pages."""
    pages = [picture(*size, seed=i) for i, size in enumerate(SIZES)]
    (answer,) = late.post("/pooling", input=[{"image": url(pages[0])}])["data"]
    vectors = np.array(answer["data"])
    expected = late.page(pages[0])
    assert vectors.shape == expected.shape == (len(expected), DIM)
    assert np.abs(np.linalg.norm(vectors, axis=1) - 1).max() < 1e-5
    assert np.abs(vectors - expected).max() < 1e-4
    query = "the quick fox"
    scores = [float((late.query(query) @ late.page(page).T).max(axis=1).sum()) for page in pages]
    documents = [{"image": url(page)} for page in pages]
    scored = late.post("/score", text_1=query, text_2=documents)["data"]
    assert np.allclose([one["score"] for one in scored], scores, atol=1e-3)
    parts = [
        {"content": [{"type": "image_url", "image_url": {"url": url(page)}}]} for page in pages
    ]
    ranked = late.post("/rerank", query=query, documents=parts, top_n=1)["results"]
    (best,) = ranked
    assert best["index"] == int(np.argmax(scores)) and "multi_modal" in best["document"]


def test_what_cannot_be_embedded_is_named(late: Late) -> None:
    body = {"query": "fox", "documents": [{"content": [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
    ]}]}  # fmt: skip
    answer = httpx.post(f"{late.served.url}/rerank", json=body, timeout=300)
    assert answer.status_code == 400 and "documents[0]" in answer.json()["error"]["message"]
    two = {"type": "image_url", "image_url": {"url": url(picture(20, 20))}}
    body["documents"] = [{"content": [two, {"type": "text", "text": "and this"}]}]
    answer = httpx.post(f"{late.served.url}/rerank", json=body, timeout=300)
    assert answer.status_code == 400, answer.text
    assert "takes one image, or a text" in answer.json()["error"]["message"]


@pytest.mark.slow
def test_a_model_that_judges_pairs_and_embeds_sees_both_sides(tmp_path: Path) -> None:
    """MUL-08: Qwen3-VL's embedding and reranker, queries and documents of images and text."""
    folder = tmp_path / "judge"
    ids = write_tokenizer(folder)
    write_processors(folder, 4, BOUNDS, (64, 32 * 32))
    preprocessor = folder / "preprocessor_config.json"
    facts = json.loads(preprocessor.read_text()) | {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    preprocessor.write_text(json.dumps(facts))
    text = {**TEXT_SIZES, "vocab_size": ids[""], "max_position_embeddings": 1024, "head_dim": 12}
    vision = {
        **{"depth": 2, "hidden_size": 32, "intermediate_size": 40, "num_heads": 2, "patch_size": 4},
        **{"out_hidden_size": 48, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
    }
    config = transformers.Qwen3VLConfig(
        vision_config=vision,
        text_config={**text, "rope_parameters": ROPES, "eos_token_id": ids["<|im_end|>"]},
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        tie_word_embeddings=False,
    )
    oracle = save_media_oracle(transformers.Qwen3VLForConditionalGeneration, config, folder)
    document = json.loads((folder / "config.json").read_text())
    document["classifier_from_token"] = ["n", "y"]
    (folder / "config.json").write_text(json.dumps(document))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))

    no, yes = (tokenizer.convert_tokens_to_ids(word) for word in "ny")

    def seen(prompt: str, *images: Image.Image) -> Any:
        given: dict[str, Any] = {}
        if images:
            given = dict(qwen_processor("colqwen3")(list(images), return_tensors="pt"))
            for grid in given["image_grid_thw"]:
                prompt = prompt.replace("<|image_pad|>", "<|X|>" * (int(grid.prod()) // 4), 1)
        prompt = prompt.replace("<|X|>", "<|image_pad|>")
        whole = torch.tensor([tokenizer.encode(prompt)])
        given["mm_token_type_ids"] = (whole == ids["<|image_pad|>"]).int()
        with torch.inference_mode():
            return oracle(input_ids=whole, output_hidden_states=True, **given)

    mark = "<|vision_start|><|image_pad|><|vision_end|>"
    one, other = picture(40, 24, 1), picture(30, 50, 2)
    options = ("--threads", "1", "--max-running", "4", "--dtype", "float32")
    with serving(None, str(folder), *options) as served:
        late = Late("judge", served, oracle, tokenizer, ids["<|image_pad|>"])
        query = {"content": [{"type": "image_url", "image_url": {"url": url(one)}}]}
        documents = [{"image": url(other)}, "the lazy dog"]
        body = {"query": query, "documents": documents, "instruction": "find the fox"}
        results = late.post("/rerank", **body)["results"]
        scores = {each["index"]: each["relevance_score"] for each in results}
        for index, (shown, images) in enumerate(((mark, (one, other)), ("the lazy dog", (one,)))):
            prompt = (
                f"<|im_start|>system\n{TASK}<|im_end|>\n<|im_start|>user\n<Instruct>: find the fox"
                f"<Query>:{mark}\n<Document>:{shown}<|im_end|>\n<|im_start|>assistant\n"
            )
            logits = seen(prompt, *images).logits[0, -1]
            expected = torch.sigmoid(logits[yes] - logits[no]).item()
            assert abs(scores[index] - expected) < 1e-3, index
        messages = [
            {"role": "user", "content": [*query["content"], {"type": "text", "text": "fox"}]}
        ]
        (answer,) = late.post("/v1/embeddings", messages=messages)["data"]
        hidden = seen(f"<|im_start|>user\n{mark}fox<|im_end|>\n", one).hidden_states[-1][0, -1]
        expected = torch.nn.functional.normalize(hidden, dim=0).numpy()
        assert np.abs(np.array(answer["embedding"]) - expected).max() < 1e-4


LAYOUTS = {
    "of its authors": ("", "custom_text_proj", {}),
    "below model": ("model.", "custom_text_proj", {"embed_dim": DIM}),
    "below vlm": ("vlm.model.", "embedding_proj_layer", {"dims": DIM}),
}


@pytest.mark.slow
def test_three_layouts_of_one_checkpoint_give_the_same_vectors(tmp_path: Path) -> None:
    """REG-094: names of tensors below different prefixes, two of the projection, its size stated or not."""
    first = tmp_path / "first"
    first.mkdir()
    ids = write_tokenizer(
        first, mark="<|vision_start|><|image_pad|><|vision_end|>", more=("<pad>",)
    )
    tokens = {"image_token_id": ids["<|image_pad|>"], "video_token_id": ids["<|video_pad|>"]}
    text = {**TEXT_SIZES, "vocab_size": ids[""], "max_position_embeddings": 512, "pad_token_id": 0}
    write_processors(first, 4, BOUNDS, (64, 32 * 32))
    write_colqwen3(first, {**text, "rope_parameters": ROPES}, tokens)
    stored = safetensors.torch.load_file(first / "model.safetensors")
    config = json.loads((first / "config.json").read_text())
    found = []
    for name, (prefix, projection, size) in LAYOUTS.items():
        folder = tmp_path / name
        shutil.copytree(first, folder)
        tensors = {
            key.replace("custom_text_proj", projection) if "proj." in key and "custom" in key
            else prefix + key: value
            for key, value in stored.items()
        }  # fmt: skip
        safetensors.torch.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        (folder / "config.json").write_text(json.dumps({**config, **size}))
        with serving(None, str(folder), "--threads", "1", "--dtype", "float32") as served:
            late = Late("colqwen3", served, None, None, 0)
            pages = [{"image": url(picture(40, 24, seed=1))}, {"text": "the quick fox"}]
            found.append(
                [np.array(late.post("/pooling", input=[one])["data"][0]["data"]) for one in pages]
            )
    for other in found[1:]:
        for one, same in zip(found[0], other, strict=True):
            assert one.shape == same.shape and np.array_equal(one, same)
