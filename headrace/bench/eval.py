"""`headrace eval`: held-out tasks of the bundled models, greedy: exact match per task, and of
speech the share of words heard.

Run it before and after any lossy change. The items are a frozen file (bench/held_out.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec

from headrace.base.errors import ConfigError
from headrace.base.wire.request import SamplingParams
from headrace.bench.held_out import EvalItem
from headrace.bench.scoring import grade
from headrace.front.client.events import Delta, EngineClient, Events, Generation
from headrace.front.client.speech_request import SpeechRequest
from headrace.front.client.transcription import SpeechModel
from headrace.front.media.preparation import MediaPreparer, MediaRequest
from headrace.front.text.chat import ChatTemplate
from headrace.front.text.media_parts import has_media

GREEDY = SamplingParams(temperature=0)


class TaskScore(msgspec.Struct, frozen=True):
    """Right answers (or words) of one task, and the first wrong one as (question, answer)."""

    task: str
    right: int
    count: int
    first_wrong: tuple[str, str] | None

    @property
    def share(self) -> float:
        """Right answers over all."""
        return self.right / self.count


class Questioner:
    """Asks a model items. `media` and `speech`: of one that sees, and of one that hears."""

    def __init__(
        self,
        engine: EngineClient,
        template: ChatTemplate,
        *,
        media: MediaPreparer | None = None,
        speech: SpeechModel | None = None,
    ) -> None:
        self._engine, self._template = engine, template
        self._media, self._speech = media, speech

    async def answer(self, item: EvalItem) -> str:
        """The text the model gives to one item."""
        return await (self._written(item) if item.audio else self._answered(item))

    async def _answered(self, item: EvalItem) -> str:
        messages, media = [dict(m) for m in item.messages], ()
        prepared = None
        if has_media(messages):
            if self._media is None:
                raise ConfigError(f"the items of {item.task} show images, and the model sees none")
            prepared = await self._media.prepare(messages, MediaRequest())
            messages = prepared.messages
        prompt = await self._template.render_async(
            messages,
            tools=None if item.tools is None else [dict(t) for t in item.tools],
            kwargs=item.template_kwargs,
        )
        if prepared is not None and self._media is not None:
            prompt, media = self._media.expand(prompt, prepared.media, field="messages")
        params = msgspec.structs.replace(
            GREEDY, max_tokens=item.max_tokens, skip_special_tokens=False
        )
        text = ""
        generation = Generation(prompt_ids=prompt, params=params, media=media)
        async for event in self._engine.generate(generation):
            if isinstance(event, Delta):
                text += event.text
        return text

    async def _written(self, item: EvalItem) -> str:
        """What is heard in the item's file."""
        if self._speech is None:
            raise ConfigError(f"the items of {item.task} are speech, and the model hears none")

        def ask(ids: list[int], params: SamplingParams, heard: bytes) -> Events:
            return self._engine.generate(Generation(prompt_ids=ids, params=params, encoder=heard))

        samples, text = await self._speech.read(item.audio), ""
        async for window in self._speech.windows(samples):
            request = SpeechRequest(language=item.language)
            text += (await self._speech.hear(window, request, item.language, ask)).text
        return text


async def score_task(
    questioner: Questioner, items: Sequence[EvalItem], *, streams: int
) -> TaskScore:
    """Asks the items of one task (at least one), `streams` at a time."""
    gate = asyncio.Semaphore(streams)

    async def answered(item: EvalItem) -> str:
        async with gate:
            return await questioner.answer(item)

    answers = await asyncio.gather(*(answered(item) for item in items))
    grades = [grade(item, text) for item, text in zip(items, answers, strict=True)]
    wrong = [
        (item.question, text)
        for item, text, (right, count) in zip(items, answers, grades, strict=True)
        if right < count
    ]
    return TaskScore(
        items[0].task,
        sum(one.right for one in grades),
        sum(one.count for one in grades),
        wrong[0] if wrong else None,
    )
