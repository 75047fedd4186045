"""A process knows when it was made."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

SAYS = """
import time
from headrace.base.process_age import process_age_s
begin = time.clock_gettime(time.CLOCK_BOOTTIME)
age_s = process_age_s()
print(begin - age_s, time.clock_gettime(time.CLOCK_BOOTTIME) - age_s)  # it may wait for a processor in between
"""


@pytest.mark.skipif(
    sys.platform != "linux", reason="asks Linux's clock of the time since it started"
)
def test_a_process_tells_when_it_was_made() -> None:
    """The printed parts of a start add up to the time somebody waits for it: no second is lost or found."""
    before = time.clock_gettime(time.CLOCK_BOOTTIME)
    child = subprocess.Popen([sys.executable, "-c", SAYS], stdout=subprocess.PIPE, text=True)
    after = time.clock_gettime(time.CLOCK_BOOTTIME)
    said, _ = child.communicate(timeout=300)
    earliest, latest = map(float, said.split())
    assert before - 0.03 <= latest and earliest <= after + 0.03
