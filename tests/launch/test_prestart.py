"""A process that is started before its arguments are known."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from headrace.launch import prestart
from headrace.launch.topology import ChildProcess, spawn

MODULE = "early_child"
TELLS = """
import os, socket, sys

def main():
    status = socket.socket(fileno=int(sys.argv[sys.argv.index("--status-fd") + 1]))
    status.sendall((repr([os.environ.get("SHARE")] + sys.argv[1:]) + "\\n").encode())
    return 0
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A module that tells its arguments, and no process that an earlier test has left waiting."""
    prestart.discard_prestarted()
    (tmp_path / f"{MODULE}.py").write_text(TELLS)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(prestart.__file__).parents[2]}")
    yield
    prestart.discard_prestarted()


def waiting() -> psutil.Process:
    ((started, _),) = prestart._waiting.values()  # by command line: empty for a moment after exec
    return psutil.Process(started.process.pid)


def told(child: ChildProcess) -> str:
    child.status.setblocking(True)
    with child.status as status:
        text = status.recv(4096).decode()
    assert child.process.wait(300) == 0
    return text


def test_the_waiting_process_gets_the_arguments_and_its_end_of_the_socket() -> None:
    prestart.prestart(MODULE)
    pid = waiting().pid
    child = spawn("one", MODULE, "--spec", "a b\n", die_with_thread=True)
    assert child.process.pid == pid
    text = told(child)
    assert text.startswith("[None, '--spec', 'a b\\n', '--parent', ") and str(os.getpid()) in text


def test_a_second_process_is_started_anew() -> None:
    prestart.prestart(MODULE)
    children = [spawn("one", MODULE, name, die_with_thread=False) for name in ("x", "y")]
    assert ["'x'" in told(children[0]), "'y'" in told(children[1])] == [True, True]


def test_one_that_needs_another_environment_is_not_the_waiting_one() -> None:
    prestart.prestart(MODULE)
    before = waiting()
    child = spawn("one", MODULE, die_with_thread=False, environment={"SHARE": "0,1"})
    assert child.process.pid != before.pid and not before.is_running()
    assert told(child).startswith("['0,1'")


def test_one_that_died_meanwhile_is_replaced() -> None:
    prestart.prestart(MODULE)
    before = waiting()
    before.kill()
    while before.is_running() and before.status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    child = spawn("one", MODULE, "x", die_with_thread=False)
    assert child.process.pid != before.pid and "'x'" in told(child)


def test_one_that_nobody_takes_ends_with_its_parents_end_of_the_pipe() -> None:
    prestart.prestart(MODULE)
    found = waiting()
    ((started, _),) = prestart._waiting.values()
    assert started.process.stdin is not None
    started.process.stdin.close()
    assert started.process.wait(300) == 0
    assert not found.is_running() or found.status() == psutil.STATUS_ZOMBIE


def test_the_waiting_process_imports_what_it_is_told_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "first_part.py").write_text("import os\nos.environ['SHARE'] = 'imported'\n")
    prestart.prestart(MODULE)
    for name in ("first_part", "json"):
        prestart.import_ahead(MODULE, name)
    text = told(spawn("one", MODULE, "--spec", "a b\n", die_with_thread=True))
    assert text.startswith("['imported', '--spec', 'a b\\n', '--parent', ")
    prestart.import_ahead(MODULE, "json")  # nobody waits
