"""The only reader of os.environ, and the table of the variables headrace knows.

Environment variables are for paths, secrets and debugging; everything else is an option of the
configuration tree. At most 20 of them (a test counts). docs/ENV.md is generated from this table.
"""

from __future__ import annotations

import os
import stat
import sys
from dataclasses import dataclass
from pathlib import Path

from headrace.base.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Variable:
    """One environment variable: its name, its meaning and the text shown as its default."""

    name: str
    doc: str
    default: str = ""


VARIABLES: tuple[Variable, ...] = (
    Variable(
        name="HEADRACE_CACHE_DIR",
        doc="Folder for caches (compiled kernels, measured tables). Created with mode 0700.",
        default="~/.cache/headrace",
    ),
    Variable(
        name="HEADRACE_API_KEYS",
        doc="Comma-separated API keys; the same as --api-keys, but invisible in the process list.",
    ),
    Variable(
        name="HEADRACE_ADMIN_KEY",
        doc="Key of the administrative routes; the same as --admin-key.",
    ),
    Variable(
        name="HEADRACE_ADMIN",
        doc="Where `headrace admin` asks: PORT, HOST:PORT, unix:FILE or https://HOST:PORT, as the "
        "server's --admin-listen.",
    ),
    Variable(
        name="HEADRACE_RUNTIME_DIR",
        doc="Folder for the Unix sockets between the processes. Created with mode 0700.",
        default="a fresh folder under the system's temporary folder",
    ),
    Variable(
        name="HEADRACE_NATIVE",
        doc="0 turns the native CPU kernels off (debugging); a path loads that library instead.",
        default="1",
    ),
    Variable(
        name="HEADRACE_ISA",
        doc="Instruction set of the native CPU kernels at most (debugging): portable, avx2, avx512, avx512dot, amx, "
        "armdot, armbf16.",
        default="the best this CPU runs",
    ),
    Variable(
        name="CXX",
        doc="C++ compiler that builds the native CPU kernels.",
        default="g++, clang++ or c++, the first found",
    ),
    Variable(
        name="HF_HOME", doc="Where downloaded checkpoints are kept.", default="~/.cache/huggingface"
    ),
    Variable(
        name="CUDA_VISIBLE_DEVICES",
        doc="Which GPUs exist for this process; kept in step with HIP_VISIBLE_DEVICES.",
    ),
    Variable(
        name="HIP_VISIBLE_DEVICES", doc="The same on AMD; a conflict between the two is an error."
    ),
    Variable(
        name="PROMETHEUS_MULTIPROC_DIR",
        doc="Folder where several API processes join their counters; set by the supervisor for its children.",
    ),
    Variable(name="NO_COLOR", doc="Any value turns colours off in the terminal."),
)

_BY_NAME = {variable.name: variable for variable in VARIABLES}


def get(name: str) -> str | None:
    """The value of a known variable, None if unset or empty; an unknown name is a programming
    error."""
    assert name in _BY_NAME, f"{name} is not in the table of environment variables"
    return os.environ.get(name) or None


def stated(name: str) -> str | None:
    """As `get`, but "" if the variable is set and empty: for those where that is a value of its
    own."""
    assert name in _BY_NAME, f"{name} is not in the table of environment variables"
    return os.environ.get(name)


def cache_dir() -> Path:
    """The cache folder, created with mode 0700; ConfigError if it cannot be, or if others can write
    to it: compiled kernels are loaded from it."""
    path = Path(get("HEADRACE_CACHE_DIR") or "~/.cache/headrace").expanduser()
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        mode = stat.S_IMODE(path.stat().st_mode)
    except OSError as error:
        raise ConfigError(
            f"HEADRACE_CACHE_DIR={path}: cannot make this folder: {error.strerror}",
            field="HEADRACE_CACHE_DIR",
        ) from error
    if mode & stat.S_IWOTH:
        raise ConfigError(
            f"HEADRACE_CACHE_DIR={path}: everyone can write to it (mode {mode:o}), and code is loaded "
            "from it: chmod 700, or name another folder",
            field="HEADRACE_CACHE_DIR",
        )
    return path


def child_environment(**changes: str) -> dict[str, str]:
    """A copy of this process's environment with `changes`, for starting a child process."""
    return {**os.environ, **changes}


def python_command() -> list[str]:
    """This interpreter, for starting a child process. A file of the working directory never stands
    in for a module (`http.py` beside a user's notes), but where headrace itself lies there."""
    package = Path(__file__).parents[2]
    return [sys.executable, *(() if package == Path.cwd() else ("-P",))]


def set_default(name: str, value: str) -> None:
    """Sets a variable of a third-party library in this process unless the user has set it."""
    os.environ.setdefault(name, value)
