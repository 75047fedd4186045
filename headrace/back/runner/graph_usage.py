"""Which sizes of steps the traffic takes: counted while steps run and kept in the cache folder, so
that their graphs are recorded while the engine is idle instead of at a request's cost.

The file holds the sizes used most, with their counts; it is written whole or not at all. Counts of
earlier runs weigh half. A file that cannot be read is ignored and said so; sizes that this engine
does not have are left out.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections import Counter
from pathlib import Path

import msgspec
import torch

from headrace.back.runner.sizes import Bucket, Sizes
from headrace.back.sampling.in_step import HeadOutput, InStepSampling, SamplerInput
from headrace.base import env
from headrace.base.config.resolved import Decision, EngineSpec
from headrace.base.errors import ConfigError

log = logging.getLogger(__name__)

MOST_KEPT = 128
"""Sizes in a file."""
SAVE_EVERY_S = 60.0
MAX_FILE_BYTES = 1 << 16


class GraphUsage:
    """`counts`: bucket -> its steps, which the loop increments. `decision`: what was kept."""

    def __init__(self, path: Path | None = None) -> None:
        self.counts: Counter[Bucket] = Counter()
        self._path = path
        self._saved_at = -SAVE_EVERY_S
        self._saved: Counter[Bucket] = Counter()
        self.decision = self._load()

    @staticmethod
    def of(spec: EngineSpec, device: torch.device) -> GraphUsage:
        """That of a model on a device, in a file of the cache folder. Ranks that must record the
        same graphs at the same time keep none: each could find another file."""
        if spec.device.world_size > 1:
            return GraphUsage()
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        words = msgspec.json.encode((spec.model, name))
        try:
            folder = env.cache_dir() / "graphs"
        except ConfigError:
            return GraphUsage()
        return GraphUsage(folder / f"{hashlib.sha256(words).hexdigest()[:32]}.json")

    def by_use(self, sizes: Sizes) -> list[Bucket]:
        """The buckets of these sizes, those used most first."""
        return [bucket for bucket, _ in self.counts.most_common() if _is_of(sizes, bucket)]

    def save(self) -> None:
        """Writes the file, at most once a minute and if something has changed."""
        now = time.monotonic()
        if self._path is None or now - self._saved_at < SAVE_EVERY_S or self.counts == self._saved:
            return
        self._saved_at, self._saved = now, self.counts.copy()
        draft = self._path.with_suffix(f".{os.getpid()}")
        try:
            self._path.parent.mkdir(mode=0o700, exist_ok=True)
            draft.write_bytes(msgspec.json.encode(self.counts.most_common(MOST_KEPT)))
            draft.replace(self._path)
        except OSError as error:
            log.warning("the sizes of steps are not kept: %s", error)
            self._path = None

    def _load(self) -> Decision | None:
        if self._path is None or not self._path.exists():
            return None
        try:
            with self._path.open("rb") as file:
                data = file.read(MAX_FILE_BYTES)
            kind = list[tuple[Bucket, int]]
            kept = msgspec.json.decode(data, type=kind, dec_hook=_sampler_input)[:MOST_KEPT]
        except (OSError, msgspec.DecodeError) as error:
            why = f"{self._path} cannot be read: {error}"
            return Decision("graphs.history", "auto", "ignored", why)
        self.counts.update({bucket: count // 2 for bucket, count in kept if count > 1})
        self._saved = self.counts.copy()
        why = "sizes that earlier runs took, recorded while idle"
        return Decision("graphs.history", "auto", f"{len(kept)} sizes", why)


def _sampler_input(kind: type, value: object) -> SamplerInput:
    """A bucket's, as it is written."""
    assert kind is SamplerInput
    return msgspec.convert(value, HeadOutput | InStepSampling)


def _is_of(sizes: Sizes, bucket: Bucket) -> bool:
    """Whether steps take this bucket. Penalties are read from tables that move when they grow:
    such a recording is made when it is needed."""
    if bucket.tokens > sizes.largest.tokens or not 1 <= bucket.rows <= sizes.largest.rows:
        return False
    if bucket.sampler_input.penalties:
        return False
    size = {"tokens": bucket.tokens, "rows": bucket.rows}
    base = sizes.of(**size)
    if bucket.verifies:
        base = sizes.verifying(**size, queries=bucket.queries)
    same = base.tokens == bucket.tokens and base.rows == bucket.rows
    same = same and base.queries == bucket.queries
    return same and base.decode == bucket.decode and base.updates == bucket.updates
