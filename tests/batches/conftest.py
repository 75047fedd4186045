from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.api.clients import openai_client
from tests.api.model_folder import write_model_folder
from tests.api.serving import Served, serving

KEY, OTHER = "batch-key-1", "batch-key-2"


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_folder(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def bundled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The real server with the bundled model."""
    store = tmp_path_factory.mktemp("store") / "files"
    options = ("--api-keys", f"{KEY},{OTHER}", "--file-store", str(store))
    with serving(None, *options, "--file-store-bytes", "4MiB") as served:
        yield served
        assert served.stop() == 0


def client_of(served: Served, key: str = KEY) -> openai.OpenAI:
    return openai_client(served.url, key)


@pytest.fixture
def client(bundled: Served) -> Iterator[openai.OpenAI]:
    with client_of(bundled) as made:
        yield made


@pytest.fixture
def other(bundled: Served) -> Iterator[openai.OpenAI]:
    with client_of(bundled, OTHER) as made:
        yield made


def chat_line(number: int, **body: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"What is {number} plus 2?"}]
    return {
        "custom_id": f"r{number}",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"messages": messages, "max_tokens": 8, "temperature": 0, **body},
    }


@pytest.fixture
def write_lines(tmp_path: Path) -> Callable[[list[dict[str, Any]]], Path]:
    def write(lines: list[dict[str, Any]]) -> Path:
        path = tmp_path / "in.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return path

    return write
