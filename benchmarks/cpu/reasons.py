"""Why a bar is missed: what counters, bytes or cycles say of it. The page (page.py) puts it beside the row."""

from __future__ import annotations

_GROUPS = (
    "each 32 inputs end a tile's sum: its store, and per row a conversion, a product of scales and a fused sum (1.2 "
    "ns, see the README), beside 5.9 ns of the tile for 16 rows; groups of 128 pay a quarter of that"
)
_SMALL = (
    "6 to 23 MB of weights lie in the caches, so a plain read of them is no bound; a step is 69 kernels of 1 to 78 us, "
    "and 0.16 to 0.18 ms of it are the host's (host.py)"
)
REASONS: dict[str, dict[str, str]] = {
    "qwen3-0.6b": {
        "decode bf16 1": "the shared host's memory: seven minutes later the same step was at 18.3 tok/s (last "
        "section), 93 % of this row's reading",
        "decode int4 1": "the shared host's memory, in part: a step of 18.7 ms here, of 14.2 when profiled, 12.7 "
        "of them products at 26 GB/s, 0.9 attention, 0.3 norms, rotation and choice, 0.3 between steps",
        "decode int4 8": "within the spread: 1.59 in the run before, 1.49 in this one",
        "prefill int8 2048": "attention is a fifth of the operations and computes in bf16, at some 900 GFLOP/s: 87 % "
        "at most; of the rest no more is known than that the same prompt of 512 ran at 860 and at 1,244 tok/s (last "
        "section)",
        "prefill int4 512": _GROUPS,
        "prefill int4 2048": _GROUPS,
        "start": "torch alone takes more than a second to import: 1,123 Python modules, the collector already off; "
        "those it does not need import each other in a circle and cannot be put off",
    },
    "bundled": {
        **{f"decode {precision} 1": _SMALL for precision in ("bf16", "int8", "int4")},
        "start": "as above",
    },
}
"""Shape -> row -> why its bar is missed: what counters, bytes or cycles say."""
