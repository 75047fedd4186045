"""Writes the shape of a Qwen 3 or OLMoE config.json as a GGUF file with random weights, for llama.cpp.

    python benchmarks/cpu/make_gguf.py benchmarks/models/qwen3-0.6b /tmp/0.6b --types BF16,Q8_0,Q4_0
    python benchmarks/cpu/make_gguf.py benchmarks/models/olmoe-1b-7b /tmp/olmoe --types Q8_0,Q4_0,Q4_K_M --layers 4

Every matrix has the named type, the embedding (which is the head too, but for OLMoE's) included: so both engines read
the same bytes. Q4_K_M is Q4_K but for values, downs of every second layer and the head, which are Q6_K; its blocks are
random bytes with usual scales. The router is random, so that tokens are spread over the experts; of a layer's experts
DIFFERENT are.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np

SCALE = 0.02
DIFFERENT = 4
FILE_TYPES = {
    "BF16": 32,
    "F16": 1,
    "Q8_0": 7,
    "Q4_0": 2,
    "Q4_K_M": 15,
}  # general.file_type: what most matrices are


PLAIN_TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


def add_tokenizer(
    out: gguf.GGUFWriter,
    vocabulary: int,
    marks: tuple[str, ...] = (),
    template: str = PLAIN_TEMPLATE,
) -> None:
    """A byte-level tokenizer with made-up tokens behind the bytes: servers want one, what it says does not matter.
    `marks`: special tokens, before the last one."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    signs = {byte: chr(byte) for byte in printable}
    signs |= {byte: chr(256 + number) for number, byte in enumerate(others)}
    tokens = [signs[byte] for byte in range(256)]
    tokens += ["ab", *(f"<{number}>" for number in range(257, vocabulary))]
    out.add_tokenizer_model("gpt2")
    out.add_tokenizer_pre("qwen2")
    types = [gguf.TokenType.NORMAL] * vocabulary
    for number, mark in enumerate(marks, vocabulary - 1 - len(marks)):
        tokens[number], types[number] = mark, gguf.TokenType.CONTROL
    out.add_token_list(tokens)
    out.add_token_types(types)
    out.add_token_merges([f"{signs[ord('a')]} {signs[ord('b')]}"])
    out.add_eos_token_id(vocabulary - 1)
    out.add_bos_token_id(vocabulary - 1)
    out.add_add_bos_token(False)
    out.add_chat_template(template)


TYPES = gguf.GGMLQuantizationType
K_SCALES = {TYPES.Q4_K: (0, 1), TYPES.Q6_K: (104,)}
"""Of a block's halfwords those that are float16 scales."""


def blocks(rng: np.random.Generator, shape: tuple[int, ...], kind: TYPES) -> np.ndarray:
    """Random values as rows of a type's bytes; of the types with blocks of 256 random bytes."""
    if kind not in K_SCALES:
        return gguf.quantize(rng.standard_normal(shape, dtype=np.float32) * SCALE, kind)
    block, size = gguf.GGML_QUANT_SIZES[kind]
    *rows, columns = shape
    data = rng.integers(0, 256, (*rows, columns // block, size), dtype=np.uint8)
    if kind == TYPES.Q6_K:
        data[..., 192:208] = rng.integers(16, 64, data[..., 192:208].shape, dtype=np.uint8)
    halves = data.view(np.float16)
    for place in K_SCALES[kind]:
        halves[..., place] = SCALE / 512
    return data.reshape(*rows, -1)


def type_of(named: str, tensor: str, layer: int) -> TYPES:
    """A matrix's type in a file of a named one."""
    if named != "Q4_K_M":
        return TYPES[named]
    more = "attn_v" in tensor or "ffn_down" in tensor
    return TYPES.Q6_K if tensor == "output.weight" or (more and layer % 2) else TYPES.Q4_K


@dataclass(frozen=True, kw_only=True)
class Seeing:
    """What a decoder behind a tower has beside its own: `sections` of its positions, how many of its layers are added
    to, special tokens, and a chat template with a place for images."""

    sections: tuple[int, ...]
    deepstack: int
    marks: tuple[str, ...]
    template: str


def write(config: dict[str, float], path: Path, named: str, seeing: Seeing | None = None) -> None:
    """One file."""
    experts = int(config.get("num_experts", 0))
    out = gguf.GGUFWriter(str(path), "olmoe" if experts else "qwen3vl" if seeing else "qwen3")
    width, inner = int(config["hidden_size"]), int(config["intermediate_size"])
    heads, kv_heads = int(config["num_attention_heads"]), int(config["num_key_value_heads"])
    head_dim, vocabulary = int(config["head_dim"]), int(config["vocab_size"])
    out.add_block_count(int(config["num_hidden_layers"]))
    out.add_context_length(int(config["max_position_embeddings"]))
    out.add_embedding_length(width)
    out.add_feed_forward_length(inner)
    out.add_head_count(heads)
    out.add_head_count_kv(kv_heads)
    out.add_key_length(head_dim)
    out.add_value_length(head_dim)
    out.add_layer_norm_rms_eps(config["rms_norm_eps"])
    out.add_rope_freq_base(config["rope_theta"])
    out.add_vocab_size(vocabulary)
    out.add_file_type(FILE_TYPES[named])
    if experts:
        out.add_expert_count(experts)
        out.add_expert_used_count(int(config["num_experts_per_tok"]))
    if seeing is None:
        add_tokenizer(out, vocabulary)
    else:
        add_tokenizer(out, vocabulary, seeing.marks, seeing.template)
        out.add_rope_dimension_sections(list(seeing.sections))
        out.add_num_deepstack_layers(seeing.deepstack)
    rng = np.random.default_rng(0)

    def kind_of(name: str) -> TYPES:
        return type_of(named, name, int(name.split(".")[1]) if name.startswith("blk.") else 0)

    def matrix(name: str, rows: int, columns: int) -> None:
        kind = kind_of(name)
        out.add_tensor(name, blocks(rng, (rows, columns), kind), raw_dtype=kind)

    def stack(name: str, rows: int, columns: int) -> None:
        kind = kind_of(name)
        few = blocks(rng, (DIFFERENT, rows, columns), kind)
        out.add_tensor(name, np.tile(few, (experts // DIFFERENT, 1, 1)), raw_dtype=kind)

    def ones(name: str, size: int) -> None:
        out.add_tensor(name, np.ones(size, np.float32))

    matrix("token_embd.weight", vocabulary, width)
    ones("output_norm.weight", width)
    if experts:
        matrix("output.weight", vocabulary, width)
    for layer in range(int(config["num_hidden_layers"])):
        at = f"blk.{layer}"
        ones(f"{at}.attn_norm.weight", width)
        ones(f"{at}.ffn_norm.weight", width)
        ones(f"{at}.attn_q_norm.weight", heads * head_dim if experts else head_dim)
        ones(f"{at}.attn_k_norm.weight", kv_heads * head_dim if experts else head_dim)
        matrix(f"{at}.attn_q.weight", heads * head_dim, width)
        matrix(f"{at}.attn_k.weight", kv_heads * head_dim, width)
        matrix(f"{at}.attn_v.weight", kv_heads * head_dim, width)
        matrix(f"{at}.attn_output.weight", width, heads * head_dim)
        if experts:
            router = rng.standard_normal((experts, width), dtype=np.float32)
            out.add_tensor(f"{at}.ffn_gate_inp.weight", router * SCALE)
            stack(f"{at}.ffn_gate_exps.weight", inner, width)
            stack(f"{at}.ffn_up_exps.weight", inner, width)
            stack(f"{at}.ffn_down_exps.weight", width, inner)
            continue
        matrix(f"{at}.ffn_gate.weight", inner, width)
        matrix(f"{at}.ffn_up.weight", inner, width)
        matrix(f"{at}.ffn_down.weight", width, inner)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


def main(write_one: Callable[[dict[str, Any], Path, str], None], types: str) -> None:
    """The command of a module that writes such files: one of each type that is not there yet."""
    parser = argparse.ArgumentParser(description=sys.modules[write_one.__module__].__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("prefix", type=Path)
    parser.add_argument("--types", default=types)
    parser.add_argument("--layers", type=int, help="instead of the shape's own number")
    given = parser.parse_args()
    config = {"rope_theta": 1e6, **json.loads((given.model / "config.json").read_text())}
    config["num_hidden_layers"] = given.layers or config["num_hidden_layers"]
    for name in given.types.split(","):
        path = given.prefix.with_name(f"{given.prefix.name}-{name}.gguf")
        if not path.exists():
            write_one(config, path, name)
        print(path)


if __name__ == "__main__":
    main(write, "BF16,Q8_0,Q4_0")
