"""What a server says and checks while it starts."""

from __future__ import annotations

import json
import shlex
import stat
from pathlib import Path

import httpx
import pytest

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


@pytest.mark.slow
def test_a_chat_template_that_does_not_compile_ends_the_start(model: Path, tmp_path: Path) -> None:
    (tmp_path / "broken.jinja").write_text("{% for message in %}")
    served = launch(model, "--chat-template", str(tmp_path / "broken.jinja"))
    assert served.process.wait(300) == 2
    served.close()
    (said,) = [line for line in served.lines if line.startswith("headrace: ")]
    assert "chat template" in said and "TemplateSyntaxError" in said


@pytest.mark.parametrize(
    ("mode", "said"),
    [
        (0o777, "everyone can write to it"),
        pytest.param(None, "--file-store auto", marks=pytest.mark.slow),
    ],
)
def test_a_cache_folder_that_cannot_be_used_is_named_at_start(
    model: Path, tmp_path: Path, mode: int | None, said: str
) -> None:
    """Kernels are loaded from it. Where even root can make nothing: a folder of the kernel's."""
    folder = Path("/proc/tty") if mode is None else tmp_path / "cache"
    if mode is not None:
        folder.mkdir()
        folder.chmod(mode)
    served = launch(model, HEADRACE_CACHE_DIR=str(folder))
    assert served.process.wait(300) == 2
    served.close()
    (line,) = [line for line in served.lines if line.startswith("headrace: ")]
    assert said in line and "HEADRACE_CACHE_DIR" in line and str(folder) in line


@pytest.mark.slow
def test_a_template_of_the_users_is_the_one_that_renders_and_is_quiet_for_scripts(
    model: Path, tmp_path: Path
) -> None:
    (tmp_path / "own.jinja").write_text("{{ messages[0].content }}{{ messages[0].content }}")
    with serving(
        model,
        "--chat-template",
        str(tmp_path / "own.jinja"),
        "--log-level",
        "error",
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


@pytest.mark.slow
def test_the_api_can_be_a_socket_file_that_its_owner_alone_opens(
    model: Path, tmp_path: Path
) -> None:
    """API-22: no key is needed, as on the loopback interface; gRPC beside it stays on a port."""
    place = tmp_path / "api.sock"
    served = launch(model, "--host", f"unix:{place}", "--grpc-port", "0")
    try:
        eventually(lambda: any("ready: unix:" in line for line in served.lines), within_s=40)
        assert stat.S_IMODE(place.stat().st_mode) == 0o600
        transport = httpx.HTTPTransport(uds=str(place))
        with httpx.Client(transport=transport, base_url="http://localhost", timeout=300) as client:
            assert client.get("/health").status_code == 200
            asked = {"prompt": "x", "max_tokens": 2}
            assert client.post("/v1/completions", json=asked).status_code == 200
            for host in ("api.sock", "evil.example", ""):
                assert client.get("/v1/models", headers={"host": host}).status_code == 200
        assert any("gRPC: 127.0.0.1:" in line for line in served.lines)
        assert served.stop() == 0
    finally:
        served.close()


def test_streams_are_paced_by_the_server_unless_their_requests_say_otherwise(model: Path) -> None:
    """API-17: flags of the server; a request's own stream_options go before them."""
    asked = {"prompt": "x", "max_tokens": 16, "ignore_eos": True, "stream": True, "temperature": 0}
    with serving(model, "--stream-interval", "8", step_s=0.005) as served:

        def chunks(**more: object) -> list[str]:
            body = served.post("/v1/completions", {**asked, **more}).text
            lines = [line for line in body.split("\n\n") if line.startswith("data: {")]
            texts = [json.loads(line[6:])["choices"][0]["text"] for line in lines]
            return [text for text in texts if text]

        paced = chunks()
        finely = chunks(stream_options={"stream_interval": 1})
        assert len(paced) <= 4 < len(finely) and "".join(paced) == "".join(finely)
        counted = chunks(stream_options={"include_usage": False})
        assert len(counted) <= 4, "options that say nothing of it leave the server's"
