"""The names of KV caches' scales. QNT-13."""

from __future__ import annotations

import pytest

from headrace.base.config.cache_scales import cache_scale

ATTENTION = "model.layers.3.self_attn"


@pytest.mark.parametrize(
    ("name", "half"),
    [
        ("k_scale", "k"),
        ("v_scale", "v"),
        ("attn.v_scale", "v"),
        ("k_proj.k_scale", "k"),
        ("qkv_proj.v_scale", "v"),
        ("v_proj.output_scale", "v"),
        ("kv_scale", "kv"),
    ],
)
def test_formats_name_the_scales_of_an_attention(name: str, half: str) -> None:
    assert cache_scale(f"{ATTENTION}.{name}") == (ATTENTION, half)


@pytest.mark.parametrize(
    "name", ["q_scale", "k_proj.weight_scale", "o_proj.output_scale", "k_scale2"]
)
def test_other_scales_are_of_no_cache(name: str) -> None:
    assert cache_scale(f"{ATTENTION}.{name}") is None
