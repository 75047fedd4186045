"""A child for bounded work: what it says is read whole, and its threads can be made to stand back."""

from __future__ import annotations

import os
import time
from contextlib import closing

import pytest

from headrace.base.pipe_process import PipeProcess

ECHO = """
import os, sys, threading
def work():
    sys.stdout.write(f"{threading.get_native_id():8d}"); sys.stdout.flush()
    sys.stdin.read(1)
thread = threading.Thread(target=work)
sys.stdin.read(1)
thread.start()
thread.join()
"""


def test_its_threads_stand_back_and_the_first_does_not() -> None:
    with closing(PipeProcess("-c", ECHO)) as child:
        assert not child.answers_within(0)  # it has been asked nothing
        child.write(b"x")
        thread = int(child.read(8, time.monotonic() + 60))
        first = int(next(line for line in _status(thread) if line.startswith("Tgid")).split()[1])
        before = os.getpriority(os.PRIO_PROCESS, first)
        child.renice_threads(19)
        assert os.getpriority(os.PRIO_PROCESS, thread) == 19
        assert os.getpriority(os.PRIO_PROCESS, first) == before
        assert os.getpgid(first) != os.getpgid(0) and os.getsid(first) == os.getsid(0)
        child.write(b"x")
        assert child.answers_within(60)  # its end
        with pytest.raises(EOFError):
            child.read(1, time.monotonic() + 60)


def _status(thread: int) -> list[str]:
    with open(f"/proc/{thread}/status") as file:
        return file.readlines()
