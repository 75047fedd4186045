"""The package's source files, read and parsed once for all tests of this folder."""

from __future__ import annotations

import ast
import gc
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from headrace.base.gc_pause import collection_paused

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "headrace"
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@cache
def sources() -> list[tuple[Path, str, ast.Module]]:
    """Path, dotted name without "headrace." and syntax tree of every module."""
    paths = sorted(PACKAGE.rglob("*.py"))
    return list(zip(paths, map(_module_name, paths), parsed(paths), strict=True))


def parsed(paths: Iterable[Path]) -> list[ast.Module]:
    """Syntax trees, walked through once. They are millions of objects that stay: to collect among them takes longer
    than to make them."""
    with collection_paused():
        trees = [ast.parse(path.read_text()) for path in paths]
        for tree in trees:
            nodes(tree)
    gc.freeze()
    return trees


def _module_name(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


@cache
def nodes(tree: ast.AST) -> list[ast.AST]:
    """All nodes of a tree: a walk takes as long as the parsing."""
    return list(ast.walk(tree))
