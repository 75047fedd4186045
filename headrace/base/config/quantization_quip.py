"""`quip_params` of config.json: QuIP# (Tseng et al. 2024). Published checkpoints have queries, keys
and values as one weight that was rotated as a whole, and so ups and gates."""

from __future__ import annotations

from headrace.base.config.hf import ConfigReader
from headrace.base.config.quantization import EVERY, Numbers, Rule, StoredQuantization

BOOKS = {"E8P12": (2, 0.0, 1), "E8P12RVQ3B": (3, 2.04, 0), "E8P12RVQ4B": (4, 3.45, 1)}
"""Codebook -> bits of a value, what the second vectors are divided by, version of the format."""


def quip(model: ConfigReader, params: ConfigReader) -> StoredQuantization:
    """Of a model's config and its section; lattice codebooks that are no longer written, inputs
    with scales and low-rank corrections are refused by key."""
    bits, divisor, version = BOOKS[params.choice("codebook", BOOKS)]
    if params.int("codebook_version", 0) != version:
        raise params.wrong("codebook_version", f"{version} (save it again with QuIP# of 2024)")
    for key in ("rescale_WH", "outlier_channel_split", "pack_out"):
        if params.bool(key, False):
            raise params.wrong(key, "false")
    if params.int("lora_rank", 0, ge=0):
        raise params.wrong("lora_rank", "0")
    override = params.float("resid_scale_override", -1.0)
    numbers = Numbers(
        arrangement="quip",
        bits=bits,
        divisor=override if override > 0 and divisor else divisor,
    )
    return StoredQuantization(
        method="quip",
        rules=(
            Rule(targets=("lm_head", "embed_tokens"), numbers=None),
            Rule(targets=(EVERY,), numbers=numbers),
        ),
        merged=_merged(model) if params.bool("fused", True) else {},
    )


def _merged(model: ConfigReader) -> dict[str, tuple[tuple[str, int], ...]]:
    """The last name of a module that holds several -> theirs, and the outputs of each."""
    heads = model.int("num_attention_heads", ge=1)
    kv_heads = model.int("num_key_value_heads", heads, ge=1)
    size = model.int("head_dim", 0, ge=0) or model.int("hidden_size", ge=1) // heads
    inner = model.int("intermediate_size", ge=1)
    return {
        "qkv_proj": (
            ("q_proj", heads * size),
            ("k_proj", kv_heads * size),
            ("v_proj", kv_heads * size),
        ),
        "upgate_proj": (("up_proj", inner), ("gate_proj", inner)),
    }
