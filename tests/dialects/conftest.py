from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.api.clients import anthropic, anthropic_client, openai_client
from tests.api.model_folder import write_model_folder
from tests.api.serving import Served, serving

KEY, OTHER = "dialect-key-1", "dialect-key-2"


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model folder for the null executor."""
    return write_model_folder(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def bundled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The real server with the bundled model, which calls tools and thinks when asked."""
    cache = tmp_path_factory.mktemp("cache")
    keys = ("--api-keys", f"{KEY},{OTHER}", "--served-model-name", "demo")
    with serving(None, *keys, HEADRACE_CACHE_DIR=str(cache)) as served:
        yield served
        assert served.stop() == 0


@pytest.fixture(scope="session")
def claude(bundled: Served) -> Iterator[anthropic.Anthropic]:
    with anthropic_client(bundled.url, KEY) as client:
        yield client


@pytest.fixture(scope="session")
def gpt(bundled: Served) -> Iterator[openai.OpenAI]:
    with openai_client(bundled.url, KEY) as client:
        yield client
