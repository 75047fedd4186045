from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.api.clients import openai_client
from tests.api.model_folder import write_model_folder
from tests.api.serving import Served, serving


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


@pytest.fixture
def client(server: Served) -> Iterator[openai.OpenAI]:
    with openai_client(server.url) as found:
        yield found
