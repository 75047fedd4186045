"""Batches: what each kernel is told, and what a step costs the host."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from headrace.back.runner import devices
from headrace.back.runner.batch import GrowingTable, Rows, shape_of
from headrace.back.runner.buckets import BucketSteps
from headrace.back.runner.exact_steps import build_batch
from headrace.back.runner.start import start_runner
from tests.back.driver import Driver
from tests.back.tiny_model import TinyModel, tiny_spec

CPU = torch.device("cpu")


def test_slots_positions_and_tables_follow_the_rows_at_every_split() -> None:
    """REG-022, against one token at a time."""
    rng = np.random.default_rng(0)
    runner = start_runner(tiny_spec(num_blocks=300), TinyModel((None, 9)), device=CPU).runner
    driver = Driver(runner.facts)
    rows = Rows.growing(max_rows=8, num_groups=2, block_tokens=8, device=CPU)
    for _ in range(30):
        prompts = [rng.integers(0, 61, rng.integers(1, 60)).tolist() for _ in range(4)]
        sequences = [driver.add(prompt) for prompt in prompts]
        while any(s.num_computed < s.num_prompt for s in sequences):
            runs = [
                (s, int(rng.integers(1, s.num_prompt - s.num_computed + 1)))
                for s in sequences
                if s.num_computed < s.num_prompt
            ]
            before = {s.request: s.num_computed for s in sequences}
            del before
            plan = driver.plan(runs)
            rows.apply(plan)
            batch = build_batch(shape_of(plan), rows, kv=(), group_of_layer=(0, 1))
            _check(plan, batch, {s.row: s for s in sequences}, driver)
            for s in sequences:
                s.unknown = 0
        for s in sequences:
            driver.release(s)


def _check(plan, batch, by_row, driver) -> None:
    at = 0
    for index, row in enumerate(plan.rows.tolist()):
        sequence = by_row[row]
        length = int(plan.num_computed[index] + plan.num_tokens[index])
        for group, view in enumerate(batch.plans):
            assert view.kv_len_R[index] == view.host_kv_len[index] == length
            assert view.query_start_R1[index] == at
            blocks = sequence.blocks[group]
            assert view.block_table_RB[index, : len(blocks)].tolist() == blocks
            assert not view.block_table_RB[index, len(blocks) :].any()
        for position in range(int(plan.num_computed[index]), length):
            assert batch.token_ids_T[at] == sequence.tokens[position]
            assert batch.positions_T[at] == position
            for group, view in enumerate(batch.plans):
                block = sequence.blocks[group][position // 8]
                assert view.slot_T[at] == block * 8 + position % 8
            at += 1
        if plan.sample[index]:
            assert at - 1 in batch.logits_at_N.tolist()
    assert len(batch.logits_at_N) == int(plan.sample.sum())
    assert batch.plans[0].num_decodes == int((plan.num_tokens == 1).sum())
    assert batch.plans[0].max_query_len == plan.num_tokens.max()


def test_places_in_a_table_are_long_whatever_the_version_of_numpy() -> None:
    """NumPy 1 makes an int32 array times an np.int64 int32, which PyTorch takes for no index."""
    table = GrowingTable.zeros(rows=4, columns=8, device=CPU)
    place = table.at(np.array([1, 3], np.int32), np.array([2, 0], np.int32))
    assert place.dtype is torch.int64 and place.tolist() == [10, 24]


def test_a_table_that_grows_keeps_what_it_holds() -> None:
    table = GrowingTable.zeros(rows=3, columns=4, device=CPU)
    table.data[:] = torch.arange(12).view(3, 4)
    table.reserve(5)
    assert table.data.shape == (3, 8)
    assert table.data[:, :4].tolist() == torch.arange(12).view(3, 4).tolist()
    assert not table.data[:, 4:].any()


class CountOps(TorchDispatchMode):
    """Counts tensor operations."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("num_rows", [2, 32])
@pytest.mark.parametrize("exact", [True, False])
def test_the_operations_of_a_decode_step_do_not_grow_with_its_rows(
    num_rows: int, exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steady decode has no loop over rows: as many tensor operations at 32 rows as at 2, at most 40; none at all where
    the step is recorded (here by the warm-up)."""
    if exact:
        monkeypatch.setattr(devices, "why_exact", lambda resources: "for the test")
    spec = tiny_spec(max_running=32, num_blocks=80)

    class Silent(TinyModel):
        def forward(self, batch):
            return HIDDEN[: len(batch.token_ids_T)]

        def logits(self, hidden):
            return LOGITS[: len(hidden)]

    runner = start_runner(spec, Silent(), device=CPU).runner
    driver = Driver(runner.facts)
    sequences = [driver.add([1, 2]) for _ in range(num_rows)]
    driver.read(runner.execute(driver.plan([(s, 2) for s in sequences])))
    plan = driver.plan([(s, 1) for s in sequences])
    with CountOps() as ops:
        runner.execute(plan)
    recorded = isinstance(runner._steps, BucketSteps)
    assert recorded <= (not exact)
    assert ops.count == 0 if recorded else 10 < ops.count <= 40


HIDDEN = torch.zeros(4096, 16)
LOGITS = torch.zeros(64, 61)
