"""`headrace eval`: held-out tasks of the bundled model, greedy, exact match per task.

Run it before and after any lossy change. The items are a frozen file (bench/held_out.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec

from headrace.base.wire.request import SamplingParams
from headrace.bench.held_out import EvalItem
from headrace.bench.scoring import score
from headrace.front.client.events import Delta, EngineClient, Generation
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
    engine: EngineClient, template: ChatTemplate, item: EvalItem, sampling: SamplingParams
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
    engine: EngineClient, template: ChatTemplate, items: Sequence[EvalItem], *, streams: int
) -> TaskScore:
    """Asks the items of one task (at least one), `streams` at a time."""
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
    count = len(items)
    return TaskScore(items[0].task, count - len(wrong), count, wrong[0] if wrong else None)
