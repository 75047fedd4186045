"""What pyproject asks of other packages: a lower bound each, known holes closed, and what is installed meets it."""

from __future__ import annotations

import tomllib
from importlib.metadata import PackageNotFoundError, version
from itertools import chain
from pathlib import Path

import pytest
from packaging.requirements import Requirement

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
ALL = [Requirement(line) for line in [*PROJECT["dependencies"], *chain(*EXTRAS.values())]]


@pytest.mark.parametrize("asked", ALL, ids=str)
def test_a_requirement_has_a_lower_bound_that_the_installed_package_meets(
    asked: Requirement,
) -> None:
    """PLT-20."""
    if asked.name == PROJECT["name"]:  # an extra that names other extras
        return
    assert any(bound.operator in (">=", "==", "~=") for bound in asked.specifier), asked
    try:
        found = version(asked.name)
    except PackageNotFoundError:
        return  # of an extra that this machine does not have
    assert asked.specifier.contains(found, prereleases=True), found


def test_no_version_with_a_known_decompression_bomb_is_accepted() -> None:
    """PLT-20: CVE-2025-69223."""
    (aiohttp,) = {asked.specifier for asked in ALL if asked.name == "aiohttp"}
    assert not aiohttp.contains("3.13.2") and aiohttp.contains("3.13.3")
