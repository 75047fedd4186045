"""llama.cpp's way to keep a conversation over a restart (BEY-42): saved through one server, restored by the next, whose
answer is the same and finds the conversation's blocks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.api.clients import openai_client
from tests.api.serving import Served, serving

pytestmark = pytest.mark.serial
SYSTEM = "You answer in one short sentence, and you never forget what was said before. " * 4
KEYS = ("--api-keys", "mine,yours")


def say(served: Served, messages: list[Any]) -> tuple[str, int]:
    """A greedy answer, and the tokens of the prompt that were cached."""
    with openai_client(served.url, "mine") as client:
        model = client.models.list().data[0].id
        answer = client.chat.completions.create(
            model=model, messages=messages, temperature=0, max_tokens=24
        )
    details = answer.usage and answer.usage.prompt_tokens_details
    return answer.choices[0].message.content or "", (details and details.cached_tokens) or 0


def slot(served: Served, action: str, key: str = "mine", **body: Any) -> Any:
    answer = served.post(f"/slots/0?action={action}", body, Authorization=f"Bearer {key}")
    return answer.status_code, answer.json()


@pytest.mark.slow
def test_a_conversation_outlives_its_server(tmp_path: Path) -> None:
    talk: list[Any] = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": "Tell a story about a fox and a bridge."},
    ]
    options = ("--device", "cpu", "--slot-save-path", str(tmp_path), *KEYS)
    with serving(None, *options) as served:
        answer, _ = say(served, talk)
        talk += [{"role": "assistant", "content": answer}, {"role": "user", "content": "Go on."}]
        status, saved = slot(served, "save", filename="fox.bin")
        assert status == 200 and saved["filename"] == "fox.bin" and saved["n_saved"] >= 64
        assert saved["n_written"] == (tmp_path / "fox.bin").stat().st_size
        assert slot(served, "save", "yours", filename="fox.bin")[0] == 404
        wanted, _ = say(served, talk)
        rows = served.get("/slots", Authorization="Bearer mine").json()
        assert [row for row in rows if row.get("n_past")], "no row remembers what it said"
        theirs = served.get("/slots", Authorization="Bearer yours").json()
        assert not [row for row in theirs if "n_past" in row]
    with serving(None, *options) as served:
        assert slot(served, "restore", "yours", filename="fox.bin")[0] == 404
        assert slot(served, "restore", filename="../fox.bin")[0] == 400
        assert slot(served, "restore", filename="wolf.bin")[0] == 404
        assert slot(served, "forget", filename="fox.bin")[0] == 400
        status, restored = slot(served, "restore", filename="fox.bin")
        assert status == 200
        assert (restored["n_restored"], restored["n_read"]) == (
            saved["n_saved"],
            saved["n_written"],
        )
        assert set(restored["timings"]) == {"restore_ms"}
        again, cached = say(served, talk)
        assert again == wanted and cached >= saved["n_saved"]
        assert slot(served, "erase")[1]["n_erased"] > 0
        path = "/slots/999?action=erase"
        assert served.post(path, {}, Authorization="Bearer mine").status_code == 404
        held = served.get("/v1/requests", Authorization="Bearer mine").json()["engines"][0]
        assert (held["held_blocks"], held["refcount_sum"]) == (0, 0)
