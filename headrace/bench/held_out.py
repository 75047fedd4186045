"""The held-out items of the demo models' tasks, as `headrace eval` asks them: their form and the
frozen files that the package ships.

The generators live outside the package (demo/); `python -m demo.freeze_held_out`,
`demo.sees.freeze` and `demo.hears.freeze` write the files. A held-out problem never occurs in the
training data, so a score measures the model and not its memory. The items are fixed: the same file
gives the same questions on every machine.
"""

from __future__ import annotations

import gzip
from enum import Enum
from pathlib import Path
from typing import Any

import msgspec

from headrace.base.errors import ConfigError

HELD_OUT = Path(__file__).parent / "held_out.jsonl.gz"
SEEN = HELD_OUT.with_name("held_out_vision.jsonl.gz")
HEARD = HELD_OUT.with_name("held_out_speech.jsonl.gz")
OF_DEMO = {"text": HELD_OUT, "vision": SEEN, "speech": HEARD, "mixture": HELD_OUT}
"""The items of each bundled model."""
MAX_BYTES = 64 << 20
"""Of a file of items, unpacked."""


class AnswerCheck(Enum):
    """How an answer is compared with the expected one (bench/scoring.py)."""

    EXACT = "exact"
    JSON = "json"
    TOOL_CALL = "tool_call"
    STORY = "story"
    ONE_OF = "one_of"
    WORDS = "words"


class EvalItem(msgspec.Struct, frozen=True, kw_only=True):
    """One question: everything needed to ask it and to judge the answer.

    `max_tokens` is enough for the right answer and its reasoning. `reference` is the right answer
    as the training data would have it. `vocabulary`: the words a story may use. `audio`: a file of
    speech in this `language`, to be written down; there are no messages then.
    """

    task: str
    messages: list[dict[str, Any]]
    check: AnswerCheck
    expected: Any
    max_tokens: int
    tools: list[dict[str, Any]] | None = None
    thinking: bool | None = False
    reference: str = ""
    vocabulary: frozenset[str] = frozenset()
    audio: bytes = b""
    language: str = ""

    @property
    def question(self) -> str:
        """What is asked last, without what is shown."""
        if not self.messages:
            return f"speech ({self.language})"
        content = self.messages[-1]["content"]
        if isinstance(content, str):
            return content
        return " ".join(part["text"] for part in content if "text" in part)

    @property
    def template_kwargs(self) -> dict[str, object]:
        """Arguments of the chat template; none where the model's knows of no thinking."""
        return {} if self.thinking is None else {"enable_thinking": self.thinking}


class _Header(msgspec.Struct, frozen=True, kw_only=True):
    """First line of the file. `vocabulary` belongs to every story, so it is stored once."""

    format: int
    seed: int
    vocabulary: list[str]


def write_items(path: Path, items: list[EvalItem], *, seed: int) -> None:
    """Writes a file of items; the same items give the same bytes."""
    words = frozenset().union(*(item.vocabulary for item in items))
    rows: list[msgspec.Struct] = [_Header(format=1, seed=seed, vocabulary=sorted(words))]
    rows += [msgspec.structs.replace(item, vocabulary=frozenset()) for item in items]
    body = b"\n".join(msgspec.json.encode(row) for row in rows) + b"\n"
    path.write_bytes(gzip.compress(body, compresslevel=9, mtime=0))


def read_items(path: Path = HELD_OUT) -> dict[str, list[EvalItem]]:
    """The items of a file by task; ConfigError if it is not such a file."""
    try:
        with gzip.open(path) as file:
            body = file.read(MAX_BYTES + 1)
        if len(body) > MAX_BYTES:
            raise ConfigError(f"--items {path}: larger than {MAX_BYTES} bytes unpacked")
        first, *lines = body.splitlines()
        vocabulary = frozenset(msgspec.json.decode(first, type=_Header).vocabulary)
        items = [msgspec.json.decode(line, type=EvalItem) for line in lines]
    except (OSError, EOFError, ValueError, msgspec.MsgspecError) as error:
        raise ConfigError(
            f"--items {path}: no file of held-out items ({error}); demo.freeze_held_out writes one",
            field="--items",
        ) from error
    by_task: dict[str, list[EvalItem]] = {}
    for item in items:
        if item.check is AnswerCheck.STORY:
            item = msgspec.structs.replace(item, vocabulary=vocabulary)
        by_task.setdefault(item.task, []).append(item)
    return by_task
