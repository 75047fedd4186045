"""`bench mm-processor`: what images cost before the engine has them, in the processes of an API
server. No weights are read.

prepare_ms   reading, decoding and processing the images of a prompt
render_ms    the chat template over its messages
expand_ms    placeholders for the images among its tokens
known        the same prompts again, whose images are known by their content
"""

from __future__ import annotations

import asyncio
import base64
import io
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from headrace.base.config.resolved import TextSpec
from headrace.base.errors import ConfigError
from headrace.base.optional import require
from headrace.bench.report import percentiles
from headrace.front.media.preparation import MediaPreparer, MediaRequest
from headrace.front.text.chat import ChatTemplate
from headrace.front.text.tokenizer_files import load_tokenizer

MILLISECONDS = 1e3
STAGES = ("prepare", "render", "expand")
_GRAIN = 32
Json = dict[str, Any]


async def mm_processor(
    text: TextSpec,
    *,
    num_prompts: int,
    images: int,
    size: tuple[int, int],
    concurrency: int,
    warmup: int,
    seed: int = 0,
) -> Json:
    """Prepares `num_prompts` chats of so many images each, then the same again. `size`: width and
    height."""
    if text.media is None or text.media.image_token is None:
        raise ConfigError("bench mm-processor: the model takes no images", field="model")
    rng = np.random.default_rng(seed)
    chats = [_chat(rng, images, size) for _ in range(num_prompts)]
    tokenizer = load_tokenizer(text.tokenizer_path, chat_template=text.chat_template)
    template = ChatTemplate(tokenizer.facts.chat_template, tokenizer, max_tokens=text.max_model_len)
    media = MediaPreparer(text.media, tokenizer)
    path = _ImagePath(media, template, MediaRequest(max_tokens=text.max_model_len))
    try:
        for _ in range(warmup):
            await path.prepare(_chat(rng, images, size))
        first, first_s = await _all(path, chats, concurrency)
        again, again_s = await _all(path, chats, concurrency)
    finally:
        template.close()
        media.close()
    return {
        "prompts": num_prompts,
        "images_per_prompt": images,
        "width": size[0],
        "height": size[1],
        "concurrency": concurrency,
        "prompt_tokens": int(first[0][-1]),
        "images_per_s": num_prompts * images / first_s,
        **_spread(first),
        "known": {"images_per_s": num_prompts * images / again_s, **_spread(again)},
    }


def _chat(rng: np.random.Generator, images: int, size: tuple[int, int]) -> list[Json]:
    parts = [
        {"type": "image_url", "image_url": {"url": _picture(rng, size)}} for _ in range(images)
    ]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "Describe this."}]}]


def _picture(rng: np.random.Generator, size: tuple[int, int]) -> str:
    """A JPEG of soft spots, whose size is about a photograph's, as a data URL."""
    image = require("PIL.Image", extra="media", purpose="bench mm-processor")
    width, height = size
    grain = (max(1, height // _GRAIN), max(1, width // _GRAIN), 3)
    spots = image.fromarray(rng.integers(0, 256, grain, dtype=np.uint8))
    buffer = io.BytesIO()
    spots.resize(size, image.Resampling.BICUBIC).save(buffer, "JPEG", quality=90)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()


class _ImagePath:
    """What a chat with images goes through in an API process."""

    def __init__(self, media: MediaPreparer, template: ChatTemplate, request: MediaRequest) -> None:
        self._media = media
        self._template = template
        self._request = request

    async def prepare(self, chat: list[Json]) -> list[float]:
        """Seconds of each stage, and the prompt's tokens."""
        times = [time.perf_counter()]
        prepared = await self._media.prepare(chat, self._request)
        times.append(time.perf_counter())
        ids = await self._template.render_async(prepared.messages)
        times.append(time.perf_counter())
        ids, _ = self._media.expand(ids, prepared.media, field="messages")
        times.append(time.perf_counter())
        return [*np.diff(times), float(len(ids))]


async def _all(
    path: _ImagePath, chats: Sequence[list[Json]], concurrency: int
) -> tuple[list[list[float]], float]:
    places = asyncio.Semaphore(concurrency)

    async def one(chat: list[Json]) -> list[float]:
        async with places:
            return await path.prepare(chat)

    begin = time.perf_counter()
    rows = await asyncio.gather(*map(one, chats))
    return list(rows), time.perf_counter() - begin


def _spread(rows: list[list[float]]) -> Json:
    stages = {
        f"{name}_ms": percentiles([row[i] for row in rows], scale=MILLISECONDS)
        for i, name in enumerate(STAGES)
    }
    return {**stages, "total_ms": percentiles([sum(row[:-1]) for row in rows], scale=MILLISECONDS)}
