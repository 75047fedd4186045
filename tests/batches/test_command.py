"""`headrace batch`: killed in the middle and repeated, it leaves exactly one answer for each line."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.api.serving import slowed
from tests.batches.conftest import chat_line


def _command(source: Path, target: Path, model: Path | None) -> list[str]:
    null = ["--load-format", "dummy", "--executor", "null"] if model else []
    named = [str(model)] if model else []
    return [*(sys.executable, "-m", "headrace", "batch"), str(source), str(target), *named, *null]


def _written(path: Path, lines: list[object]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def _ids(path: Path) -> Counter[str]:
    return Counter(json.loads(line)["custom_id"] for line in path.read_text().splitlines())


@pytest.mark.slow
def test_the_bundled_model_answers_a_file(model: Path, tmp_path: Path) -> None:
    """What comes behind the first run takes no model to show."""
    source = _written(tmp_path / "in", [*(chat_line(i) for i in range(6)), chat_line(7, n=-1)])
    target = tmp_path / "out"
    done = subprocess.run(_command(source, target, None), capture_output=True, text=True)
    assert done.returncode == 1 and "1 of 7 requests were refused" in done.stderr
    answers = {
        a["custom_id"]: a["response"] for a in map(json.loads, target.read_text().splitlines())
    }
    assert answers["r7"]["status_code"] == 400 and answers["r3"]["status_code"] == 200
    assert answers["r3"]["body"]["choices"][0]["message"]["content"]
    again = subprocess.run(_command(source, target, model), capture_output=True, text=True)
    assert again.returncode == 1 and "1 of 7 requests were refused" in again.stderr
    assert _ids(target) == Counter([*(f"r{i}" for i in range(6)), "r7"])
    _written(source, [*(chat_line(i) for i in range(6)), chat_line(7, n=1)])
    mended = subprocess.run(_command(source, target, model), capture_output=True, text=True)
    assert mended.returncode == 0, mended.stderr
    assert _ids(target) == Counter([*(f"r{i}" for i in range(6)), "r7"])
    finished = subprocess.run(_command(source, target, model), capture_output=True, text=True)
    assert finished.returncode == 0 and "have been answered" in finished.stderr


@pytest.mark.parametrize("lines", [200, pytest.param(300, marks=pytest.mark.slow)])
def test_killed_and_repeated_it_answers_each_line_once(
    lines: int, model: Path, tmp_path: Path
) -> None:
    source = _written(tmp_path / "in", [chat_line(i, max_tokens=4) for i in range(lines)])
    target = tmp_path / "out"
    # 64 lines at a time: so slow that the process is seen and killed long before its last line.
    slow = slowed(model, 0.3)
    for _ in range(2):
        before = len(_ids(target)) if target.exists() else 0
        process = subprocess.Popen(_command(source, target, slow), stderr=subprocess.DEVNULL)
        while not target.exists() or len(target.read_bytes().splitlines()) < before + 20:
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
        process.wait()
    with target.open("ab") as file:
        file.write(b'{"custom_id": "r2')  # a line that the kill cut off
    done = subprocess.run(_command(source, target, model), capture_output=True)
    assert done.returncode == 0
    assert _ids(target) == Counter(f"r{i}" for i in range(lines))


@pytest.mark.parametrize(
    ("source", "message"),
    [("", "no requests"), ("{}\n", "line 1: custom_id"), ("x\n", "not valid JSON")],
)
def test_a_wrong_file_is_refused_before_a_model_is_loaded(
    tmp_path: Path, source: str, message: str
) -> None:
    (tmp_path / "in").write_text(source)
    command = _command(tmp_path / "in", tmp_path / "out", None)
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and message in done.stderr
