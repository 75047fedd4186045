from __future__ import annotations

from typing import Any

import msgspec
import pytest

from headrace.base.config.resolved import Resolved
from headrace.base.config.tree import Options
from headrace.base.errors import ConfigError
from headrace.launch.model_facts import ModelFacts
from headrace.launch.resolve import DeviceFacts, resolve

GIB = 1 << 30
MODEL = ModelFacts(
    path="/models/m",
    name="m",
    format="safetensors",
    architecture="LlamaForCausalLM",
    family="llama",
    dtype="bfloat16",
    max_model_len=4096,
    logits_width=1000,
    eos_ids=(2,),
    config={},
    hidden_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    windows=(None, None),
    num_params=10**6,
    weight_bytes=2 * GIB,
    kv_bytes_per_token=1 << 16,
    tokenizer_path="/models/m",
    generation_defaults={"temperature": 0.6, "top_k": 20, "max_new_tokens": 5, "top_p": None},
)
CPU = DeviceFacts(kind="cpu", count=1, total_bytes=64 * GIB, free_bytes=48 * GIB, cores=8)
CUDA = DeviceFacts(kind="cuda", count=2, total_bytes=140 * GIB, free_bytes=139 * GIB, cores=16)


def options(**groups: dict[str, Any]) -> Options:
    return msgspec.convert(groups, Options)


def resolved(on: DeviceFacts = CPU, /, **groups: dict[str, Any]) -> Resolved:
    return resolve(options(**groups), MODEL, on)


@pytest.mark.parametrize("device", [CPU, CUDA])
def test_nothing_automatic_survives_and_every_choice_is_recorded(device: DeviceFacts) -> None:
    found = resolved(device)
    values = msgspec.to_builtins(found.engine.scheduler) | msgspec.to_builtins(found.engine.device)
    assert "auto" not in values.values()
    assert found.engine.device.device == device.kind
    fields = [decision.field for decision in found.decisions]
    assert len(fields) == len(set(fields)) and "--kv-memory" in fields
    assert all(d.why and d.chosen and d.given == "auto" for d in found.decisions)


def test_the_users_words_stand_and_are_no_decisions() -> None:
    found = resolved(
        kv={"kv_memory": "1GiB"},
        scheduler={"max_running": 3, "max_step_tokens": 64, "decode_stretch": None},
        device={"threads": 5, "device": "cpu", "executor": "inline"},
        model={"dtype": "float32", "max_model_len": 100},
        server={"tool_parser": "hermes", "reasoning_parser": "none"},
    )
    assert (found.text.tool_parser, found.text.reasoning_parser) == ("hermes", "none")
    engine = found.engine
    assert engine.kv.memory_bytes == GIB and engine.kv.num_blocks is None
    assert (engine.scheduler.max_running, engine.device.threads) == (3, 5)
    assert (engine.model.dtype, engine.model.max_model_len) == ("float32", 100)
    assert found.decisions == ()


def test_exactly_one_size_of_the_kv_cache_is_set() -> None:
    for kv in ({}, {"kv_blocks": 500}, {"kv_memory": "2GB"}):
        found = resolved(kv=kv).engine.kv
        assert (found.num_blocks is None) != (found.memory_bytes is None)


def test_automatic_kv_memory_is_no_more_than_running_requests_can_use() -> None:
    found = resolved(scheduler={"max_running": 1, "max_step_tokens": 64}).engine.kv
    assert found.memory_bytes == 4096 * MODEL.kv_bytes_per_token


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        ({"model": {"max_model_len": 5000}}, "--max-model-len 5000"),
        ({"server": {"host": "0.0.0.0"}}, "--host 0.0.0.0"),
        ({"server": {"api_keys": ["a"], "admin_key": "a"}}, "--admin-key"),
        ({"server": {"api_keys": [" a"]}}, "--api-keys"),
        ({"server": {"tool_parser": "hermess"}}, "--tool-parser: 'hermess'"),
        ({"device": {"device": "cuda"}}, "--device cuda"),
        ({"scheduler": {"max_running": 9, "max_step_tokens": 8}}, "--max-step-tokens 8"),
        ({"device": {"tensor_parallel": 2, "executor": "inline"}}, "--executor inline"),
        ({"kv": {"kv_blocks": 2}, "model": {"max_model_len": 64}}, "--kv-blocks 2"),
    ],
)
def test_a_contradiction_names_the_option_as_typed(groups: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolved(**groups)
    assert said in caught.value.message


def test_more_ranks_than_devices_are_refused() -> None:
    assert resolved(CUDA, device={"tensor_parallel": 2}).engine.device.executor == "processes"
    with pytest.raises(ConfigError, match="needs 4 devices; 2 found"):
        resolved(CUDA, device={"tensor_parallel": 2, "replicas": 2})


def test_weights_that_leave_no_room_are_refused_with_both_sizes() -> None:
    big = msgspec.structs.replace(MODEL, weight_bytes=130 * GIB)
    with pytest.raises(ConfigError, match=r"130\.0 GiB.*127\.9 GiB.*4\.1 GiB more"):
        resolve(options(), big, CUDA)


def test_keys_leave_as_digests_only() -> None:
    found = resolved(server={"api_keys": ["secret-key"], "admin_key": "root-key", "host": "::"})
    text = msgspec.json.encode(found)
    assert b"secret-key" not in text and b"root-key" not in text
    assert len(found.server.api_key_digests[0]) == 64


def test_sampling_defaults_of_the_checkpoint_are_taken_and_the_rest_is_left() -> None:
    assert resolved().text.generation_defaults == {"temperature": 0.6, "top_k": 20}
    greedy = msgspec.structs.replace(MODEL, generation_defaults={"do_sample": False, "top_k": 50})
    assert resolve(options(), greedy, CPU).text.generation_defaults == {"temperature": 0.0}


def test_quantization_is_a_decision_with_its_size() -> None:
    tree = resolved(model={"quantization": "int4"})
    assert tree.engine.model.quantization == "int4"
    assert "--quantization" in {decision.field for decision in tree.decisions}
    assert resolved().engine.model.quantization is None


def test_deterministic_mode_is_refused_where_torch_computes_the_model() -> None:
    assert resolved(CUDA, model={"deterministic": True}).engine.model.deterministic
    assert not resolved().engine.model.deterministic
    for facts, why in (
        (msgspec.structs.replace(MODEL, family="transformers"), "transformers fallback"),
        (msgspec.structs.replace(MODEL, encodes=True), "is an encoder"),
    ):
        with pytest.raises(ConfigError, match=why):
            resolve(options(model={"deterministic": True}), facts, CPU)


def test_attention_weights_are_refused_where_each_rank_has_but_some_heads() -> None:
    """API-21."""
    assert resolved(model={"attention_capture": True}).engine.model.attention_capture
    with pytest.raises(ConfigError, match=r"--attention-capture .* --tensor-parallel 2"):
        resolved(model={"attention_capture": True}, device={"tensor_parallel": 2})


def test_quantization_is_refused_by_name_where_no_kernel_could_serve_it() -> None:
    given = options(model={"quantization": "int8"})
    with pytest.raises(ConfigError, match="--quantization int8 needs a model family"):
        resolve(given, msgspec.structs.replace(MODEL, family="transformers"), CPU)
    with pytest.raises(ConfigError, match="--quantization int8 runs on the CPU only"):
        resolved(CUDA, model={"quantization": "int8"})


@pytest.mark.parametrize("coded", ["int8", "fp8"])
@pytest.mark.parametrize("device", [CPU, CUDA])
def test_a_coded_kv_cache_is_taken_where_kernels_read_it(coded: str, device: Any) -> None:
    assert resolved(device, kv={"kv_dtype": coded}).engine.model.kv_dtype == coded
    assert resolved(device).engine.model.kv_dtype is None


def test_an_int8_kv_cache_is_refused_by_name_where_no_kernel_could_serve_it() -> None:
    """QNT-18."""
    given = options(kv={"kv_dtype": "int8"})
    with pytest.raises(ConfigError, match="--kv-dtype int8 needs a model family"):
        resolve(given, msgspec.structs.replace(MODEL, family="transformers"), CPU)
    with pytest.raises(ConfigError, match="--kv-dtype int8 runs on CPU and CUDA, not on xpu"):
        resolve(given, MODEL, msgspec.structs.replace(CUDA, kind="xpu"))


@pytest.mark.parametrize(("running", "tokens"), [("auto", 256), (300, 300)])
def test_a_cpu_step_is_short_but_holds_a_token_of_every_running_request(
    running: Any, tokens: int
) -> None:
    found = resolved(scheduler={"max_running": running})
    assert found.engine.scheduler.max_step_tokens == tokens
    (said,) = [d.why for d in found.decisions if d.field == "--max-step-tokens"]
    assert "stall running streams" in said
