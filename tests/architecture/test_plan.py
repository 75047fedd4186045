"""docs/ARCHITECTURE.md names the files there are, but for what is marked as planned."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "ARCHITECTURE.md").read_text()


def packages() -> dict[str, str]:
    """Folder below headrace/ -> what the tree says about it; lines that go on belong to the package before."""
    tree = PAGE.split("    headrace/\n      __init__.py")[1].split("    tests/")[0]
    found: dict[str, str] = {}
    part = package = ""
    for line in tree.splitlines()[1:]:
        indent, words = len(line) - len(line.lstrip()), line.split()
        if indent in (6, 8) and words[0].endswith("/"):
            part = words[0] if indent == 6 else part
            package = words[0] if indent == 6 else part + words[0]
            found[package] = " ".join(words[1:])
        elif indent == 8:
            found[package := part + words[0]] = " ".join(words[1:])
        else:
            found[package] = found.get(package, "") + " " + " ".join(words)
    return found


@pytest.mark.parametrize("package", packages())
def test_what_the_tree_names_exists_unless_it_is_planned(package: str) -> None:
    said = packages()[package]
    if said.startswith("(planned)") or "  (planned)" in said or "transfer/" in said:
        return
    folder = ROOT / "headrace" / package
    assert folder.exists(), f"{package} is on the plan and not in the tree"
    built = re.sub(r"[^;,]*\(planned\)", "", said)
    folder = folder if folder.is_dir() else folder.parent
    for name in re.findall(r"(?<![\w/<*])(\w+\.py)\b", built):
        assert any(folder.rglob(name)) or any((ROOT / "headrace").glob(name)), f"{package}{name}"


def test_every_folder_of_the_tree_is_on_the_plan() -> None:
    named = {package.rstrip("/") for package in packages()}
    for part in ("base", "front", "core", "back"):
        for folder in (ROOT / "headrace" / part).iterdir():
            if folder.is_dir() and any(folder.glob("*.py")):
                name = f"{part}/{folder.name}"
                assert name in named, f"{name} is not in docs/ARCHITECTURE.md"


def test_the_index_of_benchmarks_names_every_script_and_only_what_exists() -> None:
    folder = ROOT / "benchmarks"
    index = (folder / "README.md").read_text()
    for script in folder.rglob("*.py"):
        if "__main__" in script.read_text() and "peer" not in script.name:
            assert script.stem in index, f"{script.name} is not in benchmarks/README.md"
    for link in re.findall(r"\]\(([^)#]+)", index):
        assert (folder / link).exists(), link


def test_the_commands_that_send_json_say_so() -> None:
    """curl calls a body a form unless it is told, and forms are answered 415."""
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "demo").glob("*.md")]
    commands = [
        command
        for page in pages
        for command in re.findall(r"curl (?:[^\n]*\\\n)*[^\n]*", page.read_text())
        if re.search(r"-d '?[{@]", command)
    ]
    assert len(commands) > 3
    assert [c for c in commands if "application/json" not in c] == []


PAGES_OF_TESTS = ("docs/CLIENTS.md", "benchmarks/robustness/README.md")


@pytest.mark.parametrize("page", PAGES_OF_TESTS)
def test_the_tests_that_a_page_names_exist(page: str) -> None:
    rows = re.findall(r"(tests/[\w/]+\.py) ((?:`test_\w+`(?:, )?)+)", (ROOT / page).read_text())
    assert len(rows) > 20
    for path, names in rows:
        source = (ROOT / path).read_text()
        for name in re.findall(r"`(test_\w+)`", names):
            assert f"def {name}(" in source, f"{path} has no {name}"
