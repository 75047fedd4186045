"""Processes that broadcast weights, for the tests of both sides."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator

from headrace.bench.startup import free_port

__all__ = ["free_port", "trainer_of_one_tensor"]

SCRIPT = """
import sys, torch
from headrace.back.transfer.groups import broadcast, join
from headrace.base.wire.weights import Group
group = Group(name="trainer", address="127.0.0.1", port=int(sys.argv[1]), backend="gloo")
members = join(group, 0, torch.device("cpu"))
broadcast(torch.arange(5.0), members)
sys.stdin.readline()
"""


@contextlib.contextmanager
def trainer_of_one_tensor(port: int) -> Iterator[subprocess.Popen[bytes]]:
    """It broadcasts 0 to 4 in float32 by gloo, and stays."""
    with subprocess.Popen([sys.executable, "-c", SCRIPT, str(port)], stdin=-1) as process:
        try:
            yield process
        finally:
            process.kill()
