"""The Dockerfile by reading (PLT-21, BEY-07): what linters of such files ask for, and that what it copies is there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from tests.test_wheel import MAX_DEPENDENCY_BYTES, MAX_WHEEL_BYTES, MIB

ROOT = Path(__file__).resolve().parents[1]


def instructions() -> list[tuple[str, str]]:
    """Name and rest of each, with continued lines joined."""
    text = re.sub(r"\\\n\s*", "", (ROOT / "Dockerfile").read_text())
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(line.split(" ", 1)[0], line.split(" ", 1)[1]) for line in lines]


def stages() -> list[list[tuple[str, str]]]:
    parts: list[list[tuple[str, str]]] = []
    for name, rest in instructions():
        if name == "FROM":
            parts.append([])
        parts[-1].append((name, rest))
    return parts


def test_the_image_that_is_left_has_no_compiler_and_no_root() -> None:
    build, image = stages()
    assert "g++" in str(build) and "apt-get" not in str(image)
    names = [name for name, _ in image]
    assert names.index("USER") > max(i for i, name in enumerate(names) if name == "RUN")
    assert ("USER", "headrace") in image and "HEALTHCHECK" in names
    assert dict(image)["ENTRYPOINT"].startswith("["), "signals reach the server, not a shell"


def test_layers_keep_nothing_and_bases_are_named_by_version() -> None:
    for name, rest in instructions():
        if name == "FROM":
            assert re.match(r"[\w.-]+:\d[\w.-]*( AS \w+)?$", rest), rest
        assert name != "ADD"
        if "pip install" in rest or "pip wheel" in rest:
            assert "--no-cache-dir" in rest
        if "apt-get install" in rest:
            assert "--no-install-recommends" in rest and "rm -rf /var/lib/apt/lists" in rest


def test_what_is_copied_is_there_and_not_ignored() -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert ignored[0] == "*"
    for name, rest in instructions():
        if name == "COPY":
            *sources, _ = shlex.split(rest)
            for source in sources:
                assert (ROOT / source).exists() and f"!{source}" in ignored, source


def test_the_budget_holds_what_is_known_of_it() -> None:
    """BEY-07: the bound of the wheel and its dependencies beside PyTorch's measured size."""
    text = (ROOT / "Dockerfile").read_text()
    form = r"unpacked: ([\d,]+) MiB. PyTorch takes (\d+) .*? at most (\d+)"
    match = re.search(form, text, re.DOTALL)
    assert match is not None
    budget, torch_mib, ours = (int(number.replace(",", "")) for number in match.groups())
    assert ours == (MAX_WHEEL_BYTES + MAX_DEPENDENCY_BYTES) // MIB
    assert torch_mib + ours < budget
