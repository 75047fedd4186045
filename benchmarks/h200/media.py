"""Models that see on one H200: the encoder alone, then a server asked about images and video.

    python -m benchmarks.h200.media --shape qwen3-vl-8b --out media.json [--parts tower,rate,first,beside,video]

Dummy weights at true widths, bfloat16, prefix caching off. Every image is a JPEG of quality 90 that no request before
had (a comment of the file differs), unless the encoder's cache is what is measured.

tower: TFLOP/s of encoding images of 1024 x 1024 pixels in batches, the GEMMs and the attention counted.
rate: requests per second with one image and 128 tokens out, and the encoder's share: what `tower` takes for an image,
times the rate. first: time to the first token of one request at a time: a new image, one that the encoder's cache
holds, and a text prompt of as many tokens. beside: what decodes of texts wait between tokens while images come.
video: 64 frames.
"""

from __future__ import annotations

import argparse
import base64
import json
import random
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.h200.offline import make_engine
from benchmarks.h200.server import start, stop
from benchmarks.h200.shapes import SHAPES, device_name, write_model
from benchmarks.media import jpeg
from headrace.bench.report import markdown_table, versions
from headrace.bench.serve import LoadSpec, run_load

SIZES = ((256, 256), (1024, 1024), (1920, 1080))
MARKS = {
    "<|vision_start|>": 151652,
    "<|vision_end|>": 151653,
    "<|image_pad|>": 151655,
    "<|video_pad|>": 151656,
}
TOWER = {
    "deepstack_visual_indexes": [8, 16, 24],
    "depth": 27,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "in_channels": 3,
    "intermediate_size": 4304,
    "model_type": "qwen3_vl",
    "num_heads": 16,
    "num_position_embeddings": 2304,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
ROPE = {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"}
SEEING = {
    "qwen3-vl-8b": ("qwen3-8b", "Qwen3VLForConditionalGeneration", "qwen3_vl"),
    "qwen3-vl-30b-a3b": ("qwen3-30b-a3b", "Qwen3VLMoeForConditionalGeneration", "qwen3_vl_moe"),
}
"""Shape -> the decoder's, the architecture and the model type."""
TEMPLATE = (
    "{% for message in messages %}{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% elif part.type == 'video' %}"
    "<|vision_start|><|video_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}"
)
TFLOPS_BAR = 385
GAP_BAR_MS = 60.0
HIT_BAR = 1.15


def write_seeing(folder: Path, shape: str, **smaller: Any) -> Path:
    """A folder that dummy weights can serve; `smaller`: values of the decoder's and the tower's config."""
    decoder, architecture, kind = SEEING[shape]
    target = write_model(folder, decoder)
    text = (
        SHAPES[decoder] | {"rope_scaling": ROPE, "rope_theta": 5_000_000} | smaller.get("text", {})
    )
    text["model_type"] = f"{kind}_text"
    tower = (
        TOWER
        | {"out_hidden_size": text["hidden_size"], "model_type": kind}
        | smaller.get("tower", {})
    )
    config = {
        "architectures": [architecture], "model_type": kind, "dtype": "bfloat16", "text_config": text,
        "vision_config": tower, "tie_word_embeddings": text["tie_word_embeddings"],
        "eos_token_id": text["eos_token_id"], "image_token_id": MARKS["<|image_pad|>"],
        "video_token_id": MARKS["<|video_pad|>"], "vision_start_token_id": MARKS["<|vision_start|>"],
        "vision_end_token_id": MARKS["<|vision_end|>"],
    }  # fmt: skip
    (target / "config.json").write_text(json.dumps(config))
    tokenizer = json.loads((target / "tokenizer.json").read_text())
    words = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].get)
    flags = {
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
    for mark, number in MARKS.items():
        words[number] = mark
        tokenizer["added_tokens"].append({"id": number, "content": mark, **flags})
    tokenizer["model"]["vocab"] = {word: number for number, word in enumerate(words)}
    (target / "tokenizer.json").write_text(json.dumps(tokenizer))
    (target / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    sides = {"patch_size": 16, "merge_size": 2, "temporal_patch_size": 2}
    for name, bounds in (
        ("preprocessor", (65536, 16777216)),
        ("video_preprocessor", (4096, 25165824)),
    ):
        size = {"shortest_edge": bounds[0], "longest_edge": bounds[1]}
        (target / f"{name}_config.json").write_text(json.dumps({"size": size, **sides}))
    return target


class Images:
    """JPEGs of one size, each a file of its own."""

    def __init__(self, width: int, height: int) -> None:
        self._data = jpeg(width, height)
        self._made = 0

    def fresh(self) -> list[dict[str, Any]]:
        """A part with a file that was never sent."""
        self._made += 1
        return [self.part(f"{self._made} {random.getrandbits(64)}")]

    def held(self) -> list[dict[str, Any]]:
        """A part with the same file each time."""
        return [self.part("kept")]

    def part(self, comment: str) -> dict[str, Any]:
        """A part with the file of this comment."""
        text = comment.encode()
        data = (
            self._data[:2]
            + b"\xff\xfe"
            + (len(text) + 2).to_bytes(2, "big")
            + text
            + self._data[2:]
        )
        url = "data:image/jpeg;base64," + base64.b64encode(data).decode()
        return {"type": "image_url", "image_url": {"url": url}}


def seen_load(base: str, parts: Any, **load: Any) -> dict[str, Any]:
    """A load of chats, each with what `parts()` gives before a few words."""

    def body(spec: LoadSpec, model: str, number: int) -> tuple[str, dict[str, Any]]:
        content = [*parts(), {"type": "text", "text": f"What is this? {number}"}]
        document = {
            "model": model, "messages": [{"role": "user", "content": content}], "stream": True, "temperature": 0,
            "max_tokens": spec.output_tokens, "ignore_eos": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        return "/v1/chat/completions", document

    return _checked(run_load(LoadSpec(base_url=base, timeout_s=60.0, **load), body=body))


def _checked(found: dict[str, Any]) -> dict[str, Any]:
    assert found["ledger"]["ok"] == found["ledger"]["sent"], (
        found["ledger"],
        found["first_problem"],
    )
    return found


def prompt_tokens(base: str, part: dict[str, Any]) -> int:
    """Of a chat about it."""
    import urllib.request

    content = [part, {"type": "text", "text": "What is this? 0"}]
    document = {"messages": [{"role": "user", "content": content}]}
    request = urllib.request.Request(
        base + "/tokenize", json.dumps(document).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return int(json.load(response)["count"])


# --- the encoder alone ---


def tower_flops(tower: dict[str, Any], patches: int, outputs: int) -> float:
    """Of one image: two for each product and sum."""
    width, inner, depth = tower["hidden_size"], tower["intermediate_size"], tower["depth"]
    layer = patches * 2 * (4 * width**2 + 2 * width * inner) + 4 * patches**2 * width
    merged = width * tower["spatial_merge_size"] ** 2
    merger = patches // tower["spatial_merge_size"] ** 2 * 2 * (merged**2 + merged * outputs)
    first = patches * 2 * 3 * tower["patch_size"] ** 2 * width
    return depth * layer + (1 + len(tower["deepstack_visual_indexes"])) * merger + first


@torch.inference_mode()
def tower_part(shape: str, smaller: dict[str, Any]) -> list[dict[str, Any]]:
    """Milliseconds and TFLOP/s of the encoder, by size and images of a pass."""
    few = {"num_hidden_layers": 4} | smaller.get("text", {})
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        engine: Any = make_engine(
            write_seeing(Path(folder), shape, text=few, tower=smaller.get("tower", {})),
            kv_memory="4GiB",
        )
    try:
        cache = engine.executor._resident.runner._state.cache
        device, encoder = cache._device, cache._encoder
        outputs, tower = encoder.width, TOWER | smaller.get("tower", {})
        side = tower["patch_size"]
        if device.type == "cuda":
            places_us(getattr(encoder, "_encoder", encoder))
        for width, height, images in _passes(smaller):
            grid = (1, 2 * round(height / side / 2), 2 * round(width / side / 2))
            patches = grid[1] * grid[2]
            pixels = torch.randint(
                0, 256, (images * patches, 3 * side**2), dtype=torch.uint8, device=device
            )
            ms = encode_ms(encoder, pixels, [grid] * images)
            flops = images * tower_flops(tower, patches, outputs)
            rows.append(
                {
                    "pixels": f"{width} x {height}", "images": images, "patches": patches, "ms": ms,
                    "ms_an_image": ms / images, "tflops": flops / ms / 1e9,
                    "bar": TFLOPS_BAR if (width, height) == (1024, 1024) and images > 1 else None,
                }
            )  # fmt: skip
            print(json.dumps(rows[-1]), flush=True)
            if device.type == "cuda":
                print(json.dumps(by_attention(encoder, pixels, [grid] * images, flops)), flush=True)
    finally:
        engine.close()
    return rows


def by_attention(encoder: Any, pixels: torch.Tensor, grids: Any, flops: float) -> dict[str, Any]:
    """TFLOP/s of the pass with each kernel of attention, and how far their outputs are apart."""
    from headrace.back.kernels.span_attention import library_spans, op, triton_spans

    inner = getattr(encoder, "_encoder", encoder)
    layers = [layer._attention for layer in inner._layers]
    spec, kept = layers[0]._spec, [layer._attend for layer in layers]
    problem = op.SpanAttentionProblem(
        device="cuda", dtype=inner.dtype, heads=spec.heads, kv_heads=spec.heads, head_dim=spec.head_dim,
        scale=spec.head_dim**-0.5,
    )  # fmt: skip
    row: dict[str, Any] = {"images": len(grids), "patches": pixels.shape[0] // len(grids)}
    expected = inner.encode("image", pixels, grids).float()
    for kernel in (triton_spans.KERNEL, library_spans.CUDNN, library_spans.FLASH):
        try:
            bound = kernel.bind(problem)
            for layer in layers:
                layer._attend = bound
            off = (inner.encode("image", pixels, grids).float() - expected).abs().max()
            row[kernel.name] = round(flops / encode_ms(inner, pixels, grids) / 1e9)
            row[f"{kernel.name}_off"] = float(off / expected.abs().max())
        except RuntimeError as error:
            row[kernel.name] = f"{error!s:.200}"
    for layer, attend in zip(layers, kept, strict=True):
        layer._attend = attend
    return row


def _passes(smaller: dict[str, Any]) -> list[tuple[int, int, int]]:
    if smaller:
        return [(64, 64, 1), (64, 64, 2)]
    return [(256, 256, 1), (256, 256, 16), (256, 256, 64), (1024, 1024, 1), (1024, 1024, 2), (1024, 1024, 4),
            (1920, 1080, 1), (1920, 1080, 2)]  # fmt: skip


def places_us(encoder: Any) -> None:
    """Positions and angles of one picture's patches: by PyTorch's operations and by one launch each, in turn."""
    from headrace.back.kernels.patch_places import op, triton_patch_places

    device, table = encoder._table_PE.device, encoder._table_PE
    add = op.PatchPositionsProblem(
        device=device.type,
        dtype=table.dtype,
        width=table.shape[1],
        merge=2,
        side=round(len(table) ** 0.5),
    )
    turn = op.PatchTurnsProblem(device=device.type, head_dim=72, merge=2, theta=10_000.0)
    ways = {
        "torch": (op.bind_positions(add), op.bind_turns(turn)),
        "triton": (triton_patch_places.POSITIONS.bind(add), triton_patch_places.TURNS.bind(turn)),
    }
    for side in (16, 32, 64, 128):
        x_NE = torch.zeros(side**2, table.shape[1], dtype=table.dtype, device=device)
        times: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(12):
            for name, (positions, turns) in ways.items():
                _wait(table)
                begin = time.perf_counter()
                positions(x_NE, table, [(1, side, side)])
                turns([(1, side, side)], device)
                _wait(table)
                times[name].append(1e6 * (time.perf_counter() - begin))
        medians = {name: round(sorted(found)[len(found) // 2]) for name, found in times.items()}
        print(json.dumps({"patches": f"{side} x {side}", "places_us": medians}), flush=True)


def encode_ms(encoder: Any, pixels: torch.Tensor, grids: list[tuple[int, int, int]]) -> float:
    """The median pass of eight, the host's work included."""
    for _ in range(3):
        encoder.encode("image", pixels, grids)
    times = []
    for _ in range(8):
        _wait(pixels)
        begin = time.perf_counter()
        encoder.encode("image", pixels, grids)
        _wait(pixels)
        times.append(1e3 * (time.perf_counter() - begin))
    return sorted(times)[len(times) // 2]


def _wait(tensor: torch.Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)


# --- a server ---


def rate_part(base: str, sizes: Any, users: int, output: int, rounds: int) -> list[dict[str, Any]]:
    """Requests per second of so many users with one image each."""
    rows = []
    for width, height in sizes:
        images = Images(width, height)
        load = {"concurrency": users, "output_tokens": output}
        seen_load(base, images.fresh, num_requests=users, **load)
        found = seen_load(base, images.fresh, num_requests=users * rounds, **load)
        rows.append(
            {
                "pixels": f"{width} x {height}", "users": users, "req_s": found["req_s"],
                "out_tok_s": found["output_tok_s"], "ttft_p50_ms": found["ttft_ms"]["p50"],
                "itl_p99_ms": found["itl_ms"]["p99"],
            }
        )  # fmt: skip
        print(json.dumps(rows[-1]), flush=True)
    return rows


def first_part(base: str, sizes: Any, count: int) -> list[dict[str, Any]]:
    """Time to the first token, one request at a time; a round that is not counted before each."""
    rows = []
    for width, height in sizes:
        images = Images(width, height)
        tokens = prompt_tokens(base, images.held()[0])
        one = {"concurrency": 1, "output_tokens": 4}
        letters = "abcdefgh" * (tokens // 8)  # a token each

        def text(letters: str = letters) -> list[dict[str, Any]]:
            return [{"type": "text", "text": letters}]

        one["num_requests"] = count
        found: dict[str, list[float]] = {"new": [], "held": [], "text": []}
        for turn in range(3):
            new = seen_load(base, images.fresh, **one)
            held = seen_load(base, images.held, **one)
            plain = seen_load(base, text, **one)
            for name, each in zip(found, (new, held, plain), strict=True):
                if turn:
                    found[name].append(each["ttft_ms"]["p50"])
        best = {name: min(values) for name, values in found.items()}
        ratio = best["held"] / best["text"]
        rows.append(
            {
                "pixels": f"{width} x {height}", "tokens": tokens,
                **{f"{name}_ms": value for name, value in best.items()},
                "held_of_text": ratio, "bar": f"{HIT_BAR} {'met' if ratio <= HIT_BAR else 'missed'}",
            }
        )  # fmt: skip
        print(json.dumps(rows[-1]), flush=True)
    return rows


def beside_part(base: str, users: int, output: int, rates: Any, sizes: Any) -> list[dict[str, Any]]:
    """Texts of `users` that decode while requests with an image come at a rate."""
    rows = []
    texts = LoadSpec(
        base_url=base, endpoint="completions", token_ids=150_000, input_words=64, num_requests=users,
        concurrency=users, output_tokens=output,
    )  # fmt: skip
    run_load(texts)
    rows.append(_gaps("none", 0, _checked(run_load(texts)), None))
    for (width, height), rate in zip(sizes, rates, strict=True):
        images, results = Images(width, height), list[dict[str, Any]]()

        def come(images: Images = images, rate: float = rate, results: Any = results) -> None:
            count = max(2, int(rate * rows[0]["wall_s"] * 0.9))
            load = {"concurrency": None, "rate": rate, "num_requests": count, "output_tokens": 16}
            results.append(seen_load(base, images.fresh, **load))

        thread = threading.Thread(target=come)
        thread.start()
        found = _checked(run_load(texts))
        thread.join()
        rows.append(_gaps(f"{width} x {height}", rate, found, results[0]["ttft_ms"]["p50"]))
    return rows


def _gaps(
    pixels: str, rate: float, found: dict[str, Any], first_ms: float | None
) -> dict[str, Any]:
    gaps = found["itl_ms"]
    row = {
        "images": pixels, "a_second": rate, "wall_s": found["wall_s"], "itl_p50_ms": gaps["p50"],
        "itl_p99_ms": gaps["p99"], "image_ttft_ms": first_ms,
        "bar": f"{GAP_BAR_MS:g} {'met' if gaps['p99'] < GAP_BAR_MS else 'missed'}",
    }  # fmt: skip
    print(json.dumps(row), flush=True)
    return row


def video_part(base: str, frames: int, side: tuple[int, int], count: int) -> list[dict[str, Any]]:
    """Clips of so many frames, which the client has sampled."""
    kept = [base64.b64encode(jpeg(*side)).decode() for _ in range(2)]
    made = iter(range(1 << 30))

    def clip() -> list[dict[str, Any]]:
        own = jpeg(*side)
        comment = f"{next(made)} {random.getrandbits(64)}".encode()
        own = own[:2] + b"\xff\xfe" + (len(comment) + 2).to_bytes(2, "big") + comment + own[2:]
        listed = [base64.b64encode(own).decode(), *(kept[i % 2] for i in range(frames - 1))]
        return [
            {
                "type": "video_url",
                "video_url": {"url": "data:video/jpeg;base64," + ",".join(listed)},
            }
        ]

    tokens = prompt_tokens(base, clip()[0])
    rows = []
    for users in (1, 8):
        load = {"concurrency": users, "output_tokens": 128 if users > 1 else 4}
        seen_load(base, clip, num_requests=users, **load)
        found = seen_load(base, clip, num_requests=count * (2 if users > 1 else 1), **load)
        rows.append(
            {
                "frames": frames, "pixels": f"{side[0]} x {side[1]}", "tokens": tokens, "users": users,
                "req_s": found["req_s"], "ttft_p50_ms": found["ttft_ms"]["p50"],
                "itl_p99_ms": found["itl_ms"]["p99"],
            }
        )  # fmt: skip
        print(json.dumps(rows[-1]), flush=True)
    return rows


def served(given: argparse.Namespace, parts: list[str], smaller: dict[str, Any]) -> dict[str, Any]:
    """What a server answers, by part."""
    small = given.try_out
    sizes = ((64, 64), (96, 64), (64, 128)) if small else SIZES
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = write_seeing(Path(name), given.shape, **smaller)
        process, base, ready_s = start(folder, ["--max-model-len", "20480", *given.serve.split()])
        print("ready_s", ready_s, flush=True)
        result["ready_s"] = ready_s
        try:
            if "rate" in parts:
                users, rounds, output = (2, 1, 4) if small else (given.users, given.rounds, 128)
                result["rate"] = rate_part(base, sizes, users, output, rounds)
            if "first" in parts:
                result["first"] = first_part(base, sizes, 2 if small else 7)
            if "beside" in parts:
                users, output, rates = (2, 32, (4.0,) * 3) if small else (16, 640, (16.0, 4.0, 2.0))
                result["beside"] = beside_part(base, users, output, rates, sizes)
            if "video" in parts:
                frames, side, count = (4, (64, 64), 2) if small else (64, (448, 448), 8)
                result["video"] = video_part(base, frames, side, count)
        finally:
            stop(process)
            if given.out:
                given.out.write_text(json.dumps(result, indent=1))
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--shape", default="qwen3-vl-8b", choices=SEEING)
    parser.add_argument("--parts", default="tower,rate,first,beside,video")
    parser.add_argument("--users", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--serve", default="", help="further options of the server")
    parser.add_argument(
        "--try-out", action="store_true", help="small widths and few requests, on a CPU"
    )
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    smaller: dict[str, Any] = {}
    if given.try_out:
        small = {
            "hidden_size": 128,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
        }
        text = small | {"num_key_value_heads": 1, "moe_intermediate_size": 64, "head_dim": 128}
        tower = small | {"num_heads": 2, "depth": 3, "deepstack_visual_indexes": [0]}
        smaller = {"text": text, "tower": tower}
    parts = given.parts.split(",")
    result: dict[str, Any] = {"shape": given.shape, "versions": versions() | device_name()}
    try:
        if "tower" in parts:
            result["tower"] = tower_part(given.shape, smaller)
        if parts != ["tower"]:
            result |= served(given, parts, smaller)
    finally:
        if given.out:
            given.out.write_text(json.dumps(result, indent=1))
    if "tower" in result and "rate" in result:
        each = {row["pixels"]: row["ms_an_image"] for row in result["tower"]}
        for row in result["rate"]:
            row["encoder_share"] = each.get(row["pixels"], 0.0) * row["req_s"] / 1e3
    if given.out:
        given.out.write_text(json.dumps(result, indent=1))
    for part in ("tower", "rate", "first", "beside", "video"):
        if part in result:
            header = list(result[part][0])
            cells = [
                ["" if row[name] is None else row[name] for name in header] for row in result[part]
            ]
            print(markdown_table(header, cells))


if __name__ == "__main__":
    main()
