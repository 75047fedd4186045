"""Scripts beside the package (benchmarks, demo) import names that exist: most of them run on other machines only."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.architecture.sources import ROOT, nodes, parsed

OWN = ("headrace", "benchmarks", "demo", "tests")


def _file_of(module: str) -> Path | None:
    path = ROOT.joinpath(*module.split("."))
    for file in (path.with_suffix(".py"), path / "__init__.py"):
        if file.exists():
            return file
    return path if path.is_dir() else None


def _names(file: Path, known: dict[Path, set[str]]) -> set[str]:
    """What a module binds anywhere at its top, in branches too."""
    if file not in known:
        names: set[str] = set()
        (tree,) = parsed([file])
        for node in nodes(tree):
            match node:
                case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                    names.add(node.name)
                case ast.Name(ctx=ast.Store()):
                    names.add(node.id)
                case ast.Import() | ast.ImportFrom():
                    names |= {a.asname or a.name.partition(".")[0] for a in node.names}
        known[file] = names
    return known[file]


def test_what_scripts_import_exists() -> None:
    known: dict[Path, set[str]] = {}
    wrong = []
    files = sorted([*(ROOT / "benchmarks").rglob("*.py"), *(ROOT / "demo").rglob("*.py")])
    for file, tree in zip(files, parsed(files), strict=True):
        for node in nodes(tree):
            if not isinstance(node, ast.ImportFrom) or node.level:
                continue
            module = node.module or ""
            if module.partition(".")[0] not in OWN:
                continue
            target = _file_of(module)
            for alias in node.names:
                there = target is not None and (
                    _file_of(f"{module}.{alias.name}") is not None
                    or (target.is_file() and alias.name in _names(target, known))
                    or (target.is_file() and "__getattr__" in _names(target, known))
                )
                if not there:
                    wrong.append(f"{file.relative_to(ROOT)}:{node.lineno} {module}.{alias.name}")
    assert not wrong, "\n".join(wrong)
