"""A tiny random model that sees, served, with transformers as its oracle."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import torch
import transformers
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tests.api.clients import openai_client
from tests.api.serving import Served, _started
from tests.front.media.folders import write_processors, write_tokenizer
from tests.models.media import save_media_oracle

IMAGE_BOUNDS, VIDEO_BOUNDS = (64, 48 * 48), (64, 32 * 32)
MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
NUM_TOKENS = 8


@dataclass(frozen=True)
class Seeing:
    """A served model and its oracle."""

    folder: Path
    oracle: Any
    ids: dict[str, int]
    served: Served
    client: openai.OpenAI

    def ask(self, *parts: Any, **more: Any) -> Any:
        return self.client.chat.completions.create(
            model=self.folder.name,
            messages=[{"role": "user", "content": list(parts)}],
            max_tokens=NUM_TOKENS,
            temperature=0,
            **more,
        )

    def processed(self, images: list[Image.Image]) -> Any:
        """What transformers' processor makes of them."""
        size = {"shortest_edge": IMAGE_BOUNDS[0], "longest_edge": IMAGE_BOUNDS[1]}
        processor = Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, size=size)
        return processor(images, return_tensors="pt")

    def answer(self, prompt: str, images: list[Image.Image], video: Any = None) -> str:
        """What transformers answers to a prompt with one placeholder for each medium."""
        more: dict[str, Any] = {}
        tokenizer = transformers.PreTrainedTokenizerFast(
            tokenizer_file=str(self.folder / "tokenizer.json")
        )
        if images:
            more |= self.processed(images)
            for grid in more["image_grid_thw"]:
                prompt = prompt.replace("<|image_pad|>", "<|X|>" * (int(grid.prod()) // 4), 1)
            prompt = prompt.replace("<|X|>", "<|image_pad|>")
        if video is not None:
            (one,) = video.inputs
            rows = torch.from_numpy(one.rows.copy()).float().reshape(-1, 3, 2 * 16) / 255
            rows = (rows - torch.tensor(MEAN)[:, None]) / torch.tensor(STD)[:, None]
            more["pixel_values_videos"] = rows.reshape(len(rows), -1)
            more["video_grid_thw"] = torch.tensor([one.grid])
            more["second_per_grid_ts"] = torch.tensor([one.step_s])
            count = one.grid[0] * one.grid[1] * one.grid[2] // 4
            prompt = prompt.replace("<|video_pad|>", "<|video_pad|>" * count)
        ids = torch.tensor([tokenizer.encode(prompt)])
        kinds = (ids == self.ids["<|image_pad|>"]) + 2 * (ids == self.ids["<|video_pad|>"])
        with torch.inference_mode():
            whole = self.oracle.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                mm_token_type_ids=kinds,
                max_new_tokens=NUM_TOKENS,
                do_sample=False,
                **more,
            )
        return tokenizer.decode(whole[0, ids.shape[1] :], skip_special_tokens=True)


def _config(ids: dict[str, int]) -> Any:
    ropes = {"rope_type": "default", "rope_theta": 1000.0, "mrope_section": [2, 2, 2]}
    text = {
        "vocab_size": ids[""],
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "bos_token_id": None,
        "eos_token_id": ids["<|im_end|>"],
        "rope_parameters": ropes,
    }
    vision = {
        **{"num_heads": 2, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2},
        **{"depth": 3, "hidden_size": 32, "intermediate_size": 40, "out_hidden_size": 48},
        **{"window_size": 16, "fullatt_block_indexes": [1], "tokens_per_second": 2},
    }
    return transformers.Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=False,
    )


def write_seeing(folder: Path) -> tuple[Any, dict[str, int]]:
    """The model in `folder`; its oracle, and the ids of its special tokens."""
    ids = write_tokenizer(folder)
    oracle = save_media_oracle(
        transformers.Qwen2_5_VLForConditionalGeneration, _config(ids), folder
    )
    oracle.generation_config.eos_token_id = ids["<|im_end|>"]
    write_processors(folder, 4, IMAGE_BOUNDS, VIDEO_BOUNDS)
    return oracle, ids


@contextmanager
def served_seeing(folder: Path, *more: str, **environment: str) -> Iterator[Seeing]:
    """The model, served on the CPU."""
    oracle, ids = write_seeing(folder)
    options = ("--dtype", "float32", "--device", "cpu", "--kv-blocks", "256", "--max-running", "4")
    served = _started(str(folder), *options, *more, **environment)
    try:
        served.wait_ready()
        with openai_client(served.url) as client:
            yield Seeing(folder, oracle, ids, served, client)
    finally:
        served.close()


def url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def image(data: bytes, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url(data), **more}}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


SEEN = "<|vision_start|><|image_pad|><|vision_end|>"


def chat(content: str) -> str:
    return f"<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n"
