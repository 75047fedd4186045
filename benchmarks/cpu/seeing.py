"""A model that sees beside llama.cpp's (mtmd) on a CPU: both serve the same GGUF file and the same file of its tower,
and are asked in turn about images that they have not seen.

    python -m benchmarks.cpu.seeing --peer FOLDER [--threads 2] [--rounds 3] [--sides 256,512]

FOLDER: where xllamacpp lies, which brings llama.cpp's server (pip install --no-deps --target FOLDER xllamacpp). Random
weights: the decoder of Qwen3-0.6B in Q8_0, the tower of Qwen3-VL-2B in F16. Processor seconds are told beside wall
seconds, as other work may run on the machine.
"""

from __future__ import annotations

import argparse
import base64
import http.client
import io
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import psutil
from PIL import Image

from benchmarks.cpu import make_gguf
from headrace.bench.report import markdown_table
from headrace.bench.startup import free_port, wait_ready

DECODER = Path(__file__).parents[1] / "models" / "qwen3-0.6b" / "config.json"
WIDTH, INNER, DEPTH, HEADS, PATCH, MERGE, POSITIONS, DEEP = (
    1024,
    4096,
    24,
    16,
    16,
    2,
    2304,
    (5, 11, 17),
)
MARKS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
TEMPLATE = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}"
)
SEEING = make_gguf.Seeing(
    sections=(24, 20, 20, 0), deepstack=len(DEEP), marks=MARKS, template=TEMPLATE
)
OUTPUT = 16


def write_tower(path: Path, outputs: int) -> None:
    """The tower's file, in F16."""
    out = gguf.GGUFWriter(str(path), "clip")
    keys = gguf.Keys.ClipVision
    out.add_string(gguf.Keys.Clip.PROJECTOR_TYPE, str(gguf.VisionProjectorType.QWEN3VL))
    out.add_bool(gguf.Keys.Clip.HAS_VISION_ENCODER, True)
    out.add_file_type(make_gguf.FILE_TYPES["F16"])
    sizes = {
        keys.EMBEDDING_LENGTH: WIDTH, keys.FEED_FORWARD_LENGTH: INNER, keys.BLOCK_COUNT: DEPTH,
        keys.Attention.HEAD_COUNT: HEADS, keys.PATCH_SIZE: PATCH, keys.IMAGE_SIZE: 768, keys.PROJECTION_DIM: outputs,
        keys.SPATIAL_MERGE_SIZE: MERGE,
    }  # fmt: skip
    for key, value in sizes.items():
        out.add_uint32(key, value)
    out.add_float32(keys.Attention.LAYERNORM_EPS, 1e-6)
    out.add_array(keys.IMAGE_MEAN, [0.5] * 3)
    out.add_array(keys.IMAGE_STD, [0.5] * 3)
    out.add_bool("clip.use_gelu", True)
    out.add_array(keys.IS_DEEPSTACK_LAYERS, [layer in DEEP for layer in range(DEPTH)])
    rng = np.random.default_rng(0)

    def matrix(name: str, *shape: int, kind: type = np.float16) -> None:
        values = rng.standard_normal(shape, dtype=np.float32) * make_gguf.SCALE
        out.add_tensor(f"{name}.weight", values.astype(kind))

    def linear(name: str, rows: int, columns: int) -> None:
        matrix(name, rows, columns)
        out.add_tensor(f"{name}.bias", np.zeros(rows, np.float32))

    def norm(name: str, size: int) -> None:
        out.add_tensor(f"{name}.weight", np.ones(size, np.float32))
        out.add_tensor(f"{name}.bias", np.zeros(size, np.float32))

    for name in ("v.patch_embd.weight", "v.patch_embd.weight.1"):
        values = rng.standard_normal((WIDTH, 3, PATCH, PATCH), dtype=np.float32) * make_gguf.SCALE
        out.add_tensor(name, values.astype(np.float16))
    out.add_tensor("v.patch_embd.bias", np.zeros(WIDTH, np.float32))
    matrix("v.position_embd", POSITIONS, WIDTH, kind=np.float32)
    for layer in range(DEPTH):
        at = f"v.blk.{layer}"
        norm(f"{at}.ln1", WIDTH)
        norm(f"{at}.ln2", WIDTH)
        linear(f"{at}.attn_qkv", 3 * WIDTH, WIDTH)
        linear(f"{at}.attn_out", WIDTH, WIDTH)
        linear(f"{at}.ffn_up", INNER, WIDTH)
        linear(f"{at}.ffn_down", WIDTH, INNER)
    merged = WIDTH * MERGE**2
    for layer in DEEP:
        norm(f"v.deepstack.{layer}.norm", merged)
        linear(f"v.deepstack.{layer}.fc1", merged, merged)
        linear(f"v.deepstack.{layer}.fc2", outputs, merged)
    norm("v.post_ln", WIDTH)
    linear("mm.0", merged, merged)
    linear("mm.2", outputs, merged)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


def write_pair(folder: Path) -> tuple[Path, Path]:
    """Both files."""
    model, tower = folder / "seeing-Q8_0.gguf", folder / "mmproj-seeing-F16.gguf"
    config = {"rope_theta": 5e6, **json.loads(DECODER.read_text())}
    make_gguf.write(config, model, "Q8_0", SEEING)
    write_tower(tower, int(config["hidden_size"]))
    return model, tower


class Server:
    """One of the two, with what its processes have used."""

    def __init__(self, command: list[str], port: int, log: Path, **environment: str) -> None:
        self.port = port
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                command, env=os.environ | environment, stdout=out, stderr=out
            )

    def wait(self, path: str) -> None:
        """Until it answers."""
        end = time.perf_counter() + 180
        if path == "/health/ready":
            return wait_ready(f"http://127.0.0.1:{self.port}", self._process, end)
        while time.perf_counter() < end:
            assert self._process.poll() is None, "the peer ended"
            try:
                self.ask(None, 1)
                return None
            except (OSError, AssertionError):
                time.sleep(0.5)
        raise TimeoutError("the peer is not ready")

    def processor_s(self) -> float:
        """Of its processes so far."""
        root = psutil.Process(self._process.pid)
        times = [one.cpu_times() for one in (root, *root.children(recursive=True))]
        return float(sum(t.user + t.system for t in times))

    def ask(self, url: str | None, tokens: int) -> dict[str, Any]:
        """A chat about an image, or of text alone: seconds to the first token and in all, and its usage."""
        content: list[dict[str, Any]] = [{"type": "text", "text": "What is this?"}]
        if url is not None:
            content.insert(0, {"type": "image_url", "image_url": {"url": url}})
        body = {
            "model": "m", "messages": [{"role": "user", "content": content}], "max_tokens": tokens, "temperature": 0,
            "stream": True, "ignore_eos": True, "stream_options": {"include_usage": True}, "cache_prompt": False,
        }  # fmt: skip
        if url is None and tokens == 1:
            body["stream"] = True
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        begin, first, usage = time.perf_counter(), 0.0, {}
        connection.request(
            "POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"}
        )
        response = connection.getresponse()
        assert response.status == 200, response.read()[:400]
        for line in response:
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line[6:])
            usage = chunk.get("usage") or usage
            if chunk.get("choices") and not first and chunk["choices"][0]["delta"].get("content"):
                first = time.perf_counter() - begin
        return {
            "first_s": first,
            "all_s": time.perf_counter() - begin,
            "prompt": usage.get("prompt_tokens"),
        }

    def close(self) -> None:
        """Ends it."""
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()


PEER = """
import sys, time
import xllamacpp as x
p = x.CommonParams()
p.model.path, p.mmproj.path, p.port, threads = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
p.cpuparams.n_threads = p.cpuparams_batch.n_threads = threads
p.n_ctx, p.n_parallel, p.n_gpu_layers, p.mmproj_use_gpu, p.use_jinja = 8192, 1, 0, False, True
p.cache_ram_mib, p.n_batch, p.n_ubatch, p.warmup = 0, 2048, 2048, True
server = x.Server(p)
while True:
    time.sleep(60)
"""


def picture(side: int, number: int) -> str:
    """A new image as a data URL."""
    rng = np.random.default_rng(number)
    pixels = (
        rng.integers(0, 256, (side // 8, side // 8, 3), dtype=np.uint8).repeat(8, 0).repeat(8, 1)
    )
    data = io.BytesIO()
    Image.fromarray(pixels).save(data, "PNG")
    return "data:image/png;base64," + base64.b64encode(data.getvalue()).decode()


def compare(servers: dict[str, Server], side: int, rounds: int) -> list[list[Any]]:
    """Rows of one size: seconds to the first token, seconds of the processor."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in servers}
    for turn in range(rounds + 1):
        url = picture(side, 1000 * side + turn)
        for name, server in servers.items():
            before = server.processor_s()
            one = server.ask(url, OUTPUT)
            if turn:  # the first is not counted
                found[name].append(one | {"processor_s": server.processor_s() - before})
    rows = []
    for figure, title in (
        ("first_s", "to the first token, s"), ("all_s", f"and {OUTPUT} tokens, s"), ("processor_s", "processor s"),
    ):  # fmt: skip
        ours, theirs = (statistics.median(one[figure] for one in each) for each in found.values())
        prompts = [each[0]["prompt"] for each in found.values()]
        rows.append(
            [f"{side} x {side}", f"{prompts[0]}, {prompts[1]}", title, ours, theirs, theirs / ours]
        )
    return rows


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--peer", required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sides", default="256,512")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model, tower = write_pair(folder)
        script, threads = folder / "peer.py", str(given.threads)
        script.write_text(PEER)
        ports = free_port(), free_port()
        ours = [
            sys.executable,
            "-m",
            "headrace",
            "serve",
            str(model),
            "--device",
            "cpu",
            "--threads",
            threads,
        ]
        ours += [
            "--port",
            str(ports[0]),
            "--max-model-len",
            "8192",
            "--no-prefix-caching",
            "--max-running",
            "4",
            "--served-model-name",
            "m",
        ]
        theirs = [sys.executable, str(script), str(model), str(tower), str(ports[1]), threads]
        servers = {
            "headrace": Server(ours, ports[0], folder / "ours.log"),
            "llama.cpp": Server(theirs, ports[1], folder / "theirs.log", PYTHONPATH=given.peer),
        }
        try:
            servers["headrace"].wait("/health/ready")
            servers["llama.cpp"].wait("/health")
            rows = [
                row
                for side in given.sides.split(",")
                for row in compare(servers, int(side), given.rounds)
            ]
        except BaseException:
            for log in ("ours.log", "theirs.log"):
                print((folder / log).read_text(errors="replace")[-3000:])
            raise
        finally:
            for server in servers.values():
                server.close()
    print(markdown_table(["image", "prompt tokens", "", *servers, "ratio"], rows))


if __name__ == "__main__":
    main()
