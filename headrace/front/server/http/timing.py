"""Why was it slow: where one request's time went, told on demand in the answer and, when it took
long, in one log line.

The parts follow each other and add up to the whole:

    front      reading, checking, template, tokenizing, until the engine has it
    queue      waiting in the engine until first scheduled; `grammar`: what of it a grammar took
    prefill    from then to the first token (all of it for pooled requests)
    decode     from the first token to the last, preemptions included
    delivery   detokenizing, parsing, and waiting for the client to read

A stop string ends an answer in the front, where the engine's own times are not known: its queue is
in `prefill`."""

from __future__ import annotations

import logging

import msgspec
import orjson

from headrace.front.client.events import Ended

log = logging.getLogger("headrace.requests")


class Timeline(msgspec.Struct, frozen=True, kw_only=True):
    """One request, seconds by part, and what explains them."""

    front_s: float
    queue_s: float
    prefill_s: float
    decode_s: float
    delivery_s: float
    end: Ended
    num_prompt: int

    @property
    def total_s(self) -> float:
        """From the arrival to the end of the answer."""
        return self.front_s + self.queue_s + self.prefill_s + self.decode_s + self.delivery_s

    def document(self) -> dict[str, object]:
        """Milliseconds by part, and the counts."""
        parts = ("front", "queue", "prefill", "decode", "delivery", "total")
        document: dict[str, object] = {
            f"{part}_ms": round(1e3 * getattr(self, f"{part}_s"), 3) for part in parts
        }
        for name in ("reason", "num_cached", "num_output", "num_preemptions"):
            document[name] = getattr(self.end, name)
        document["grammar_ms"] = round(1e3 * self.end.hook_wait_s, 3)
        return document | {"num_prompt": self.num_prompt}

    def server_timing(self) -> str:
        """The value of a Server-Timing header (W3C)."""
        parts = ("front", "queue", "prefill", "decode", "delivery", "total")
        entries = [f"{part};dur={1e3 * getattr(self, f'{part}_s'):.3f}" for part in parts]
        entries += [
            f'preemptions;desc="{self.end.num_preemptions}"',
            f'cached;desc="{self.end.num_cached}"',
            f'grammar;desc="{1e3 * self.end.hook_wait_s:.3f}"',
        ]
        return ", ".join(entries)


def timeline(
    end: Ended, arrival: float, handed: float, first: float | None, now: float, *, num_prompt: int
) -> Timeline:
    """From the monotonic times of arrival, hand-over, first token seen and end, and what the engine
    told."""
    total, front = now - arrival, handed - arrival
    if end.total_s is not None:
        queue = end.scheduled_s or 0.0
        prefill = (end.total_s if end.first_token_s is None else end.first_token_s) - queue
        decode = end.total_s - queue - prefill
    else:
        queue = 0.0
        prefill = (now if first is None else first) - handed
        decode = 0.0 if first is None else now - first
    return Timeline(
        front_s=front,
        queue_s=queue,
        prefill_s=prefill,
        decode_s=decode,
        delivery_s=max(0.0, total - front - queue - prefill - decode),
        end=end,
        num_prompt=num_prompt,
    )


def log_slow(where: Timeline, request_id: str, *, after_s: float | None) -> None:
    """One structured line for a request that took longer than `after_s` (None: never)."""
    if after_s is not None and where.total_s >= after_s:
        log.info("%s", orjson.dumps({"request": request_id, **where.document()}).decode())
