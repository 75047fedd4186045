"""Logging of all headrace processes: one line per event on stderr, with control characters escaped
and length capped.

Text from outside (paths, header values) can reach a log line only through the formatter here, which
escapes CR, LF, ANSI and every other control character, so that one event is one line. Prompts
and keys are never passed to it.
"""

from __future__ import annotations

import logging
import sys

MAX_LINE_CHARS = 4000
LEVELS = ("debug", "info", "warning", "error")
_ESCAPES = {
    code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if code not in (9, 10)
}


class LineFormatter(logging.Formatter):
    """`time level process: message`; a traceback of ours may span lines, a message may not."""

    def __init__(self, process: str) -> None:
        super().__init__(f"%(asctime)s %(levelname)s {process}: %(message)s", "%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Escapes the message of the record and caps its length."""
        record.message = escape(record.message)
        return super().formatMessage(record)


def escape(text: str, *, limit: int = MAX_LINE_CHARS) -> str:
    """`text` as one line of at most `limit` characters without control characters."""
    cut = text if len(text) <= limit else text[:limit] + "..."
    return cut.translate(_ESCAPES).replace("\n", "\\n")


def configure(process: str, level: str) -> None:
    """Sets up the root logger of this process; called once, first."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter(process))
    logging.basicConfig(handlers=[handler], force=True)
    set_level(level)


def set_level(level: str) -> None:
    """Sets this process's log level, one of LEVELS. Verbose libraries stay at warnings."""
    logging.getLogger().setLevel(level.upper())
    for noisy in ("uvicorn", "uvicorn.error", "asyncio"):
        logging.getLogger(noisy).setLevel(max(logging.WARNING, logging.getLogger().level))
    logging.getLogger(__name__).debug("logs at %s from now on", level)


def level() -> str:
    """What this process logs now; children are started with it."""
    return logging.getLevelName(logging.getLogger().getEffectiveLevel()).lower()
