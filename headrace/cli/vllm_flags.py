"""The flags of `vllm serve`: a row each (other_flag.py)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from headrace.cli.compilation import compilation_words
from headrace.cli.other_flag import (
    ALWAYS,
    EDIT_CONFIG,
    KERNELS,
    ONE,
    OPTIONAL,
    PER_REQUEST,
    SEVERAL,
    OtherFlag,
    as_ours,
    by_value,
    left_out,
    refused,
    rows,
    switch,
)

GPU_SHARE = "--gpu-memory-utilization"
_ADAPTERS = "adapters are applied where the model runs"
_COMPILED = "nothing is compiled by torch.compile"
_RECORDED = "steps are recorded size by size as they are needed"
_ONE_HOST = "one host serves: see --replicas and --tensor-parallel"
_NO_TWO_BATCHES = "a step is one batch"
_EXPERTS_FOLLOW = "--expert-rebalance-steps 3000 and --num-redundant-experts say so"
_NO_CODE = "no code is named on the command line: see --extensions and docs/EXTENDING.md"
_NO_TRANSFER = "transfer of KV blocks is not part of headrace"
_METRICS = "docs/METRICS.md says what is measured, always"
_UNLOGGED = "requests are never logged; --log-slow-s logs slow ones"
_CORS = "CORS headers are set by a proxy in front of the server"
_LOADING = "weights are read by several threads as fast as the disk gives them"
_STATES = "recurrent states are kept as the model computes them"
_MEDIA_CACHE = "the processed media of the last requests are kept, 256 MiB of them"
_PREFIX_HASHES = "sha256", "sha256_cbor", "xxhash", "xxhash_cbor"
_MATCHED = "prefixes are found by blocks of 16 tokens, in hybrid models too: see --block-tokens"
_KV_DTYPES = {
    "auto": (),
    "fp8": ("--kv-dtype", "fp8"),
    "fp8_e4m3": ("--kv-dtype", "fp8"),
    "fp8_inc": ("--kv-dtype", "fp8"),
    "fp8_per_token_head": ("--kv-dtype", "fp8"),
    "fp8_e5m2": ("--kv-dtype", "fp8_e5m2"),
    "int8_per_token_head": ("--kv-dtype", "int8"),
    "int4_per_token_head": ("--kv-dtype", "int4"),
    "nvfp4": ("--kv-dtype", "nvfp4"),
    "nvfp4_4over6": ("--kv-dtype", "nvfp4-4over6"),
    "fp8_ds_mla": ("--kv-dtype", "fp8"),
    "nvfp4_ds_mla": ("--kv-dtype", "nvfp4"),
    "turboquant_4bit_nc": ("--kv-dtype", "turboquant-4bit"),
    "turboquant_3bit_nc": ("--kv-dtype", "turboquant-3bit"),
}
_STORED = (
    *("aqlm", "auto-round", "auto_awq", "auto_gptq", "awq", "awq_marlin", "bitblas", "bitnet"),
    *("compressed-tensors", "fbgemm_fp8", "gguf", "gptq", "gptq_bitblas", "gptq_marlin"),
    *("gptq_marlin_24", "hqq", "marlin", "modelopt", "modelopt_fp4", "modelopt_mixed"),
    *("modelopt_mxfp8", "moe_wna16", "quark", "vptq", "blockwise_int8", "cpu_awq", "fp_quant"),
    *("deepseek_v4_fp8", "gpt_oss_mxfp4", "inc", "modelopt_fp8", "petit_nvfp4", "w4afp8"),
    "w8a8_int8",
)
QUANTIZATIONS: Mapping[str, tuple[tuple[str, ...], str]] = {
    **dict.fromkeys(_STORED, ((), "how a checkpoint's weights are stored, its own config says")),
    "experts_int8": (("--quantization-config", '{"moe":"int8"}'), "experts alone are made int8"),
}
"""Values of --quantization that are not ours -> our words, and why."""
_KV_HINT = (
    f"allowed: {', '.join(_KV_DTYPES)}; turboquant_k8v4 and turboquant_k3v4_nc keep keys and values "
    "in numbers of unlike bits, which is not built; float16 and bfloat16: --dtype"
)


def _long_texts(values: list[str]) -> list[str] | None:
    """How texts longer than the context are embedded; how the model pools is in its own files."""
    try:
        config = msgspec.json.decode(values[0], type=_PoolerConfig)
    except msgspec.DecodeError:
        return None
    if not config.enable_chunked_processing:
        return [] if config.max_embed_len is None else None
    return ["--max-embed-tokens", str(config.max_embed_len or _LONGEST_TEXT)]


def _hidden_states(values: list[str]) -> list[str] | None:
    """Of the connectors the one that leaves hidden states in files."""
    try:
        config = msgspec.json.decode(values[0], type=_ConnectorConfig)
    except msgspec.DecodeError:
        return None
    return ["--hidden-states-path", config.kv_connector_extra_config.shared_storage_path]


class _ConnectorFolder(msgspec.Struct):
    shared_storage_path: str


class _ConnectorConfig(msgspec.Struct):
    kv_connector: Literal["ExampleHiddenStatesConnector"]
    kv_connector_extra_config: _ConnectorFolder


class _PoolerConfig(msgspec.Struct, forbid_unknown_fields=True):
    enable_chunked_processing: bool = False
    max_embed_len: int | None = None


_LONGEST_TEXT = 1 << 20


_VLLM: Mapping[str, OtherFlag] = {
    "--tensor-parallel-size": as_ours("--tensor-parallel"),
    "-tp": as_ours("--tensor-parallel"),
    "--data-parallel-size": as_ours("--data-parallel"),
    "-dp": as_ours("--data-parallel"),
    "--pipeline-parallel-size": as_ours("--pipeline-parallel"),
    "-pp": as_ours("--pipeline-parallel"),
    "--enable-expert-parallel": switch("--enable-expert-parallel"),
    "-dcp": as_ours("--decode-context-parallel-size"),
    GPU_SHARE: as_ours("--gpu-memory", why="here a share of the memory that is free"),
    "--max-num-seqs": as_ours("--max-running"),
    "--max-num-batched-tokens": as_ours("--max-step-tokens"),
    "--max-num-partial-prefills": as_ours("--max-partial-prefills"),
    "--long-prefill-token-threshold": as_ours("--long-prefill-threshold"),
    "--enable-prefix-caching": switch("--prefix-caching"),
    "--no-enable-prefix-caching": switch("--no-prefix-caching"),
    "--enable-chunked-prefill": left_out(ALWAYS),
    "--no-enable-chunked-prefill": refused("prompts are always computed in chunks", 0),
    "--block-size": as_ours("--block-tokens"),
    "--kv-cache-dtype": by_value(_KV_DTYPES, _KV_HINT),
    "--kv-cache-dtype-skip-layers": as_ours("--kv-dtype-skip-layers"),
    "--kv-cache-memory-bytes": as_ours("--kv-memory"),
    "--num-gpu-blocks-override": as_ours("--kv-blocks"),
    "--swap-space": left_out("preempted requests are computed again, not swapped", ONE),
    "--cpu-offload-gb": by_value({"0": ()}, "weights are not offloaded; use --quantization"),
    **rows(
        "--compilation-config -cc",
        OtherFlag(words=compilation_words, arity=ONE, why=_COMPILED, is_object=True),
    ),
    "-O": left_out(_COMPILED, ONE),
    "--trust-remote-code": left_out("code of a checkpoint is never executed"),
    "--tokenizer-mode": left_out("the tokenizer's kind is read from its files", ONE),
    "--tokenizer-revision": refused("--revision pins the model and its tokenizer"),
    "--download-dir": refused("HF_HOME names the folder of downloads"),
    "--model-impl": by_value(
        {"auto": (), "vllm": (), "transformers": ("--family", "transformers")},
        "allowed: auto, vllm, transformers",
    ),
    "--runner": left_out("read from the checkpoint", ONE),
    "--task": left_out("read from the checkpoint", ONE),
    "--hf-overrides": refused(EDIT_CONFIG),
    "--rope-scaling": refused("edit rope_scaling in the model's config.json"),
    "--generation-config": by_value({"auto": ()}, "the model's own is read"),
    "--override-generation-config": refused(PER_REQUEST),
    "--enable-auto-tool-choice": left_out(ALWAYS),
    "--tool-call-parser": as_ours("--tool-parser"),
    "--chat-template-content-format": left_out("read from the chat template", ONE),
    "--structured-outputs-backend": by_value(
        {
            "auto": (),
            "guidance": ("--grammar-backend", "llguidance"),
            "xgrammar": ("--grammar-backend", "xgrammar"),
        },
        "allowed: auto, guidance, xgrammar",
    ),
    "--scheduling-policy": as_ours("--policy"),
    "--async-scheduling": switch("--overlap"),
    "--no-async-scheduling": switch("--no-overlap"),
    "--distributed-executor-backend": by_value(
        {"mp": (), "uni": ("--executor", "inline")}, "allowed: mp, uni"
    ),
    "--api-key": as_ours("--api-keys", SEVERAL),
    "--api-server-count": as_ours("--api-servers"),
    "--uds": OtherFlag(
        words=lambda values: ["--host", f"unix:{values[0]}"], arity=ONE, why="the same option"
    ),
    "--uvicorn-log-level": as_ours("--log-level"),
    "--shutdown-timeout": as_ours("--shutdown-timeout-s"),
    "--otlp-traces-endpoint": as_ours("--otlp-endpoint"),
    "--enable-force-include-usage": switch("--force-include-usage"),
    "--return-tokens-as-token-ids": switch("--return-tokens-as-token-ids"),
    "--enable-per-request-metrics": switch("--per-request-metrics"),
    "--enable-tokenizer-info-endpoint": switch("--tokenizer-info"),
    "--enable-prompt-tokens-details": left_out(ALWAYS),
    "--enable-server-load-tracking": left_out(ALWAYS),
    "--enable-request-id-headers": left_out(ALWAYS),
    "--enable-sleep-mode": left_out("/sleep needs only --admin-key"),
    "--enable-log-requests": refused(_UNLOGGED, 0),
    "--disable-log-requests": left_out("requests are never logged"),
    "--no-enable-log-requests": left_out("requests are never logged"),
    "--disable-log-stats": left_out("figures are at /metrics, not in the log"),
    "--disable-uvicorn-access-log": left_out("requests are never logged"),
    "--max-log-len": left_out("requests are never logged", ONE),
    "--disable-fastapi-docs": left_out("there is /openapi.json and no page of it"),
    "--pooler-config": OtherFlag(
        words=_long_texts,
        arity=ONE,
        why="how the model pools is read from its files; enable_chunked_processing and max_embed_len are taken",
    ),
    "--mm-processor-kwargs": left_out("requests say it: mm_processor_kwargs", ONE),
    "--enable-lora": left_out(_ADAPTERS, 0),
    "--lora-modules": left_out(_ADAPTERS, SEVERAL),
    "--max-loras": left_out(_ADAPTERS, ONE),
    "--max-lora-rank": left_out(_ADAPTERS, ONE),
    "--max-cpu-loras": left_out(_ADAPTERS, ONE),
    "--kv-transfer-config": OtherFlag(
        words=_hidden_states,
        arity=ONE,
        why="files of hidden states; KV passes to other servers by --kv-transfer-path",
    ),
    "--allowed-origins": refused(_CORS),
    "--middleware": refused("no code of others runs in the server"),
    **rows("--convert --config-format --code-revision", left_out("read from the checkpoint", ONE)),
    **rows(
        "--hf-config-path --rope-theta --override-attention-dtype --override-neuron-config",
        refused(EDIT_CONFIG),
    ),
    "-q": as_ours("--quantization"),
    **rows("--max-seq-len-to-capture --max-cudagraph-capture-size", left_out(_RECORDED, ONE)),
    "--cudagraph-capture-sizes": left_out(_RECORDED, SEVERAL),
    "--optimization-level": left_out(_COMPILED, ONE),
    "-O0": switch("--enforce-eager", why="steps are not recorded; nothing is compiled anyway"),
    **rows("-O1 -O2 -O3", left_out(_COMPILED)),
    **rows(
        "--attention-backend --attention-config --moe-backend --linear-backend --kernel-config --ir-op-priority "
        "--performance-mode --mm-encoder-attn-backend --all2all-backend --mamba-backend "
        "--gdn-prefill-backend --num-lookahead-slots",
        left_out(KERNELS, ONE),
    ),
    **rows(
        "--enable-flashinfer-autotune --disable-custom-all-reduce --disable-cascade-attn "
        "--kv-sharing-fast-prefill --enable-mamba-cache-stochastic-rounding "
        "--disable-hybrid-kv-cache-manager --disable-nccl-for-dp-synchronization",
        left_out(KERNELS),
    ),
    **rows("--mamba-cache-dtype --mamba-ssm-cache-dtype", by_value({"auto": ()}, _STATES)),
    "--mamba-cache-mode": by_value(
        {
            "none": ("--no-prefix-caching",),
            "all": ("--state-interval", "1"),
            "align": (),
        },
        "allowed: none, all, align",
    ),
    **rows("--prefix-match-unit --mamba-block-size", left_out(_MATCHED, ONE)),
    "--enable-mamba-fine-grained-prefix-cache": left_out(_MATCHED),
    "--calculate-kv-scales": left_out("each token has scales of its own"),
    "--prefix-caching-hash-algo": by_value(
        {name: ("--prefix-hash", name) for name in _PREFIX_HASHES},
        "--prefix-hash takes blake2b too",
    ),
    "--logprobs-mode": by_value(
        {"raw_logprobs": ()}, "raw ones; requests may say logprobs_mode: processed"
    ),
    "--disable-sliding-window": refused("a model's windows are part of it", 0),
    "--skip-tokenizer-init": refused("tokens in, tokens out: POST /inference/v1/generate", 0),
    **rows("--tokens-only --enable-scale-out", left_out("/inference/v1/generate is always there")),
    "--hf-token": refused("HF_TOKEN in the environment", OPTIONAL),
    **rows(
        "--logits-processors --worker-cls --worker-extension-cls "
        "--tool-parser-plugin --reasoning-parser-plugin",
        refused(_NO_CODE, SEVERAL),
    ),
    "--kv-cache-metrics": OtherFlag(
        words=lambda values: ["--watched-blocks", "100"], arity=0, why="one block in a hundred"
    ),
    "--io-processor-plugin": as_ours("--io-processor", why="the name of an extension"),
    "--scheduler-cls": as_ours("--scheduler-cls", why="the name of an extension"),
    "--logits-processor-pattern": left_out("requests name no code", ONE),
    **rows(
        "--safetensors-load-strategy --max-parallel-loading-workers --pt-load-map-location",
        left_out(_LOADING, ONE),
    ),
    "--ignore-patterns": left_out(_LOADING, SEVERAL),
    "--use-tqdm-on-load": left_out(_LOADING),
    "--model-loader-extra-config": refused("--load-format says how weights are read"),
    "--structured-outputs-config": refused("--grammar-backend names the back end"),
    "--reasoning-config": refused("--reasoning-parser names the format of thoughts"),
    "--nnodes": by_value({"1": ()}, _ONE_HOST),
    "--node-rank": by_value({"0": ()}, _ONE_HOST),
    **rows(
        "--master-addr --master-port --data-parallel-rank --data-parallel-start-rank "
        "--data-parallel-address --data-parallel-rpc-port",
        refused(_ONE_HOST),
    ),
    **rows(
        "--headless --data-parallel-hybrid-lb --data-parallel-external-lb", refused(_ONE_HOST, 0)
    ),
    "--data-parallel-backend": by_value({"mp": ()}, _ONE_HOST),
    "--data-parallel-size-local": left_out(_ONE_HOST, ONE),
    "--decode-context-parallel-size": as_ours("--decode-context-parallel-size"),
    "--prefill-context-parallel-size": by_value({"1": ()}, "only 1; use --sequence-parallel"),
    "--enable-dbo": refused(_NO_TWO_BATCHES, 0),
    "--dbo-decode-token-threshold": refused(_NO_TWO_BATCHES),
    "--enable-eplb": refused(_EXPERTS_FOLLOW, 0),
    "--eplb-config": refused(_EXPERTS_FOLLOW),
    "--num-redundant-experts": as_ours("--num-redundant-experts"),
    "--expert-placement-strategy": by_value({"linear": ()}, _EXPERTS_FOLLOW),
    "--enable-elastic-ep": left_out("--max-replicas says how many engine cores there may be"),
    "--ray-workers-use-nsight": refused("/start_profile records steps", 0),
    **rows(
        "--kv-offloading-size --kv-offloading-backend --kv-events-config --ec-transfer-config",
        refused(_NO_TRANSFER),
    ),
    "--offload-backend": refused("--offload-layers and --offload-experts say what is offloaded"),
    **rows("--additional-config --watermarking-config", refused("not part of headrace")),
    "--media-io-kwargs": left_out("requests say it: mm_processor_kwargs", ONE),
    "--trust-request-mm-kwargs": left_out("mm_processor_kwargs are taken within bounds"),
    **rows(
        "--mm-processor-cache-gb --mm-processor-cache-type --mm-shm-cache-max-object-size-mb "
        "--mm-tensor-ipc",
        left_out(_MEDIA_CACHE, ONE),
    ),
    "--disable-mm-preprocessor-cache": left_out(_MEDIA_CACHE),
    **rows(
        "--interleave-mm-strings --skip-mm-profiling --disable-chunked-mm-input", left_out(ALWAYS)
    ),
    "--lora-dtype": left_out("adapters have the type of the model's activations", ONE),
    **rows("--enable-lora-bias --fully-sharded-loras", left_out(_ADAPTERS)),
    "--lora-target-modules": refused(
        "--lora-kinds says which kinds of adapters there are", SEVERAL
    ),
    **rows("--show-hidden-metrics-for-version --collect-detailed-traces", left_out(_METRICS, ONE)),
    **rows(
        "--cudagraph-metrics --enable-layerwise-nvtx-tracing",
        left_out(_METRICS),
    ),
    "--enable-mfu-metrics": switch("--mfu-metrics"),
    "--profiler-config": refused("--profile-dir is the folder of profiles"),
    **rows("--allowed-methods --allowed-headers", refused(_CORS)),
    "--allow-credentials": refused(_CORS, 0),
    "--response-role": by_value({"assistant": ()}, "answers have the role assistant"),
    "--ssl-cert-reqs": by_value(
        {"2": ()}, "with --ssl-ca-certs clients must show a certificate, without it they need none"
    ),
    "--ssl-ciphers": refused("those of Python's defaults for TLS 1.2 and 1.3 are offered"),
    "--enable-ssl-refresh": left_out(ALWAYS),
    "--disable-frontend-multiprocessing": left_out("API and core are processes of their own"),
    **rows("--exclude-tools-when-tool-choice-none --scheduler-reserve-full-isl", left_out(ALWAYS)),
    "--log-config-file": refused("--log-level is what can be said about logs"),
    **rows("--enable-log-outputs --enable-log-deltas", refused(_UNLOGGED, 0)),
    "--log-error-stack": left_out(ALWAYS),
    "--disable-access-log-for-endpoints": left_out("requests are never logged", ONE),
    **rows(
        "--h11-max-incomplete-event-size --h11-max-header-count",
        left_out("requests may have 64 headers of 64 KiB together", ONE),
    ),
    "-asc": as_ours("--api-servers"),
    "--renderer-num-workers": left_out("see --api-servers", ONE),
    "--max-num-queued-reqs": as_ours("--max-queued-requests"),
    "--max-num-queued-tokens": as_ours("--max-queued-tokens"),
    "--numa-bind": left_out("see --cpu-binding"),
    **rows("--numa-bind-nodes --numa-bind-cpus", left_out("see --cpu-binding", SEVERAL)),
    "--weight-transfer-config": left_out("ways to push weights: docs/WEIGHTS.md", ONE),
    **rows(
        "--fail-on-environ-validation --enable-offline-docs", left_out("there is no such thing")
    ),
    "--default-chat-template-kwargs": refused("send chat_template_kwargs with each request"),
    "--grpc": refused("--grpc-port is the port of gRPC", 0),
    **rows("--use-async-output-proc --disable-async-output-proc", left_out(ALWAYS)),
}


VLLM: Mapping[str, OtherFlag] = {
    **_VLLM,
    "--override-pooler-config": _VLLM["--pooler-config"],
    "--guided-decoding-backend": _VLLM["--structured-outputs-backend"],
}
