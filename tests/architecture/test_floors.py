"""The rules of the house (docs/ARCHITECTURE.md), held by reading the source.

Floors: a package imports only from lower ones, and packages on one floor are blind to each other. Front and core know
no torch. One module reads the environment. Files stay small. Model families are named in their own rooms only.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "headrace"

FLOORS = {
    "base.errors": -1, "base.env": 0, "base.registry": 0, "base.optional": 0,
    "base.splitmix": 0, "base.affinity": 0, "base.age": 0, "base.collector": 0,
    "base.config": 1, "base.child": 1, "base.wire": 1, "base.telemetry": 1, "back.platforms": 1, "back.parallel": 1,
    "back.kernels": 2,
    "core": 3, "front.text": 3, "back.attention": 3, "back.quant": 3,
    "back.layers": 4,
    "front.media": 5, "back.models": 5, "back.sampling": 5, "back.lora": 5,
    "back.speculative": 6, "back.transfer": 6,
    "back.runner": 7,
    "back.executor": 8,
    "launch": 9,
    "front.client": 10,
    "bench": 11, "front.server": 11,
    "cli": 12,
}  # fmt: skip

FAMILY_ROOMS = (
    "back/models",
    "front/media/processors",
    "base/config/gguf",
    "base/config/weight_files",  # the checkpoint format of that name
    "launch/locate",
    "front/text/gguf_tokenizer",  # names of pre-tokenizers in GGUF metadata
    "front/text/parsing/families",  # names of output formats
)
SIZE_LIMIT = 600
NO_TORCH = ("base", "front", "core")


def room_of(module: str) -> str | None:
    """The room a dotted module name (without "headrace.") belongs to."""
    for room in sorted(FLOORS, key=len, reverse=True):
        if module == room or module.startswith(room + "."):
            return room
    return None


@cache
def sources() -> list[tuple[Path, str, ast.Module]]:
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        module = ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")
        found.append((path, module, ast.parse(path.read_text())))
    return found


def imports(tree: ast.Module) -> list[str]:
    """Every imported module, wherever the import stands."""
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide the room"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def floor_violations() -> list[str]:
    wrong = []
    for path, module, tree in sources():
        room = room_of(module)
        if room is None:
            continue
        for name in imports(tree):
            target = (
                room_of(name.removeprefix("headrace.")) if name.startswith("headrace.") else None
            )
            if target is None or target == room:
                continue
            if FLOORS[target] >= FLOORS[room]:
                wrong.append(
                    f"{path.relative_to(ROOT)} (L{FLOORS[room]}) imports {name} (L{FLOORS[target]})"
                )
    return wrong


def test_imports_go_down_only() -> None:
    assert floor_violations() == []


def test_every_module_has_a_room() -> None:
    known = {"", "__main__", "base", "front", "back"}
    homeless = [
        m for _, m, _ in sources() if room_of(m) is None and m not in known and m != "__init__"
    ]
    assert homeless == []


def test_front_core_and_base_know_no_torch() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}: {name}"
        for path, module, tree in sources()
        if module.split(".")[0] in NO_TORCH
        for name in imports(tree)
        if name.split(".")[0] in ("torch", "triton", "transformers")
    ]
    assert wrong == []


def test_only_launch_joins_the_towers() -> None:
    towers = {"front", "core", "back"}
    wrong = []
    for path, module, tree in sources():
        tower = module.split(".")[0]
        if tower not in towers:
            continue
        for name in imports(tree):
            other = (
                name.removeprefix("headrace.").split(".")[0] if name.startswith("headrace.") else ""
            )
            if (
                other in towers
                and other != tower
                and not (tower == "back" and name.startswith("headrace.core.ports"))
            ):
                wrong.append(f"{path.relative_to(ROOT)}: {name}")
    assert wrong == []


def test_one_module_reads_the_environment() -> None:
    wrong = []
    for path, module, tree in sources():
        if module == "base.env":
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "putenv"):
                wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert wrong == []


@pytest.mark.parametrize(
    "path", [p for p, _, _ in sources()], ids=lambda p: str(p.relative_to(PACKAGE))
)
def test_files_stay_small(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= SIZE_LIMIT


def test_no_unpickling_and_no_eval() -> None:
    """P1, P14: no byte from outside can become code."""
    sinks = {"pickle", "cloudpickle", "dill", "marshal", "shelve"}
    wrong = []
    for path, _, tree in sources():
        wrong += [
            f"{path.relative_to(ROOT)}: imports {n}"
            for n in imports(tree)
            if n.split(".")[0] in sinks
        ]
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                function = node.func
                name = (
                    function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")
                )
                holder = function.value if isinstance(function, ast.Attribute) else None
                on_torch = isinstance(holder, ast.Name) and holder.id == "torch"
                if (name in ("eval", "exec") and holder is None) or (name == "load" and on_torch):
                    wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}: {name}")
    assert wrong == []


def families() -> set[str]:
    shared = {
        "__init__",
        "registry",
        "blocks",
        "protocol",
        "weights",
        "build",
        "transformers",
        "attention_hook",
    }
    return {p.stem for p in (PACKAGE / "back" / "models").glob("*.py")} - shared


def test_no_room_but_their_own_names_a_family() -> None:
    wrong = []
    for path, _, tree in sources():
        place = str(path.relative_to(PACKAGE))
        if place.startswith(FAMILY_ROOMS):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and node.value in families():
                wrong.append(f"{place}:{node.lineno}: {node.value!r}")
    assert wrong == []


def test_functions_stay_short() -> None:
    wrong = []
    for path, _, tree in sources():
        limit = 150 if "kernels" in path.parts else 60
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or 0) - node.lineno + 1
                if length > limit:
                    wrong.append(
                        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}: {length} lines"
                    )
    assert wrong == []


def test_every_file_says_what_lives_there() -> None:
    wrong = [str(p) for p, _, tree in sources() if p.stat().st_size and not ast.get_docstring(tree)]
    assert wrong == []


SILENCED = re.compile(
    r"#\s*(?:ruff: )?(?:noqa|type: ?ignore)\b:?\s*(?:\[[\w, -]+\]|[A-Z]+\d+(?:, ?[A-Z]+\d+)*)?(.*)"
)


def test_every_silenced_check_says_why() -> None:
    """In the tests and benchmarks no type checker looks: nothing is to be silenced there."""
    folders = ("headrace", "tests", "benchmarks", "demo")
    paths = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    bare, idle = [], []
    for path in paths:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            found = SILENCED.search(line)
            if found is None or "re.compile" in line:
                continue
            where = f"{path.relative_to(ROOT)}:{number}"
            if len(found[1].strip(" -#()")) < 5:
                bare.append(where)
            if "type:" in found[0] and not where.startswith("headrace/"):
                idle.append(where)
    assert len(paths) > 500 and not bare and not idle, (bare, idle)
