"""Kernels of a device that is not here, for every family: chosen with reasons, never bound (BEY-56)."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from headrace.back.kernels.op import DeferredChecks
from headrace.back.models.families import architecture_of, text_config
from headrace.back.platforms.detect import FAKES
from headrace.base.config.resolved import ModelSpec
from headrace.launch.plan import build_without_memory, kernels_on_absent_device
from tests.models.oracle import WHOLE
from tests.models.test_encoders import ENCODER_CASES
from tests.models.test_parity import CASES, tiny_config

pytest.importorskip("triton")

CONFIGS: dict[str, tuple[str, Any]] = {
    case: (
        f"{name if name in ('AriaText', 'HrmText') else name.removesuffix('Text')}ForCausalLM",
        partial(tiny_config, case),
    )
    for case, (name, _) in CASES.items()
} | {name: (name, make) for name, make in ENCODER_CASES}


MIXERS = {
    *("kernel.attention", "kernel.span_attention", "kernel.latent_attention"),
    "kernel.sparse_latent_attention",
    "kernel.compressed_attention",
    "kernel.sparse_attention",
    *("kernel.ssd_scan", "kernel.selective_scan", "kernel.wkv"),
}
BY_PYTORCH = (
    *("DebertaV2Model", "DebertaV2ForSequenceClassification"),
    *("LongformerModel", "LongformerForSequenceClassification"),
    *("DebertaForSequenceClassification", "DebertaForTokenClassification"),
    *("FNetForSequenceClassification", "OpenAIPrivacyFilterForTokenClassification"),
    *("XLNetModel", "XLNetForTokenClassification", "XLNetForSequenceClassification"),
)
"""Their mixers are PyTorch's operations."""


def test_fp8_weights_have_a_kernel_on_a_gpu() -> None:
    """Head and embedding stay floats."""
    config = tiny_config("qwen3").to_dict() | {"architectures": ["Qwen3ForCausalLM"]}
    named = architecture_of(config)
    spec = ModelSpec(
        path="", name="m", format="dummy", family=named.family, dtype="bfloat16", max_model_len=32,
        logits_width=config["vocab_size"], eos_ids=(), config=config, head=named.head,
        bare=named.bare, num_labels=2, quantization="fp8",
    )  # fmt: skip
    decided = kernels_on_absent_device(spec, FAKES["h200"], block_tokens=16)
    found = {d.field: (d.chosen, d.why) for d in decided}
    assert found["kernel.linear_fp8"][0] == found["kernel.linear"][0] == "triton"
    assert "kernel.fused_linear" not in found


@pytest.mark.parametrize("case", CONFIGS)
def test_every_family_tells_the_kernels_it_would_have_on_a_gpu(case: str) -> None:
    architecture, make = CONFIGS[case]
    config = make().to_dict() | {"architectures": [architecture]}
    if config["model_type"] in WHOLE:
        config = {"architectures": [WHOLE[config["model_type"]]], "text_config": config}
    named = architecture_of(config)
    spec = ModelSpec(
        path="", name=case, format="dummy", family=named.family, dtype="bfloat16", max_model_len=32,
        logits_width=text_config(config)["vocab_size"], eos_ids=(), config=config, head=named.head,
        bare=named.bare, num_labels=2,
    )  # fmt: skip
    decided = kernels_on_absent_device(spec, FAKES["h200"], block_tokens=16)
    found = {d.field: (d.chosen, d.why) for d in decided}
    assert (
        found["kernel.linear"][0] == "triton"
        and "native: runs on the CPU only" in found["kernel.linear"][1]
    )
    assert MIXERS & found.keys() or case in BY_PYTORCH


def problems_of(
    case: str, *, capability: tuple[int, int] = (9, 0), **changes: Any
) -> set[tuple[str, Any]]:
    """(op, problem) of every kernel that a GPU would compile for the case's model."""
    from headrace.back.kernels.triton.wrap import planned_for

    config = tiny_config(case).to_dict() | {"architectures": [f"{CASES[case][0]}ForCausalLM"]}
    config |= changes
    spec = ModelSpec(
        path="", name=case, format="dummy", family=architecture_of(config).family, dtype="bfloat16",
        max_model_len=32, logits_width=config["vocab_size"], eos_ids=(), config=config,
    )  # fmt: skip
    with DeferredChecks() as checks, planned_for(capability):
        build_without_memory(spec, block_tokens=16, planned="cuda").finish_load()
        problems = {(op.name, problem) for op, _, problem in checks._checks}
    checks.forget()
    return problems


CHOICES = {
    "deepseek-v3.2": ("index_write", "index_select", "sparse_latent_attention"),
    "deepseek-v4": ("group_write", "group_select", "compressed_attention"),
    "glm-dsa": ("index_write", "index_select", "sparse_latent_attention"),
}


@pytest.mark.parametrize("device", ["a100", "h200", "b200"])
@pytest.mark.parametrize("case", CHOICES)
def test_choices_and_what_reads_them_have_kernels_on_every_generation(
    case: str, device: str
) -> None:
    """KRN-03, KRN-04."""
    capability = FAKES[device].capability
    assert capability is not None
    ops = {op for op, _ in problems_of(case, capability=capability[:2])}
    assert ops.issuperset(CHOICES[case])


@pytest.mark.parametrize(("case", "least"), [("qwen3", 2), ("deepseek-v3", 2), ("qwen3-next", 4)])
def test_a_deeper_model_has_no_more_kernels_to_compile(case: str, least: int) -> None:
    """KRN-24, REG-043, REG-045: kernels know shapes, not layers, nor their names. Of four layers of Qwen3-Next one
    has full attention."""
    few, many = (problems_of(case, num_hidden_layers=n, layer_types=None) for n in (least, 12))
    assert few == many and len(few) > 10


@pytest.mark.parametrize(
    ("case", "outputs"), [("deepseek-v3", (20, 24, 6)), ("qwen3-next", (16, 16, 48, 48, 4, 4))]
)
def test_projections_of_one_input_are_one_gemm(case: str, outputs: tuple[int, ...]) -> None:
    """KRN-21: the bottleneck of queries, latents and rotary keys; KRN-15: queries, keys, values, gates and the two
    numbers of each head, for which a second stream would have nothing left. With the norm before it."""
    inputs = tiny_config(case).hidden_size
    found = [
        problem.outputs
        for op, problem in problems_of(case)
        if op in ("linear", "fused_linear") and problem.inputs == inputs
    ]
    assert sum(outputs) in found and not set(outputs) & set(found) - {inputs}
