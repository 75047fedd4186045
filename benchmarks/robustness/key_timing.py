"""Whether the time of a refusal tells how much of a key was right (P3/T3): Welch's t-test.

    python -m benchmarks.robustness.key_timing --keys 20000 --write

The gate itself is timed, in process and in CPU time, because a socket's jitter (100 us) would hide what is looked for
(20 ns). Keys with 0 to 31 right leading bytes alternate at random; |t| between the keys with none right and those with
k right must stay below 4.5, which chance exceeds in 7 of a million tests. `control` is the same test on a comparison
that gives up at the first wrong byte: it must fail, or the test could not see a leak.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import math
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from headrace.base.config.server_options import ServerOptions
from headrace.base.errors import Unauthorized
from headrace.front.server.http.auth import ApiKeyAuthenticator
from headrace.front.server.http.keys import ApiKeys
from headrace.launch.resolve import server_spec

KEY = b"sk-0123456789abcdefghijklmnopqrs"  # 32 bytes
BOUND = 4.5
REPEAT = 20  # decisions per timing: one takes some 3 us


def scope_of(key: bytes) -> dict[str, Any]:
    return {"path": "/v1/models", "headers": [(b"authorization", b"Bearer " + key)]}


def refuse(gate: ApiKeyAuthenticator, scope: dict[str, Any]) -> None:
    try:
        gate.tenant(scope)
    except Unauthorized:
        return
    raise AssertionError("a wrong key was let in")


def leaky(key: bytes) -> bool:
    """What a comparison byte by byte would be."""
    for ours, theirs in zip(KEY, key, strict=True):  # noqa: SIM110 - the loop is what is timed
        if ours != theirs:
            return False
    return True


def wrong_key(right: int, random_: random.Random) -> bytes:
    """A key whose first `right` bytes, and not the next, are those of the key."""
    rest = bytes(random_.choice(b"ABCDEFGHIJKLMNOPQRSTUVWXYZ") for _ in range(len(KEY) - right))
    return KEY[:right] + rest


def timings(
    make: Callable[[bytes], Callable[[], None]], keys: int, seed: int
) -> dict[int, list[float]]:
    """CPU seconds of REPEAT decisions by number of right bytes, in random order."""
    random_ = random.Random(seed)
    order = [i % 32 for i in range(keys)]
    random_.shuffle(order)
    found: dict[int, list[float]] = {right: [] for right in range(32)}
    gc.disable()
    for right in order:
        ask = make(wrong_key(right, random_))
        begin = time.thread_time_ns()
        for _ in range(REPEAT):
            ask()
        found[right].append((time.thread_time_ns() - begin) / 1e9)
    gc.enable()
    return found


def trimmed(values: list[float]) -> tuple[float, float]:
    """The mean without the slowest and fastest tenth (interrupts), and its squared error: Yuen's form of Welch's test,
    for which the variance is taken with those values moved to the edge, not left out."""
    ordered = np.sort(values)
    out = len(ordered) // 10
    kept = ordered[out : len(ordered) - out]
    winsorized = np.clip(ordered, kept[0], kept[-1])
    error = (len(ordered) - 1) * winsorized.var(ddof=1) / (len(kept) * (len(kept) - 1))
    return float(kept.mean()), float(error)


def worst_t(found: dict[int, list[float]]) -> float:
    """The largest |t| of keys with k right bytes against keys with none."""
    none, none_error = trimmed(found[0])
    others = [trimmed(values) for right, values in found.items() if right]
    return max(abs(mean - none) / math.sqrt(error + none_error) for mean, error in others)


def run(keys: int, seed: int) -> dict[str, Any]:
    digests = tuple(hashlib.sha256(key).hexdigest() for key in (KEY, b"another key"))
    spec = server_spec(ServerOptions(api_keys=("none",)))
    gate = ApiKeyAuthenticator(
        keys=ApiKeys(msgspec.structs.replace(spec, api_key_digests=digests)),
        admin_key_digest=None,
        public_metrics=False,
        admin=frozenset(),
        admin_reads=frozenset(),
    )

    def ours(key: bytes) -> Callable[[], None]:
        scope = scope_of(key)
        return lambda: refuse(gate, scope)

    def control(key: bytes) -> Callable[[], None]:
        return lambda: leaky(key) and None

    found = timings(ours, keys, seed)
    return {
        "keys": keys, "seed": seed, "decision_us": round(1e6 * float(np.median(found[0])) / REPEAT, 2),
        "worst_t": round(worst_t(found), 2), "bound": BOUND,
        "worst_t_of_control": round(worst_t(timings(control, keys, seed)), 1),
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--keys", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--write", action="store_true", help="keep the report beside this script")
    given = parser.parse_args()
    report = run(given.keys, given.seed)
    print(json.dumps(report, indent=1))
    if given.write:
        Path(__file__).with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
    return 0 if report["worst_t"] < BOUND < report["worst_t_of_control"] else 1


if __name__ == "__main__":
    sys.exit(main())
