"""A tiny model folder that takes images and video: a tokenizer with the tokens of vision, a chat template, configs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

TEXTS = [
    "the quick brown fox jumps over the lazy dog",
    "what is in the image? a mill wheel turns in the headrace",
    "<0.2 seconds><13.7 seconds> größe, naïve, 水車",
]
SPECIAL = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>"),
    *("<|image_pad|>", "<|video_pad|>"),
)
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part.type == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tokenizer(
    folder: Path,
    *,
    mark: str = "<|vision_start|><|image_pad|><|vision_end|>",
    more: Sequence[str] = (),
) -> dict[str, int]:
    """Writes the tokenizer with its chat template, which writes `mark` for an image; the ids of the special tokens,
    `more` among them."""
    special = [*SPECIAL, *more]
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS * 20, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    template = TEMPLATE.replace("<|vision_start|><|image_pad|><|vision_end|>", mark)
    facts = {"eos_token": "<|im_end|>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(facts))
    return {token: tokenizer.token_to_id(token) for token in special} | {
        "": tokenizer.get_vocab_size()
    }


def write_processors(
    folder: Path, patch: int, image: tuple[int, int], video: tuple[int, int]
) -> None:
    """The files of the image and the video processor."""
    for name, bounds in (("preprocessor_config", image), ("video_preprocessor_config", video)):
        size = {"shortest_edge": bounds[0], "longest_edge": bounds[1]}
        document: dict[str, Any] = {"size": size, "patch_size": patch, "merge_size": 2}
        (folder / f"{name}.json").write_text(json.dumps(document))
