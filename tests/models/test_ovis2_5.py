"""Ovis 2.5 and 2.6 (MOD-15), which transformers has no class for, against an independent reference around the decoder
that it does have: sizes, placeholders of prompts as text and as ids, images, a clip."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from safetensors.torch import save_file

from headrace.front.media.placeholders import expanded
from headrace.front.media.preparation import _prepared
from headrace.front.media.processing import Sampling
from headrace.front.media.processors.families import PROCESSORS, read_media
from tests.front.media.pictures import picture
from tests.models.media import Answer, SeeingEngine, compare_answers
from tests.models.oracle import randomize
from tests.models.test_pictures import BEFORE, BEHIND, BETWEEN, Ready, _digest_of
from tests.models.test_towers import TEXT, TOWER
from tests.references import ovis2_5

IMAGE, VIDEO, MARK = 100, 101, 102
WORDS = 30
LEAST, MOST = 400, 1600
VISION: dict[str, Any] = {
    **{**TOWER, "model_type": "siglip2_navit", "image_size": 24, "num_patches": -1},
    **{"hidden_stride": 2, "window_size": 16, "fullatt_block_indexes": "1", "use_rope": True},
    **{"temporal_patch_size": 1, "preserve_original_pe": True},
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
CASES = {
    "ovis2.5": ("Ovis2_5", "ovis2_5", "Qwen3", {}, VISION),
    "ovis2.6-moe": (
        "Ovis2_6_MoeForCausalLM", "ovis2_6_moe", "Qwen3Moe", {**EXPERTS, "norm_topk_prob": True},
        {**VISION, "fullatt_block_indexes": None},
    ),
}  # fmt: skip


class Reference(torch.nn.Module):
    def __init__(self, decoder: str, text: dict[str, Any], vision: dict[str, Any]) -> None:
        super().__init__()
        settings = getattr(transformers, f"{decoder}Config")(**text, tie_word_embeddings=False)
        settings._attn_implementation = "eager"
        self.llm = getattr(transformers, f"{decoder}ForCausalLM")(settings)
        self.eyes = ovis2_5.Eyes(vision, WORDS, text["hidden_size"])

    def tensors(self) -> dict[str, torch.Tensor]:
        stored = {name: one for name, one in self.state_dict().items() if ".experts." not in name}
        for index, layer in enumerate(self.llm.model.layers):
            experts = getattr(layer.mlp, "experts", None)
            for i in range(0 if experts is None else len(experts.down_proj)):
                at = f"llm.model.layers.{index}.mlp.experts.{i}"
                gate, up = experts.gate_up_proj[i].chunk(2)
                parts = {"gate_proj": gate, "up_proj": up, "down_proj": experts.down_proj[i]}
                stored |= {f"{at}.{name}.weight": one for name, one in parts.items()}
        return {name.removeprefix("eyes."): one.contiguous() for name, one in stored.items()}

    def answer(self, ids: list[int], clips: Sequence[Any], kind: str, max_tokens: int) -> Answer:
        ids, count, logprobs = list(ids), len(ids), torch.empty(0)
        seen = torch.cat([self.eyes(values_of(frames), kind) for frames in clips])
        for _ in range(max_tokens):
            embedded = self.llm.get_input_embeddings()(torch.tensor(ids))
            places = [i for i, token in enumerate(ids[:count]) if token == IMAGE]
            embedded[places] = seen
            logprobs = self.llm(inputs_embeds=embedded[None]).logits[0].log_softmax(-1)
            ids.append(int(logprobs[-1].argmax()))
        rows = list(logprobs.numpy())
        return Answer(
            tokens=ids[count:], prompt_logprobs=rows[: count - 1], logprobs=rows[count - 1 :]
        )


def values_of(frames: Sequence[Image.Image]) -> torch.Tensor:
    """As the published processor gives them."""
    width, height = frames[0].size
    high, wide = ovis2_5.size_of(height, width, 8, LEAST, MOST)
    small = [one.resize((wide, high), Image.Resampling.BICUBIC) for one in frames]
    values = torch.from_numpy(np.stack([np.asarray(one) for one in small])).permute(0, 3, 1, 2)
    return (values.float() / 255 - 0.5) / 0.5


def checkpoint(folder: Path, name: str) -> tuple[Reference, dict[str, Any]]:
    architecture, kind, decoder, more, vision = CASES[name]
    text = {**TEXT, **more}
    torch.manual_seed(5)
    reference = Reference(decoder, text, vision).eval()
    randomize(reference)
    save_file(reference.tensors(), folder / "model.safetensors")
    types = {"Qwen3": "qwen3", "Qwen3Moe": "qwen3_moe"}
    config = {
        **{"architectures": [architecture], "model_type": kind, "visual_vocab_size": WORDS},
        **{"hidden_size": text["hidden_size"], "vit_config": vision, "tie_word_embeddings": False},
        "llm_config": {**text, "model_type": types[decoder]},
    }
    (folder / "config.json").write_text(json.dumps(config))
    bounds = {"min_pixels": LEAST, "max_pixels": MOST, "image_mean": [0.5] * 3}
    (folder / "preprocessor_config.json").write_text(json.dumps({**bounds, "image_std": [0.5] * 3}))
    marks = {"<|image_pad|>": IMAGE, "<|video_pad|>": VIDEO, "<image>": MARK}
    added = [{"id": id, "content": mark} for mark, id in marks.items()]
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    return reference, config


@pytest.mark.parametrize("name", ["ovis2.5", pytest.param("ovis2.6-moe", marks=pytest.mark.slow)])
@torch.inference_mode()
def test_images_and_clips_are_seen_as_by_the_reference(name: str, tmp_path: Path) -> None:
    reference, config = checkpoint(tmp_path, name)
    spec = read_media(tmp_path, config)
    assert spec is not None and spec.image_token == IMAGE and spec.video_token == VIDEO
    processor = PROCESSORS.load(spec.processor)(spec.settings)
    pictures = [picture(*size, seed) for seed, size in enumerate(((40, 24), (17, 50), (5, 90)))]
    clip = [picture(40, 24, seed) for seed in range(3)]
    media = [processor.image(one) for one in pictures]
    medium = processor.video(iter(clip), range(3), Sampling(3, 2.0))
    engine = SeeingEngine(tmp_path)
    cut = engine.with_steps(tmp_path, max_step_tokens=7)

    def ready(prompt: list[int], kind: str, given: list[Any]) -> Ready:
        prepared = [_prepared(one, kind, _digest_of(one), 0, 2) for one in given]
        ids, inputs = expanded(prompt, prepared, spec, list, field="prompt")
        again, same = expanded(ids, prepared, spec, list, field="prompt")
        assert (again, same) == (ids, inputs)
        return Ready(ids, inputs)

    def prompt_of(mark: int) -> list[int]:
        return [*BEFORE, mark, *BETWEEN, mark, *BETWEEN, mark, *BEHIND]

    seen = ready(prompt_of(IMAGE), "image", media)
    assert seen == ready(prompt_of(MARK), "image", media)
    expected = reference.answer(seen.ids, [[one] for one in pictures], "image", 4)
    for each in (engine, cut):
        compare_answers(each.run(seen, max_tokens=4)[0], expected)
    moving = ready([*BEFORE, VIDEO, *BEHIND], "video", [medium])
    expected = reference.answer(moving.ids, [clip], "video", 4)
    for each in (engine, cut):
        compare_answers(each.run(moving, max_tokens=4)[0], expected)
    engine.close()


def test_sizes_are_the_reference_s(tmp_path: Path) -> None:
    _, config = checkpoint(tmp_path, "ovis2.5")
    spec = read_media(tmp_path, config)
    assert spec is not None
    processor = PROCESSORS.load(spec.processor)(spec.settings)
    for width, height in ((1, 1), (7, 9), (300, 200), (1, 5), (33, 31), (90, 17), (1700, 8)):
        high, wide = ovis2_5.size_of(height, width, 8, LEAST, MOST)
        if not high or not wide:
            continue
        (one,) = processor.image(picture(width, height, 1)).inputs
        assert one.grid == (1, high // 4, wide // 4), (width, height)
        assert one.num_tokens == high * wide // 64 + 2
