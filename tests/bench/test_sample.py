"""A sample of a model is an engine of its first layers, measured at several numbers of rows."""

from __future__ import annotations

import pytest

from headrace.back.models.registry import DTYPES
from headrace.base.config.options import CommandLine
from headrace.bench import sample
from headrace.bench.sample import ROWS, SAMPLE_LAYERS, run_sample
from headrace.launch.facts import resolve_options
from headrace.launch.locate import bundled_model
from headrace.launch.performance_model import ModelCost
from headrace.launch.plan import build_without_memory, cost_of


@pytest.mark.parametrize("extra", [(), ("--quantization", "int4")])
def test_a_sample_has_the_models_first_layers_and_its_head(
    extra: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample, "WHOLE_BYTES", 0)  # as if it were a large one
    line = CommandLine("test", "", groups=("model", "kv", "scheduler", "device"))
    words = ["--model", str(bundled_model()), "--device", "cpu", "--threads", "1", *extra]
    resolved = resolve_options(line.parse(words)[1])
    model = resolved.engine.model
    bare = build_without_memory(model, block_tokens=resolved.engine.kv.block_tokens)
    cost = cost_of(bare, dtype=DTYPES[model.dtype])
    timing, decisions = run_sample(resolved, cost)
    assert len(timing.cost.kv_layers) == SAMPLE_LAYERS < len(cost.kv_layers)
    assert timing.cost.kv_layers == cost.kv_layers[:SAMPLE_LAYERS]
    own, whole = (c.read_bytes - c.head_bytes for c in (timing.cost, cost))
    norm_bytes = model.config["hidden_size"] * DTYPES[model.dtype].itemsize  # before the head
    layers = len(cost.kv_layers)
    assert (own - norm_bytes) * layers == (whole - norm_bytes) * SAMPLE_LAYERS
    assert timing.cost.head_bytes == cost.head_bytes > 0
    assert tuple(rows for rows, _ in timing.steps) == ROWS
    assert all(0 < seconds < 1000 for _, seconds in timing.steps)
    assert all(0 < seconds < 1000 for _, seconds in timing.prompts)
    wanted = "linear_blocks" if extra else "linear"
    assert any(d.field.startswith(f"kernel.{wanted}") for d in decisions)


@pytest.mark.parametrize(
    ("weight_bytes", "layers"),
    [(sample.WHOLE_BYTES, 8), (sample.WHOLE_BYTES + 1, SAMPLE_LAYERS), (8 << 30, 2)],
)
def test_small_models_run_whole_and_large_ones_by_a_few_layers(
    weight_bytes: int, layers: int
) -> None:
    cost = ModelCost(
        weight_bytes=weight_bytes, read_bytes=1, multiplied=1, kv_layers=((1, None),) * 8
    )
    assert sample._num_layers(cost) == layers
