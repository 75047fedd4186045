from __future__ import annotations

import os
from typing import Any

import msgspec
import pytest

from headrace.base.config.resolved import Resolved, ServerSpec
from headrace.base.config.server_options import ServerOptions, ServerSettings
from headrace.base.config.tree import Options
from headrace.base.errors import CheckpointError, ConfigError
from headrace.launch.model_facts import ModelFacts
from headrace.launch.resolve import resolve
from headrace.launch.resolve_device import MachineFacts

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
CPU = MachineFacts(kind="cpu", count=1, total_bytes=64 * GIB, free_bytes=48 * GIB, cores=8)
CUDA = MachineFacts(kind="cuda", count=2, total_bytes=140 * GIB, free_bytes=139 * GIB, cores=16)


MOVING_EXPERTS = {
    "tensor_parallel": 2,
    "enable_expert_parallel": True,
    "expert_rebalance_steps": 9,
}
SHARED_CONTEXT = {"tensor_parallel": 2, "decode_context_parallel_size": 2}


def options(**groups: dict[str, Any]) -> Options:
    return msgspec.convert(groups, Options)


def resolved(on: MachineFacts = CPU, /, **groups: dict[str, Any]) -> Resolved:
    return resolve(options(**groups), MODEL, on)


@pytest.mark.parametrize("device", [CPU, CUDA])
def test_nothing_automatic_survives_and_every_choice_is_recorded(device: MachineFacts) -> None:
    found = resolved(device)
    values = msgspec.to_builtins(found.engine.scheduler) | msgspec.to_builtins(found.engine.device)
    assert "auto" not in values.values()
    assert found.engine.device.device == device.kind
    fields = [decision.field for decision in found.decisions]
    assert len(fields) == len(set(fields)) and "--kv-memory" in fields
    assert all(d.why and d.chosen and d.requested == "auto" for d in found.decisions)


def test_the_users_words_stand_and_are_no_decisions() -> None:
    found = resolved(
        kv={"kv_memory": "1GiB"},
        scheduler={"max_running": 3, "max_step_tokens": 64, "max_decode_slowdown": None},
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


def drafting(**fields: Any) -> dict[str, Any]:
    """Options with speculation."""
    config = {"method": "ngram", "num_speculative_tokens": 6, **fields}
    return {"scheduler": {"speculative_config": config}}


def test_drafts_are_looked_up_by_what_the_user_says_or_by_two_to_five_tokens() -> None:
    spec = resolved(**drafting()).engine.speculation
    assert spec is not None and (spec.num_tokens, spec.min_match, spec.max_match) == (6, 2, 5)
    for asked, bounds in (({"prompt_lookup_max": 1}, (1, 1)), ({"prompt_lookup_min": 7}, (7, 7))):
        spec = resolved(**drafting(**asked)).engine.speculation
        assert spec is not None and (spec.min_match, spec.max_match) == bounds
    assert resolved().engine.speculation is None


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        ({"model": {"max_model_len": 5000}}, "--max-model-len 5000"),
        ({"model": {"max_model_len": 0}}, "--max-model-len 0: at least 1"),
        ({"server": {"host": "0.0.0.0"}}, "--host 0.0.0.0"),
        ({"server": {"api_keys": ["a"], "admin_key": "a"}}, "--admin-key"),
        ({"server": {"api_keys": [" a"]}}, "--api-keys"),
        ({"server": {"tool_parser": "hermess"}}, "--tool-parser: 'hermess'"),
        ({"device": {"device": "cuda"}}, "--device cuda"),
        ({"scheduler": {"max_running": 9, "max_step_tokens": 8}}, "--max-step-tokens 8"),
        ({"device": {"tensor_parallel": 2, "executor": "inline"}}, "--executor inline"),
        ({"device": {"enable_expert_parallel": True}}, "--data-parallel, which are 1"),
        ({"device": {"num_redundant_experts": 2}}, "--num-redundant-experts 2 is about whole"),
        ({"device": {"expert_rebalance_steps": 9}}, "--expert-rebalance-steps 9 is about whole"),
        (
            {"device": {**MOVING_EXPERTS}, "model": {"deterministic": True}},
            "--expert-rebalance-steps 9 does not go with --deterministic",
        ),
        ({"device": {"all2all_backend": "ragged"}}, "--all2all-backend ragged sends tokens"),
        (
            {"device": {"tensor_parallel": 3, "decode_context_parallel_size": 2}},
            "not divide --tens",
        ),
        (
            {"device": {**SHARED_CONTEXT, "dcp_kv_cache_interleave_size": 3}},
            "3 does not divide --block-tokens 16",
        ),
        ({"scheduler": {"max_long_partial_prefills": 2}}, "--max-long-partial-prefills 2"),
        (
            {
                "scheduler": {
                    "max_partial_prefills": 1,
                    "max_long_partial_prefills": 2,
                    "long_prefill_threshold": 9,
                }
            },
            "--max-partial-prefills (1)",
        ),
        ({"scheduler": {"policy": "fair", "tenant_weights": ["key=2"]}}, "--tenant-weights key=2"),
        ({"scheduler": {"tenant_weights": ["a" * 64 + "=2"]}}, "--policy fair"),
        ({"kv": {"kv_blocks": 2}, "model": {"max_model_len": 64}}, "--kv-blocks 2"),
        (drafting(method="eagle4"), "method 'eagle4' is not known (known: auto, ngram, "),
        (drafting(method="lookahead"), "method 'lookahead' is not part of headrace; use ngram"),
        (drafting(method="eagle3"), "method 'eagle3' needs \"model\""),
        (drafting(prompt_lookup_min=5, prompt_lookup_max=3), "prompt_lookup_min 5 is greater"),
        ({**drafting(), "model": {"attention_capture": True}}, "not with --attention-capture"),
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


def test_tenants_have_the_weights_that_are_named() -> None:
    """Defect: there was no way to set tenants' weights."""
    digest = "0aB" + "1" * 61
    scheduler = {"policy": "fair", "tenant_weights": [f"{digest}=2.5"]}
    weights = resolved(scheduler=scheduler).engine.scheduler.tenant_weights
    assert weights == {digest.lower(): 2.5}


def test_prompts_are_spread_where_it_pays_or_is_asked_for() -> None:
    """On an H200 a bound that bent cost 8B 13 % of tok/s at 16 users and 7 % at 64."""
    large = msgspec.structs.replace(MODEL, num_params=8_000_000_000)
    for facts, options_, expected in (
        (large, {}, None),
        (MODEL, {}, None),
        (large, {"max_decode_slowdown": 3.0}, 3.0),
        (large, {"max_decode_slowdown": None}, None),
    ):
        scheduler = resolve(options(scheduler=options_), facts, CUDA).engine.scheduler
        assert scheduler.max_decode_slowdown == expected


def test_keys_leave_as_digests_only() -> None:
    found = resolved(server={"api_keys": ["secret-key"], "admin_key": "root-key", "host": "::"})
    text = msgspec.json.encode(found)
    assert b"secret-key" not in text and b"root-key" not in text
    assert len(found.server.api_key_digests[0]) == 64


def test_settings_are_stated_once_and_what_is_resolved_has_another_form() -> None:
    """A field that options and spec both name outside of the settings is typed in one form and
    travels in another; keys do not travel at all."""
    settings = set(ServerSettings.__struct_fields__)
    typed = {f.name: f for f in msgspec.structs.fields(ServerOptions) if f.name not in settings}
    spec = {f.name: f for f in msgspec.structs.fields(ServerSpec) if f.name not in settings}
    assert typed.keys() - spec.keys() == {
        "api_keys", "admin_key", "tool_parser", "reasoning_parser", "ssl_certfile", "ssl_keyfile",
        "ssl_ca_certs",
    }  # fmt: skip
    assert spec.keys() - typed.keys() == {"api_key_digests", "admin_key_digest", "tls"}
    server = {"max_n": 3, "max_body_bytes": "1KiB", "profile_dir": "traces", "admin_listen": "7"}
    found = resolved(server=server).server
    assert (found.max_n, found.max_body_bytes) == (3, 1024)
    assert (found.profile_dir, found.admin_listen) == (os.path.abspath("traces"), "127.0.0.1:7")


def test_sampling_defaults_of_the_checkpoint_are_taken_and_the_rest_is_left() -> None:
    assert resolved().text.generation_defaults == {"temperature": 0.6, "top_k": 20}
    greedy = msgspec.structs.replace(MODEL, generation_defaults={"do_sample": False, "top_k": 50})
    assert resolve(options(), greedy, CPU).text.generation_defaults == {"temperature": 0.0}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -1),
        ("temperature", "warm"),
        ("temperature", True),
        ("top_p", 7.0),
        ("top_p", 0),
        ("top_k", 1.5),
        ("top_k", -2),
        ("repetition_penalty", 0.0),
        ("min_p", float("nan")),
    ],
)
def test_a_sampling_default_that_no_request_could_have_is_refused_at_start(
    name: str, value: object
) -> None:
    model = msgspec.structs.replace(MODEL, generation_defaults={name: value})
    with pytest.raises(CheckpointError, match=f"generation_config.json: {name} is "):
        resolve(options(), model, CPU)


def test_a_manifest_is_passed_on_absolute_and_not_with_dummy_weights() -> None:
    assert resolved().engine.model.manifest is None
    manifest = resolved(model={"manifest": "SHA256SUMS"}).engine.model.manifest
    assert manifest is not None and manifest.startswith("/")
    dummy = msgspec.structs.replace(MODEL, format="dummy")
    with pytest.raises(ConfigError, match="--manifest SHA256SUMS: --load-format dummy"):
        resolve(options(model={"manifest": "SHA256SUMS"}), dummy, CPU)


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


def test_an_encoder_with_more_positions_than_its_decoder_reads_them_all() -> None:
    for own, stated, read in ((16384, None, 16384), (16384, 512, 512), (4096, None, 4096)):
        facts = msgspec.structs.replace(MODEL, encoder_tokens=own)
        words = {} if stated is None else {"max_model_len": stated}
        tree = resolve(options(model=words), facts, CPU)
        assert tree.engine.model.encoder_tokens == read


def test_attention_weights_are_refused_where_each_rank_has_but_some_heads() -> None:
    """API-21."""
    assert resolved(model={"attention_capture": True}).engine.model.attention_capture
    with pytest.raises(ConfigError, match=r"--attention-capture .* --tensor-parallel 2"):
        resolved(model={"attention_capture": True}, device={"tensor_parallel": 2})


def test_quantization_is_refused_by_name_where_no_kernel_could_serve_it() -> None:
    given = options(model={"quantization": "int8"})
    with pytest.raises(ConfigError, match="--quantization int8 needs a model family"):
        resolve(given, msgspec.structs.replace(MODEL, family="transformers"), CPU)


def test_cuda_makes_quantized_weights_while_loading() -> None:
    """By every scheme."""
    for scheme in ("fp8", "int8", "int8-g32", "mxfp4", "int4", "int4-asym-g128"):
        assert resolved(CUDA, model={"quantization": scheme}).engine.model.quantization == scheme
        refused = f"--quantization {scheme} does not go with --deterministic"
        with pytest.raises(ConfigError, match=refused):
            resolved(CUDA, model={"quantization": scheme, "deterministic": True})


@pytest.mark.parametrize("coded", ["int8", "int3-rotated"])
@pytest.mark.parametrize("device", [CPU, CUDA])
def test_a_coded_kv_cache_is_taken_where_kernels_read_it(coded: str, device: Any) -> None:
    assert resolved(device, kv={"kv_dtype": coded}).engine.model.kv_dtype == coded
    assert resolved(device).engine.model.kv_dtype is None


def test_layers_that_keep_their_kv_type_are_checked_against_the_model() -> None:
    kv = {"kv_dtype": "int8", "kv_dtype_skip_layers": ("0", "sliding_window")}
    assert resolved(CPU, kv=kv).engine.model.kv_plain_layers == (0, "sliding_window")
    for name in ("-1", "99999", "first"):
        with pytest.raises(ConfigError, match=f"--kv-dtype-skip-layers {name}: a number from 0"):
            resolved(CPU, kv={**kv, "kv_dtype_skip_layers": (name,)})
    with pytest.raises(ConfigError, match="needs a --kv-dtype"):
        resolved(CPU, kv={"kv_dtype_skip_layers": ("0",)})


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


def test_the_length_is_what_the_pool_holds_where_that_is_less_than_the_models() -> None:
    small = resolved(kv={"kv_blocks": 50})
    assert small.text.max_model_len == small.engine.model.max_model_len == 49 * 16
    (decision,) = [d for d in small.decisions if d.field == "--max-model-len"]
    assert decision.chosen == "784" and "--kv-blocks 50" in decision.why
    assert resolved(kv={"kv_blocks": 5000}).text.max_model_len == 4096


def length_decision(**kv: Any) -> tuple[Resolved, str, str]:
    """Resolved with --max-model-len -1, and its one decision: what was chosen, and why."""
    largest = resolved(kv=kv, model={"max_model_len": -1})
    (decision,) = [d for d in largest.decisions if d.field == "--max-model-len"]
    assert decision.requested == "-1"
    return largest, decision.chosen, decision.why


def test_minus_one_is_the_most_that_the_model_and_the_blocks_hold() -> None:
    small, chosen, why = length_decision(kv_blocks=50)
    assert small.text.max_model_len == small.engine.model.max_model_len == 49 * 16
    assert chosen == "784" and "--kv-blocks 50" in why
    large, chosen, why = length_decision(kv_blocks=5000)
    assert large.text.max_model_len == large.engine.model.max_model_len == 4096
    assert chosen == "4096" and "the model's own" in why


@pytest.mark.parametrize("kv", [{}, {"kv_memory": "1GiB"}, {"kv_memory": "16MiB"}])
def test_minus_one_gives_the_lengths_that_auto_gives(kv: dict[str, str]) -> None:
    largest, auto = length_decision(**kv)[0], resolved(kv=kv)
    assert (largest.engine, largest.text) == (auto.engine, auto.text)
    windowed = msgspec.structs.replace(MODEL, windows=(512, 1024))
    blocks = {"kv_blocks": 50}
    spec = resolve(options(kv=blocks, model={"max_model_len": -1}), windowed, CPU)
    assert spec.engine == resolve(options(kv=blocks), windowed, CPU).engine


def test_a_length_stated_beside_the_memory_must_fit_it() -> None:
    stated, memory = {"max_model_len": 1000}, {"kv_memory": "1GiB"}
    assert resolved(kv=memory, model=stated).engine.kv.least_tokens == 1000
    for model, kv in ((stated, {}), ({}, memory), ({"max_model_len": -1}, memory)):
        assert resolved(kv=kv, model=model).engine.kv.least_tokens is None


def test_tables_of_positions_are_no_longer_than_what_the_memory_holds() -> None:
    """A model that states 4 million positions."""
    long = msgspec.structs.replace(MODEL, max_model_len=4_000_000)
    found = resolve(options(kv={"kv_memory": "1GiB"}), long, CPU)
    assert found.engine.model.max_model_len == 4 * GIB // long.kv_bytes_per_token
    windowed = msgspec.structs.replace(long, windows=(512, 1024))
    whole = resolve(options(kv={"kv_memory": "1GiB"}), windowed, CPU)
    assert whole.engine.model.max_model_len == 4_000_000


def test_parts_of_a_model_are_quantized_in_ways_of_their_own() -> None:
    parts = {"moe": "mxfp4", "ignore": ["lm_head"]}
    tree = resolved(model={"quantization": "fp8", "quantization_config": parts})
    found = tree.engine.model.quantization_parts
    assert found is not None and (found.moe, found.linear, found.ignore) == (
        "mxfp4",
        None,
        ("lm_head",),
    )
    chosen = {one.requested: one.chosen for one in tree.decisions if one.field == "--quantization"}
    assert chosen == {"fp8": "8 bits a weight", "mxfp4": "4.25 bits a weight"}
    alone = resolved(model={"quantization_config": {"linear": "nvfp4"}}).engine.model
    assert alone.quantization is None and alone.quantization_parts is not None
