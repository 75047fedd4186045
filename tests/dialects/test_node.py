"""The official Node clients drive both dialects (clients.mjs); skipped with its reason where they cannot be had."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.api.serving import Served
from tests.dialects.conftest import KEY

HERE = Path(__file__).parent
PACKAGES = ("openai", "@anthropic-ai/sdk")
INSTALL_S = 90


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the clients installed."""
    npm = shutil.which("npm")
    if npm is None or shutil.which("node") is None:
        pytest.skip("node or npm is not on this machine")
    found = tmp_path_factory.mktemp("node")
    command = [npm, "install", "--no-audit", "--no-fund", "--ignore-scripts", *PACKAGES]
    try:
        done = subprocess.run(command, cwd=found, capture_output=True, text=True, timeout=INSTALL_S)
    except subprocess.TimeoutExpired:
        pytest.skip(f"npm install took longer than {INSTALL_S} s")
    if done.returncode:
        pytest.skip(f"npm install failed: {done.stderr.strip()[-200:]}")
    return found


@pytest.mark.slow  # npm fetches them; in `make test` Python's clients ask the same
@pytest.mark.timeout(240)
def test_the_clients_of_node_are_served(folder: Path, bundled: Served) -> None:
    script = folder / "clients.mjs"
    script.write_text((HERE / "clients.mjs").read_text())
    done = subprocess.run(
        ["node", script, bundled.url, KEY], cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines() == [
        *(
            "ok chat",
            "ok functions",
            "ok completions",
            "ok embeddings",
            "ok models",
            "ok filesAndBatches",
        ),
        *("ok messages", "ok messagesAgent", "ok responses", "ok responsesAgent"),
        *("ok conversations", "ok decisions", "ok errors", "ok leaving"),
    ]
