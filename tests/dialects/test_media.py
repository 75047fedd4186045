"""Images and documents in every dialect, by its own client (MUL-05): the answer is transformers'."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from typing import Any

import cohere
import numpy as np
import openai
import pytest
import torch

from headrace import LLM, SamplingParams
from tests.api.clients import anthropic, anthropic_client, openai_client
from tests.e2e.seeing import NUM_TOKENS, SEEN, Seeing, chat, served_seeing, url
from tests.front.media.pictures import encoded, picture

KEY = "media-key-1"
SIZE = (40, 24)
DATA = encoded(picture(*SIZE))
BASE64 = base64.b64encode(DATA).decode()
QUESTION = "what is in the image?"
SHEETS = [picture(40, 40, 1), picture(40, 40, 2)]
PDF = encoded(SHEETS[0], "PDF", save_all=True, append_images=SHEETS[1:], resolution=144.0)
PDF64 = base64.b64encode(PDF).decode()


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seeing]:
    folder = tmp_path_factory.mktemp("dialects") / "seeing"
    cache = str(tmp_path_factory.mktemp("cache"))
    options = ("--api-keys", KEY, "--enable-mm-embeds")
    with served_seeing(folder, *options, HEADRACE_CACHE_DIR=cache) as seeing:
        yield seeing


@pytest.fixture(scope="module")
def gpt(seeing: Seeing) -> Iterator[openai.OpenAI]:
    with openai_client(seeing.served.url, KEY) as client:
        yield client


@pytest.fixture(scope="module")
def claude(seeing: Seeing) -> Iterator[anthropic.Anthropic]:
    with anthropic_client(seeing.served.url, KEY) as client:
        yield client


@pytest.fixture(scope="module")
def expected(seeing: Seeing) -> str:
    return seeing.answer(chat(SEEN + QUESTION), [picture(*SIZE)])


@pytest.fixture(scope="module")
def file_id(gpt: openai.OpenAI) -> str:
    return gpt.files.create(file=("a.png", io.BytesIO(DATA)), purpose="vision").id


def respond(gpt: openai.OpenAI, *parts: Any) -> str:
    answer = gpt.responses.create(
        model="seeing",
        input=[{"role": "user", "content": list(parts)}],
        max_output_tokens=NUM_TOKENS,
        temperature=0,
        store=False,
    )
    return answer.output_text


def test_responses_take_images_by_url_and_by_file(
    gpt: openai.OpenAI, file_id: str, expected: str
) -> None:
    words = {"type": "input_text", "text": QUESTION}
    for image in (
        {"image_url": url(DATA), "detail": "auto"},
        {"file_id": file_id, "detail": "high"},
    ):
        assert respond(gpt, {"type": "input_image", **image}, words) == expected
    by_file = {"type": "input_file", "filename": "a.png", "file_data": url(DATA)}
    assert respond(gpt, by_file, words) == expected


def test_responses_take_the_pages_of_a_pdf(seeing: Seeing, gpt: openai.OpenAI) -> None:
    words = {"type": "input_text", "text": QUESTION}
    data = f"data:application/pdf;base64,{PDF64}"
    answer = respond(gpt, {"type": "input_file", "filename": "a.pdf", "file_data": data}, words)
    assert answer
    ident = gpt.files.create(file=("a.pdf", io.BytesIO(PDF)), purpose="user_data").id
    assert respond(gpt, {"type": "input_file", "file_id": ident}, words) == answer


def test_chats_take_vectors_in_place_of_an_image(
    seeing: Seeing, gpt: openai.OpenAI, expected: str
) -> None:
    """Those that transformers' tower gives."""
    inputs = seeing.processed([picture(*SIZE)])
    grid = inputs["image_grid_thw"]
    with torch.inference_mode():
        given = seeing.oracle.model.get_image_features(inputs["pixel_values"], grid).pooler_output
    vectors = torch.cat(tuple(given)).numpy()

    def ask(vectors: np.ndarray) -> str | None:
        data = io.BytesIO()
        np.save(data, vectors, allow_pickle=False)
        sent = {"data": base64.b64encode(data.getvalue()).decode(), "grid": grid[0].tolist()}
        words = {"type": "text", "text": QUESTION}
        content: list[Any] = [{"type": "image_embeds", "image_embeds": sent}, words]
        answer = gpt.chat.completions.create(
            model="seeing",
            messages=[{"role": "user", "content": content}],
            max_tokens=NUM_TOKENS,
            temperature=0,
        )
        return answer.choices[0].message.content

    assert ask(vectors) == expected
    with pytest.raises(openai.BadRequestError, match=r"vectors of 47 numbers; .* have 48"):
        ask(vectors[:, :-1])
    with pytest.raises(openai.BadRequestError, match=r"num_tokens is 14, .* send the grid"):
        ask(vectors[:-1])


def converse(claude: anthropic.Anthropic, *blocks: Any) -> str:
    message = claude.messages.create(
        model="seeing",
        max_tokens=NUM_TOKENS,
        extra_body={"temperature": 0},
        messages=[{"role": "user", "content": list(blocks)}],
    )
    return "".join(block.text for block in message.content if block.type == "text")


def test_messages_take_images_by_base64_url_and_file(
    claude: anthropic.Anthropic, file_id: str, expected: str
) -> None:
    words = {"type": "text", "text": QUESTION}
    for source in (
        {"type": "base64", "media_type": "image/png", "data": BASE64},
        {"type": "url", "url": url(DATA)},
        {"type": "file", "file_id": file_id},
    ):
        assert converse(claude, {"type": "image", "source": source}, words) == expected
    count = claude.messages.count_tokens(
        model="seeing",
        messages=[
            {"role": "user", "content": [
                {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": BASE64}},
                words,
            ]}
        ],
    )  # fmt: skip
    assert count.input_tokens > 15
    with pytest.raises(anthropic.BadRequestError, match=r"source.type: 'ftp' given"):
        converse(claude, {"type": "image", "source": {"type": "ftp"}}, words)
    with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\].content\[0\]"):
        converse(claude, {"type": "image", "source": {"type": "url", "url": "http://a.example/"}})


def test_messages_take_documents_and_results_with_images(
    claude: anthropic.Anthropic, seeing: Seeing
) -> None:
    source = {"type": "base64", "media_type": "application/pdf", "data": PDF64}
    assert converse(claude, {"type": "document", "source": source, "title": "A"})
    image = {
        "type": "image",
        "source": {"type": "base64", "media_type": "image/png", "data": BASE64},
    }
    content = {"type": "content", "content": [{"type": "text", "text": "fox"}, image]}
    assert converse(claude, {"type": "document", "source": content})
    message = claude.messages.create(
        model="seeing",
        max_tokens=NUM_TOKENS,
        extra_body={"temperature": 0},
        tools=[{"name": "see", "input_schema": {"type": "object"}}],
        messages=[
            {"role": "user", "content": "look"},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "see", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": [image]}]},
        ],
    )  # fmt: skip
    prompt = f"<|im_start|>user\nlook<|im_end|>\n<|im_start|>assistant\n<|im_end|>\n<|im_start|>tool\n{SEEN}<|im_end|>"
    prompt += "\n<|im_start|>assistant\n"
    expected = seeing.answer(prompt, [picture(*SIZE)])
    assert "".join(b.text for b in message.content if b.type == "text") == expected


def test_cohere_takes_image_urls(seeing: Seeing, expected: str) -> None:
    with cohere.ClientV2(api_key=KEY, base_url=seeing.served.url) as client:
        answer = client.chat(
            model="seeing",
            temperature=0,
            max_tokens=NUM_TOKENS,
            messages=[
                {
                    "role": "user",
                    "content": [
                        {"type": "image_url", "image_url": {"url": url(DATA)}},
                        {"type": "text", "text": QUESTION},
                    ],
                }
            ],
        )
    assert answer.message.content is not None and answer.message.content[0].text == expected


def test_images_beside_the_content_stand_before_it(
    seeing: Seeing, gpt: openai.OpenAI, expected: str
) -> None:
    """As Ollama's clients send them: base64 without a data URL."""
    message: Any = {"role": "user", "content": QUESTION, "images": [BASE64]}
    answer = gpt.chat.completions.create(
        model="seeing", messages=[message], max_tokens=NUM_TOKENS, temperature=0
    )
    assert answer.choices[0].message.content == expected
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.model_dump()["image_tokens"] == 15


def test_scripts_hand_over_images(seeing: Seeing, expected: str) -> None:
    """MOD-15: as a conversation, as text with a placeholder, as ids with all of them. REG-051."""
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0)
    prompt = chat(SEEN + QUESTION)
    image = picture(*SIZE)
    with LLM(str(seeing.folder), dtype="float32", device="cpu", kv_blocks=256) as llm:
        parts = [{"type": "image_pil", "image_pil": image}, {"type": "text", "text": QUESTION}]
        spoken = llm.chat([{"role": "user", "content": parts}], params, progress=False)
        assert spoken[0].text == expected
        for data in (image, DATA, [image], url(DATA)):
            written = llm.generate(
                {"prompt": prompt, "multi_modal_data": {"image": data}}, params, progress=False
            )
            assert written[0].text == expected and written[0].prompt == prompt
            assert written[0].prompt_ids == spoken[0].prompt_ids
        ids = spoken[0].prompt_ids
        numbered = llm.generate(
            [{"prompt_token_ids": ids, "multi_modal_data": {"image": image}}],
            params,
            progress=False,
        )
        assert numbered[0].text == expected and numbered[0].prompt_ids == ids
