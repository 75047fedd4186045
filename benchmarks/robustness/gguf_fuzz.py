"""Damaged GGUF files: every one is refused by a CheckpointError (or ConfigError) or loads into finite weights.

    python -m benchmarks.robustness.gguf_fuzz --count 5000 --out benchmarks/robustness/gguf_fuzz.json

Files of several block types are mutated (bits, lengths, counts, offsets, types, cuts, splices, bytes appended), most of
them in the header, then loaded as the server would: header, configuration, tokenizer, check, packing by the native
kernels, a product with a packed weight. With `--heap` the files are read into memory of their own instead of a map, so
that the address sanitizer sees a read one byte beyond the end:

    python -m benchmarks.robustness.gguf_fuzz --sanitized --heap --count 5000

builds the kernels that read what a file holds with `SANITIZE_FLAGS`, in plain C++ (no vectors: the loops are the same
text), and runs itself again under them.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import platform
import random
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from headrace.back.kernels.native import build
from headrace.back.kernels.native.library import load
from headrace.back.models.families import family_of
from headrace.back.models.load import gguf as gguf_source
from headrace.back.models.load import load_model
from headrace.back.parallel.mesh import Mesh
from headrace.base.config.gguf import read_gguf
from headrace.base.config.gguf_config import gguf_config
from headrace.base.config.resolved import ModelSpec
from headrace.base.errors import HeadraceError

TYPES = {"Q8_0": (8, 32, 34), "Q4_0": (2, 32, 18), "Q5_1": (7, 32, 24), "Q2_K": (10, 256, 84),
         "Q3_K": (11, 256, 110), "Q4_K": (12, 256, 144), "Q5_K": (13, 256, 176),
         "Q6_K": (14, 256, 210), "IQ4_NL": (20, 32, 18), "IQ4_XS": (23, 256, 136)}  # fmt: skip
HALVES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,)}
READERS = ("native_pack_blocks", "native_linear_blocks", "native_embedding_blocks")
WIDTH, INNER, VOCABULARY, LAYERS = 256, 256, 64, 1
EDGES = (0, 1, 2, 31, 32, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1)


def sample_file(seed: int) -> tuple[bytes, int]:
    """A sound file of a tiny Llama whose matrices are of random block types, and the length of its header."""
    rng = random.Random(seed)
    matrices = {"token_embd": (VOCABULARY, WIDTH), "output": (VOCABULARY, WIDTH)}
    vectors = {"output_norm": WIDTH}
    for layer in range(LAYERS):
        at = f"blk.{layer}."
        matrices |= {at + n: (WIDTH, WIDTH) for n in ("attn_q", "attn_output")}
        matrices |= {at + n: (WIDTH // 2, WIDTH) for n in ("attn_k", "attn_v")}
        matrices |= {at + n: (INNER, WIDTH) for n in ("ffn_gate", "ffn_up", "ffn_down")}
        vectors |= {at + n: WIDTH for n in ("attn_norm", "ffn_norm")}
    infos, blobs, offset = b"", b"", 0
    for name, shape in (*matrices.items(), *((n, (w,)) for n, w in vectors.items())):
        if len(shape) == 2:
            kind = rng.choice(sorted(TYPES))
            number, data = TYPES[kind][0], _blocks(kind, shape[0] * shape[1], rng)
        else:
            number, data = 0, np.ones(shape, np.float32).tobytes()
        infos += _text(name + ".weight") + struct.pack("<I", len(shape))
        infos += b"".join(struct.pack("<Q", size) for size in reversed(shape))
        infos += struct.pack("<IQ", number, offset)
        blobs += data + bytes(-len(data) % 32)
        offset += len(data) + -len(data) % 32
    values = _metadata()
    count = len(matrices) + len(vectors)
    head = b"GGUF" + struct.pack("<IQQ", 3, count, len(values)) + b"".join(values) + infos
    head += bytes(-len(head) % 32)
    return head + blobs, len(head)


def _blocks(kind: str, elements: int, rng: random.Random) -> bytes:
    _, block, size = TYPES[kind]
    raw = np.frombuffer(rng.randbytes(elements // block * size), np.uint8).reshape(-1, size).copy()
    for at in HALVES.get(kind, (0, 2) if kind in ("Q5_1", "Q4_K", "Q5_K") else (0,)):
        raw[:, at : at + 2] = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)
    return raw.tobytes()


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _metadata() -> list[bytes]:
    numbers = {"block_count": LAYERS, "context_length": 64, "embedding_length": WIDTH,
               "feed_forward_length": INNER, "attention.head_count": 4,
               "attention.head_count_kv": 2}  # fmt: skip
    values = [_text("general.architecture") + struct.pack("<I", 8) + _text("llama")]
    values += [_text("llama." + key) + struct.pack("<II", 4, n) for key, n in numbers.items()]
    key = _text("llama.attention.layer_norm_rms_epsilon")
    values.append(key + struct.pack("<If", 6, 1e-6))
    tokens = b"".join(_text(f"t{i}") for i in range(VOCABULARY))
    values.append(_text("tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, VOCABULARY) + tokens)
    return values


def mutate(data: bytes, header: int, rng: random.Random) -> bytes:
    """One to four changes; three of four hit the header."""
    out = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        end = min(header, len(out)) if rng.random() < 0.75 else len(out)
        at = rng.randrange(max(1, end - 8)) if end > 8 else 0
        kind = rng.randrange(8)
        if kind == 0:
            out[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            out[at] = rng.randrange(256)
        elif kind == 2:
            out[at : at + 8] = struct.pack("<Q", rng.choice(EDGES))
        elif kind == 3:
            out[at : at + 4] = struct.pack("<I", rng.choice(EDGES) & 0xFFFFFFFF)
        elif kind == 4:
            del out[rng.randrange(len(out)) :]
        elif kind == 5:
            del out[at : at + rng.randint(1, 64)]
        elif kind == 6:
            out[at:at] = rng.randbytes(rng.randint(1, 64))
        else:
            other = rng.randrange(max(1, len(out) - 8))
            out[at : at + 8] = out[other : other + 8]
        if len(out) < 16:
            break
    return bytes(out)


def load_all(path: Path) -> str:
    """What the server does with the file; "loaded" or the kind of refusal. Any other exception is a finding."""
    try:
        config = gguf_config(read_gguf(path))
        spec = ModelSpec(
            path=str(path), name="fuzz", format="gguf", family=family_of(config),
            dtype="bfloat16", max_model_len=64, logits_width=config["vocab_size"], eos_ids=(),
            config=config,
        )  # fmt: skip
        model, _ = load_model(spec, mesh=Mesh(), device=torch.device("cpu"), block_tokens=16)
        width = config["hidden_size"]
        model.logits(torch.ones(2, width, dtype=torch.bfloat16))
    except HeadraceError as error:
        return type(error).__name__
    return "loaded"


def on_the_heap(path: Path) -> np.ndarray:
    """The file in an allocation of exactly its size, for the address sanitizer."""
    return np.frombuffer(path.read_bytes(), np.uint8).copy()


def run(count: int, seed: int) -> dict[str, object]:
    """`count` mutated files; the summary. A finding is printed with its number."""
    outcomes: collections.Counter[str] = collections.Counter()
    findings: list[str] = []
    start = time.perf_counter()
    samples = [sample_file(seed + i) for i in range(16)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.gguf"
        for data, _ in samples:
            path.write_bytes(data)
            assert load_all(path) == "loaded", "the sound file must load"
        for number in range(count):
            rng = random.Random(seed * 1_000_003 + number)
            path.write_bytes(mutate(*rng.choice(samples), rng))
            try:
                outcomes[load_all(path)] += 1
            except Exception as error:
                findings.append(f"{number}: {type(error).__name__}: {error}"[:300])
                print(findings[-1], flush=True)
    return {
        "files": count,
        "seed": seed,
        "outcomes": dict(sorted(outcomes.items())),
        "findings": findings,
        "seconds": round(time.perf_counter() - start, 1),
        "library": str(getattr(load(), "isa", load())),
        "machine": platform.machine(),
    }


def in_jobs(jobs: int, count: int, seed: int, heap: bool) -> dict[str, object]:
    """The same files in several processes, one per job, each with a seed of its own; the sums."""
    with tempfile.TemporaryDirectory() as folder:
        shares = [count // jobs + (i < count % jobs) for i in range(jobs)]
        outs = [Path(folder) / f"{i}.json" for i in range(jobs)]
        command = [sys.executable, "-m", "benchmarks.robustness.gguf_fuzz"]
        command += ["--heap"] if heap else []
        children = [
            subprocess.Popen(
                [*command, "--count", str(share), "--seed", str(seed + i), "--out", str(out)],
                stdout=subprocess.DEVNULL,
            )
            for i, (share, out) in enumerate(zip(shares, outs, strict=True))
        ]
        crashed = [child.returncode for child in children if child.wait() not in (0, 1)]
        assert not crashed, f"processes died: {crashed}"
        parts = [json.loads(out.read_text()) for out in outs]
    total: collections.Counter[str] = collections.Counter()
    for part in parts:
        total.update(part["outcomes"])
    return {
        **parts[0],
        "files": sum(part["files"] for part in parts),
        "jobs": jobs,
        "outcomes": dict(sorted(total.items())),
        "findings": [finding for part in parts for finding in part["findings"]],
        "seconds": max(part["seconds"] for part in parts),
    }


def sanitized_library(folder: Path) -> Path:
    """All kernels in the portable instruction set; those of READERS instrumented."""
    compiler = build.find_compiler()
    scratch = folder / "scratch"
    scratch.mkdir()
    objects = []
    for command in build._units(scratch, compiler, ()):
        source, out = Path(command[-3]).stem, Path(command[-1])
        if source.startswith("native_") and not out.stem.endswith("_portable"):
            continue
        flags = build.SANITIZE_FLAGS if source in READERS else ()
        objects.append(build._compile([*command[:-4], *flags, *command[-4:]]))
    library = folder / "libsanitized.so"
    link = [compiler, "-shared", "-pthread", *build.SANITIZE_FLAGS, *objects, "-o", str(library)]
    subprocess.run(link, check=True)
    return library


def sanitized(arguments: list[str]) -> int:
    """Runs this script again with a sanitized library."""
    with tempfile.TemporaryDirectory(prefix=".sanitized-", dir=build.FOLDER) as folder:
        library = sanitized_library(Path(folder))
        names = [
            subprocess.run(
                [build.find_compiler(), f"-print-file-name={name}"],
                capture_output=True, text=True, check=True,
            ).stdout.strip()
            for name in ("libasan.so", "libubsan.so")
        ]  # fmt: skip
        settings = {"LD_PRELOAD": " ".join(names), "HEADRACE_NATIVE": str(library),
                    "ASAN_OPTIONS": "detect_leaks=0", "PYTHONMALLOC": "malloc"}  # fmt: skip
        command = [sys.executable, "-m", "benchmarks.robustness.gguf_fuzz", *arguments]
        return subprocess.run(command, env={**os.environ, **settings}, check=False).returncode


def main() -> int:
    """Exit status 1 if anything but a refusal or a load happened."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--heap", action="store_true", help="read files into memory of their own")
    parser.add_argument("--sanitized", action="store_true", help="run under the address sanitizer")
    parser.add_argument("--out", type=Path)
    own = parser.parse_args()
    if own.sanitized:
        return sanitized([argument for argument in sys.argv[1:] if argument != "--sanitized"])
    if own.heap:
        gguf_source._mapped = on_the_heap
    if own.jobs > 1:
        done = in_jobs(own.jobs, own.count, own.seed, own.heap)
    else:
        done = run(own.count, own.seed)
    summary = {
        **done,
        "heap": own.heap,
        "sanitizers": "LD_PRELOAD" in os.environ,
    }
    print(json.dumps(summary, indent=2))
    if own.out is not None:
        own.out.write_text(json.dumps(summary, indent=2) + "\n")
    return 1 if summary["findings"] else 0


if __name__ == "__main__":
    sys.exit(main())
