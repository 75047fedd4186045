"""Ids of a family whose tags are control tokens, over HTTP: the format chosen, its calls, its text (P28)."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer

from tests.api.model_folder import TEMPLATE, write_model_folder
from tests.api.serving import NO_TLS

TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
CHAT = {"messages": [{"role": "user", "content": "x"}], "tools": [TOOL]}
CALL = '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]f[ARGS]{}'


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = write_model_folder(tmp_path_factory.mktemp("models") / "tiny")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(["[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"])
    tokenizer.save(str(folder / "tokenizer.json"))
    _change(folder / "config.json", vocab_size=tokenizer.get_vocab_size())
    _change(folder / "tokenizer_config.json", chat_template=TEMPLATE + "{# [TOOL_CALLS] [ARGS] #}")
    command = [
        *(sys.executable, "-m", "headrace", "render", str(folder)),
        *("--port", "0", "--load-format", "dummy", "--tokenizer-info"),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        found = re.search(r"ready: (\S+)", process.stdout.readline())
        assert found
        yield found[1]
        process.terminate()


def _change(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def _ids(url: str, text: str) -> list[int]:
    answer = httpx.post(url + "/tokenize", json={"prompt": text}, verify=NO_TLS, timeout=300)
    found: list[int] = answer.json()["tokens"]
    return found


def _message(url: str, ids: list[int]) -> Any:
    response = {"choices": [{"token_ids": ids, "finish_reason": "stop"}]}
    body = {"request": CHAT, "response": response}
    answer = httpx.post(
        url + "/v1/chat/completions/derender", json=body, verify=NO_TLS, timeout=300
    )
    return answer.json()["choices"][0]


def test_the_format_is_chosen_by_the_template(url: str) -> None:
    assert (
        httpx.get(url + "/tokenizer_info", verify=NO_TLS, timeout=300).json()["tool_parser"]
        == "mistral"
    )


def test_control_tokens_are_calls(url: str) -> None:
    choice = _message(url, _ids(url, CALL))
    calls = [call["function"] for call in choice["message"]["tool_calls"]]
    assert [(c["name"], json.loads(c["arguments"])) for c in calls] == [("f", {"a": 1}), ("f", {})]
    assert all(re.fullmatch(r"\w{9}", call["id"]) for call in choice["message"]["tool_calls"])
    assert (choice["message"]["content"], choice["finish_reason"]) == (None, "tool_calls")


def test_the_same_characters_as_text_are_content(url: str) -> None:
    ids = [token for character in CALL for token in _ids(url, character)]
    choice = _message(url, ids)
    assert choice["message"]["content"] == CALL and "tool_calls" not in choice["message"]
