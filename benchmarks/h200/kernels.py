"""The Triton kernels on one GPU: right, how fast, how far from the floor. `python -m benchmarks.h200.kernels OUT
[PART ...]`

Parts: check, small, attention, gemms, chain (all, in this order). Writes OUT/kernels.json and OUT/gemms.json
(the table that ships, headrace/back/kernels/linear/tables). An H200 takes about three minutes, most of it compiling.
"""

# ruff: noqa: B023 - what is timed is called in its turn
from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.h200 import attention, chain, correct, gemms
from benchmarks.h200.timing import read_rate
from headrace.back.kernels.gated_act import triton_gated_act
from headrace.back.kernels.gated_act.op import GatedActProblem
from headrace.back.kernels.greedy import triton_greedy
from headrace.back.kernels.greedy.op import GreedyProblem
from headrace.back.kernels.gumbel import triton_gumbel
from headrace.back.kernels.gumbel.op import GumbelProblem
from headrace.back.kernels.linear import table
from headrace.back.kernels.linear.triton_small import gemm_device_of
from headrace.back.kernels.qk_rope_write import triton_qk_rope_write
from headrace.back.kernels.qk_rope_write.op import QKRopeWriteProblem
from headrace.back.kernels.rms_norm import triton_rms_norm
from headrace.back.kernels.rms_norm.op import RMSNormProblem
from headrace.back.kernels.triton.timing import each_us

CUDA = {"device": "cuda", "dtype": torch.bfloat16}
SIZES = [(1, 256), (8, 256), (32, 256), (128, 256), (256, 256), (256, 1024)]


def small() -> list[dict[str, Any]]:
    """Kernels that move little: microseconds in a chain."""
    found = []
    for tokens in (1, 32, 256, 8192):
        x, residual = (torch.randn(tokens, 4096, **CUDA) for _ in range(2))
        wide, qkv = torch.randn(tokens, 2 * 12288, **CUDA), torch.randn(tokens, 6144, **CUDA)
        add_norm = triton_rms_norm.bind_add_norm(
            RMSNormProblem(**CUDA, width=4096, eps=1e-6), torch.ones(4096, device="cuda")
        )
        act = triton_gated_act.bind(GatedActProblem(**CUDA, width=12288, activation="silu"))
        ones = torch.ones(128, device="cuda")
        rope = triton_qk_rope_write.bind(
            QKRopeWriteProblem(
                **CUDA,
                heads=32,
                kv_heads=8,
                head_dim=128,
                block_tokens=16,
                rotary_dim=128,
                eps=1e-6,
            ),
            ones,
            ones,
        )
        kv = torch.zeros(tokens // 16 + 2, 2, 8, 16, 128, **CUDA)
        slots, angles = (
            torch.arange(16, 16 + tokens, device="cuda"),
            torch.randn(8192, 128, device="cuda"),
        )
        positions = torch.arange(tokens, device="cuda") % 8192
        row = {
            "tokens": tokens,
            "add_rms_norm": each_us([lambda: add_norm(x, residual)] * 20),
            "silu_mul": each_us([lambda: act(wide)] * 20),
            "qk_rope_write": each_us([lambda: rope(qkv, positions, angles, kv, slots)] * 20),
        }
        if tokens <= 256:
            logits = torch.randn(tokens, 151936, device="cuda")
            heat = torch.ones(tokens, device="cuda", dtype=torch.float64)
            keys = torch.arange(tokens, device="cuda")
            greedy, gumbel = (
                triton_greedy.bind(GreedyProblem(device="cuda")),
                triton_gumbel.bind(GumbelProblem(device="cuda")),
            )
            row["greedy"] = each_us([lambda: greedy(logits)] * 4)
            row["gumbel"] = each_us([lambda: gumbel(logits, heat, keys)] * 4)
            row["torch_argmax"] = each_us([lambda: logits.argmax(1)] * 4)
            row["torch_float"] = each_us([lambda: logits.bfloat16()] * 4)
        found.append({name: round(value, 2) for name, value in row.items()})
        print(found[-1], flush=True)
    return found


def main() -> None:
    """See the module."""
    out = Path(sys.argv[1])
    parts = sys.argv[2:] or ["check", "small", "attention", "gemms", "chain"]
    report: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    rate = read_rate()
    report["read_bytes_per_s"] = rate
    print(f"read rate {rate / 1e12:.3f} TB/s", flush=True)
    torch.cuda.empty_cache()
    for part in parts:
        began = time.perf_counter()
        try:
            report[part] = _run(part, rate, out)
        except Exception as error:
            report[part] = f"failed: {type(error).__name__}: {error}"
            print(report[part], flush=True)
            import traceback

            traceback.print_exc()
        torch.cuda.empty_cache()
        report[f"{part}_s"] = round(time.perf_counter() - began, 1)
        print(f"-- {part}: {report[f'{part}_s']} s", flush=True)
        (out / "kernels.json").write_text(json.dumps(report, indent=1) + "\n")


def _run(part: str, rate: float, out: Path) -> object:
    if part == "check":
        wrong = correct.check()
        print("\n".join(["WRONG", *wrong] if wrong else ["all right"]), flush=True)
        return wrong
    if part == "small":
        return small()
    if part == "attention":
        attention.compile_all()
        return {
            "decode": attention.decode(rate),
            "prefill": attention.prefill(),
            "quantized": attention.quantized(rate),
            "shared": attention.shared(),
        }
    if part == "gemms":
        print("compiled", gemms.compile_all(), flush=True)
        found, rows = gemms.sweep(rate)
        here = gemm_device_of(torch.device("cuda", 0))
        table.write(out / "gemms.json", here, found)
        table.write(table.user_file(here), here, found)
        return rows
    assert part == "chain", part
    return [row for model in chain.MODELS for row in chain.Step(model).report(rate, SIZES)]


def report_name() -> str:
    """The device's name in tables."""
    return torch.cuda.get_device_name()


if __name__ == "__main__":
    main()
