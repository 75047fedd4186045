"""`headrace eval`: held-out tasks of the bundled model, greedy, exact match per task.

The measuring stick for everything lossy: run it before and after. Items never occur in training; the same seed gives
the same items.
"""

from __future__ import annotations

import asyncio

import msgspec

from headrace.base.wire.params import SamplingParams
from headrace.bench.datasets.tasks import EvalItem, generate_eval, score
from headrace.front.client.events import Delta, Engine, Generation
from headrace.front.text.chat import ChatTemplate


class TaskScore(msgspec.Struct, frozen=True):
    """Right answers of one task, and the first wrong one as (question, answer)."""

    task: str
    right: int
    count: int
    first_wrong: tuple[str, str] | None

    @property
    def share(self) -> float:
        """Right answers over all."""
        return self.right / self.count


async def answer(
    engine: Engine, template: ChatTemplate, item: EvalItem, sampling: SamplingParams
) -> str:
    """The text the model gives to one item."""
    prompt = await template.render_async(
        [dict(m) for m in item.messages],
        tools=None if item.tools is None else [dict(t) for t in item.tools],
        kwargs=item.template_kwargs,
    )
    params = msgspec.structs.replace(
        sampling, max_tokens=item.max_tokens, skip_special_tokens=False
    )
    text = ""
    async for event in engine.generate(Generation(prompt_ids=prompt, params=params)):
        if isinstance(event, Delta):
            text += event.text
    return text


async def score_task(
    engine: Engine, template: ChatTemplate, task: str, *, count: int, seed: int, streams: int
) -> TaskScore:
    """Asks `count` items, `streams` at a time."""
    items = generate_eval(task, count, seed)
    gate = asyncio.Semaphore(streams)

    async def judged(item: EvalItem) -> tuple[bool, str]:
        async with gate:
            text = await answer(engine, template, item, SamplingParams(temperature=0))
        return score(item, text), text

    results = await asyncio.gather(*(judged(item) for item in items))
    wrong = [
        (str(i.messages[-1]["content"]), text)
        for i, (ok, text) in zip(items, results, strict=True)
        if not ok
    ]
    return TaskScore(task, count - len(wrong), count, wrong[0] if wrong else None)
