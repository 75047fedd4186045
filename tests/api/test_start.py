"""What a server says and checks while it starts."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from tests.api.serving import Served, eventually, launch, serving

ASKED = {"messages": [{"role": "user", "content": "fox"}], "max_tokens": 1}


def test_the_line_to_try_first_is_a_request_that_works(server: Served) -> None:
    def tries() -> list[str]:
        return [line for line in server.lines if line.startswith("try:")]

    eventually(lambda: bool(tries()), within_s=5)
    words = shlex.split(tries()[0].removeprefix("try:"))
    assert words[:2] == ["curl", server.url + "/v1/chat/completions"]
    answer = server.post("/v1/chat/completions", json.loads(words[-1]))
    assert answer.status_code == 200 and answer.json()["model"] == "tiny"


def test_a_chat_template_that_does_not_compile_ends_the_start(model: Path, tmp_path: Path) -> None:
    (tmp_path / "broken.jinja").write_text("{% for message in %}")
    served = launch(model, "--chat-template", str(tmp_path / "broken.jinja"))
    assert served.process.wait(30) == 2
    served.close()
    (said,) = [line for line in served.lines if line.startswith("headrace: ")]
    assert "chat template" in said and "TemplateSyntaxError" in said


def test_a_template_of_the_users_is_the_one_that_renders_and_is_quiet_for_scripts(
    model: Path, tmp_path: Path
) -> None:
    (tmp_path / "own.jinja").write_text("{{ messages[0].content }}{{ messages[0].content }}")
    with serving(
        *(model, "--chat-template", str(tmp_path / "own.jinja"), "--log-level", "error"),
        "--trust-request-chat-template",
    ) as served:
        single = served.post("/tokenize", {"prompt": "fox"}).json()["count"]
        assert served.post("/tokenize", ASKED).json()["count"] == 2 * single
        # A request's own template is rendered by other processes than the server's.
        own = {**ASKED, "chat_template": "{{ messages[0].content }}"}
        assert served.post("/tokenize", own).json()["count"] == single
        assert len(served.named("template_worker")) == 2
        assert served.stop() == 0
        assert not any(line.startswith("try:") for line in served.lines)
