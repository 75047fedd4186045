"""Holds the installed versions against the floors of pyproject.toml: `python .ci/lowest.py [EXTRA ...]`.

`make lowest` installs the lowest versions that fit each other and runs the tests over them. Where the
lowest that fits is above a floor, that floor was never tested: it must be raised.
"""

from __future__ import annotations

import re
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
FLOOR = re.compile(r"([\w.-]+)(?:\[[\w,]+\])?\s*(?:>=|==)\s*([\w.]+)")


def requirements(extras: list[str]) -> list[str]:
    """The lines of the package itself and of these extras, and of the extras that these name."""
    lines = list(PROJECT["dependencies"])
    queue, done = list(extras), set[str]()
    while queue:
        extra = queue.pop(0)
        if extra in done:
            continue
        done.add(extra)
        for line in PROJECT["optional-dependencies"][extra]:
            if line.startswith("headrace["):
                queue += line.partition("[")[2].partition("]")[0].split(",")
            else:
                lines.append(line)
    return lines


def release(text: str) -> list[int]:
    """ "2.11.0+cpu" -> [2, 11]: the first three numbers of a version, without zeros at their end."""
    numbers = [int(part) for part in re.findall(r"\d+", text.partition("+")[0])][:3]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return numbers


def main() -> None:
    """Exit status 1 with a line per floor that is not what is installed."""
    wrong = []
    for line in requirements(sys.argv[1:]):
        floor = FLOOR.match(line)
        if floor is None:
            sys.exit(f"{line!r} in pyproject.toml has no lower bound")
        installed = version(floor[1])
        if release(installed) != release(floor[2]):
            wrong.append(f"{line}: {installed} is installed: raise the floor to it")
    sys.exit("\n".join(wrong) or None)


if __name__ == "__main__":
    main()
