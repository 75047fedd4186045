"""A server of the towers alone encodes an image into files, from which another one, in a process of its own, answers as
it does by itself (MUL-05)."""

from __future__ import annotations

import base64
import io
import os
import re
import time
from pathlib import Path
from typing import Any

import openai
import pytest
from PIL import Image, ImageDraw
from safetensors.torch import load_file

from headrace.launch.locate import bundled_model
from tests.api.clients import openai_client
from tests.api.serving import Served, serving

pytestmark = pytest.mark.slow
OPTIONS = ("--demo", "vision", "--threads", "1", "--device", "cpu")


def message(seed: int) -> list[dict[str, Any]]:
    """About an image of three discs."""
    picture = Image.new("RGB", (160, 160), "white")
    pen = ImageDraw.Draw(picture)
    for number in range(3):
        left = 10 + 50 * number
        pen.ellipse((left, 20 + seed, left + 30, 50 + seed), fill="red")
    stream = io.BytesIO()
    picture.save(stream, "PNG")
    url = "data:image/png;base64," + base64.b64encode(stream.getvalue()).decode()
    asked = {"type": "text", "text": "How many red circles are there?"}
    return [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}, asked]}]


def answer(client: openai.OpenAI, messages: Any) -> tuple[str, list[float]]:
    """The greedy one, and the log-probabilities of its tokens."""
    choice = client.chat.completions.create(
        model="headrace-vision", messages=messages, temperature=0, max_tokens=12, logprobs=True
    ).choices[0]
    assert choice.logprobs is not None and choice.logprobs.content is not None
    return choice.message.content or "", [one.logprob for one in choice.logprobs.content]


def weight_bytes(served: Served) -> int:
    page = served.get("/metrics").text
    (found,) = re.findall(r"headrace_engine_weight_bytes\{.*\} (\S+)", page)
    return int(float(found))


def decoder_bytes() -> int:
    stored = load_file(bundled_model("vision") / "model.safetensors")
    return sum(one.nbytes for name, one in stored.items() if "visual" not in name)


def file_of(folder: Path, number: int) -> Path:
    """The newest of so many, once it is there: files are written beside the steps."""
    end = time.monotonic() + 120
    while len(files := list(folder.glob("*.hrencoded"))) < number:
        assert time.monotonic() < end, files
        time.sleep(0.01)
    return max(files, key=lambda file: file.stat().st_mtime_ns)


def test_one_encodes_and_another_answers(tmp_path: Path) -> None:
    apart = ("--encoder-cache-path", str(tmp_path))
    with (
        serving(None, *OPTIONS, *apart, "--mm-encoder-only") as towers,
        serving(None, *OPTIONS, *apart) as decoder,
        serving(None, *OPTIONS) as whole,
        openai_client(towers.url) as encodes,
        openai_client(decoder.url) as answers,
        openai_client(whole.url) as alone,
    ):
        for number in (1, 2):
            reply = towers.post("/pooling", {"messages": message(number)})
            assert reply.status_code == 200 and len(reply.json()["data"]) == 1
            file = file_of(tmp_path, number)
            os.utime(file, (number, number))
            written = file.stat().st_ino
            assert answer(answers, message(number)) == answer(alone, message(number))
            # the file was read, and what is encoded is written anew
            assert file.stat().st_mtime > 1000 and file.stat().st_ino == written
        assert len(list(tmp_path.iterdir())) == 2
        assert weight_bytes(decoder) - weight_bytes(towers) == decoder_bytes()
        with pytest.raises(openai.BadRequestError, match="--mm-encoder-only"):
            answer(encodes, message(1))
        words = towers.post("/pooling", {"input": "words"})
        assert words.status_code == 400 and "text alone is given" in words.text
