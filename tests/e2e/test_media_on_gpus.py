"""Models that see and hear on GPUs, served as their users serve them: the answers of a CPU, on one device and over
two whose towers are split or share out the images."""

from __future__ import annotations

import importlib.util
from typing import Any

import httpx
import pytest
import torch

from headrace.bench.held_out import HEARD, OF_DEMO, read_items
from tests.api.serving import serving

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]
EXACT = ("--dtype", "float32", "--threads", "4", "--kv-blocks", "512")
OWN = ("--device", "cuda", "--gpu-memory", "6GiB")
"""Other tests take memory of the same device."""
MANY = 7
"""Images of one prompt: a number that two ranks cannot share out evenly."""
VIDEOS = importlib.util.find_spec("av") is not None
"""Those of the task "order" need PyAV."""


def questions() -> list[list[dict[str, Any]]]:
    """Of each task of the items some, and a message with MANY images."""
    items = read_items(OF_DEMO["vision"])
    chats = [
        item.messages for task in items if VIDEOS or task != "order" for item in items[task][:3]
    ]
    pictures = [
        part
        for item in items["count"][:MANY]
        for part in item.messages[-1]["content"]
        if part["type"] != "text"
    ]
    text = {"type": "text", "text": "How many shapes are there?"}
    return [*chats, [{"role": "user", "content": [*pictures, text]}]]


def answers(*options: str) -> list[str]:
    """Greedy, by a server of these options; images of a message that are not kept are all encoded."""
    with serving(None, "--demo", "vision", *EXACT, *options) as served:
        said = []
        for messages in questions():
            body = {
                "messages": messages,
                "temperature": 0,
                "max_tokens": 24,
                "model": "headrace-vision",
            }
            answer = httpx.post(f"{served.url}/v1/chat/completions", json=body, timeout=120)
            assert answer.status_code == 200, answer.text
            said.append(answer.json()["choices"][0]["message"]["content"])
        assert served.stop(timeout_s=60) == 0
    return said


@pytest.fixture(scope="module")
def expected() -> list[str]:
    return answers("--device", "cpu")


def test_one_gpu_says_what_a_cpu_says(expected: list[str]) -> None:
    assert answers(*OWN) == expected


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices here")
@pytest.mark.parametrize("mode", ["weights", "data"])
def test_two_gpus_say_what_a_cpu_says(expected: list[str], mode: str) -> None:
    shared = ("--tensor-parallel", "2", "--mm-encoder-tp-mode", mode)
    assert answers(*OWN, *shared) == expected


@pytest.mark.skipif(not VIDEOS, reason="PyAV is not here")
def test_speech_is_heard_on_a_gpu_as_on_a_cpu() -> None:
    texts = []
    for device in (("--device", "cpu"), OWN):
        with serving(None, "--demo", "speech", *EXACT[:4], *device) as served:
            heard = []
            for language in ("en", "de"):
                for item in read_items(HEARD)[language][:6]:
                    answer = httpx.post(
                        f"{served.url}/v1/audio/transcriptions",
                        files={"file": ("speech.ogg", item.audio)},
                        data={"model": "headrace-speech", "language": language, "temperature": "0"},
                        timeout=120,
                    )
                    assert answer.status_code == 200, answer.text
                    heard.append(answer.json()["text"])
            assert served.stop(timeout_s=60) == 0
        texts.append(heard)
    assert texts[0] == texts[1]
