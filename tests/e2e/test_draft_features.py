"""Every drafter with what the other files of drafts leave out (SPC-02, SPC-05, SPC-06, BEY-20): adapters, stop
strings, choices of one prompt, prompts with images; answers are those without drafts.

Sampling, log-probabilities, penalties, chunks, preemption, prefix hits, grammars, ranks: test_drafters.py,
test_speculation.py, test_grammar_drafts.py; recurrent layers: test_hybrid_drafts.py; distributions:
test_draft_statistics.py.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.draft_statistics import drafters
from headrace.back.kernels.native.library import NativeLibrary, load
from headrace.base.wire.request import SamplingParams
from headrace.front.client.llm import LLM
from tests.front.media.pictures import encoded, picture

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        not isinstance(load(), NativeLibrary), reason="the native kernels are not built"
    ),
]
DEMO = Path(__file__).parents[2] / "demo"
KINDS = (
    "ngram",
    "suffix",
    "draft_model",
    "pard",
    "eagle3",
    "mtp",
    "eagle",
    "medusa",
    "mlp_speculator",
    "dflash",
    "dspark",
)
PROMPTS = [
    "Once upon a time there was a little dog who ran and ran and ran and",
    "The cat sat on the mat. The dog sat on the",
    "one, two, three, one, two, three, one, two,",
]
ADAPTERS = ("", "shout", "quote")
Answer = tuple[str, tuple[int, ...], str | None]


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    configs = drafters(tmp_path_factory.mktemp("heads"))
    assert {name.removesuffix(", sampled") for name in configs} == set(KINDS)
    return configs


def answers(config: dict[str, Any] | None) -> list[Answer]:
    """Rows of both adapters and of none, in pairs of an adapter's, each with stop strings, some sampled."""
    modules = [f"{name}={DEMO / 'adapters' / name}" for name in ADAPTERS if name]
    llm = LLM(
        "", speculative_config=config, deterministic=True, max_running=8, lora_modules=modules
    )
    params = [
        SamplingParams(temperature=0.0, max_tokens=24, stop=[" ran and ran", "dog"]),
        SamplingParams(temperature=0.8, seed=5, max_tokens=24, stop=["."], n=2),
        SamplingParams(
            temperature=0.0, max_tokens=24, stop=[", three"], include_stop_str_in_output=True
        ),
    ]
    found: list[Answer] = []
    try:
        for adapter in ADAPTERS:
            for output in llm.generate(PROMPTS, params, adapter=adapter, progress=False):
                found += [
                    (one.text, tuple(one.token_ids), one.finish_reason) for one in output.outputs
                ]
    finally:
        llm.close()
    return found


@pytest.fixture(scope="module")
def plain() -> list[Answer]:
    plain = answers(None)
    assert sum(reason == "stop" for _, _, reason in plain) > 3, "no string stops one"
    assert len(set(plain)) > 9
    return plain


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_and_stop_strings_say_what_they_say_without_drafts(
    kind: str, configs: dict[str, dict[str, Any]], plain: list[Answer]
) -> None:
    assert answers(configs[kind]) == plain


def about(width: int, height: int, seed: int) -> list[dict[str, Any]]:
    """A conversation about a picture."""
    data = base64.b64encode(encoded(picture(width, height, seed=seed))).decode()
    parts = [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}},
        {"type": "text", "text": "What is in it?"},
    ]
    return [{"role": "user", "content": parts}]


def seen(config: dict[str, Any] | None) -> Iterator[str]:
    """What the bundled model that sees says of pictures, the second twice."""
    llm = LLM(str(DEMO / "models" / "vision"), speculative_config=config)
    try:
        for size in ((64, 64), (120, 40), (120, 40)):
            params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
            (output,) = llm.chat(about(*size, size[0]), params, progress=False)
            yield output.outputs[0].text
    finally:
        llm.close()


@pytest.mark.parametrize("kind", ["ngram", "suffix", "draft_model"])
def test_prompts_with_images_are_answered_as_without_drafts(kind: str) -> None:
    """The model that sees as its own drafter reads the text alone."""
    own = {"model": str(DEMO / "models" / "vision")} if kind == "draft_model" else {}
    config = {"method": kind, "num_speculative_tokens": 3, "adaptive": False, **own}
    plain = list(seen(None))
    assert plain[1] == plain[2]
    assert list(seen(config)) == plain


@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
            ],
        ),
    ],
)
def test_more_pictures_at_once_than_a_step_has_room_for_drafts(device: str) -> None:
    """SPC-04, REG-083: 72 rows, whose prompts take turns in steps, some of them cut within a picture."""
    own = {"model": str(DEMO / "models" / "vision")}
    config = {"method": "draft_model", "num_speculative_tokens": 3, "adaptive": False, **own}
    many = [about(40 + 4 * (i % 9), 40, i) for i in range(72)]
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    options = {"max_running": 72, "max_step_tokens": 128, "device": device, "dtype": "float32"}
    found = []
    for how in (config, None):
        llm = LLM(own["model"], speculative_config=how, **options)
        try:
            outputs = llm.chat(many, params, progress=False)
            found.append([output.outputs[0].token_ids for output in outputs])
        finally:
            llm.close()
    assert len(found[0]) == 72 and found[0] == found[1]
