"""The chat template of Florence-2 against the prompts of transformers' processor."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from transformers.models.florence2.processing_florence2 import Florence2Processor

from headrace.base.errors import InvalidRequest
from headrace.front.text.chat import ChatTemplate
from headrace.front.text.florence2 import ALONE, CHAT_TEMPLATE, WITH_INPUT
from headrace.front.text.tokenizer_files import load_tokenizer
from tests.front.media.folders import write_tokenizer

PLACES = [f"<loc_{i}>" for i in (0, 52, 332, 999)]
MORE = ("<s>", "</s>", "<od>", "<cap>", *PLACES)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("model")
    write_tokenizer(folder, more=MORE)
    facts = {"bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(facts))
    one = ChatTemplate(CHAT_TEMPLATE, load_tokenizer(str(folder)))
    yield one
    one.close()


def asked(template: ChatTemplate, content: Any) -> str:
    ids = template.render([{"role": "user", "content": content}])
    text = str(template._tokenizer.decode(ids, skip_special_tokens=False))
    return text.removeprefix("<s>").removesuffix("</s>")


def reference(text: str) -> str:
    """Its own prompts stand in its constructor."""
    processor = SimpleNamespace(
        image_seq_length=1, image_token="<i>", image_token_id=1, all_special_tokens=[]
    )
    one = Florence2Processor.__new__(Florence2Processor)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Florence2Processor.__mro__[1], "__init__", lambda *_, **__: None)
        Florence2Processor.__init__(one, processor, processor)
    return str(one._construct_prompts(text)[0])


def test_tasks_are_asked_as_by_the_reference(template: ChatTemplate) -> None:
    texts = [
        *(f"<{name}>" for name in ALONE),
        *(f"<{name}> a red car" for name in WITH_INPUT),
        *(f"<{name}>{''.join(PLACES)}" for name in WITH_INPUT),
        "what is this? 1 < 2 > 0 <CAPTIONS> <loc_x>",
    ]
    for text in texts:
        assert asked(template, text) == reference(text), text


def test_places_are_tokens_and_nothing_else_of_a_text_is(template: ChatTemplate) -> None:
    tokenizer = template._tokenizer
    ids = template.render([{"role": "user", "content": "a<loc_52></s><cap><loc_999>"}])
    names = [tokenizer.decode([id], skip_special_tokens=False) for id in ids]
    assert [one for one in names if one in MORE] == ["<s>", "<loc_52>", "<loc_999>", "</s>"]


def test_a_task_that_takes_no_input_stands_alone(template: ChatTemplate) -> None:
    with pytest.raises(InvalidRequest, match="<CAPTION> stands alone"):
        asked(template, "<CAPTION> of the car")
    with pytest.raises(InvalidRequest, match="one message"):
        template.render([{"role": "user", "content": "a"}, {"role": "user", "content": "b"}])
