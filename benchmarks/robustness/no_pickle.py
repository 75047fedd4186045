"""Nothing is unpickled in a serving process tree (P1/T1): an audit hook in every process, pickle bombs at every door.

    python -m benchmarks.robustness.no_pickle --write

The server runs with two worker processes, so that every internal channel is in use. The hook comes in by a
sitecustomize module on PYTHONPATH; each process leaves a line when it starts, so that one without the hook is noticed,
and a line for each `pickle.find_class`. The bombs go to the port and to every Unix socket, bare and framed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import pickle
import socket
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.robustness.serving import BYSTANDER_PROMPTS, at_rest, bystander, children, server

HOOK = """
import os, sys, traceback
def note(text, path=os.environ["AUDIT_FOLDER"] + f"/{os.getpid()}"):
    with open(path, "a") as file:
        file.write(text + "\\n")
def hook(event, arguments):
    if event == "pickle.find_class":
        where = traceback.extract_stack(limit=6)[0]
        note(f"EVENT {arguments[0]}.{arguments[1]} at {where.filename}:{where.lineno}")
sys.addaudithook(hook)
note("HOOKED")
"""
GREETING_S = 60.0


class Bomb:
    """Unpickling it touches a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def notes(folder: Path) -> dict[int, list[str]]:
    """What each process has noted."""
    return {int(f.name): f.read_text().splitlines() for f in folder.iterdir()}


def dropped(connection: socket.socket, data: bytes) -> bool:
    """Sends; whether the other side hangs up (what it says before is read and thrown away)."""
    with connection, contextlib.suppress(ConnectionError):
        connection.settimeout(GREETING_S)
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        try:
            while connection.recv(65536):
                pass
        except TimeoutError:
            return False
    return True


def throw_bombs(port: int, sockets: list[Path], bomb: bytes) -> dict[str, int]:
    """Both spellings to every door; how many were thrown, and how many of them ended the connection."""
    thrown = ended = 0
    for data in (bomb, struct.pack("<I", len(bomb)) + bomb):
        doors = [socket.create_connection(("127.0.0.1", port))]
        for path in sockets:
            door = socket.socket(socket.AF_UNIX)
            door.connect(str(path))
            doors.append(door)
        for door in doors:
            thrown += 1
            ended += dropped(door, data)
    return {"thrown": thrown, "ended": ended}


async def traffic(base: str, supervisor: Any) -> dict[int, str]:
    """Ordinary work of all kinds; the processes that did it."""
    async with aiohttp.ClientSession(base) as session:
        await asyncio.gather(*(bystander(session, i) for i in range(len(BYSTANDER_PROMPTS))))
        bodies = [
            {"prompt": "fox", "n": 3, "logprobs": 2, "max_tokens": 8},
            {"prompt": "fox", "max_tokens": 4, "top_p": 0.9, "stop": ["x"], "bad_words": ["a"]},
            {"prompt": "", "max_tokens": 4},
            {"prompt": [10**9], "max_tokens": 4},
        ]
        for body in bodies:
            async with session.post("/v1/completions", json=body) as response:
                await response.read()
        for path in ("/metrics", "/v1/models", "/health"):
            async with session.get(path) as response:
                await response.read()
        await at_rest(session)
        return children(supervisor)


def control(environment: dict[str, str], folder: Path) -> bool:
    """Whether the hook sees an unpickling at all."""
    code = "import pickle, os; print(os.getpid()); pickle.loads(pickle.dumps(print))"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True
    )
    found = folder / done.stdout.decode().strip()
    seen = "EVENT" in found.read_text()
    found.unlink()
    return seen


def run() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        site, audit, runtime = root / "site", root / "audit", root / "run"
        for folder in (site, audit, runtime):
            folder.mkdir()
        (site / "sitecustomize.py").write_text(HOOK)
        path = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))
        environment = {"PYTHONPATH": path, "AUDIT_FOLDER": str(audit)}
        hook_works = control(environment, audit)
        arguments = ["--tensor-parallel", "2", "--executor", "processes"]
        environment["HEADRACE_RUNTIME_DIR"] = str(runtime)
        with server(*arguments, environment=environment) as (base, supervisor):
            working = asyncio.run(traffic(base, supervisor))
            bomb = pickle.dumps(Bomb(root / "exploded"))
            bombs = throw_bombs(int(base.rpartition(":")[2]), list(runtime.rglob("*.sock")), bomb)
            still = asyncio.run(traffic(base, supervisor))
            time.sleep(0.2)
            told = notes(audit)
        return {
            "processes": len(working), "hooked": sum("HOOKED" in told.get(pid, []) for pid in working),
            "control_seen": hook_works, "bombs": bombs, "exploded": (root / "exploded").exists(),
            "restarts": len(working.keys() - still.keys()),
            "events": sorted({line for lines in told.values() for line in lines if "EVENT" in line}),
        }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", action="store_true", help="keep the report beside this script")
    given = parser.parse_args()
    report = run()
    print(json.dumps(report, indent=1))
    if given.write:
        Path(__file__).with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
    bombs = report["bombs"]
    whole = report["hooked"] == report["processes"] and report["control_seen"]
    safe = not report["events"] and not report["exploded"] and not report["restarts"]
    return 0 if whole and safe and bombs["thrown"] == bombs["ended"] > 2 else 1


if __name__ == "__main__":
    sys.exit(main())
