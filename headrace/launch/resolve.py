"""From what the user said, what the model states and what the device has to one resolved tree: a pure function.

"auto" ends here. Every value chosen for the user becomes a `Decision`, printed as one table at start; every
contradiction becomes a ConfigError that names the option as it is typed.
"""

from __future__ import annotations

import hashlib
import ipaddress
from pathlib import Path
from typing import Any

import msgspec

from headrace.back.models.families import FALLBACK
from headrace.base.config.resolved import (
    Decision,
    DeviceSpec,
    EngineSpec,
    GrammarSpec,
    KVSpec,
    ModelSpec,
    Resolved,
    SchedulerSpec,
    ServerSpec,
    TextSpec,
)
from headrace.base.config.tree import Options, ServerOptions
from headrace.base.config.units import parse_bytes
from headrace.base.errors import ConfigError
from headrace.base.wire.params import SamplingParams
from headrace.front.text.parsing.families import (
    choose_reasoning,
    choose_tools,
    reasoning_family,
    tool_family,
)
from headrace.launch.model_facts import ModelFacts


class DeviceFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What the machine has: kind and number of devices, memory of one (host memory for cpu), cores we may use; and of
    a CPU where threads and memory are best placed (back/platforms/placement.py: Placement)."""

    kind: str
    count: int
    total_bytes: int
    free_bytes: int
    cores: int
    cpus: tuple[int, ...] = ()
    other_cpus: tuple[int, ...] = ()
    nodes: tuple[int, ...] = ()
    placed: str = ""


class DoesNotFit(ConfigError):
    """The weights leave no room for a KV cache."""


CPU_KV_SHARE = 0.25
CUDA_MEMORY_SHARE = 0.92
CUDA_RESERVE_BYTES = 2 << 30
MIN_KV_BYTES = 16 << 20
NULL_BLOCKS = 8192
WEIGHT_BITS = {
    "int8": 8.0, "int8-g32": 8.5, "int8-g64": 8.25, "int8-g128": 8.125, "fp8": 8.0,
    "int4": 4.5, "int4-g64": 4.25, "int4-g128": 4.125,
    "int4-asym": 5.0, "int4-asym-g64": 4.5, "int4-asym-g128": 4.25,
}  # fmt: skip
# A step holds at most this many tokens, so this long is the pause that a long prompt makes in running streams. On two
# CPU cores 1024 tokens took 170 ms with the bundled 10 M model and seconds with one of 0.6 B.
CPU_STEP_TOKENS = 256
FAST_STEP_TOKENS = 8192
# On CUDA a step of prompts may take about 48 ms: 2048 tokens of an 8 B model on an H200. Products reach the rate of the
# longest ones at 2048 rows, so more tokens would only make streams wait; fewer would let prompts wait behind decodes.
CUDA_STEP_OPERATIONS = 0.048 * 700e12
CUDA_LEAST_STEP_TOKENS = 512
CPU_STRETCH = 2.0


class Chooser:
    """Collects the decisions. `pick` returns the user's value, or records and returns the one chosen for "auto"."""

    def __init__(self) -> None:
        self.decisions: list[Decision] = []

    def pick(self, field: str, given: Any, chosen: Any, why: str) -> Any:
        if given != "auto":
            return given
        self.note(field, "auto", chosen, why)
        return chosen

    def note(self, field: str, given: Any, chosen: Any, why: str) -> None:
        self.decisions.append(Decision(field, str(given), str(chosen), why))


def resolve(options: Options, model: ModelFacts, device: DeviceFacts) -> Resolved:
    """The resolved tree; ConfigError where options contradict each other, the model or the machine."""
    choose = Chooser()
    where = _device(options, device, choose)
    dtype = choose.pick("--dtype", options.model.dtype, model.dtype, "the checkpoint's type")
    quantization = _quantization(options, model, where, choose)
    text = text_spec(options, model, choose)
    max_model_len, names = text.max_model_len, text.model_names
    scheduler = _scheduler(options, model, where, max_model_len, choose)
    engine = EngineSpec(
        model=ModelSpec(
            path=model.path,
            name=names[0],
            format=model.format,
            family=model.family,
            dtype=dtype,
            max_model_len=max_model_len,
            logits_width=model.logits_width,
            eos_ids=model.eos_ids,
            config=model.config,
            seed=options.model.seed,
            quantization=quantization,
            kv_dtype=_kv_dtype(options, model, where, choose),
            deterministic=_deterministic(options, model),
            head=model.head,
            bare=model.bare,
            num_labels=model.num_labels,
            dense=model.dense,
            dense_per_token=model.pooling.late is not None,
            attention_capture=_attention_capture(options, where),
        ),
        kv=_kv(options, model, device, where, scheduler, max_model_len, choose),
        scheduler=scheduler,
        device=where,
        grammar=GrammarSpec(
            tokenizer_path=text.tokenizer_path, backend=options.scheduler.grammar_backend
        ),
    )
    return Resolved(
        engine=engine,
        text=text,
        server=server_spec(options.server),
        replicas=options.device.replicas,
        decisions=tuple(choose.decisions),
    )


def text_spec(options: Options, model: ModelFacts, choose: Chooser) -> TextSpec:
    """The front's part, which needs no device."""
    if model.unattended_expansion:
        why = "expansion tokens that nothing attends to are not supported here"
        choose.note("query expansion", "on", "off", why)
    return TextSpec(
        tokenizer_path=options.model.tokenizer or model.tokenizer_path,
        chat_template=model.chat_template,
        model_names=options.model.served_model_name or (model.name,),
        generation_defaults=_generation_defaults(model.generation_defaults),
        logits_width=model.logits_width,
        eos_ids=model.eos_ids,
        max_model_len=_max_model_len(options, model, choose),
        generates=model.head == "lm",
        pooling=model.pooling,
        tool_parser=_tool_parser(options.server, model, choose),
        reasoning_parser=_reasoning_parser(options.server, model, choose),
    )


def _device(options: Options, device: DeviceFacts, choose: Chooser) -> DeviceSpec:
    given = options.device
    kind = choose.pick("--device", given.device, device.kind, f"{device.count} found")
    if kind == "cuda" and device.kind != "cuda":
        raise ConfigError("--device cuda: no CUDA device was found on this machine")
    ranks = given.tensor_parallel * given.replicas
    if kind == "cuda" and ranks > device.count:
        raise ConfigError(
            f"--tensor-parallel {given.tensor_parallel} x --replicas {given.replicas} needs {ranks} devices; "
            f"{device.count} found"
        )
    if given.tensor_parallel > 1 and given.executor == "inline":
        raise ConfigError("--executor inline runs one worker; --tensor-parallel needs processes")
    executor = choose.pick(
        *("--executor", given.executor),
        *("inline" if given.tensor_parallel == 1 else "processes", "one worker per device"),
    )
    alone = kind == "cpu" and executor == "inline" and ranks == 1
    # Asked for a number of threads, we leave their cores to the system: others may have been given the rest.
    cpus = device.cpus if alone and given.threads == "auto" else ()
    if cpus:
        threads = choose.pick("--threads", given.threads, len(cpus), device.placed)
    else:
        share = max(1, device.cores // ranks)
        threads = choose.pick(
            "--threads", given.threads, share, f"{device.cores} usable cores, {ranks} workers"
        )
    nodes = device.nodes if alone and len(device.nodes) > 1 else ()
    if nodes:
        names = ", ".join(map(str, nodes))
        choose.note("memory", "auto", "interleaved", f"over the NUMA nodes {names}, page by page")
    return DeviceSpec(
        device=kind,
        executor=executor,
        tensor_parallel=given.tensor_parallel,
        threads=threads,
        memory_bytes=_gpu_bytes(given.gpu_memory, kind, executor, device, choose),
        cpus=cpus,
        other_cpus=device.other_cpus if cpus else (),
        nodes=nodes,
    )


def _gpu_bytes(
    given: str, kind: str, executor: str, device: DeviceFacts, choose: Chooser
) -> int | None:
    """What a worker may take of its GPU; None where there is none."""
    if kind != "cuda" or executor == "null":
        if given != "auto":
            raise ConfigError(f"--gpu-memory {given}: there is no GPU in use ({kind})")
        return None
    share = CUDA_MEMORY_SHARE
    if given != "auto":
        try:
            share = float(given)
        except ValueError:
            return parse_bytes(given, field="--gpu-memory")
        if share > 1:
            return int(share)
        if share <= 0:
            raise ConfigError(f"--gpu-memory {given}: a size, or a fraction above 0 and up to 1")
    room = int(device.free_bytes * share)
    choose.note("--gpu-memory", given, f"{room / 2**30:.1f}GiB", f"{share:g} of what is free")
    return room


def _quantization(
    options: Options, model: ModelFacts, where: DeviceSpec, choose: Chooser
) -> str | None:
    """The scheme by name; ConfigError where no kernel could serve it."""
    given = options.model.quantization
    if given == "none":
        return None
    if where.device != "cpu":
        raise ConfigError(f"--quantization {given} runs on the CPU only, not on {where.device}")
    if model.family == FALLBACK:
        raise ConfigError(
            f"--quantization {given} needs a model family of headrace; {model.architecture} runs "
            "by the transformers fallback"
        )
    bits = WEIGHT_BITS[given]
    size = model.num_params * bits / 8 / 2**30
    choose.note(
        "--quantization", given, f"{bits:g} bits a weight", f"{size:.2f}GiB, packed while loading"
    )
    return given


def _kv_dtype(
    options: Options, model: ModelFacts, where: DeviceSpec, choose: Chooser
) -> str | None:
    """The type of the KV cache where it is not that of the activations."""
    given = options.kv.kv_dtype
    if given == "auto":
        return None
    if where.device not in ("cpu", "cuda"):
        raise ConfigError(f"--kv-dtype {given} runs on CPU and CUDA, not on {where.device}")
    if model.family == FALLBACK:
        raise ConfigError(
            f"--kv-dtype {given} needs a model family of headrace; {model.architecture} runs "
            "by the transformers fallback"
        )
    choose.note("--kv-dtype", given, "codes with a scale per token and head", "as asked")
    return given


def _deterministic(options: Options, model: ModelFacts) -> bool:
    """Whether results may not depend on the batch; ConfigError where torch's own operations compute the model."""
    if options.model.deterministic and (model.family == FALLBACK or model.encodes):
        how = "is an encoder" if model.encodes else "runs by the transformers fallback"
        raise ConfigError(
            f"--deterministic needs a decoder of headrace's own families; {model.architecture} {how}",
            field="deterministic",
        )
    return options.model.deterministic


def _attention_capture(options: Options, where: DeviceSpec) -> bool:
    """Whether requests may ask for attention weights; each rank has but a part of the heads."""
    if options.model.attention_capture and where.tensor_parallel > 1:
        raise ConfigError(
            "--attention-capture tells the weights of one device; it does not go with --tensor-parallel "
            f"{where.tensor_parallel}",
            field="attention_capture",
        )
    return options.model.attention_capture


def _weight_bytes(options: Options, model: ModelFacts) -> int:
    """Of the whole model in memory, about."""
    bits = WEIGHT_BITS.get(options.model.quantization)
    return model.weight_bytes if bits is None else int(model.num_params * bits / 8)


def _max_model_len(options: Options, model: ModelFacts, choose: Chooser) -> int:
    given = options.model.max_model_len
    if given != "auto" and given > model.max_model_len:
        raise ConfigError(
            f"--max-model-len {given}: the model was made for {model.max_model_len} tokens at most"
        )
    chosen: int = choose.pick("--max-model-len", given, model.max_model_len, "the model's own")
    return chosen


def _cuda_step_tokens(model: ModelFacts, ranks: int) -> int:
    """A multiple of 256, the rows of the largest tiles of products."""
    tokens = CUDA_STEP_OPERATIONS * ranks / (2 * max(1, model.num_params))
    whole = int(tokens) // 256 * 256
    return min(FAST_STEP_TOKENS, max(CUDA_LEAST_STEP_TOKENS, whole))


def _scheduler(
    options: Options, model: ModelFacts, where: DeviceSpec, max_model_len: int, choose: Chooser
) -> SchedulerSpec:
    given = options.scheduler
    fast = where.device == "cuda" or where.executor == "null"
    running = choose.pick(
        "--max-running", given.max_running, 256 if fast else 64, f"for {where.device}"
    )
    tokens = FAST_STEP_TOKENS if fast else CPU_STEP_TOKENS
    if where.device == "cuda" and where.executor != "null":
        tokens = _cuda_step_tokens(model, where.tensor_parallel)
    step = choose.pick(
        "--max-step-tokens",
        given.max_step_tokens,
        max(tokens, running),
        f"{where.device}: long prompts must not stall running streams",
    )
    if model.encodes and step < max_model_len:
        choose.note("--max-step-tokens", step, max_model_len, "an encoder computes a text at once")
        step = max_model_len
    if step < running:
        raise ConfigError(
            f"--max-step-tokens {step}: at least --max-running ({running}) is needed, one token for each"
        )
    stretch = choose.pick(
        "--decode-stretch",
        given.decode_stretch,
        None if fast else CPU_STRETCH,
        f"for {where.device}" if fast else "cpu: prefill takes no more of a step than decodes do",
    )
    return SchedulerSpec(
        max_step_tokens=step,
        max_running=running,
        policy=given.policy,
        inter_prefill_budget=given.inter_prefill_budget,
        decode_stretch=stretch,
        max_queued_requests=given.max_queued_requests,
        max_queued_tokens=given.max_queued_tokens,
        overlap=given.overlap,
        ageing_steps=given.ageing_steps,
        step_timeout_s=given.step_timeout_s,
        chunked=not model.encodes,
    )


def _kv(
    options: Options,
    model: ModelFacts,
    device: DeviceFacts,
    where: DeviceSpec,
    scheduler: SchedulerSpec,
    max_model_len: int,
    choose: Chooser,
) -> KVSpec:
    given = options.kv
    if model.encodes:
        choose.note("--kv-blocks", "auto", 1, "an encoder keeps no KV cache")
        return KVSpec(block_tokens=given.block_tokens, prefix_caching=False, num_blocks=1)
    blocks, memory, fit = given.kv_blocks, None, False
    needed = -(-max_model_len // given.block_tokens) + 1  # block 0 belongs to nobody
    if blocks is not None and options.model.max_model_len != "auto" and blocks < needed:
        raise ConfigError(
            f"--kv-blocks {blocks}: --max-model-len {max_model_len} needs {needed} blocks "
            f"of {given.block_tokens} tokens"
        )
    if blocks is None and given.kv_memory != "auto":
        memory = parse_bytes(given.kv_memory, field="--kv-memory")
    elif blocks is None and where.executor == "null":
        blocks = max(NULL_BLOCKS, needed)
        choose.note("--kv-blocks", "auto", blocks, "nothing is stored by the null executor")
    elif blocks is None:
        memory = _kv_bytes(_weight_bytes(options, model), device, where)
        most = scheduler.max_running * max_model_len * max(1, model.kv_bytes_per_token)
        why = (
            "a share of the free memory" if memory <= most else "what all running requests can use"
        )
        memory, fit = min(memory, most), where.device == "cuda"
        if fit:
            why += "; or what the largest step leaves"
        if where.device == "cpu":
            why += "; taken from the system only as it fills"
        choose.note("--kv-memory", "auto", f"{memory / 2**30:.2f}GiB", why)
    return KVSpec(
        block_tokens=given.block_tokens,
        prefix_caching=given.prefix_caching,
        num_blocks=blocks,
        memory_bytes=memory,
        fit=fit,
    )


def _kv_bytes(weight_bytes: int, device: DeviceFacts, where: DeviceSpec) -> int:
    """Memory for the KV cache of one worker. On CUDA the workers measure again after loading."""
    if where.device == "cpu":
        return max(MIN_KV_BYTES, int(device.free_bytes * CPU_KV_SHARE) - weight_bytes // 4)
    weights = weight_bytes // where.tensor_parallel
    assert where.memory_bytes is not None
    room = where.memory_bytes - weights - CUDA_RESERVE_BYTES
    if room < MIN_KV_BYTES:
        raise DoesNotFit(
            f"the weights ({weights / 2**30:.1f} GiB per device) leave no room for the KV cache in "
            f"{where.memory_bytes / 2**30:.1f} GiB ({device.free_bytes / 2**30:.1f} GiB are free): "
            f"{(MIN_KV_BYTES - room) / 2**30:.1f} GiB more are needed; raise --gpu-memory, use "
            "--tensor-parallel, or --kv-memory to insist"
        )
    return room


def _tool_parser(given: ServerOptions, model: ModelFacts, choose: Chooser) -> str:
    """The name of a known format of tool calls, or "none"."""
    found = choose_tools(model.chat_template, str(model.config.get("model_type")))
    name: str = choose.pick("--tool-parser", given.tool_parser, found.name, found.why)
    row = tool_family(name, model.chat_template)
    return name if row is None else row.name


def _reasoning_parser(given: ServerOptions, model: ModelFacts, choose: Chooser) -> str:
    """The name of a known format of reasoning, or "none"."""
    found = choose_reasoning(model.chat_template, str(model.config.get("model_type")))
    name: str = choose.pick("--reasoning-parser", given.reasoning_parser, found.name, found.why)
    row = reasoning_family(name, model.chat_template)
    return name if row is None else row.name


def _generation_defaults(given: dict[str, Any]) -> dict[str, float | int]:
    """The sampling defaults a checkpoint may set, under our names; the rest of its entries mean nothing here."""
    allowed = ("temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty")
    if given.get("do_sample") is False:
        return {"temperature": 0.0}
    found = {name: given[name] for name in allowed if isinstance(given.get(name), int | float)}
    msgspec.convert(found, SamplingParams)
    return found


def digest(key: str) -> str:
    """The form in which a key leaves this process."""
    return hashlib.sha256(key.encode()).hexdigest()


def server_spec(given: ServerOptions) -> ServerSpec:
    """The server's part; ConfigError for an open server without keys."""
    if not given.api_keys and not _is_loopback(given.host):
        raise ConfigError(
            f"--host {given.host} can be reached from other machines: set --api-keys (or HEADRACE_API_KEYS)"
        )
    for key in (*given.api_keys, *([given.admin_key] if given.admin_key is not None else [])):
        if not key or key != key.strip() or not key.isascii():
            raise ConfigError(
                "--api-keys and --admin-key: a key is ASCII text without spaces around it"
            )
    if given.admin_key is not None and given.admin_key in given.api_keys:
        raise ConfigError("--admin-key: must differ from every API key")
    return ServerSpec(
        host=given.host,
        port=given.port,
        api_key_digests=tuple(digest(key) for key in given.api_keys),
        admin_key_digest=None if given.admin_key is None else digest(given.admin_key),
        api_servers=given.api_servers,
        max_body_bytes=parse_bytes(given.max_body_bytes, field="--max-body-bytes"),
        max_connections=given.max_connections,
        header_timeout_s=given.header_timeout_s,
        body_timeout_s=given.body_timeout_s,
        keepalive_timeout_s=given.keepalive_timeout_s,
        pre_drain_s=given.pre_drain_s,
        shutdown_timeout_s=given.shutdown_timeout_s,
        request_timeout_s=given.request_timeout_s,
        ping_interval_s=given.ping_interval_s,
        max_requests_per_key=given.max_requests_per_key,
        max_n=given.max_n,
        trust_request_chat_template=given.trust_request_chat_template,
        public_metrics=given.public_metrics,
        tokenizer_info=given.tokenizer_info,
        log_level=given.log_level,
        admin_listen=_admin_address(given),
        admin_readonly=given.admin_readonly,
        profile_dir=_absolute(given.profile_dir),
        metrics_compat=given.metrics_compat,
        grpc_port=given.grpc_port,
        stream_interval=given.stream_interval,
        stream_interval_ms=given.stream_interval_ms,
        log_slow_s=given.log_slow_s,
        otlp_endpoint=_url(given.otlp_endpoint),
        file_store=given.file_store,
        file_store_bytes=parse_bytes(given.file_store_bytes, field="--file-store-bytes"),
        response_store=_response_store(given.response_store),
        response_store_bytes=parse_bytes(
            given.response_store_bytes, field="--response-store-bytes"
        ),
        response_ttl_s=given.response_ttl_s,
        max_websockets=given.max_websockets,
    )


def _admin_address(given: ServerOptions) -> str | None:
    """HOST:PORT or unix:FILE. Where others could reach it, it needs a key."""
    address = given.admin_listen
    if address is None or address.startswith("unix:"):
        return address
    host, _, port = address.rpartition(":")
    host = host or "127.0.0.1"
    if not port.isdecimal() or int(port) > 65535:
        raise ConfigError(
            f"--admin-listen {address}: PORT, HOST:PORT or unix:FILE is expected",
            field="admin_listen",
        )
    if given.admin_key is None and not _is_loopback(host):
        raise ConfigError(f"--admin-listen {address}: others can reach it; set --admin-key")
    return f"{host}:{port}"


def _absolute(path: str | None) -> str | None:
    return None if path is None else str(Path(path).expanduser().absolute())


def _url(given: str | None) -> str | None:
    if given is not None and not given.startswith(("http://", "https://")):
        raise ConfigError(f"--otlp-endpoint {given}: a URL with http:// or https:// is expected")
    return given


def _response_store(given: str) -> str:
    kinds = ("sqlite:", "postgresql://", "postgres://")
    if given not in ("off", "sqlite") and not given.startswith(kinds):
        raise ConfigError(
            f"--response-store: {given.partition(':')[0]!r} is not known; "
            "allowed: off, sqlite, sqlite:FILE, postgresql://...",
            field="response_store",
        )
    return given


def _is_loopback(host: str) -> bool:
    if host == "localhost" or host.startswith("unix:"):
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
