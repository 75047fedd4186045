"""Where kernels are interpreted (test_interpreter.py), the interpreter is a quicker one, and of each product of
parameters the cases that cover all values are enough, but for the slow tests."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

INTERPRETED = False
if find_spec("triton") is not None:
    from headrace.back.kernels.triton.wrap import interpreted

    INTERPRETED = interpreted()
    if INTERPRETED:
        from tests.kernels.triton.quick_interpreter import quicken

        quicken()


THOROUGH = {
    "test_attention_plans": ("few_queries_go_the_way_of_prompts", "tiles_that_do_not_compile_are_replaced"),
    "test_cascade": ("nan_behind_a_shared_prefix",),
    "test_experts_quantized": (
        *("of_e4m3_numbers[208", "tiles_of_4_bit_numbers[208", "tiles_of_4_bit_numbers[256"),
        "regimes_of_e4m3_numbers[128-256-more1-None",
        "regimes_of_e4m3_numbers[208-144-more0-None-False",
    ),
    "test_fixed": (
        *("the_same_bits_in_any_step[more1", "the_same_bits_in_any_step[more2", "the_same_bits_in_any_step[more3"),
        *("halves_merge_to_the_whole[True", "halves_merge_to_the_whole[False-dtype1"),
        "the_same_where_parts_are_merged_elsewhere",
    ),
    "test_kernels": ("the_tiles_of_many_rows[50", "halves_merge_to_the_whole[shape1"),
    "test_latent": ("heads_over_chosen_positions_equal_the_reference[40", "rows_beyond_that_memory"),
    "test_linear_int4": (
        *("many_tokens_become_int8[more1-32", "many_tokens_become_int8[more0", "many_tokens_become_int8[more1-None"),
    ),
    "test_mixture": ("sorted_in_order_into_tiles_of_one_expert[300", "experts_equal_the_reference[swiglu_step"),
    "test_recurrent": (
        *("the_self_check_accepts_it", "the_self_check_accepts_chunks", "drafts_beside_chunks_go_token_by_token"),
        *("by_chunks_give_what_they_give_alone[gated_delta-dtype0", "give_alone[ssd_scan-dtype0"),
        "by_chunks_give_what_they_give_alone[gated_delta-bounded-dtype1",
        "drafts_is_kept[gated_delta",
        *("drafts_is_kept[ssd_scan", "drafts_is_kept[causal_conv-plain", "drafts_is_kept[selective_scan-odd"),
    ),
    "test_sample": (
        *("the_draws_of_one_row_follow_its_distribution", "narrowed_down[few", "narrowed_down[ties"),
        *("a_sample_that_misleads_costs_time_only[9.0", "a_top_p_of_almost_one", "costs_time_only[-9.0-256"),
    ),
    "test_sampling": ("what_a_step_does_itself_is_as_many_launches", "steps_give_penalised_and_scored_rows"),
    "test_spans": ("heads_of_72_give_the_same_over_and_over",),
}  # fmt: skip
"""By file, what others in it show with other numbers: `make slow` alone interprets it (a third of the time)."""


ONE_CASE = (
    *("the_layer_takes_any_number_of_tokens", "latents_are_written_and_read", "experts_equal_the_reference"),
    *("a_step_is_a_handful_of_launches", "tiles_of_4_bit_numbers", "tiles_of_bytes", "rows_are_sorted_as_e4m3"),
    *("the_same_bits_in_any_step", "the_same_bits_among_any_number", "attention_agrees_with_the_reference"),
    *("halves_merge_to_the_whole", "halves_of_a_quantized_cache", "shared_prefixes_do_not_show"),
    *("attention_equals_the_reference", "over_chosen_positions_equal", "sinks_take_their_share_once"),
    *("the_chosen_positions_are_those", "the_chosen_groups_are_those", "a_window_and_entries_in_one_softmax"),
    *("ties_at_the_border_stay", "every_row_keeps_and_draws", "splits_do_not_show"),
    *("many_tokens_become_int8", "all_tokens_may_have_one_scale", "every_tile_is_in_one_run"),
    *("spans.py::test_it_equals_the_reference", "prompts_by_chunks_give", "the_state_behind_every_token"),
)  # fmt: skip
"""Tests of which one case, or one of each `case`, shows that the kernel runs: `make slow` and GPUs run all (a third of
the time too)."""


def _is_thorough(item: pytest.Item) -> bool:
    """Whether a part of its name stands in the table."""
    return any(part in item.name for part in THOROUGH.get(item.path.stem, ()))


def _one_case(item: pytest.Item) -> tuple[object, ...] | None:
    """What a case stands for, if one is enough."""
    if not isinstance(item, pytest.Function) or not any(name in item.nodeid for name in ONE_CASE):
        return None
    return item.parent, item.originalname, item.callspec.params.get("case")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A GPU runs them all in no time."""
    chosen: set[tuple[object, ...]] = set()
    for item in items:
        if not INTERPRETED or not item.path.is_relative_to(Path(__file__).parent):
            continue
        stands_for = None if _is_thorough(item) else _one_case(item)
        is_slow = _is_thorough(item) or stands_for in chosen
        item.add_marker(pytest.mark.slow if is_slow else pytest.mark.covering(1))
        if stands_for is not None:
            chosen.add(stands_for)
