from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.api.clients import openai_client
from tests.api.model_folder import write_model_folder
from tests.api.serving import Served, serving
from tests.api.speech import write_whisper

MODEL = Path(__file__).resolve().parents[2] / "demo" / "model"


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_folder(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def server(model: Path) -> Iterator[Served]:
    """One server for all tests that leave it as they found it."""
    with serving(model) as served:
        yield served
        assert served.at_rest()
        assert len(served.cores) == 1, "the core was restarted"
        assert served.stop() == 0


@pytest.fixture(scope="session")
def demo() -> Iterator[Served]:
    """The bundled model in its own numbers, in steps shorter than its context."""
    options = ("--threads", "1", "--dtype", "float32", "--max-step-tokens", "64")
    with serving(None, str(MODEL), *options, "--served-model-name", "headrace-demo,demo") as found:
        yield found
        assert found.at_rest()


@pytest.fixture
def client(server: Served) -> Iterator[openai.OpenAI]:
    with openai_client(server.url) as found:
        yield found


@pytest.fixture(scope="session")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A model that hears, and the reference's model of it."""
    folder = tmp_path_factory.mktemp("whisper")
    return folder, write_whisper(folder)


@pytest.fixture(scope="session")
def ear(whisper: tuple[Path, Any]) -> Iterator[Served]:
    """A server of it."""
    flags = ("--threads", "1", "--max-running", "4", "--served-model-name", "ear")
    with serving(None, str(whisper[0]), *flags) as found:
        yield found
        assert found.at_rest()


@pytest.fixture
def ear_client(ear: Served) -> Iterator[openai.OpenAI]:
    with openai_client(ear.url) as found:
        yield found
