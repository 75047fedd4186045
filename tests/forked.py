"""Tests beside each other, in processes that are forked once all is imported and collected: `--forks=N`.

Each of xdist's workers imports PyTorch, the oracles and the clients, and collects eleven thousand tests: 20 processor
seconds apiece. Here one process does so, and the workers share what it holds, copy-on-write. It then only hands out
tests and shows reports; a worker that is free takes the next file or folder (tests/scopes.py), in the order in which
they were collected. The tests of a worker that dies are run by another one, but that during which it died.

What is forked has one thread: another one's locks would stay locked, and pools of threads are gone, of tokenizers for
one. So no module of tests trains a tokenizer when it is imported. Nor may it open a GPU: where there is one, xdist
serves.
"""

from __future__ import annotations

import atexit
import io
import os
import sys
import threading
import traceback
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any, NoReturn

import pytest
from _pytest.config import create_terminal_writer

from tests.scopes import scopes_of

STOP: list[int] = []
"""In the place of numbers of tests: there are none left."""
NEXT, ENDED = "next", "ended"
"""What a worker sends beside reports: it asks for tests, or is done."""


@dataclass(kw_only=True, eq=False)
class Worker:
    """As the process sees it that hands out tests."""

    pid: int
    connection: Connection
    pending: deque[int] = field(default_factory=deque)
    """Numbers of the tests it was given and has not ended, in order."""


class Forked:
    """A plugin that runs the collected tests in `count` processes."""

    def __init__(self, config: pytest.Config, count: int) -> None:
        self._config = config
        self._count = count
        self._workers: list[Worker] = []
        self._num_forked = 0

    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        """In the place of pytest's own, which serves where there is nothing to run."""
        if session.config.option.collectonly or session.testsfailed or not session.items:
            return None
        _expect_one_thread(self._config)
        scopes = deque(scopes_of([item.nodeid for item in session.items], self._count))
        try:
            for _ in range(min(self._count, len(scopes))):
                self._fork(session, scopes.popleft())
            for worker, message in self._messages():
                self._handle(session, scopes, worker, message)
        finally:
            self._end()
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)
        return True

    def _messages(self) -> Iterator[tuple[Worker, object]]:
        """Until no worker is left: what each sends; None where it has died."""
        while by_connection := {worker.connection: worker for worker in self._workers}:
            for connection in wait(list(by_connection)):
                assert isinstance(connection, Connection)
                worker = by_connection[connection]
                try:
                    yield worker, connection.recv()
                except (EOFError, OSError):
                    yield worker, None

    def _handle(
        self, session: pytest.Session, scopes: deque[list[int]], worker: Worker, message: object
    ) -> None:
        if message is None:
            self._replace(session, worker)
        elif message == NEXT:
            worker.pending = deque(scopes.popleft() if scopes and not _is_over(session) else STOP)
            worker.connection.send(list(worker.pending))
        elif message == ENDED:
            self._reap(worker)
        elif isinstance(message, str):
            self._reap(worker)
            session.shouldstop = f"a worker failed outside tests:\n{message}"
        else:
            self._show(session, worker, message)

    def _show(self, session: pytest.Session, worker: Worker, message: Any) -> None:
        hook = self._config.hook
        report = hook.pytest_report_from_serializable(config=self._config, data=message)
        hook.pytest_runtest_logreport(report=report)
        if report.when == "teardown":
            hook.pytest_runtest_logfinish(nodeid=report.nodeid, location=report.location)
            worker.pending.popleft()
        if _is_over(session):
            for other in self._workers:
                with suppress(OSError):  # one that has died meanwhile
                    other.connection.send(STOP)

    def _replace(self, session: pytest.Session, worker: Worker) -> None:
        """The first of the tests it had is the one during which it died."""
        status = self._reap(worker)
        assert worker.pending, f"a worker ended with status {status} before or after its tests"
        item = session.items[worker.pending.popleft()]
        report = pytest.TestReport(
            nodeid=item.nodeid, location=item.location, keywords={}, outcome="failed", when="call",
            longrepr=f"the process of this test ended with status {status}",
        )  # fmt: skip
        self._config.hook.pytest_runtest_logreport(report=report)
        if worker.pending and not _is_over(session):
            self._fork(session, list(worker.pending))

    def _reap(self, worker: Worker) -> int:
        """Its exit status, or minus the signal that ended it."""
        self._workers.remove(worker)
        worker.connection.close()
        return os.waitstatus_to_exitcode(os.waitpid(worker.pid, 0)[1])

    def _end(self) -> None:
        """Of a run that is broken off: workers end with the test they run, as what they send finds no reader."""
        while self._workers:
            self._reap(self._workers[0])

    def _fork(self, session: pytest.Session, numbers: list[int]) -> None:
        ours, theirs = Pipe()
        folder = self._config._tmp_path_factory.getbasetemp() / f"fork{self._num_forked}"
        self._num_forked += 1
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if not pid:
            for connection in (ours, *(worker.connection for worker in self._workers)):
                connection.close()
            _run(session, theirs, deque(numbers), folder)
        theirs.close()
        self._workers.append(Worker(pid=pid, connection=ours, pending=deque(numbers)))


def _expect_one_thread(config: pytest.Config) -> None:
    """Python's threads are a mistake of ours; what a library starts may wait for nothing, so the run goes on."""
    assert threading.active_count() == 1, threading.enumerate()
    tasks = Path("/proc/self/task")
    if tasks.exists() and (count := len(list(tasks.iterdir()))) > 1:
        terminal = config.pluginmanager.getplugin("terminalreporter")
        terminal.write_line(
            f"importing the tests has started {count - 1} threads, which workers lack"
        )


def _is_over(session: pytest.Session) -> bool:
    return bool(session.shouldfail or session.shouldstop)


def _run(
    session: pytest.Session, connection: Connection, numbers: deque[int], folder: Path
) -> NoReturn:
    """The life of a worker. It ends without freeing millions of objects one by one."""
    try:
        try:
            _become_worker(session.config, connection, folder)
            _run_tests(session, connection, numbers)
        finally:
            session._setupstate.teardown_exact(None)
            threading._shutdown()
            atexit._run_exitfuncs()
        connection.send(ENDED)
    except BaseException:
        connection.send(traceback.format_exc())
    finally:
        os._exit(0)


def _become_worker(config: pytest.Config, connection: Connection, folder: Path) -> None:
    """What files and terminal pytest opened are the other process's. Other plugins take this for one of xdist's."""
    config.workerinput = {"workerid": folder.name}
    folder.mkdir(mode=0o700)
    config._tmp_path_factory._basetemp = folder
    manager = config.pluginmanager
    manager.getplugin("terminalreporter")._tw = create_terminal_writer(config, io.StringIO())
    capture = manager.getplugin("capturemanager")
    capture.stop_global_capturing()
    capture.start_global_capturing()
    capture.suspend_global_capture()
    manager.register(_Reports(config, connection))


class _Reports:
    """A worker's plugin: sends what it reports."""

    def __init__(self, config: pytest.Config, connection: Connection) -> None:
        self._config = config
        self._connection = connection

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._connection.send(data)


def _run_tests(session: pytest.Session, connection: Connection, numbers: deque[int]) -> None:
    """The fixtures of the session alone outlive the last test of what is handed out together."""
    while numbers:
        while numbers:
            item = session.items[numbers.popleft()]
            nextitem: Any = session.items[numbers[0]] if numbers else session
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=nextitem)
            if _is_over(session) or connection.poll():
                return
        connection.send(NEXT)
        numbers.extend(connection.recv())
