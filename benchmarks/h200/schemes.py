"""What each scheme of weights makes of a model's steps, beside bfloat16 in one run on one GPU.

    python -m benchmarks.h200.schemes --out schemes.json [--schemes bf16,fp8-tensor,...] [--seconds 180] [--whole]

A quarter of Qwen3-8B: 9 of its 36 layers, a quarter of its vocabulary, random weights; so every ratio is that of the
whole model but for what a step costs once. Decode steps of 1 and of 32 rows (128 tokens in, medians of 63 steps) and
prefill of 1 x 8192 and 16 x 1024. Made while loading from dummy weights, or, where a checkpoint's own words matter
(int8 and W4A8 inputs, static scales, GGUF), read from files of random numbers that are written first. bf16 is measured
first and, where time is left, again at the end. It stops when its seconds are over, with what was measured until then.
`--whole`: all of Qwen3-8B, decode steps alone.
"""

from __future__ import annotations

import argparse
import json
import struct
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.h200.shapes import SHAPES, device_name, write_model
from headrace.base.config.tree import KVOptions, ModelOptions, Options, SchedulerOptions
from headrace.bench.latency import latency
from headrace.bench.offline import OfflineEngine
from headrace.bench.report import markdown_table, versions
from headrace.launch.facts import resolve_options

QUARTER = "qwen3-8b-quarter"
SHAPES[QUARTER] = SHAPES["qwen3-8b"] | {
    "num_hidden_layers": 9,
    "vocab_size": 151936 // 4,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
ONLINE = {
    "fp8": "fp8",
    "fp8-tensor": "fp8-tensor",
    "fp8-block": "fp8-block",
    "int8": "int8",
    "int4-g128": "int4-g128",
    "mxfp4": "mxfp4",
    "nvfp4": "nvfp4",
    "mxfp8": "mxfp8",
}
"""Case -> `--quantization`."""
INT8_INPUTS = {
    "num_bits": 8,
    "type": "int",
    "strategy": "token",
    "dynamic": True,
    "symmetric": True,
}
FP8_TENSOR = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True}
COMPRESSED: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "w8a8-int8": (
        "int-quantized",
        {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True},
        INT8_INPUTS,
    ),
    "w4a8": (
        "pack-quantized",
        {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True},
        INT8_INPUTS,
    ),
    "fp8-static": ("float-quantized", FP8_TENSOR, FP8_TENSOR),
}
"""Case -> format, weights and inputs of a compressed-tensors checkpoint."""
CASES = (
    "bf16", "fp8-tensor", "fp8-block", "int4-g128", "w8a8-int8", "gguf-q4_k_m", "mxfp4", "nvfp4", "w4a8", "int8",
    "fp8-static", "fp8", "mxfp8",
)  # fmt: skip
STEPS = ((1, 128), (32, 128))
PREFILL = ((1, 8192), (16, 1024))
OUTPUT = 64


def matrices(config: dict[str, Any]) -> Iterator[tuple[str, str, int, int]]:
    """Of a layer: names in safetensors and in GGUF, outputs, inputs."""
    width, inner, head_dim = (
        config[name] for name in ("hidden_size", "intermediate_size", "head_dim")
    )
    heads, kv_heads = (
        config[name] * head_dim for name in ("num_attention_heads", "num_key_value_heads")
    )
    yield "self_attn.q_proj", "attn_q", heads, width
    yield "self_attn.k_proj", "attn_k", kv_heads, width
    yield "self_attn.v_proj", "attn_v", kv_heads, width
    yield "self_attn.o_proj", "attn_output", width, heads
    yield "mlp.gate_proj", "ffn_gate", inner, width
    yield "mlp.up_proj", "ffn_up", inner, width
    yield "mlp.down_proj", "ffn_down", width, inner


NORMS = {
    "input_layernorm": ("attn_norm", "hidden_size"),
    "post_attention_layernorm": ("ffn_norm", "hidden_size"),
    "self_attn.q_norm": ("attn_q_norm", "head_dim"),
    "self_attn.k_norm": ("attn_k_norm", "head_dim"),
}


def _quantized(case: str, name: str, outputs: int, inputs: int) -> dict[str, torch.Tensor]:
    """The tensors of one matrix of a compressed-tensors checkpoint, about as large as dummy ones."""
    _, weights, asked = COMPRESSED[case]
    found: dict[str, torch.Tensor] = {}
    if weights["type"] == "float":
        numbers = torch.randn(outputs, inputs, dtype=torch.bfloat16).to(torch.float8_e4m3fn)
        found["weight"] = numbers
        found["weight_scale"] = torch.full((1,), 0.02)
        found["input_scale"] = torch.full((1,), 0.02)
    elif weights["num_bits"] == 8:
        found["weight"] = torch.randint(-127, 128, (outputs, inputs), dtype=torch.int8)
        found["weight_scale"] = torch.full((outputs, 1), 0.02 / 73)
    else:
        found["weight_packed"] = torch.randint(
            -(2**31), 2**31 - 1, (outputs, inputs // 8), dtype=torch.int32
        )
        found["weight_scale"] = torch.full(
            (outputs, inputs // 128), 0.02 / 4.6, dtype=torch.bfloat16
        )
        found["weight_shape"] = torch.tensor([outputs, inputs])
    assert asked
    return {f"{name}.{part}": tensor for part, tensor in found.items()}


def write_compressed(folder: Path, case: str) -> Path:
    """A checkpoint of random numbers in the layout of compressed-tensors."""
    target, config = write_model(folder, QUARTER), SHAPES[QUARTER]
    layout, weights, inputs = COMPRESSED[case]
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    method = {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }
    (target / "config.json").write_text(json.dumps(config | {"quantization_config": method}))
    tensors: dict[str, torch.Tensor] = {}
    table = torch.randn(config["vocab_size"], config["hidden_size"], dtype=torch.bfloat16) * 0.02
    tensors["model.embed_tokens.weight"] = table
    tensors["lm_head.weight"] = table.clone()
    tensors["model.norm.weight"] = torch.ones(config["hidden_size"], dtype=torch.bfloat16)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        for name, (_, size) in NORMS.items():
            tensors[f"{at}.{name}.weight"] = torch.ones(config[size], dtype=torch.bfloat16)
        for name, _, outputs, columns in matrices(config):
            tensors |= _quantized(case, f"{at}.{name}", outputs, columns)
    save_file(tensors, str(target / "model.safetensors"), metadata={"format": "pt"})
    return target


F32, Q4_K, Q6_K = 0, 12, 14
BLOCK_BYTES = {Q4_K: 144, Q6_K: 210}
ALIGNMENT = 32


def _gguf_string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _gguf_value(value: Any) -> bytes:
    """A value behind its type's number."""
    if isinstance(value, str):
        return struct.pack("<I", 8) + _gguf_string(value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    kind = 8 if isinstance(value[0], str) else 5
    items = (_gguf_string(one) if kind == 8 else struct.pack("<i", one) for one in value)
    return struct.pack("<IIQ", 9, kind, len(value)) + b"".join(items)


def _gguf_blocks(kind: int, outputs: int, inputs: int) -> bytes:
    """Random numbers with usual scales; ones of F32."""
    if kind == F32:
        return torch.ones(outputs * inputs).numpy().tobytes()
    data = torch.randint(0, 256, (outputs * inputs // 256, BLOCK_BYTES[kind]), dtype=torch.uint8)
    scale = torch.tensor([0.02 / 512], dtype=torch.float16).view(torch.uint8)
    if kind == Q6_K:
        data[:, 192:208] = torch.randint(16, 64, (len(data), 16), dtype=torch.uint8)
    for place in (0, 2) if kind == Q4_K else (208,):
        data[:, place : place + 2] = scale
    return data.numpy().tobytes()


def write_gguf(folder: Path) -> Path:
    """Q4_K_M: Q4_K but for values and downs of every second layer and the head, which are Q6_K."""
    config, path = SHAPES[QUARTER], folder / "quarter-Q4_K_M.gguf"
    width, vocabulary = config["hidden_size"], config["vocab_size"]
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    tokens = [chr(byte) for byte in printable] + [chr(256 + n) for n in range(len(others))]
    tokens += ["ab", *(f"<{number}>" for number in range(257, vocabulary))]
    metadata = {
        "general.architecture": "qwen3", "general.file_type": 15,
        "qwen3.block_count": config["num_hidden_layers"],
        "qwen3.context_length": config["max_position_embeddings"], "qwen3.embedding_length": width,
        "qwen3.feed_forward_length": config["intermediate_size"],
        "qwen3.attention.head_count": config["num_attention_heads"],
        "qwen3.attention.head_count_kv": config["num_key_value_heads"],
        "qwen3.attention.key_length": config["head_dim"],
        "qwen3.attention.value_length": config["head_dim"],
        "qwen3.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "qwen3.rope.freq_base": float(config["rope_theta"]), "qwen3.vocab_size": vocabulary,
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": [1] * vocabulary,
        "tokenizer.ggml.merges": ["a b"], "tokenizer.ggml.eos_token_id": vocabulary - 1,
        "tokenizer.ggml.bos_token_id": vocabulary - 1,
    }  # fmt: skip
    tensors = [
        ("token_embd.weight", Q4_K, vocabulary, width),
        ("output.weight", Q6_K, vocabulary, width),
        ("output_norm.weight", F32, 1, width),
    ]
    for layer in range(config["num_hidden_layers"]):
        for name, size in NORMS.values():
            tensors.append((f"blk.{layer}.{name}.weight", F32, 1, config[size]))
        for _, name, outputs, inputs in matrices(config):
            more = name in ("attn_v", "ffn_down") and layer % 2
            kind = Q6_K if more else Q4_K
            tensors.append((f"blk.{layer}.{name}.weight", kind, outputs, inputs))
    head = [struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(metadata))]
    head += [_gguf_string(key) + _gguf_value(value) for key, value in metadata.items()]
    at = 0
    for name, kind, outputs, inputs in tensors:
        dims = (inputs,) if kind == F32 else (inputs, outputs)
        head.append(_gguf_string(name) + struct.pack(f"<I{len(dims)}Q", len(dims), *dims))
        head.append(struct.pack("<IQ", kind, at))
        size = outputs * inputs * 4 if kind == F32 else outputs * inputs // 256 * BLOCK_BYTES[kind]
        at += -(-size // ALIGNMENT) * ALIGNMENT
    with path.open("wb") as out:
        out.write(b"".join(head))
        for _, kind, outputs, inputs in tensors:
            out.write(b"\0" * (-out.tell() % ALIGNMENT))
            out.write(_gguf_blocks(kind, outputs, inputs))
        out.write(b"\0" * (-out.tell() % ALIGNMENT))
    return path


def open_engine(folder: Path, case: str) -> OfflineEngine:
    """The engine of one case."""
    stored = case not in ("bf16", *ONLINE)
    if case in COMPRESSED:
        path = write_compressed(folder, case)
    else:
        path = write_gguf(folder) if stored else write_model(folder, QUARTER)
    quantization: Any = ONLINE.get(case, "none")
    model = ModelOptions(
        model=str(path),
        load_format="auto" if stored else "dummy",
        max_model_len=8448,
        quantization=quantization,
    )
    options = Options(
        model=model,
        kv=KVOptions(prefix_caching=False, kv_memory="4GiB"),
        scheduler=SchedulerOptions(max_running=64, max_step_tokens=16384),
    )
    return OfflineEngine(resolve_options(options))


def measure(
    case: str, steps: tuple[tuple[int, int], ...], prefill: tuple[tuple[int, int], ...]
) -> dict[str, Any]:
    """Decode steps in milliseconds, prefill in tokens per second."""
    with tempfile.TemporaryDirectory() as folder:
        engine = open_engine(Path(folder), case)
    row: dict[str, Any] = {"case": case, "start_s": round(engine.start_s, 1)}
    facts = engine.executor.facts
    row["decisions"] = [
        list(one) for one in facts.decisions if "quant" in str(one) or "weight" in str(one)
    ]
    try:
        for batch, prompt in steps:
            found = latency(
                engine,
                batch_size=batch,
                input_len=prompt,
                output_len=OUTPUT,
                iterations=1,
                warmup=1,
            )
            row[f"decode b{batch}, ms"] = round(found["decode_step_ms"], 4)
        for batch, prompt in prefill:
            found = latency(
                engine, batch_size=batch, input_len=prompt, output_len=3, iterations=2, warmup=1
            )
            row[f"prefill {batch} x {prompt}, tok/s"] = round(found["prefill_tok_s"])
    finally:
        engine.close()
    return row


def table(rows: list[dict[str, Any]]) -> str:
    """Each case's figures, and how many times as quick as bf16's it is."""
    names = [name for name in rows[0] if "," in name]
    plain = rows[0]
    cells = []
    for row in rows:
        line = [row["case"]]
        for name in names:
            if name not in row:
                line.append(row.get("failed", "")[:80])
                continue
            quicker = row[name] / plain[name] if "tok/s" in name else plain[name] / row[name]
            line.append(f"{row[name]:,} ({quicker:.2f} x)")
        cells.append(line)
    return markdown_table(["scheme", *names], cells)


def main() -> None:
    """Measures the cases in turn."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--schemes", default=",".join(CASES))
    parser.add_argument("--seconds", type=float, default=180)
    parser.add_argument("--whole", action="store_true", help="all layers, decode steps alone")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.whole:
        SHAPES[QUARTER] = SHAPES["qwen3-8b"]
    cases = given.schemes.split(",")
    if unknown := [case for case in cases if case not in CASES]:
        parser.error(f"--schemes: {', '.join(unknown)} not in {', '.join(CASES)}")
    until = time.monotonic() + given.seconds
    rows: list[dict[str, Any]] = []
    result = {"versions": versions() | device_name(), "whole": given.whole, "rows": rows}
    for case in [*cases, "bf16"]:
        begin = time.monotonic()
        if begin > until:
            break
        try:
            rows.append(measure(case, STEPS, () if given.whole else PREFILL))
        except Exception as failure:  # one scheme that fails must not cost the others
            rows.append({"case": case, "failed": f"{type(failure).__name__}: {failure}"[:400]})
        rows[-1]["took_s"] = round(time.monotonic() - begin, 1)
        print(json.dumps(rows[-1]), flush=True)
        if given.out:
            given.out.write_text(json.dumps(result, indent=1))
    print(table(rows))


if __name__ == "__main__":
    main()
