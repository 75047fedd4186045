"""Which tests stay together where a few workers share them: those of a file, and of some folders all.

The files of these folders ask a server, or several, that lives as long as its worker: spread over three workers each
was started three times, 2 to 3 processor seconds apiece. Those of tests/architecture share the syntax trees of the
package, 4 processor seconds, those of tests/core/grammar the processes that compile grammars, of which each imports
xgrammar, and so PyTorch and transformers. Where there are many workers the time counts, not the work.
"""

from __future__ import annotations

import pytest
from xdist.scheduler import LoadFileScheduling

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


class FolderScheduling(LoadFileScheduling):
    """xdist's by files, with these folders whole."""

    def _split_scope(self, nodeid: str) -> str:
        file: str = super()._split_scope(nodeid)
        folder = file.rpartition("/")[0]
        return folder if folder in TOGETHER else file
