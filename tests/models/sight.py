"""Checkpoints that see as their authors publish them, beside a reference: a decoder of transformers, or one of
tests/references, into which the rows go that the reference's eyes make of pictures."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file

from headrace.back.models.published_keys import in_common_keys
from headrace.base.config.media import MediaSpec
from headrace.base.wire.media import MediaInput
from headrace.front.media.placeholders import expanded
from headrace.front.media.preparation import _prepared
from headrace.front.media.processing import ProcessedMedia
from headrace.front.media.processors.families import PROCESSORS, read_media
from tests.models.media import IMAGE, Answer, SeeingEngine, compare_answers

BEFORE, BETWEEN, BEHIND = (5, 6, 7), (8, 9), (10, 11, 12)
Decode = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""ids [1, T] and embeddings [1, T, E] to logits [1, T, V]."""


@dataclass(frozen=True)
class Expanded:
    """A prompt with its inputs at their places."""

    ids: list[int]
    media: tuple[MediaInput, ...]


def write_checkpoint(
    folder: Path,
    tensors: Mapping[str, torch.Tensor],
    config: Mapping[str, Any],
    *,
    files: Mapping[str, Mapping[str, Any]] | None = None,
    marks: Mapping[str, int] | None = None,
) -> None:
    """`files`: more JSON files by name; `marks`: added tokens."""
    save_file(
        {n: t.detach().contiguous() for n, t in tensors.items()}, folder / "model.safetensors"
    )
    for name, keys in {"config": config, **(files or {})}.items():
        (folder / f"{name}.json").write_text(json.dumps(keys))
    added = [{"id": id, "content": mark} for mark, id in (marks or {}).items()]
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))


def read_spec(folder: Path) -> MediaSpec:
    """What launch reads of the media of a checkpoint."""
    config = in_common_keys(json.loads((folder / "config.json").read_text()))
    spec = read_media(folder, config)
    assert spec is not None
    return spec


def processed(spec: MediaSpec, pictures: Sequence[Image.Image]) -> list[ProcessedMedia]:
    """As preparation.py has them processed."""
    settings = spec.settings
    if 0 < settings.most_cut < len(pictures):
        settings = msgspec.structs.replace(settings, tiles=(1, 1))
    processor = PROCESSORS.load(spec.processor)(settings)
    return [processor.image(one) for one in pictures]


def prompt_of(
    spec: MediaSpec,
    media: Sequence[ProcessedMedia],
    encode: Callable[[str], list[int]] = list,
) -> Expanded:
    """From one mark for each picture; expanded again it stays as it is."""
    ids = list(BEFORE)
    for index in range(len(media)):
        ids += [*(BETWEEN if index else ()), spec.image_token or IMAGE]
    merge = spec.settings.merge
    prepared = [_prepared(one, "image", _digest_of(one), 0, merge) for one in media]
    ids, inputs = expanded([*ids, *BEHIND], prepared, spec, encode, field="prompt")
    assert expanded(ids, prepared, spec, encode, field="prompt") == (ids, inputs)
    return Expanded(ids, inputs)


def _digest_of(medium: ProcessedMedia) -> bytes:
    return hashlib.sha256(b"".join(one.rows.tobytes() for one in medium.inputs)).digest()


def said(
    decoder: Any,
    ids: torch.Tensor,
    rows: torch.Tensor,
    max_tokens: int,
    *,
    token: int = IMAGE,
    decode: Decode | None = None,
) -> Answer:
    """What a decoder says with these rows in the places of `token`."""
    answer = Answer()
    decode = decode or (lambda _, x: decoder(inputs_embeds=x).logits)
    with torch.inference_mode():
        x = decoder.get_input_embeddings()(ids)
        x[ids == token] = rows
        for count in range(max_tokens):
            told = decode(ids, x)[0].log_softmax(-1)
            if not count:
                answer.prompt_logprobs = list(told[:-1].numpy())
            answer.logprobs.append(told[-1].numpy())
            answer.tokens.append(int(told[-1].argmax()))
            new = torch.tensor([answer.tokens[-1:]])
            ids = torch.cat((ids, new), dim=1)
            x = torch.cat((x, decoder.get_input_embeddings()(new)), dim=1)
    return answer


def agree(
    folder: Path,
    decoder: Any,
    pictures: Sequence[Image.Image],
    rows: torch.Tensor,
    *,
    step_tokens: int = 7,
    max_tokens: int = 4,
    encode: Callable[[str], list[int]] = list,
    decode: Decode | None = None,
) -> None:
    """Our answers to pictures are the reference's, whole and in chunks that cut images; `rows`: what it makes of
    them, one behind the other."""
    spec = read_spec(folder)
    prompt = prompt_of(spec, processed(spec, pictures), encode)
    token = spec.image_token or IMAGE
    assert prompt.ids.count(token) == len(rows)
    ids = torch.tensor([prompt.ids])
    expected = said(decoder, ids, rows, max_tokens, token=token, decode=decode)
    engine = SeeingEngine(folder)
    cut = engine.with_steps(folder, max_step_tokens=step_tokens)
    for each in (engine, cut):
        compare_answers(each.run(prompt, max_tokens=max_tokens)[0], expected)
    engine.close()


def values_of(picture: Image.Image, mean: float = 0.5, std: float = 0.5) -> torch.Tensor:
    """[3, H, W], one mean and deviation for all colours."""
    channels = torch.from_numpy(np.array(picture)).permute(2, 0, 1)
    return (channels.float() / 255 - mean) / std
