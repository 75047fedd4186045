"""The two adapters that come with the bundled model: small, read as any other, and each in its manner on held-out
questions, beside each other and beside the model itself (ENG-20)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from demo.tasks import generate_eval
from demo.train_adapters import MANNERS, MODEL
from headrace import LLM, SamplingParams

FOLDER = MODEL.parent / "adapters"
TASKS = ("chat", "arithmetic", "sort")
EACH = 12
MOST_WRONG = 3


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    modules = tuple(f"{name}={FOLDER / name}" for name in MANNERS)
    with LLM(lora_modules=modules, max_lora_rank=8, device="cpu", kv_memory="256MiB") as made:
        yield made


def test_they_are_at_most_half_a_megabyte_each() -> None:
    for name in MANNERS:
        files = list(Path(FOLDER / name).iterdir())
        assert sum(file.stat().st_size for file in files) <= 500_000, files


@pytest.mark.covering(0)
@pytest.mark.parametrize("name", [*MANNERS, ""])
def test_held_out_questions_are_answered_in_its_manner(llm: LLM, name: str) -> None:
    items = [item for task in TASKS for item in generate_eval(task, EACH, seed=3)]
    prompts = [
        llm.chat_template.render(item.messages, add_generation_prompt=True) for item in items
    ]
    params = SamplingParams(max_tokens=64, temperature=0.0)
    outputs = llm.generate(prompts, params, adapter=name, progress=False)
    manner = MANNERS.get(name, str)
    wanted = [manner(str(item.reference)) for item in items]
    wrong = [
        (output.outputs[0].text, want)
        for output, want in zip(outputs, wanted, strict=True)
        if output.outputs[0].text.strip() != want.strip()
    ]
    assert len(wrong) <= MOST_WRONG, wrong
