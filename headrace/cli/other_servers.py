"""The flags of `vllm serve` and llama-server, for `headrace serve`, `plan` and `render`: each one
that is known here becomes ours, is left out because it asks for what is so anyway or for what the
command has no option for, or is refused with a hint.

Our own flags are never looked up: where a name is ours, it means what docs/CONFIG.md says. What was
translated or left out is a Decision, printed at start with the others.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from headrace.base.config.resolved import Decision
from headrace.base.config.tree import Options
from headrace.base.errors import ConfigError
from headrace.launch.topology import device_facts

ONE, SEVERAL, OPTIONAL = 1, "+", "?"
GPU_SHARE = "--gpu-memory-utilization"


@dataclass(frozen=True, kw_only=True)
class OtherFlag:
    """A row. `arity`: how many words follow it (0, ONE, SEVERAL or OPTIONAL); `words`: ours for
    them, None where the values cannot be honoured; `why`: the reason shown, or the hint of a
    refusal."""

    words: Callable[[list[str]], list[str] | None]
    arity: int | str
    why: str


def _as(flag: str, arity: int | str = ONE, why: str = "the same option") -> OtherFlag:
    return OtherFlag(words=lambda values: [flag, ",".join(values)], arity=arity, why=why)


def _switch(flag: str, why: str = "the same option") -> OtherFlag:
    return OtherFlag(words=lambda values: [flag], arity=0, why=why)


def _left_out(why: str, arity: int | str = 0) -> OtherFlag:
    return OtherFlag(words=lambda values: [], arity=arity, why=why)


def _refused(hint: str, arity: int | str = ONE) -> OtherFlag:
    return OtherFlag(words=lambda values: None, arity=arity, why=hint)


def _by_value(table: Mapping[str, Sequence[str]], hint: str) -> OtherFlag:
    """Ours by the value; other values are refused."""

    def words(values: list[str]) -> list[str] | None:
        chosen = table.get(values[0].lower())
        return None if chosen is None else list(chosen)

    return OtherFlag(words=words, arity=ONE, why=hint)


def _layers_on_gpu(values: list[str]) -> list[str] | None:
    value = values[0]
    if value == "0":
        return ["--device", "cpu"]
    return (
        [] if value in ("all", "auto", "-1") or (value.isdecimal() and int(value) >= 99) else None
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


class _PoolerConfig(msgspec.Struct, forbid_unknown_fields=True):
    enable_chunked_processing: bool = False
    max_embed_len: int | None = None


_LONGEST_TEXT = 1 << 20


_NO_LORA = "LoRA adapters are taken in PEFT's layout: --lora-modules NAME=FOLDER"
_ADAPTERS = "adapters are applied where the model runs"
_NO_TLS = "serve TLS from a proxy in front of the server"
_PER_REQUEST = "send it with each request, or put it into the model's generation_config.json"
_ALWAYS = "always so"
_KV_DTYPES = {
    "auto": (),
    "fp8": ("--kv-dtype", "fp8"),
    "fp8_e4m3": ("--kv-dtype", "fp8"),
    "fp8_per_token_head": ("--kv-dtype", "fp8"),
    "fp8_e5m2": ("--kv-dtype", "fp8_e5m2"),
    "int8_per_token_head": ("--kv-dtype", "int8"),
    "int4_per_token_head": ("--kv-dtype", "int4"),
    "nvfp4": ("--kv-dtype", "nvfp4"),
}
_KV_HINT = (
    f"allowed: {', '.join(_KV_DTYPES)}; turboquant types are not built: --kv-dtype int4-rotated "
    "and int3-rotated are much like them; float16 and bfloat16: --dtype"
)
_CACHE_TYPES = {
    "f16": (),
    "bf16": (),
    "q8_0": ("--kv-dtype", "int8"),
    "q4_0": ("--kv-dtype", "int4"),
    "q4_1": ("--kv-dtype", "int4"),
}
_CACHE_HINT = f"allowed: {', '.join(_CACHE_TYPES)}"

VLLM: Mapping[str, OtherFlag] = {
    "--tensor-parallel-size": _as("--tensor-parallel"),
    "-tp": _as("--tensor-parallel"),
    "--data-parallel-size": _as("--replicas", why="whole copies of the model, requests by load"),
    "-dp": _as("--replicas", why="whole copies of the model, requests by load"),
    "--pipeline-parallel-size": _by_value({"1": ()}, "only 1; use --tensor-parallel"),
    "-pp": _by_value({"1": ()}, "only 1; use --tensor-parallel"),
    "--enable-expert-parallel": _refused("expert parallelism is not part of headrace", 0),
    GPU_SHARE: _as("--gpu-memory", why="here a share of the memory that is free"),
    "--max-num-seqs": _as("--max-running"),
    "--max-num-batched-tokens": _as("--max-step-tokens"),
    "--max-num-partial-prefills": _as("--max-partial-prefills"),
    "--long-prefill-token-threshold": _as("--long-prefill-threshold"),
    "--enable-prefix-caching": _switch("--prefix-caching"),
    "--no-enable-prefix-caching": _switch("--no-prefix-caching"),
    "--enable-chunked-prefill": _left_out(_ALWAYS),
    "--no-enable-chunked-prefill": _refused("prompts are always computed in chunks", 0),
    "--block-size": _as("--block-tokens"),
    "--kv-cache-dtype": _by_value(_KV_DTYPES, _KV_HINT),
    "--kv-cache-dtype-skip-layers": _as("--kv-dtype-skip-layers"),
    "--kv-cache-memory-bytes": _as("--kv-memory"),
    "--num-gpu-blocks-override": _as("--kv-blocks"),
    "--swap-space": _left_out("preempted requests are computed again, not swapped", ONE),
    "--cpu-offload-gb": _by_value({"0": ()}, "weights are not offloaded; use --quantization"),
    "--enforce-eager": _left_out("recorded steps are checked at start; there is no other mode"),
    "--compilation-config": _left_out("nothing is compiled by torch.compile", ONE),
    "-O": _left_out("nothing is compiled by torch.compile", ONE),
    "--trust-remote-code": _left_out("code of a checkpoint is never executed"),
    "--tokenizer-mode": _by_value({"auto": ()}, "the tokenizer's kind is read from its files"),
    "--tokenizer-revision": _refused("--revision pins the model and its tokenizer"),
    "--download-dir": _refused("HF_HOME names the folder of downloads"),
    "--model-impl": _by_value(
        {"auto": (), "vllm": (), "transformers": ("--family", "transformers")},
        "allowed: auto, vllm, transformers",
    ),
    "--runner": _left_out("read from the checkpoint", ONE),
    "--task": _left_out("read from the checkpoint", ONE),
    "--hf-overrides": _refused("edit the model's config.json"),
    "--rope-scaling": _refused("edit rope_scaling in the model's config.json"),
    "--generation-config": _by_value({"auto": ()}, "the model's own is read"),
    "--override-generation-config": _refused(_PER_REQUEST),
    "--enable-auto-tool-choice": _left_out(_ALWAYS),
    "--tool-call-parser": _as("--tool-parser"),
    "--chat-template-content-format": _left_out("read from the chat template", ONE),
    "--structured-outputs-backend": _by_value(
        {
            "auto": (),
            "guidance": ("--grammar-backend", "llguidance"),
            "xgrammar": ("--grammar-backend", "xgrammar"),
        },
        "allowed: auto, guidance, xgrammar",
    ),
    "--scheduling-policy": _as("--policy"),
    "--async-scheduling": _switch("--overlap"),
    "--no-async-scheduling": _switch("--no-overlap"),
    "--distributed-executor-backend": _by_value(
        {"mp": (), "uni": ("--executor", "inline")}, "allowed: mp, uni"
    ),
    "--api-key": _as("--api-keys", SEVERAL),
    "--api-server-count": _as("--api-servers"),
    "--uds": OtherFlag(
        words=lambda values: ["--host", f"unix:{values[0]}"], arity=ONE, why="the same option"
    ),
    "--uvicorn-log-level": _as("--log-level"),
    "--shutdown-timeout": _as("--shutdown-timeout-s"),
    "--otlp-traces-endpoint": _as("--otlp-endpoint"),
    "--enable-force-include-usage": _switch("--force-include-usage"),
    "--return-tokens-as-token-ids": _switch("--return-tokens-as-token-ids"),
    "--enable-per-request-metrics": _switch("--per-request-metrics"),
    "--enable-tokenizer-info-endpoint": _switch("--tokenizer-info"),
    "--enable-prompt-tokens-details": _left_out(_ALWAYS),
    "--enable-server-load-tracking": _left_out(_ALWAYS),
    "--enable-request-id-headers": _left_out(_ALWAYS),
    "--enable-sleep-mode": _left_out("/sleep needs only --admin-key"),
    "--enable-log-requests": _refused("requests are never logged; --log-slow-s logs slow ones", 0),
    "--disable-log-requests": _left_out("requests are never logged"),
    "--no-enable-log-requests": _left_out("requests are never logged"),
    "--disable-log-stats": _left_out("figures are at /metrics, not in the log"),
    "--disable-uvicorn-access-log": _left_out("requests are never logged"),
    "--max-log-len": _left_out("requests are never logged", ONE),
    "--disable-fastapi-docs": _left_out("there is /openapi.json and no page of it"),
    "--pooler-config": OtherFlag(
        words=_long_texts,
        arity=ONE,
        why="how the model pools is read from its files; enable_chunked_processing and max_embed_len are taken",
    ),
    "--mm-processor-kwargs": _left_out("requests say it: mm_processor_kwargs", ONE),
    "--enable-lora": _left_out(_ADAPTERS, 0),
    "--lora-modules": _left_out(_ADAPTERS, SEVERAL),
    "--max-loras": _left_out(_ADAPTERS, ONE),
    "--max-lora-rank": _left_out(_ADAPTERS, ONE),
    "--max-cpu-loras": _left_out(_ADAPTERS, ONE),
    "--kv-transfer-config": _refused("transfer of KV blocks is not part of headrace"),
    "--ssl-keyfile": _refused(_NO_TLS),
    "--ssl-certfile": _refused(_NO_TLS),
    "--allowed-origins": _refused("CORS headers are set by a proxy in front of the server"),
    "--middleware": _refused("no code of others runs in the server"),
}
_DRAFT_MODEL = OtherFlag(
    words=lambda values: [
        "--speculative-config",
        json.dumps({"method": "draft_model", "model": values[0]}),
    ],
    arity=ONE,
    why="the same drafts",
)
LLAMA: Mapping[str, OtherFlag] = {
    "-m": _as("--model"),
    "-hf": OtherFlag(
        words=lambda values: ["--model", values[0].partition(":")[0], "--allow-download"],
        arity=ONE,
        why="a hub id, downloaded if it is not in the cache",
    ),
    "-a": _as("--served-model-name"),
    "--alias": _as("--served-model-name"),
    "-t": _as("--threads"),
    "-tb": _left_out("prompts take the threads of --threads", ONE),
    "--threads-batch": _left_out("prompts take the threads of --threads", ONE),
    "--threads-http": _left_out("see --api-servers", ONE),
    "-c": OtherFlag(
        words=lambda values: ["--max-model-len", "auto" if values[0] == "0" else values[0]],
        arity=ONE,
        why="here per request, not shared by all",
    ),
    "-np": _as("--max-running"),
    "--parallel": _as("--max-running"),
    "-b": _as("--max-step-tokens"),
    "--batch-size": _as("--max-step-tokens"),
    "-ub": _left_out("see --max-step-tokens", ONE),
    "--ubatch-size": _left_out("see --max-step-tokens", ONE),
    "-ngl": OtherFlag(
        words=_layers_on_gpu,
        arity=ONE,
        why="a model is whole on the GPU or whole on the CPU: 0, all, or 99 and more",
    ),
    "-fa": _left_out("kernels are chosen and checked at start", OPTIONAL),
    "--flash-attn": _left_out("kernels are chosen and checked at start", OPTIONAL),
    "-ctk": _by_value(_CACHE_TYPES, _CACHE_HINT),
    "--cache-type-k": _by_value(_CACHE_TYPES, _CACHE_HINT),
    "-ctv": _by_value(_CACHE_TYPES, _CACHE_HINT),
    "--cache-type-v": _by_value(_CACHE_TYPES, _CACHE_HINT),
    "-cb": _left_out(_ALWAYS),
    "--cont-batching": _left_out(_ALWAYS),
    "--no-cont-batching": _refused("requests are always batched", 0),
    "--mlock": _left_out("weights are read into memory"),
    "--no-mmap": _left_out("weights are read into memory"),
    "--jinja": _left_out(_ALWAYS),
    "--chat-template-file": _as("--chat-template"),
    "--reasoning-format": _by_value(
        {"auto": (), "none": ("--reasoning-parser", "none")}, "allowed: auto, none"
    ),
    "--embedding": _left_out("vectors are served beside text where the model has them"),
    "--embeddings": _left_out("vectors are served beside text where the model has them"),
    "--reranking": _left_out("read from the checkpoint"),
    "--metrics": _left_out(_ALWAYS),
    "--slots": _left_out("see /v1/requests"),
    "--props": _left_out("see /v1/admin/config"),
    "--no-warmup": _left_out("recorded steps and kernels are always checked"),
    "--timeout": _as("--request-timeout-s"),
    "-to": _as("--request-timeout-s"),
    "-v": OtherFlag(words=lambda values: ["--log-level", "debug"], arity=0, why="the same option"),
    "--verbose": OtherFlag(
        words=lambda values: ["--log-level", "debug"], arity=0, why="the same option"
    ),
    "--temp": _refused(_PER_REQUEST),
    "--top-k": _refused(_PER_REQUEST),
    "--top-p": _refused(_PER_REQUEST),
    "--min-p": _refused(_PER_REQUEST),
    "-n": _refused("send max_tokens with each request"),
    "--lora": _refused(_NO_LORA),
    "-mm": _as("--mmproj"),
    "-md": _DRAFT_MODEL,
    "--model-draft": _DRAFT_MODEL,
    "--ssl-key-file": _refused(_NO_TLS),
    "--ssl-cert-file": _refused(_NO_TLS),
}
_LONG = {
    "--hf-repo": "-hf",
    "--ctx-size": "-c",
    "--n-gpu-layers": "-ngl",
    "--gpu-layers": "-ngl",
}
OTHERS: Mapping[str, tuple[str, OtherFlag]] = {
    **{flag: ("llama-server", row) for flag, row in LLAMA.items()},
    **{flag: ("llama-server", LLAMA[short]) for flag, short in _LONG.items()},
    **{flag: ("vLLM", row) for flag, row in VLLM.items()},
}


_LISTS = ("--served-model-name", "--lora-modules")
"""Flags of ours whose values other servers take as words of their own."""


def translated(argv: Sequence[str], known: Mapping[str, bool]) -> tuple[list[str], list[Decision]]:
    """The command line in our words, and a Decision for each flag that was not ours; ConfigError
    with the hint for one that cannot be honoured. `known`: our flags, and whether a value follows
    each."""
    queue, words, decisions, has_model = list(argv), [], [], False
    while queue:
        word = queue.pop(0)
        flag, equals, value = word.partition("=")
        if flag.startswith("--") and "." not in flag:
            flag = flag.replace("_", "-")
        if flag in _LISTS and flag in known and has_model and not equals:
            words += [flag, ",".join(_taken(queue, SEVERAL))]
        elif flag in known:
            words.append(flag + equals + value)
            if known[flag] and not equals and queue:
                words.append(queue.pop(0))
            has_model = has_model or flag == "--model"
        elif flag not in OTHERS:
            words.append(word)
            has_model = has_model or not word.startswith("-")
        else:
            server, row = OTHERS[flag]
            values = [value] if equals else _taken(queue, row.arity)
            ours, why = _ours(flag, server, row, values), row.why
            if ours and ours[0] not in known:
                ours, why = [], "this command has no such option"
            words += ours
            has_model = has_model or "--model" in ours
            why = f"{server}'s flag: {why}"
            decisions.append(Decision(flag, " ".join(values), " ".join(ours) or "left out", why))
    return words, decisions


def without_gpu(options: Options, notes: list[Decision]) -> tuple[Options, list[Decision]]:
    """On a machine without a GPU, vLLM's share of its memory is left out instead of refused: its
    command lines name one everywhere."""
    if not any(note.field == GPU_SHARE for note in notes):
        return options, notes
    if device_facts(options.device.device).kind != "cpu":
        return options, notes
    device = msgspec.structs.replace(options.device, gpu_memory="auto")
    left_out = {"chosen": "left out", "why": "vLLM's flag: there is no GPU in use"}
    notes = [
        msgspec.structs.replace(note, **left_out) if note.field == GPU_SHARE else note
        for note in notes
    ]
    return msgspec.structs.replace(options, device=device), notes


def _taken(queue: list[str], arity: int | str) -> list[str]:
    """The values of a flag, off the front of the queue."""
    most = {SEVERAL: len(queue), OPTIONAL: 1}.get(str(arity), arity)
    values: list[str] = []
    while queue and len(values) < int(most):
        is_flag = queue[0].startswith("-") and not queue[0].lstrip("-").replace(".", "").isdigit()
        if is_flag:
            break
        values.append(queue.pop(0))
    return values


def _ours(flag: str, server: str, row: OtherFlag, values: list[str]) -> list[str]:
    if row.arity in (ONE, SEVERAL) and not values:
        raise ConfigError(f"{flag}: a value is needed", field=flag)
    ours = row.words(values)
    if ours is None:
        shown = " ".join([flag, *values])
        raise ConfigError(f"{shown} ({server}'s flag): {row.why}", field=flag)
    return ours
