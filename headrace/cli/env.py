"""`headrace env`: versions, devices and environment variables, for a bug report. Values of secrets
are not shown."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from importlib import metadata

from headrace import __version__
from headrace.base import env, extensions
from headrace.base.config.options import CommandLine
from headrace.bench.report import emit, processor_name

_PACKAGES = (
    "torch", "triton", "numpy", "transformers", "tokenizers", "safetensors",
    "starlette", "uvicorn", "msgspec", "jinja2",
)  # fmt: skip
_SECRET = ("KEY", "KEYS", "TOKEN")


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "absent"


def _shown(name: str) -> str:
    value = env.get(name)
    if value is None:
        return "not set"
    return "set (hidden)" if name.endswith(_SECRET) else value


def collect() -> dict[str, dict[str, str]]:
    """Everything `headrace env` prints."""
    return {
        "system": {
            "headrace": __version__,
            "python": platform.python_version(),
            "platform": platform.platform(),
            "processor": processor_name(),
        },
        "packages": {name: _version(name) for name in _PACKAGES},
        "extensions": {
            f"{one.group} {one.name}": f"{one.package} {one.version} ({one.target})"
            for one in extensions.installed()
        },
        "variables": {v.name: _shown(v.name) for v in env.VARIABLES},
    }


def main(argv: Sequence[str]) -> int:
    """Prints versions, devices and variables."""
    line = CommandLine("headrace env", "Versions, devices and environment variables.", groups=())
    line.parser.add_argument("--json", action="store_true", help="print one JSON object")
    own, _ = line.parse(argv)
    emit(collect(), as_json=own.json, title="headrace env")
    return 0
