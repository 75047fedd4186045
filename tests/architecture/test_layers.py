"""The rules of docs/ARCHITECTURE.md, held by reading the source.

Import layers: a package imports only from lower ones, and packages of one layer are blind to each other. Front and
core know no torch. One module reads the environment. Files stay small. Only some packages name model families.
"""

from __future__ import annotations

import ast
import re
from functools import cache

from tests.architecture.sources import PACKAGE, ROOT, nodes, parsed, sources

LAYERS = {
    "base.errors": -1, "base.env": 0, "base.registry": 0, "base.extensions": 0, "base.optional": 0,
    "base.splitmix": 0, "base.affinity": 0, "base.process_age": 0, "base.process_stop": 0, "base.process_memory": 0,
    "base.gc_pause": 0, "base.heap": 0,
    "base.config": 1, "base.pipe_process": 1, "base.wire": 1, "base.telemetry": 1,
    "back.platforms": 1, "back.parallel": 1,
    "back.kernels": 2,
    "core": 3, "front.text": 3, "back.attention": 3, "back.quant": 3,
    "back.layers": 4,
    "front.media": 5, "back.models": 5, "back.sampling": 5, "back.lora": 5,
    "back.speculative": 6, "back.transfer": 6,
    "back.runner": 7,
    "back.executor": 8,
    "launch": 9,
    "front.client": 10,
    "front.server.http": 10.1,
    "front.server.state": 10.2,
    "front.server.conversation": 10.3,
    "front.server.administration": 10.4,
    "front.server.openai": 10.5, "front.server.responses": 10.5, "front.server.anthropic": 10.5,
    "front.server.cohere": 10.5, "front.server.ollama": 10.5,
    "front.server.native": 10.5, "front.server.pooling": 10.5, "front.server.decisions": 10.5,
    "front.server.grpc": 10.5, "front.server.batches": 10.5, "front.server.webui": 10.5,
    "front.server": 10.6,
    "bench": 11,
    "cli": 12,
}  # fmt: skip

FAMILY_PACKAGES = (
    "back/models",
    "front/media/processors",
    "base/config/gguf",
    "base/config/weight_files",  # the checkpoint format of that name
    "base/config/quantization_formats",  # names of checkpoint formats
    "launch/locate",
    "front/text/gguf_tokenizer",  # names of pre-tokenizers in GGUF metadata
    "front/text/tokenizer_classes",  # names of model types in config.json
    "front/text/parsing/families",  # names of output formats
)
SIZE_LIMIT = 400
LARGER = {  # lines at most, and why the file is one idea; the list and its numbers may only shrink
    "back/executor/null.py": (600, "the whole fake back: sampling, KV checks and pooling"),
    "back/kernels/attention/triton_decode_hopper.py": (560, "one kernel and its launch tables"),
    "back/kernels/op.py": (450, "what an op, a kernel and a choice are"),
    "back/kernels/sample/triton_truncate.py": (460, "one kernel and its passes"),
    "back/runner/buckets.py": (472, "a recorded step: its tensors, its message and its parts"),
    "core/core.py": (500, "the step loop"),
    "core/scheduler/scheduler.py": (450, "what runs in a step"),
    "front/server/conversation/request.py": (550, "a request resolved once, field by field"),
    "launch/resolve.py": (550, "one decision after another, each with its reason"),
}
NO_TORCH = ("base", "front", "core")


def package_of(module: str) -> str | None:
    """The package a dotted module name (without "headrace.") belongs to."""
    for package in sorted(LAYERS, key=len, reverse=True):
        if module == package or module.startswith(package + "."):
            return package
    return None


@cache
def imports(tree: ast.Module) -> list[str]:
    """Every imported module, wherever the import stands."""
    names: list[str] = []
    for node in nodes(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide the package"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def layer_violations() -> list[str]:
    wrong = []
    for path, module, tree in sources():
        package = package_of(module)
        if package is None:
            continue
        for name in imports(tree):
            target = (
                package_of(name.removeprefix("headrace.")) if name.startswith("headrace.") else None
            )
            if target is None or target == package:
                continue
            if LAYERS[target] >= LAYERS[package]:
                wrong.append(
                    f"{path.relative_to(ROOT)} (L{LAYERS[package]}) imports {name} (L{LAYERS[target]})"
                )
    return wrong


def test_imports_go_down_only() -> None:
    assert layer_violations() == []


def test_the_benchmarks_know_no_server() -> None:
    """They ask it over HTTP, as they ask other servers."""
    wrong = [
        f"{path.relative_to(ROOT)}: {name}"
        for path, module, tree in sources()
        if module.startswith("bench.")
        for name in imports(tree)
        if name.startswith("headrace.front.server")
    ]
    assert wrong == []


def test_every_module_has_a_package() -> None:
    known = {"", "__main__", "base", "front", "back"}
    unplaced = [
        m for _, m, _ in sources() if package_of(m) is None and m not in known and m != "__init__"
    ]
    assert unplaced == []


def test_front_core_and_base_know_no_torch() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}: {name}"
        for path, module, tree in sources()
        if module.split(".")[0] in NO_TORCH
        for name in imports(tree)
        if name.split(".")[0] in ("torch", "triton", "transformers")
    ]
    assert wrong == []


def test_only_launch_joins_front_core_and_back() -> None:
    parts = {"front", "core", "back"}
    wrong = []
    for path, module, tree in sources():
        part = module.split(".")[0]
        if part not in parts:
            continue
        for name in imports(tree):
            other = (
                name.removeprefix("headrace.").split(".")[0] if name.startswith("headrace.") else ""
            )
            if (
                other in parts
                and other != part
                and not (part == "back" and name.startswith("headrace.core.ports"))
            ):
                wrong.append(f"{path.relative_to(ROOT)}: {name}")
    assert wrong == []


def test_one_module_reads_the_environment() -> None:
    wrong = []
    for path, module, tree in sources():
        if module == "base.env":
            continue
        for node in nodes(tree):
            if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "putenv"):
                wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert wrong == []


def test_files_stay_small() -> None:
    lengths = {path: len(path.read_text().splitlines()) for path, _, _ in sources()}
    names = {path.relative_to(PACKAGE).as_posix(): length for path, length in lengths.items()}
    limits = {name: LARGER.get(name, (SIZE_LIMIT, ""))[0] for name in names}
    assert {name: n for name, n in names.items() if n > limits[name]} == {}


SPLATTED = re.compile(r"(?:[\w\])}]\(|,|#[^\n]*\n)\s*\*\s*[(\[]")


def test_no_call_takes_a_splatted_literal() -> None:
    """`f(*(a, b), c=d)` is `f(a, b, c=d)`."""
    folders = ("benchmarks", "demo", "tests")
    paths = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    paths = [path for path in paths if SPLATTED.search(path.read_text()) is not None]
    trees = [(path, tree) for path, _, tree in sources()]
    wrong = []
    for path, tree in (*trees, *zip(paths, parsed(paths), strict=True)):
        for node in nodes(tree):
            arguments = node.args if isinstance(node, ast.Call) else []
            wrong += [
                f"{path.relative_to(ROOT)}:{one.lineno}"
                for one in arguments
                if isinstance(one, ast.Starred) and isinstance(one.value, ast.Tuple | ast.List)
            ]
    assert wrong == []


def test_no_unpickling_and_no_eval() -> None:
    """P1, P14: no byte from outside can become code."""
    sinks = {"pickle", "cloudpickle", "dill", "marshal", "shelve"}
    wrong = []
    for path, _, tree in sources():
        wrong += [
            f"{path.relative_to(ROOT)}: imports {n}"
            for n in imports(tree)
            if n.split(".")[0] in sinks
        ]
        for node in nodes(tree):
            if isinstance(node, ast.Call):
                function = node.func
                name = (
                    function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")
                )
                holder = function.value if isinstance(function, ast.Attribute) else None
                on_torch = isinstance(holder, ast.Name) and holder.id == "torch"
                if (name in ("eval", "exec") and holder is None) or (name == "load" and on_torch):
                    wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}: {name}")
    assert wrong == []


def families() -> set[str]:
    shared = {
        "__init__",
        "registry",
        "blocks",
        "protocol",
        "weights",
        "build",
        "transformers",
        "attention_hook",
        "latent",
        "moe",
        "hybrid",
        "vision",
        "vlm_inside",
    }
    return {p.stem for p in (PACKAGE / "back" / "models").glob("*.py")} - shared


def test_only_some_packages_name_a_family() -> None:
    wrong, family_names = [], families()
    for path, _, tree in sources():
        place = str(path.relative_to(PACKAGE))
        if place.startswith(FAMILY_PACKAGES):
            continue
        for node in nodes(tree):
            if isinstance(node, ast.Constant) and node.value in family_names:
                wrong.append(f"{place}:{node.lineno}: {node.value!r}")
    assert wrong == []


def test_functions_stay_short() -> None:
    wrong = []
    for path, _, tree in sources():
        limit = 150 if "kernels" in path.parts else 60
        for node in nodes(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or 0) - node.lineno + 1
                if length > limit:
                    wrong.append(
                        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}: {length} lines"
                    )
    assert wrong == []


def test_every_file_says_what_lives_there() -> None:
    wrong = [str(p) for p, _, tree in sources() if p.stat().st_size and not ast.get_docstring(tree)]
    assert wrong == []


SILENCED = re.compile(
    r"#\s*(?:ruff: )?(?:noqa|type: ?ignore)\b:?\s*(?:\[[\w, -]+\]|[A-Z]+\d+(?:, ?[A-Z]+\d+)*)?(.*)"
)


def test_every_silenced_check_says_why() -> None:
    """In the tests and benchmarks no type checker looks: nothing is to be silenced there."""
    folders = ("headrace", "tests", "benchmarks", "demo")
    paths = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    bare, idle = [], []
    for path in paths:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            found = SILENCED.search(line)
            if found is None or "re.compile" in line:
                continue
            where = f"{path.relative_to(ROOT)}:{number}"
            if len(found[1].strip(" -#()")) < 5:
                bare.append(where)
            if "type:" in found[0] and not where.startswith("headrace/"):
                idle.append(where)
    assert len(paths) > 500 and not bare and not idle, (bare, idle)
