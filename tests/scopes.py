"""Which tests stay together where a few workers share them: those of a file, and of some folders all.

The files of these folders ask a server, or several, that lives as long as its worker: spread over three workers each
was started three times, 2 to 3 processor seconds apiece. Those of tests/architecture share the syntax trees of the
package, 4 processor seconds, those of tests/core/grammar the processes that compile grammars, of which each imports
xgrammar, and so PyTorch and transformers. Where there are many workers the time counts, not the work.
"""

from __future__ import annotations

from collections import defaultdict

import pytest

TOGETHER = (
    *("tests/api", "tests/architecture", "tests/batches", "tests/core/grammar", "tests/dialects"),
    *("tests/e2e", "tests/tokens"),
)
FEW = 4
"""Workers at most."""


def comes_first(item: pytest.Item) -> bool:
    """A file that takes long, or one of these folders, whose files follow each other."""
    folder = item.nodeid.partition("::")[0].rpartition("/")[0]
    return folder in TOGETHER or item.get_closest_marker("long") is not None


def scopes_of(nodeids: list[str], num_workers: int) -> list[list[int]]:
    """Numbers of the tests that one worker runs, in the order of the first of each."""
    scopes: dict[str, list[int]] = defaultdict(list)
    for number, nodeid in enumerate(nodeids):
        file = nodeid.partition("::")[0]
        folder = file.rpartition("/")[0]
        together = folder in TOGETHER and num_workers <= FEW
        scopes[folder if together else file].append(number)
    return list(scopes.values())
