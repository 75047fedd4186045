"""The package's source files, read and parsed once for all tests of this folder."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

from headrace.base.gc_pause import collection_paused

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "headrace"
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@cache
def sources() -> list[tuple[Path, str, ast.Module]]:
    """Path, dotted name without "headrace." and syntax tree of every module."""
    with collection_paused():
        return [
            (path, _module_name(path), ast.parse(path.read_text()))
            for path in sorted(PACKAGE.rglob("*.py"))
        ]


def _module_name(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


@cache
def nodes(tree: ast.AST) -> list[ast.AST]:
    """All nodes of a tree: a walk takes as long as the parsing."""
    return list(ast.walk(tree))
