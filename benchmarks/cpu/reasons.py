"""Why a bar is missed: what counters, bytes or cycles say of it. The page (page.py) puts it beside the row."""

from __future__ import annotations

_GROUPS = (
    "many rows are multiplied in bf16 (as int8 each 32 inputs would end a tile's sum), whose peak is half of int8's: a "
    "tile's product takes 5.5 ns for 32 inputs or 64, and 15 to 19 with its operands from the second-level cache and "
    "the widening of the weights"
)
_SMALL = (
    "6 to 23 MB of weights lie in the caches, so a plain read of them is no bound; a step is 69 kernels of 1 to 78 us, "
    "and 0.16 to 0.18 ms of it are the host's (host.py)"
)
_ATTENTION = (
    "attention takes 39 to 47 % of the time (prompt.py) for 46 % of the operations, about as long as the products for "
    "as many: of its tiles' own rate both reach a fifth to a quarter; products of 384 and 640 inputs are short"
)
REASONS: dict[str, dict[str, str]] = {
    "qwen3-0.6b": {
        "decode bf16 1": "the shared host's memory: a run of the same step minutes apart from its reading was at 93 % "
        "of it; no other engine reads faster",
        "decode bf16 32": "within the spread of the shared host: 1.29, 1.22 and 1.19 in three runs",
        "decode int8 1": "the shared host's memory: 86 % of it in the run before, with 39.4 tokens per second",
        "decode int4 1": "the shared host's memory, in part: a step of 18.7 ms here, of 14.2 when profiled, 12.7 "
        "of them products at 26 GB/s, 0.9 attention, 0.3 norms, rotation and choice, 0.3 between steps",
        "decode int4 8": "within the spread of the shared host: 1.59, 1.49 and 1.44 in three runs",
        "prefill bf16 512": "attention takes 16 % of the time for 6 % of the operations (prompt.py), norms and "
        "rotation 3 %; the peak is a single product's, measured for a second",
        "prefill bf16 2048": "attention takes 23 % of the time for a fifth of the operations (prompt.py)",
        "prefill int8 512": "products take 68 % of the time (prompt.py), at about the rate of the peak (many_rows.py: "
        "7 to 11 ns a tile's product on two threads, the peak's 9); attention, in bf16, 17 %, norms, rotation and "
        "codes 8 %, 4 % are outside of kernels",
        "prefill int8 2048": "attention, in bf16, takes 32 % of the time for a fifth of the operations (prompt.py)",
        "prefill int4 512": _GROUPS,
        "prefill int4 2048": _GROUPS,
        "start": "reads of 1.1 GB beside two imports on a shared host: ready after 2.2 to 3.4 s within minutes, "
        "medians 2.5 to 3.2; torch alone takes more than a second to import: 1,123 Python modules, the collector "
        "already off; those it does not need import each other in a circle and cannot be put off",
    },
    "bundled": {
        **{f"decode {precision} 1": _SMALL for precision in ("bf16", "int8", "int4")},
        **{f"prefill {precision} 2048": _ATTENTION for precision in ("bf16", "int8", "int4")},
        "prefill bf16 512": "21.3 ms (prompt.py): products 11.4, attention 4.4, norms and rotation 1.7, before and "
        "behind the kernels 1.9, between them 1.8; products of 384 and 640 inputs are short",
        "prefill int8 512": "22.9 ms (prompt.py): products 10.3, attention (bf16) 5.2, norms and rotation 2.0, before "
        "and behind the kernels 1.8, between them 3.3",
        "prefill int4 512": "23.6 ms (prompt.py): products 12.8 in bf16, whose peak is half of int8's, attention 4.6, "
        "norms and rotation 1.6, before and behind the kernels 2.1, between them 2.3",
        "start": "torch alone takes 1.04 s to import",
    },
}
"""Shape -> row -> why its bar is missed: what counters, bytes or cycles say."""
