"""The wheel holds what serving needs and nothing else, in few bytes; installed, it serves (BEY-07)."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from importlib.metadata import distribution
from pathlib import Path

import httpx
import pytest
from packaging.requirements import Requirement

from headrace.back.kernels.native import build
from tests.api.serving import NO_TLS, Served

pytestmark = pytest.mark.long  # not the last
ROOT = Path(__file__).resolve().parents[1]
SOURCES = (
    "headrace",
    "demo/model",
    "demo/models",
    "setup.py",
    "pyproject.toml",
    "MANIFEST.in",
    "README.md",
    "LICENSE",
)
NEEDED = (
    "headrace/demo_model/config.json",
    "headrace/demo_model/model.safetensors",
    "headrace/demo_model/tokenizer.json",
    "headrace/demo_models/vision/model.safetensors",
    "headrace/demo_models/speech/model.safetensors",
    "headrace/demo_models/mixture/model.safetensors",
    "headrace/bench/held_out.jsonl.gz",
    "headrace/bench/held_out_vision.jsonl.gz",
    "headrace/bench/held_out_speech.jsonl.gz",
    "headrace/back/kernels/linear/tables/nvidia-h200.json",
    "headrace/back/kernels/native/pool.cpp",
    "headrace/front/server/webui/page/index.html",
)
KINDS = {".py", ".cpp", ".h", ".so", ".json", ".gz", ".safetensors", ".proto", ".binpb"} | {
    *(".html", ".css", ".js", ".svg"),
}
MIB = 1 << 20
MAX_WHEEL_BYTES = 48 * MIB  # 20 of them the demo model, 13 the three small ones
MAX_DEPENDENCY_BYTES = 220 * MIB  # installed, beside torch: 174 with these versions
MAX_DEPENDENCIES = 52


def build_wheel(folder: Path, library: Path | None = None) -> Path:
    """A wheel of this tree. library: the built kernels; without, there is no compiler either."""
    for name in SOURCES:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        target = folder / "tree" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        copy(ROOT / name, target)
    native = folder / "tree/headrace/back/kernels/native"
    for path in native.glob("*.so"):
        path.unlink()
    (native / ".objects").mkdir(exist_ok=True)
    (native / ".objects/native_linear_avx2-0123.o").write_bytes(b"an object of an earlier build")
    if library is not None:
        shutil.copy(library, native)
    environment = dict(os.environ) | ({} if library else {"CXX": "no-such-compiler"})
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "-w", str(folder), str(folder / "tree")], env=environment, check=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.mark.slow
def test_the_wheel_holds_the_package_with_its_model_and_no_scrap(tmp_path: Path) -> None:
    wheel = build_wheel(tmp_path)
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    inside = [name for name in names if ".dist-info/" not in name]
    assert set(NEEDED) <= set(inside)
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "headrace").rglob("*.py")}
    assert modules <= set(inside)
    assert [name for name in inside if not name.startswith("headrace/")] == []
    assert [name for name in inside if Path(name).suffix not in KINDS] == []
    assert wheel.stat().st_size < MAX_WHEEL_BYTES


def test_the_dependencies_are_few_and_small() -> None:
    """Of the package itself, without extras, as installed here; torch is as large as its build."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    sizes: dict[str, int] = {}
    queue = [Requirement(line) for line in project["dependencies"]]
    while queue:
        requirement = queue.pop()
        name = requirement.name.lower().replace("_", "-")
        marker = requirement.marker
        if name in sizes or not (marker is None or marker.evaluate({"extra": ""})):
            continue
        found = distribution(requirement.name)
        files = [Path(str(file.locate())) for file in found.files or () if file.suffix != ".pyc"]
        sizes[name] = sum(file.stat().st_size for file in files if file.exists())
        queue += [Requirement(line) for line in found.requires or ()]
    gpu = {name for name in sizes if name.startswith(("torch", "triton", "nvidia-", "cuda-"))}
    rest = {name: size for name, size in sizes.items() if name not in gpu}
    assert len(rest) <= MAX_DEPENDENCIES, sorted(rest)
    assert sum(rest.values()) < MAX_DEPENDENCY_BYTES, sorted(rest.items(), key=lambda one: -one[1])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_an_installed_wheel_serves_as_the_checkout_does(tmp_path: Path) -> None:
    """In an environment of its own, which sees the dependencies installed here but not this tree."""
    wheel = build_wheel(tmp_path, build.build())
    assert wheel.stat().st_size < MAX_WHEEL_BYTES
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    python = venv / "bin/python"
    packages = Path(
        subprocess.check_output(
            [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True
        ).strip()
    )
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    subprocess.run([python, "-m", "pip", "install", "-q", "--no-deps", str(wheel)], check=True)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    served = Served(
        subprocess.Popen(
            [venv / "bin/headrace", "serve", "--port", "0"],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            cwd=tmp_path, env=environment | {"OMP_NUM_THREADS": "1"}, start_new_session=True,
        )
    )  # fmt: skip
    try:
        served.wait_ready()
        ask = {"messages": [{"role": "user", "content": "What is 17 + 25?"}], "temperature": 0}
        answer = httpx.post(
            served.url + "/v1/chat/completions", json=ask, timeout=300, verify=NO_TLS
        ).json()
        assert "42" in answer["choices"][0]["message"]["content"]
        assert not any("native kernels are not" in line for line in served.lines)
        assert any(re.search(r"\bnative\b", line) for line in served.lines), served.lines
        assert served.stop() == 0
    finally:
        served.close()
