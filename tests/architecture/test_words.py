"""The package speaks in the field's terms: banned words in names, class names used twice, width and ids in prose.

A reader who greps for a term of a paper must find the code, so names take the field's words, and one public class name
means one thing.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from tests.architecture.sources import FUNCTIONS, PACKAGE, nodes, sources


@dataclass(frozen=True)
class Ban:
    """A word no name may be, the term to take instead, and where; `part`: nor may it be one of a name's words."""

    word: str
    instead: str
    part: bool = False
    under: tuple[str, ...] = ("",)


BACK = ("back/",)
CORE = ("core/",)
BANNED = (
    # Locals are nouns for the thing.
    Ban("found", "a noun for the thing (blocks, row, match)"),
    Ban("made", "a noun for the thing (client, batch)"),
    Ban("given", "a noun for the thing (value, args, body)"),
    Ban("told", "a noun for the thing; on the device: logprobs", part=True),
    # Core and scheduler.
    Ban("hopeless", "unschedulable", part=True),
    Ban("landing", "StepOutputProcessor", part=True),
    Ban("flight", "InFlightStep, in_flight"),
    Ban("outbox", "OutputBuffer", part=True),
    Ban("pace", "prefill budget; in the server: StreamInterval", part=True),
    Ban("supply", "deferred inputs", part=True),
    Ban("jumps", "jump-forward"),
    Ban(
        "draft", "StepPlanBuilder (drafts are speculation's)", under=("core/scheduler", "core/core")
    ),
    Ban("gate", "AdmissionHook", under=CORE),
    # Runner and executor.
    Ban("machine", "StepResources", under=("back/runner", "back/executor")),
    Ban("ran", "StepOutputs", under=BACK),
    Ban("launched", "LaunchedStep, launched_step", under=BACK),
    Ban("tape", "CPU graph", part=True),
    Ban("leaves", "sampler input"),
    Ban("picks", "argmax"),
    Ban("tops", "top candidates", under=BACK),
    Ban("tap", "attention probe"),
    Ban("moment", "a field's term (step state, snapshot)", part=True),
    Ban("together", "collective"),
    # Kernels and quantization.
    Ban("draw", "sample", part=True, under=BACK),
    Ban("codes", "quantized values", under=BACK),
    Ban("coded", "quantized", part=True, under=BACK),
    Ban("widened", "dequantized", part=True),
    Ban("products", "GEMMs", under=BACK),
    Ban("pieces", "KV splits", part=True, under=("back/kernels/attention",)),
    # Client and server.
    Ban("home", "CoreHandle"),
    Ban("keeper", "authenticator", part=True),
    Ban("spoken", "chat output", part=True),
    Ban("wish", "a noun of its own (ScoreRequest)", part=True),
    Ban("plane", "admin API", part=True, under=("front/", "launch/", "base/", "core/", "cli/")),
    Ban("seat", "managed process", part=True),
    Ban("beat", "heartbeat", part=True),
    Ban("fronts", "frontend connections", part=True),
    Ban("forecast", "performance model", part=True),
    Ban("patient", "admission retry", part=True),
    # Layers and packages have no metaphors.
    Ban("floor", "layer (of imports)", part=True),
    Ban("tower", "package", part=True, under=("base/", "core/", "launch/", "cli/")),
    Ban("house", "package", part=True),
)
BANNED_CLASSES = {
    "Answer": "ChoiceState",
    "Draft": "StepPlanBuilder",
    "Exchange": "a request context",
    "Gate": "AdmissionHook",
    "Jumps": "JumpForward",
    "Launched": "LaunchedStep",
    "Leaves": "SamplerInput",
    "Machine": "StepResources",
    "Ran": "StepOutputs",
    "Room": "QueueAdmission",
    "Stream": "GenerationStream",
    "Supply": "DeferredInputs",
    "Tape": "CpuGraph",
}

COLUMNS = 100
ENTRY_ID = re.compile(r"\b(?!UTF|CRC|SHA|ISO)[A-Z]{3}-\d\d\b")


@cache
def words_of(name: str) -> list[str]:
    """`has_KVCache_ids` -> has, kv, cache, ids."""
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", name)]


def names(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Every name the module gives to something, with its line."""
    for node in nodes(tree):
        if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            yield node.name, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr, node.lineno


@cache
def bans_of(name: str) -> list[Ban]:
    """The words that are banned somewhere and of which the name is made."""
    words = words_of(name)
    return [ban for ban in BANNED if words == [ban.word] or (ban.part and ban.word in words)]


def objection(name: str, place: str) -> str | None:
    """What to write instead of a name at a path below headrace/, or None."""
    return next((ban.instead for ban in bans_of(name) if place.startswith(ban.under)), None)


def modules() -> list[tuple[Path, str, ast.Module]]:
    """Every module, with its path below headrace/."""
    return [(path, path.relative_to(PACKAGE).as_posix(), tree) for path, _, tree in sources()]


CPP_COMMENT_OR_TEXT = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:[^"\\\n]|\\.)*"', re.DOTALL)
CPP_NAME = re.compile(r"\b[A-Za-z_]\w*\b")


def cpp_names(text: str) -> Iterator[tuple[str, int]]:
    """Every name in C++ source, with its line; not those in comments and texts."""
    code = CPP_COMMENT_OR_TEXT.sub(lambda match: "\n" * match[0].count("\n"), text)
    for number, line in enumerate(code.splitlines(), start=1):
        yield from ((name, number) for name in CPP_NAME.findall(line))


@cache
def prose(path: Path, tree: ast.Module) -> list[tuple[int, str]]:
    """Line number and full line of every comment and docstring."""
    text = path.read_text()
    lines = text.splitlines()
    numbers = set()
    for node in nodes(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            numbers.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            numbers.add(token.start[0])
    return [(number, lines[number - 1]) for number in sorted(numbers)]


def test_names_are_the_terms_of_the_field() -> None:
    wrong = [
        f"headrace/{place}:{line} {name}: {instead}"
        for _, place, tree in modules()
        for name, line in names(tree)
        if (instead := objection(name, place))
    ]
    wrong += [
        f"headrace/{place}: a file's name: {instead}"
        for path, place, _ in modules()
        if (instead := objection(path.stem, place))
    ]
    wrong += [
        f"headrace/{place}:{node.lineno} class {node.name}: {BANNED_CLASSES[node.name]}"
        for _, place, tree in modules()
        for node in nodes(tree)
        if isinstance(node, ast.ClassDef) and node.name in BANNED_CLASSES
    ]
    assert wrong == []


def test_names_in_cpp_are_the_terms_of_the_field() -> None:
    paths = [*PACKAGE.rglob("*.cpp"), *PACKAGE.rglob("*.h")]
    assert paths
    places = {path: path.relative_to(PACKAGE).as_posix() for path in sorted(paths)}
    wrong = {
        f"headrace/{place}:{line} {name}: {instead}"
        for path, place in places.items()
        for name, line in [(path.stem, 1), *cpp_names(path.read_text())]
        if (instead := objection(name, place))
    }
    assert wrong == set()


def test_names_of_cpp_are_read_without_comments_and_texts() -> None:
    text = 'int codes; // made\n/* found\n*/ f("told", widened_panel);'
    assert [*cpp_names(text)] == [("int", 1), ("codes", 1), ("f", 3), ("widened_panel", 3)]


def test_a_public_class_name_is_used_once() -> None:
    places = defaultdict(list)
    for path, _, tree in sources():
        for node in nodes(tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(f"{path.relative_to(PACKAGE)}:{node.lineno}")
    twice = {name: where for name, where in places.items() if len(where) > 1}
    assert twice == {}


def test_prose_wraps_at_the_width_of_the_code() -> None:
    """A line that holds an address is as long as the address."""
    wrong = [
        f"headrace/{place}:{number}: {len(line)} columns"
        for path, place, tree in modules()
        if max(map(len, path.read_text().splitlines()), default=0) > COLUMNS
        for number, line in prose(path, tree)
        if len(line) > COLUMNS and "https://" not in line
    ]
    assert wrong == []


def test_prose_says_the_reason_not_the_id_of_an_entry() -> None:
    wrong = [
        f"headrace/{place}:{number}: {id_[0]}"
        for path, place, tree in modules()
        if ENTRY_ID.search(path.read_text())
        for number, line in prose(path, tree)
        if (id_ := ENTRY_ID.search(line))
    ]
    assert wrong == []


@pytest.mark.parametrize(
    ("name", "place", "banned"),
    [
        ("found", "front/text/x.py", True),
        ("not_found", "front/text/x.py", False),
        ("_outbox", "core/core.py", True),
        ("StepDraw", "back/runner/x.py", True),
        ("draw_lengths", "bench/x.py", False),
        ("status_codes", "back/x.py", False),
        ("num_in_flight", "core/x.py", False),
    ],
)
def test_a_word_is_banned_whole_or_as_a_part_and_where_it_says(
    name: str, place: str, banned: bool
) -> None:
    assert (objection(name, place) is not None) is banned
