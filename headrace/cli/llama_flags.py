"""The flags of llama-server: a row each (other_flag.py)."""

from __future__ import annotations

import json
from collections.abc import Mapping

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

_NO_LORA = "LoRA adapters are taken in PEFT's layout: --lora-modules NAME=FOLDER"
_DEVICES = "CUDA_VISIBLE_DEVICES says which GPUs there are, --tensor-parallel how many are used"
_EXPERTS = "--offload-experts N keeps the experts of so many layers in host memory"
_CACHE_TYPES = {
    "f16": (),
    "bf16": (),
    "q8_0": ("--kv-dtype", "int8"),
    "q4_0": ("--kv-dtype", "int4"),
    "q4_1": ("--kv-dtype", "int4"),
}
_CACHE_HINT = f"allowed: {', '.join(_CACHE_TYPES)}"


def _layers_on_gpu(values: list[str]) -> list[str] | None:
    value = values[0]
    if value == "0":
        return ["--device", "cpu"]
    return (
        [] if value in ("all", "auto", "-1") or (value.isdecimal() and int(value) >= 99) else None
    )


def _scaled_vectors(values: list[str]) -> list[str] | None:
    """FILE:SCALE, or FILE and SCALE as words of their own, as older builds take them."""
    if len(values) == 2 and ":" not in values[0]:
        values = [":".join(values)]
    return ["--control-vectors", ",".join(values)]


_DRAFT_MODEL = OtherFlag(
    words=lambda values: [
        "--speculative-config",
        json.dumps({"method": "draft_model", "model": values[0]}),
    ],
    arity=ONE,
    why="the same drafts",
)
_LLAMA: Mapping[str, OtherFlag] = {
    "-m": as_ours("--model"),
    "-hf": OtherFlag(
        words=lambda values: ["--model", values[0].partition(":")[0], "--allow-download"],
        arity=ONE,
        why="a hub id, downloaded if it is not in the cache",
    ),
    "-a": as_ours("--served-model-name"),
    "--alias": as_ours("--served-model-name"),
    "-t": as_ours("--threads"),
    "-tb": left_out("prompts take the threads of --threads", ONE),
    "--threads-batch": left_out("prompts take the threads of --threads", ONE),
    "--threads-http": left_out("see --api-servers", ONE),
    "-c": OtherFlag(
        words=lambda values: ["--max-model-len", "auto" if values[0] == "0" else values[0]],
        arity=ONE,
        why="here per request, not shared by all",
    ),
    "-np": as_ours("--max-running"),
    "--parallel": as_ours("--max-running"),
    "-b": as_ours("--max-step-tokens"),
    "--batch-size": as_ours("--max-step-tokens"),
    "-ub": left_out("see --max-step-tokens", ONE),
    "--ubatch-size": left_out("see --max-step-tokens", ONE),
    "-ngl": OtherFlag(
        words=_layers_on_gpu,
        arity=ONE,
        why="a model is whole on the GPU or whole on the CPU: 0, all, or 99 and more",
    ),
    "-fa": left_out(KERNELS, OPTIONAL),
    "--flash-attn": left_out(KERNELS, OPTIONAL),
    "-ctk": by_value(_CACHE_TYPES, _CACHE_HINT),
    "--cache-type-k": by_value(_CACHE_TYPES, _CACHE_HINT),
    "-ctv": by_value(_CACHE_TYPES, _CACHE_HINT),
    "--cache-type-v": by_value(_CACHE_TYPES, _CACHE_HINT),
    "-cb": left_out(ALWAYS),
    "--cont-batching": left_out(ALWAYS),
    "--no-cont-batching": refused("requests are always batched", 0),
    "--mlock": left_out("weights are read into memory"),
    "--no-mmap": left_out("weights are read into memory"),
    "--jinja": left_out(ALWAYS),
    "--chat-template-file": as_ours("--chat-template"),
    "--reasoning-format": by_value(
        {"auto": (), "none": ("--reasoning-parser", "none")}, "allowed: auto, none"
    ),
    "--embedding": left_out("vectors are served beside text where the model has them"),
    "--embeddings": left_out("vectors are served beside text where the model has them"),
    "--reranking": left_out("read from the checkpoint"),
    "--metrics": left_out(ALWAYS),
    "--slots": left_out("see /v1/requests"),
    "--props": left_out("see /v1/admin/config"),
    "--no-warmup": left_out("recorded steps and kernels are always checked"),
    "--timeout": as_ours("--request-timeout-s"),
    "-to": as_ours("--request-timeout-s"),
    "-v": OtherFlag(words=lambda values: ["--log-level", "debug"], arity=0, why="the same option"),
    "--verbose": OtherFlag(
        words=lambda values: ["--log-level", "debug"], arity=0, why="the same option"
    ),
    "--temp": refused(PER_REQUEST),
    "--top-k": refused(PER_REQUEST),
    "--top-p": refused(PER_REQUEST),
    "--min-p": refused(PER_REQUEST),
    "-n": refused("send max_tokens with each request"),
    "--lora": refused(_NO_LORA),
    "-mm": as_ours("--mmproj"),
    "-md": _DRAFT_MODEL,
    "--model-draft": _DRAFT_MODEL,
    "--ssl-key-file": as_ours("--ssl-keyfile"),
    "--ssl-cert-file": as_ours("--ssl-certfile"),
    **rows("--predict --n-predict", refused("send max_tokens with each request")),
    "--keep": as_ours("--context-keep"),
    **rows("-e --escape --no-escape --no-perf --perf --spm-infill", left_out("requests say it")),
    **rows(
        "--rope-scale --rope-freq-base --rope-freq-scale --yarn-orig-ctx --yarn-ext-factor "
        "--yarn-attn-factor --yarn-beta-slow --yarn-beta-fast --override-kv",
        refused(EDIT_CONFIG),
    ),
    **rows("-dt --defrag-thold", left_out("blocks need not lie side by side", ONE)),
    "--numa": left_out("see --cpu-binding", ONE),
    **rows(
        "-C --cpu-mask -Cr --cpu-range --cpu-strict --prio --poll -Cb --cpu-mask-batch "
        "--prio-batch --poll-batch",
        left_out("see --cpu-binding", ONE),
    ),
    **rows("-dev -sm --split-mode -ts --tensor-split -mg --main-gpu", refused(_DEVICES)),
    "--list-devices": refused("headrace doctor lists them", 0),
    **rows("-ot --override-tensor -ncmoe --n-cpu-moe", refused(_EXPERTS)),
    **rows("-cmoe --cpu-moe", refused(_EXPERTS, 0)),
    **rows("-nkvo --no-kv-offload", refused("the KV cache lies where the model is", 0)),
    **rows("--kv-offload --op-offload --no-op-offload --repack --no-repack", left_out(KERNELS)),
    **rows("--check-tensors --swa-full -kvu --kv-unified --no-host", left_out(ALWAYS)),
    **rows("-cram --cache-ram --cache-reuse", left_out("prefixes stay in the KV cache", ONE)),
    **rows("-fit --fit", left_out("memory is measured at start", OPTIONAL)),
    **rows("-sps --slot-prompt-similarity", left_out("every prefix is found", ONE)),
    **rows("-mu --model-url -hff --hf-file --mmproj-url", refused("download it; --model FILE")),
    **rows("-hft --hf-token-file", refused("HF_TOKEN in the environment")),
    **rows("--offline", left_out("nothing is downloaded without --allow-download")),
    "--lora-scaled": refused(_NO_LORA),
    "--control-vector": as_ours("--control-vectors"),
    "--control-vector-scaled": OtherFlag(
        words=_scaled_vectors, arity=SEVERAL, why="FILE:SCALE, or FILE SCALE"
    ),
    "--control-vector-layer-range": OtherFlag(
        words=lambda values: (
            ["--control-vector-layers", "-".join(values)] if len(values) == 2 else None
        ),
        arity=2,
        why="two numbers: the first and the last layer",
    ),
    "--lora-init-without-apply": left_out("requests name their adapter"),
    **rows("--log-disable --log-prefix --log-timestamps", left_out("see --log-level")),
    "--log-colors": left_out("see --log-level", OPTIONAL),
    "--log-file": refused("send the standard error output to a file"),
    **rows("-lv --verbosity --log-verbosity", left_out("see --log-level", ONE)),
    "-s": as_ours("--seed"),
    **rows(
        "--samplers --sampling-seq --sampler-seq --top-nsigma --top-n-sigma --xtc-probability "
        "--xtc-threshold --typical --repeat-last-n --repeat-penalty --presence-penalty "
        "--frequency-penalty --dry-multiplier --dry-base --dry-allowed-length "
        "--dry-penalty-last-n --dry-sequence-breaker --dynatemp-range --dynatemp-exp --mirostat "
        "--mirostat-lr --mirostat-ent -l --logit-bias --grammar --grammar-file -j --json-schema "
        "-jf --json-schema-file --chat-template-kwargs",
        refused(PER_REQUEST),
    ),
    "--ignore-eos": refused(PER_REQUEST, 0),
    **rows("-sp --special", refused("send skip_special_tokens: false with each request", 0)),
    "--pooling": left_out("read from the checkpoint", ONE),
    "--rerank": left_out("read from the checkpoint"),
    "--no-mmproj": switch("--language-model-only"),
    **rows(
        "--no-mmproj-offload --mmproj-offload --mmproj-auto", left_out("it lies with the model")
    ),
    **rows("--image-min-tokens --image-max-tokens", refused("send mm_processor_kwargs")),
    "--api-prefix": as_ours("--root-path"),
    "--path": refused("files are served by a proxy in front of the server"),
    **rows("--no-webui --no-ui --webui --ui", left_out("the page stands at /")),
    "--no-slots": left_out("/v1/requests shows a key its own requests alone"),
    "--reasoning-budget": by_value({"-1": ()}, "send thinking_token_budget with each request"),
    "--no-prefill-assistant": left_out("requests say it: continue_final_message"),
    **rows(
        "--draft --draft-n --draft-max --draft-min --draft-p-min --draft-p-split --spec-type",
        refused("--speculative-config says what drafts, and how many"),
    ),
    **rows(
        "-td --threads-draft -cd --ctx-size-draft -ngld --gpu-layers-draft "
        "--n-gpu-layers-draft -devd --device-draft",
        left_out("a draft model lies where the model is", ONE),
    ),
    "--sleep-idle-seconds": refused("a server of several models ends those that idle"),
}


LLAMA: Mapping[str, OtherFlag] = {
    **_LLAMA,
    "--hf-repo": _LLAMA["-hf"],
    "--ctx-size": _LLAMA["-c"],
    **rows("--n-gpu-layers --gpu-layers", _LLAMA["-ngl"]),
}
