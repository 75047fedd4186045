"""What deterministic mode costs on one H200: products one by one, then decode steps and prefill with it off and on.

    python -m benchmarks.h200.deterministic --out results.json [--shape qwen3-8b] [--parts products,attention,engine]

Products: microseconds of the kernel that is taken otherwise (with what is fused around it), and of the fixed order in
several tiles, in graphs over weights that no cache holds. Engine: `headrace bench latency`, as in offline.py.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.h200.offline import make_engine
from benchmarks.h200.shapes import write_model
from headrace.back.kernels.attention import op as attention
from headrace.back.kernels.attention.triton_fixed import FixedAttentionTile
from headrace.back.kernels.attention.triton_fixed import bind as fixed_attention
from headrace.back.kernels.fused_linear import op as fused_linear
from headrace.back.kernels.linear import op as linear
from headrace.back.kernels.linear.triton_fixed import FixedOrderTile, fixed, tile_for
from headrace.back.kernels.linear.triton_small import Gemm
from headrace.back.kernels.triton.timing import copies, each_us
from headrace.bench.latency import latency
from headrace.bench.report import markdown_table, versions

PRODUCTS = {
    "qkv": (6144, 4096, ""), "o": (4096, 4096, ""), "gate_up": (24576, 4096, "silu"),
    "down": (4096, 12288, ""), "head": (151936, 4096, ""),
}  # fmt: skip
TOKENS = (1, 64, 128, 256, 2048)
BATCHES = ((1, 128), (8, 128), (64, 128), (256, 128), (64, 1024))
FEW = (
    FixedOrderTile(m=64, n=64, k=64, warps=4, stages=6),
    FixedOrderTile(m=64, n=128, k=64, warps=4, stages=4),
    FixedOrderTile(m=64, n=128, k=64, warps=4, stages=6),
    FixedOrderTile(m=64, n=128, k=128, warps=4, stages=3),
    FixedOrderTile(m=64, n=64, k=128, warps=4, stages=4),
)
MANY = (
    FixedOrderTile(m=64, n=128, k=64, warps=4, stages=4),
    FixedOrderTile(m=128, n=128, k=64, warps=4, stages=4),
    FixedOrderTile(m=128, n=128, k=64, warps=8, stages=3),
    FixedOrderTile(m=128, n=256, k=64, warps=8, stages=3),
    FixedOrderTile(m=128, n=64, k=64, warps=4, stages=4),
)


def products(tokens: tuple[int, ...]) -> list[dict[str, Any]]:
    """A row per product and number of tokens."""
    rows = []
    for name, (outputs, inputs, activation) in PRODUCTS.items():
        count = copies(2 * outputs * inputs, most=16)
        weights = [
            torch.randn(outputs, inputs, device="cuda", dtype=torch.bfloat16) / inputs**0.5
            for _ in range(count)
        ]
        for num in tokens if name != "head" else tokens[:2]:
            rows.append(_product(name, weights, activation, num))
            print(json.dumps(rows[-1]), flush=True)
        del weights
    return rows


def _product(
    name: str, weights: list[torch.Tensor], activation: str, tokens: int
) -> dict[str, Any]:
    outputs, inputs = weights[0].shape
    new = {"device": "cuda", "dtype": torch.bfloat16}
    x = torch.randn(tokens, inputs, **new)
    y = torch.empty(tokens, outputs // (2 if activation else 1), **new)
    if activation:
        problem = fused_linear.FusedLinearProblem(
            device="cuda",
            dtype=torch.bfloat16,
            inputs=inputs,
            outputs=outputs,
            activation=activation,
        )
        usual = [fused_linear.OP.choose(problem).bind(w, None, None) for w in weights]
        calls = [lambda f=f: f(x, None) for f in usual]
    else:
        plain = linear.LinearProblem(
            device="cuda", dtype=torch.bfloat16, inputs=inputs, outputs=outputs
        )
        calls = [lambda f=linear.OP.choose(plain).bind(w, None): f(x) for w in weights]
    times = {"usual": each_us(calls)}
    chosen = tile_for(tokens, torch.bfloat16, gated=bool(activation))
    for tile in {chosen: None, **dict.fromkeys(FEW if tokens <= 64 else MANY)}:
        if activation and tile.n == 256:
            continue
        runs = [fixed(Gemm(weight_OI=w, activation=activation), tile=tile) for w in weights]
        label = f"{tile.m}x{tile.n}x{tile.k} w{tile.warps} s{tile.stages}"
        try:
            us = each_us([lambda run=run: run(x, y) for run in runs])
        except Exception as error:  # a tile that does not fit is a figure too
            us, label = None, f"{label} ({type(error).__name__})"
        times[label + (" *" if tile == chosen else "")] = us
    floor = 1e6 * max(outputs * inputs * 2 / 4.3e12, 2 * tokens * outputs * inputs / 780e12)
    return {"product": name, "tokens": tokens, "floor_us": floor, **times}


PAGE = """# Deterministic mode on one H200

`python -m benchmarks.h200.deterministic --out RESULT`, then `--write RESULT`. With `--deterministic` a row's bits do
not depend on what runs beside it (tests/kernels/triton/test_fixed.py, tests/back/test_deterministic.py).

What the cost is made of: at 64 rows products are about 10 % slower (one instruction for every number of rows, so 64
rows are computed where there are fewer; shares of the inputs fixed by the shape), attention the rest. Decodes take
attention tiles of 16 query-head pairs, prompts of 64: both instructions add up along the inner dimension alike, and
sums over positions are products with ones, so that the bits are the same (table below). That took the cost at batch 64
from 12.4 to 2.9 % (prompts of 128) and from 52.7 to 13.1 % (1024); the bar is 12 %. One row pays for the products'
large tile and for attention in parts of 512 positions; 256 rows for products whose tiles must not follow their number.
"""
CONTEXTS = ((64, 192), (64, 1152), (256, 192), (1, 8192))
DECODE_TILES = (
    FixedAttentionTile(m=64, n=64, warps=4, stages=3),
    FixedAttentionTile(m=64, n=64, warps=4, stages=2),
    FixedAttentionTile(m=16, n=64, warps=1, stages=2),
    FixedAttentionTile(m=16, n=64, warps=1, stages=3),
    FixedAttentionTile(m=16, n=64, warps=2, stages=2),
    FixedAttentionTile(m=16, n=64, warps=2, stages=3),
    FixedAttentionTile(m=16, n=64, warps=4, stages=2),
)


def attention_decodes() -> list[dict[str, Any]]:
    """Decodes by the usual kernel and in tiles of 64 and 16 query-head pairs, and whether these give the same bits:
    then a decode could take the small one and a prompt the large one."""
    problem = attention.AttentionProblem(
        device="cuda", dtype=torch.bfloat16, heads=32, kv_heads=8, head_dim=128, block_tokens=16,
        scale=128**-0.5,
    )  # fmt: skip
    found = []
    for rows, context in CONTEXTS:
        plan, blocks = attention.sample_plan(
            [(1, context - i % 50) for i in range(rows)],
            block_tokens=16,
            window=None,
            device="cuda",
        )
        caches = [
            torch.randn(blocks, 2, 8, 16, 128, device="cuda").bfloat16()
            for _ in range(copies(2 * rows * context * 2048, most=8))
        ]
        q = torch.randn(rows, 32, 128, device="cuda").bfloat16()
        usual = attention.OP.choose(problem).bind()
        row: dict[str, Any] = {"rows": rows, "context": context}
        row["usual"] = each_us([partial(usual, q, kv, plan) for kv in caches])
        first = None
        for tile in DECODE_TILES:
            run = fixed_attention(problem, tile=tile)
            label = f"{tile.m}x{tile.n} w{tile.warps} s{tile.stages}"
            out = run(q, caches[0], plan)
            first = out if first is None else first
            row[label] = each_us([partial(run, q, kv, plan) for kv in caches])
            row[f"{label} same bits"] = torch.equal(out, first)
        found.append(row)
        print(json.dumps(row), flush=True)
    return found


MODES = {"both": (False, True), "on": (True,), "off": (False,)}


def engine(shape: str, modes: str, batches: tuple[tuple[int, int], ...]) -> list[dict[str, Any]]:
    """Steps and prefill with it off and on."""
    rows: dict[tuple[int, int], dict[str, Any]] = {}
    for deterministic in MODES[modes]:
        with tempfile.TemporaryDirectory() as folder:
            made = make_engine(write_model(Path(folder), shape), deterministic=deterministic)
        mode = "on" if deterministic else "off"
        for line in made.executor.facts.decisions if deterministic else ():
            print(line, flush=True)
        for batch, prompt in batches:
            found = latency(
                made, batch_size=batch, input_len=prompt, output_len=96, iterations=1, warmup=1
            )
            row = rows.setdefault((batch, prompt), {"batch": batch, "prompt": prompt})
            row[f"step_ms {mode}"] = found["decode_step_ms"]
            row[f"prefill tok/s {mode}"] = found["prefill_tok_s"]
            print(json.dumps(row), flush=True)
        made.close()
        del made
        gc.collect()
        torch.cuda.empty_cache()
    for row in rows.values():
        if modes == "both":
            row["cost"] = f"{100 * (row['step_ms on'] / row['step_ms off'] - 1):.1f} %"
    return list(rows.values())


def table(result: dict[str, Any]) -> str:
    """The page of a result."""
    engine, measured = result["engine"], result["products"]
    steps = markdown_table(
        [
            "batch",
            "prompt",
            "step off, ms",
            "step on, ms",
            "cost",
            "prefill off, tok/s",
            "prefill on, tok/s",
        ],
        [
            [
                *(row["batch"], row["prompt"], row["step_ms off"], row["step_ms on"], row["cost"]),
                *(row["prefill tok/s off"], row["prefill tok/s on"]),
            ]
            for row in engine
        ],
    )
    known = ("product", "tokens", "floor_us", "usual")
    rows = []
    for row in measured:
        best = min((us, tile) for tile, us in row.items() if tile not in known and us is not None)
        rows.append([row["product"], row["tokens"], row["floor_us"], row["usual"], *best])
    tiles = measured_tiles(result["attention"])
    header = ["product", "tokens", "floor, us", "usual, us", "fixed order, us", "best tile"]
    name = ", ".join(f"{key} {value}" for key, value in result["versions"].items())
    return (
        f"{PAGE}\nOne NVIDIA H200; {name}; shape {result['shape']}, bfloat16, dummy weights.\n\n## Engine\n\n{steps}"
        f"\n\n## Products\n\nWith the activation where there is one; the best of the tiles tried.\n\n"
        f"{markdown_table(header, rows)}\n\n## Attention of decodes\n\nOne layer, microseconds. In brackets: other "
        f"bits than the first tile's.\n\n{tiles}\n"
    )


def measured_tiles(measured: list[dict[str, Any]]) -> str:
    """Attention in the tiles that were tried."""
    names = [name for name in measured[0] if f"{name} same bits" in measured[0]]
    rows = [
        [
            *(row["rows"], row["context"], row["usual"]),
            *(
                f"{row[name]:.1f}" if row[f"{name} same bits"] else f"({row[name]:.1f})"
                for name in names
            ),
        ]
        for row in measured
    ]
    return markdown_table(["rows", "context", "usual", *names], rows)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", default="qwen3-8b")
    parser.add_argument("--parts", default="products,attention,engine")
    parser.add_argument("--modes", default="both", choices=MODES)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--write", type=Path, help="results of an earlier run: writes the page")
    given = parser.parse_args()
    if given.write:
        Path(__file__).with_suffix(".md").write_text(table(json.loads(given.write.read_text())))
        return
    result: dict[str, Any] = {"versions": versions(), "shape": given.shape}
    if "products" in given.parts:
        result["products"] = products(TOKENS)
    if "attention" in given.parts:
        result["attention"] = attention_decodes()
    if "engine" in given.parts:
        result["engine"] = engine(given.shape, given.modes, BATCHES)
        header = list(result["engine"][0])
        print(markdown_table(header, [[row[h] for h in header] for row in result["engine"]]))
    if given.out:
        given.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
