"""The small bundled models answer right through the real server and OpenAI's client: what is to be seen, what is to be
heard, and what passes through experts, latent attention and recurrent states."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator

import httpx
import openai
import pytest
from PIL import Image, ImageDraw, ImageFont

from headrace.bench.held_out import HEARD, OF_DEMO, read_items
from headrace.bench.scoring import grade, score
from tests.api.clients import openai_client
from tests.api.serving import serving

SIDE = 160


@pytest.fixture(scope="module")
def eye() -> Iterator[openai.OpenAI]:
    with serving(None, "--demo", "vision", "--threads", "1") as served:
        with openai_client(served.url) as client:
            yield client
        assert served.stop(timeout_s=300) == 0


@pytest.fixture(scope="module")
def ear() -> Iterator[openai.OpenAI]:
    with serving(None, "--demo", "speech", "--threads", "1") as served:
        with openai_client(served.url) as client:
            yield client
        assert served.stop(timeout_s=300) == 0


def blank(side: int = SIDE) -> tuple[Image.Image, ImageDraw.ImageDraw]:
    picture = Image.new("RGB", (side, side), "white")
    return picture, ImageDraw.Draw(picture)


def url_of(picture: Image.Image) -> str:
    data = io.BytesIO()
    picture.save(data, "PNG")
    return "data:image/png;base64," + base64.b64encode(data.getvalue()).decode()


def asked(client: openai.OpenAI, question: str, *pictures: Image.Image) -> str:
    parts = [
        *({"type": "image_url", "image_url": {"url": url_of(one)}} for one in pictures),
        {"type": "text", "text": question},
    ]
    answer = client.chat.completions.create(
        model="headrace-vision",
        messages=[{"role": "user", "content": parts}],
        temperature=0,
        max_tokens=60,
    )
    return answer.choices[0].message.content or ""


@pytest.mark.slow
def test_a_number_is_read(eye: openai.OpenAI) -> None:
    picture, draw = blank()
    draw.text((30, 50), "427", fill="black", font=ImageFont.load_default(40))
    assert asked(eye, "Which number is this?", picture) == "427"


@pytest.mark.slow
@pytest.mark.parametrize("lines", ["CASHIER 17\nTEA 3,000\nTOTAL 8,000", "TEA 3\nCAKE 5\nTOTAL 8"])
def test_a_receipt_is_read_line_by_line_and_no_line_twice(eye: openai.OpenAI, lines: str) -> None:
    """MOD-05, REG-050."""
    picture, draw = blank()
    for place, line in enumerate(lines.splitlines()):
        draw.text((12, 12 + 44 * place), line, fill="black", font=ImageFont.load_default(22))
    assert asked(eye, "What does the image say?", picture) == lines


@pytest.mark.slow
def test_a_word_is_read_and_red_circles_are_counted(eye: openai.OpenAI) -> None:
    picture, draw = blank()
    draw.text((20, 55), "Hello", fill=(20, 40, 160), font=ImageFont.load_default(44))
    assert asked(eye, "What does the image say?", picture) == "Hello"
    picture, draw = blank()
    for x, y in ((30, 40), (110, 30), (70, 110)):
        draw.ellipse((x - 15, y - 15, x + 15, y + 15), fill=(220, 30, 30))
    assert asked(eye, "How many red circles are there?", picture) == "3"


@pytest.mark.slow
def test_most_scenes_are_counted(eye: openai.OpenAI) -> None:
    """Of ten answers; a tower or positions that are wrong leave two or three by chance."""
    right = 0
    for item in read_items(OF_DEMO["vision"])["count"][:10]:
        answer = eye.chat.completions.create(
            model="headrace-vision", messages=item.messages, temperature=0, max_tokens=16
        )
        right += score(item, answer.choices[0].message.content or "")
    assert right >= COUNTED


COUNTED = 7


@pytest.mark.slow
def test_speech_is_written_down_with_times(ear: openai.OpenAI) -> None:
    """A held-out voice; an OpenAI client's verbose answer has the segments."""
    item = read_items(HEARD)["de"][0]
    answer = ear.audio.transcriptions.create(
        model="headrace-speech",
        file=("speech.ogg", item.audio),
        response_format="verbose_json",
        temperature=0,
    )
    assert score(item, answer.text), (answer.text, item.expected)
    assert answer.language == "de"
    (segment,) = answer.segments or []
    assert 0 <= segment.start < segment.end <= answer.duration
    assert answer.duration - segment.end < 0.8, "the files end half a second behind the last word"


@pytest.mark.slow
def test_most_words_are_heard_of_voices_that_were_never_trained(ear: openai.OpenAI) -> None:
    right = count = 0
    for language in ("en", "de"):
        for item in read_items(HEARD)[language][:6]:
            answer = ear.audio.transcriptions.create(
                model="headrace-speech", file=("speech.ogg", item.audio), language=language
            )
            one = grade(item, answer.text)
            right, count = right + one.right, count + one.count
    assert right >= 0.9 * count, (right, count)


@pytest.mark.slow
def test_held_out_items_of_each_task_are_seen(eye: openai.OpenAI) -> None:
    """As `headrace eval --demo vision` asks them, through the server."""
    wrong = {}
    for task, least in SEEN_LEAST.items():
        items = read_items(OF_DEMO["vision"])[task][:20]
        right = 0
        for item in items:
            answer = eye.chat.completions.create(
                model="headrace-vision", messages=item.messages, temperature=0, max_tokens=80
            )
            right += score(item, answer.choices[0].message.content or "")
        if right < least:
            wrong[task] = right
    assert not wrong


SEEN_LEAST = {
    **{"read_number": 18, "read_word": 17, "read_line": 16, "name": 17},
    **{"count": 15, "place": 14, "order": 14},
}
"""Of 20; a broken tower or position gives none."""


@pytest.mark.slow
@pytest.mark.parametrize("task", ["copy", "reverse", "tool_answer", "recall"])
def test_the_model_with_experts_does_the_bundled_tasks(task: str) -> None:
    """A wrong router, state or latent cache loses them."""
    items = read_items(OF_DEMO["mixture"])[task][:20]
    with serving(None, "--demo", "mixture", "--threads", "1") as served:
        right = 0
        for item in items:
            body = {
                "messages": item.messages,
                "temperature": 0,
                "max_tokens": item.max_tokens,
                "chat_template_kwargs": item.template_kwargs,
            } | ({"tools": item.tools} if item.tools else {})
            answer = httpx.post(served.url + "/v1/chat/completions", json=body, timeout=300).json()
            right += score(item, answer["choices"][0]["message"]["content"] or "")
    assert right >= 18
