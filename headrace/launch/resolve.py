"""From what the user said, what the model states and what the device has to one resolved tree: a
pure function.

"auto" ends here. Every value chosen for the user becomes a `Decision`, printed as one table at
start; every contradiction becomes a ConfigError that names the option as it is typed.
"""

from __future__ import annotations

import ipaddress
from pathlib import Path

from msgspec.structs import replace

from headrace.back.models.families import FALLBACK
from headrace.base import extensions
from headrace.base.config.api_keys import is_key, key_digest, read_keys
from headrace.base.config.resolved import (
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
from headrace.base.config.server_options import ServerOptions, ServerSettings
from headrace.base.config.tool_servers import tool_servers
from headrace.base.config.tree import Options
from headrace.base.config.units import parse_bytes
from headrace.base.errors import ConfigError
from headrace.front.text.parsing.families import (
    choose_reasoning,
    choose_tools,
    reasoning_family,
    tool_family,
)
from headrace.launch.adapters import adapter_spec
from headrace.launch.chooser import Chooser
from headrace.launch.control_vectors import control_spec
from headrace.launch.denoising import with_denoising
from headrace.launch.drafters import DraftCheckpoint
from headrace.launch.encoder_decoder import alignment_heads, longest_heard, suppressed_ids
from headrace.launch.generation_defaults import generation_defaults
from headrace.launch.hidden_states import computing_all, hidden_states_spec
from headrace.launch.kv_types import kv_dtype_of, kv_plain_layers
from headrace.launch.lengths import (
    LARGEST,
    block_span,
    encoder_tokens,
    states_length,
    tokens_of_blocks,
    with_short_tables,
)
from headrace.launch.media_spec import media_spec, prompt_width
from headrace.launch.model_facts import ModelFacts
from headrace.launch.offload import KV_SHARE, RESERVE_BYTES, offload_spec, offloads
from headrace.launch.online_quantization import online_quantization, online_weight_bytes
from headrace.launch.parallel_modes import check_modes
from headrace.launch.resolve_device import (
    MachineFacts,
    first_replicas,
    most_replicas,
    resolve_device,
)
from headrace.launch.scheduler_limits import (
    FAST_STEP_TOKENS,
    check_partial_prefills,
    cuda_step_tokens,
    mfu_metrics_of,
    tenant_weights_of,
)
from headrace.launch.slots import with_slots
from headrace.launch.speculation import speculation_spec
from headrace.launch.tls import tls_spec


class DoesNotFit(ConfigError):
    """The weights leave no room for a KV cache."""


CPU_KV_SHARE = 0.25
MIN_KV_BYTES = 16 << 20
NULL_BLOCKS = 8192
# A step holds at most this many tokens, so this long is the pause that a long prompt makes in
# running streams. On two CPU cores 1024 tokens took 170 ms with the bundled 10 M model and seconds
# with one of 0.6 B.
CPU_STEP_TOKENS = 256
DECODE_SLOWDOWN = 2.0


def resolve(
    options: Options,
    model: ModelFacts,
    machine: MachineFacts,
    draft: DraftCheckpoint | None = None,
) -> Resolved:
    """The resolved tree; ConfigError for contradictions. `draft`: the weights that draft."""
    choose = Chooser()
    device_spec = resolve_device(options, model, machine, choose)
    dtype = choose.pick("--dtype", options.model.dtype, model.dtype, "the checkpoint's type")
    text = text_spec(options, model, choose)
    max_model_len, names = text.max_model_len, text.model_names
    scheduler = _scheduler(options, model, device_spec, max_model_len, choose)
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
            quantization=online_quantization(options, model, device_spec, choose),
            kv_dtype=kv_dtype_of(options, model, device_spec, choose),
            kv_plain_layers=kv_plain_layers(options, model),
            reader="direct" if options.model.load_format == "fastsafetensors" else "buffered",
            weights_url=options.model.weights_url,
            deterministic=_deterministic(options, model),
            head=model.head,
            bare=model.bare,
            num_labels=model.num_labels,
            dense=model.dense,
            attention_capture=_attention_capture(options, device_spec),
            manifest=_manifest(options, model),
            encoder_tokens=text.encoder_tokens,
            adapters=adapter_spec(options, model, device_spec),
            spectrogram=text.spectrogram,
        ),
        kv=_kv(options, model, machine, device_spec, scheduler, max_model_len, choose),
        scheduler=scheduler,
        device=device_spec,
        grammar=_grammar(options, text),
        extensions=options.model.extensions,
    )
    engine = with_denoising(_finished(engine, options, model), options, model, choose)
    engine = computing_all(engine, choose)
    speculation = speculation_spec(options, model, engine, draft, choose)
    engine = check_modes(replace(engine, speculation=speculation), options, model, text)
    return Resolved(
        engine=with_short_tables(engine, options, model, choose.note),
        text=text,
        server=server_spec(options.server),
        replicas=first_replicas(options.device),
        max_replicas=most_replicas(options.device),
        decisions=tuple(choose.decisions),
    )


def _grammar(options: Options, text: TextSpec) -> GrammarSpec:
    backend = options.scheduler.grammar_backend
    return GrammarSpec(tokenizer_path=text.tokenizer_path, backend=backend)


def text_spec(options: Options, model: ModelFacts, choose: Chooser) -> TextSpec:
    """The front's part, which needs no device."""
    if model.unattended_expansion:
        why = "expansion tokens that nothing attends to are not supported here"
        choose.note("query expansion", "on", "off", why)
    max_model_len = _max_model_len(options, model, choose)
    extensions.check_named(
        extensions.IO_PROCESSORS, options.model.io_processor, option="io-processor"
    )
    return TextSpec(
        io_processor=options.model.io_processor,
        extensions=options.model.extensions,
        tokenizer_path=options.model.tokenizer or model.tokenizer_path,
        chat_template=model.chat_template,
        model_names=options.model.served_model_name or (model.name,),
        generation_defaults=generation_defaults(model.generation_defaults),
        logits_width=model.logits_width,
        eos_ids=model.eos_ids,
        max_model_len=max_model_len,
        generates=model.head == "lm",
        pooling=model.pooling,
        media=media_spec(options, model.media),
        prompt_width=prompt_width(options, model),
        encoder_tokens=encoder_tokens(options, model, max_model_len),
        encoder_vocabulary=model.encoder_vocabulary,
        decoder_start=model.decoder_start,
        spectrogram=model.spectrogram,
        hears=model.hears,
        speech_prompt=model.speech_prompt,
        suppressed_ids=suppressed_ids(model.generation_defaults, model.config, model.logits_width),
        alignment_heads=alignment_heads(model.generation_defaults, model.config)
        if model.spectrogram
        else (),
        tool_parser=_tool_parser(options.server, model, choose),
        reasoning_parser=_reasoning_parser(options.server, model, choose),
    )


def _finished(engine: EngineSpec, options: Options, model: ModelFacts) -> EngineSpec:
    """With which weights lie in host memory, which parts are quantized in other ways than the rest,
    how media are encoded, what is added to residuals, and what of the model is told."""
    spec = replace(
        engine.model,
        routed_experts=options.model.enable_return_routed_experts,
        quantization_parts=options.model.quantization_config,
        offload=offload_spec(options, model, engine.device, engine.kv),
        image_norm=None if model.media is None else model.media.norm,
        shares_encoder=options.model.mm_encoder_tp_mode == "data",
        vision_path=model.vision_path,
        encoder_vocabulary=model.encoder_vocabulary,
        control=control_spec(options, model, engine.scheduler.max_running),
        prompt_embeds=bool(prompt_width(options, model)),
        hidden_states=hidden_states_spec(options, model),
        unfused=options.device.unfused,
    )
    return replace(engine, model=spec)


def _deterministic(options: Options, model: ModelFacts) -> bool:
    """Whether results may not depend on the batch; ConfigError where torch's own operations compute
    the model."""
    reads = model.encodes or model.has_encoder
    if options.model.deterministic and (model.family == FALLBACK or reads):
        how = "runs by the transformers fallback"
        if reads:
            how = "is an encoder" if model.encodes else "has an encoder"
        raise ConfigError(
            f"--deterministic needs a decoder of headrace's own families; {model.architecture} {how}",
            field="deterministic",
        )
    return options.model.deterministic


def _attention_capture(options: Options, device_spec: DeviceSpec) -> bool:
    """Whether requests may ask for attention weights; each rank has but a part of the heads."""
    if options.model.attention_capture and device_spec.tensor_parallel > 1:
        raise ConfigError(
            "--attention-capture tells the weights of one device; it does not go with --tensor-parallel "
            f"{device_spec.tensor_parallel}",
            field="attention_capture",
        )
    return options.model.attention_capture


def _manifest(options: Options, model: ModelFacts) -> str | None:
    """The file of digests, absolute; ConfigError where there are no files that it could list."""
    manifest = options.model.manifest
    if manifest is not None and model.format == "dummy":
        raise ConfigError(
            f"--manifest {manifest}: --load-format dummy reads no weights", field="manifest"
        )
    if manifest is not None and options.model.weights_url is not None:
        raise ConfigError(
            f"--manifest {manifest}: verifies files of a folder, not those of --weights-url",
            field="manifest",
        )
    return _absolute(manifest)


def _max_model_len(options: Options, model: ModelFacts, choose: Chooser) -> int:
    """In tokens; what memory in bytes holds bounds requests besides, once it is divided."""
    requested = options.model.max_model_len
    if requested == 0:
        raise ConfigError("--max-model-len 0: at least 1, or -1 for the most that fits")
    if requested != "auto" and requested > model.max_model_len:
        raise ConfigError(
            f"--max-model-len {requested}: the model was made for {model.max_model_len} tokens at most"
        )
    longest, why = model.max_model_len, "the model's own"
    pool = tokens_of_blocks(options, model)
    if pool is not None and pool < longest:
        longest, why = pool, f"what --kv-blocks {options.kv.kv_blocks} holds; the model: {longest}"
    if requested == LARGEST:
        choose.note("--max-model-len", requested, longest, f"the most that fits: {why}")
        return longest
    chosen: int = choose.pick("--max-model-len", requested, longest, why)
    return chosen


def _scheduler(
    options: Options,
    model: ModelFacts,
    device_spec: DeviceSpec,
    max_model_len: int,
    choose: Chooser,
) -> SchedulerSpec:
    requested = options.scheduler
    fast = device_spec.device == "cuda" or device_spec.executor == "null"
    running = choose.pick(
        "--max-running", requested.max_running, 256 if fast else 64, f"for {device_spec.device}"
    )
    tokens = FAST_STEP_TOKENS if fast else CPU_STEP_TOKENS
    if device_spec.device == "cuda" and device_spec.executor != "null":
        tokens = cuda_step_tokens(model.num_params, device_spec.tensor_parallel)
    step = choose.pick(
        "--max-step-tokens",
        requested.max_step_tokens,
        max(tokens, running),
        f"{device_spec.device}: long prompts must not stall running streams",
    )
    if model.encodes and step < max_model_len:
        choose.note("--max-step-tokens", step, max_model_len, "an encoder computes a text at once")
        step = max_model_len
    if step < running:
        raise ConfigError(
            f"--max-step-tokens {step}: at least --max-running ({running}) is needed, one token for each"
        )
    max_slowdown = choose.pick(
        "--max-decode-slowdown",
        requested.max_decode_slowdown,
        None if fast else DECODE_SLOWDOWN,
        f"for {device_spec.device}"
        if fast
        else "cpu: prefill takes no more of a step than decodes do",
    )
    check_partial_prefills(requested, encodes=model.encodes)
    return SchedulerSpec(
        max_step_tokens=step,
        max_running=running,
        policy=requested.policy,
        no_evict=requested.no_evict,
        scheduler_cls=requested.scheduler_cls,
        inter_prefill_budget=requested.inter_prefill_budget,
        max_decode_slowdown=max_slowdown,
        max_partial_prefills=requested.max_partial_prefills,
        long_prefill_threshold=requested.long_prefill_threshold,
        max_long_partial_prefills=requested.max_long_partial_prefills,
        tenant_weights=tenant_weights_of(requested),
        max_prompt_tokens_per_key=requested.max_prompt_tokens_per_key,
        max_queued_requests=requested.max_queued_requests,
        max_queued_tokens=requested.max_queued_tokens,
        overlap=requested.overlap,
        ageing_steps=requested.ageing_steps,
        step_timeout_s=requested.step_timeout_s,
        slow_step_s=None if requested.slow_step_s == "auto" else requested.slow_step_s,
        chunked=not model.encodes,
        stages=device_spec.pipeline_parallel,
        mfu_metrics=mfu_metrics_of(requested, model),
    )


def _kv(
    options: Options,
    model: ModelFacts,
    machine: MachineFacts,
    device_spec: DeviceSpec,
    scheduler: SchedulerSpec,
    max_model_len: int,
    choose: Chooser,
) -> KVSpec:
    requested = options.kv
    if model.encodes:
        choose.note("--kv-blocks", "auto", 1, "an encoder keeps no KV cache")
        spec = KVSpec(block_tokens=requested.block_tokens, prefix_caching=False, num_blocks=1)
        return with_slots(spec, requested, model, device_spec)
    blocks, memory, fit, least_tokens = requested.kv_blocks, None, False, None
    size = block_span(options, model)
    needed = -(-max_model_len // size) + 1  # block 0 belongs to nobody
    if blocks is not None and states_length(options) and blocks < needed:
        raise ConfigError(
            f"--kv-blocks {blocks}: --max-model-len {max_model_len} needs {needed} blocks "
            f"of {size} tokens"
        )
    if blocks is None and requested.kv_memory != "auto":
        memory = parse_bytes(requested.kv_memory, field="--kv-memory")
        least_tokens = max_model_len if states_length(options) else None
    elif blocks is None and device_spec.executor == "null":
        blocks = max(NULL_BLOCKS, needed)
        choose.note("--kv-blocks", "auto", blocks, "nothing is stored by the null executor")
    elif blocks is None:
        if offloads(options) and device_spec.memory_bytes is not None:
            memory = device_spec.memory_bytes // KV_SHARE
        else:
            memory = _kv_bytes(online_weight_bytes(options, model), machine, device_spec)
        longest = max_model_len + (model.encoder_tokens or longest_heard(model.spectrogram))
        most = scheduler.max_running * longest * max(1, model.kv_bytes_per_token)
        why = (
            "a share of the free memory" if memory <= most else "what all running requests can use"
        )
        memory, fit = min(memory, most), device_spec.device == "cuda"
        if fit:
            why += "; or what the largest step leaves"
        if device_spec.device == "cpu":
            why += "; taken from the system only as it fills"
        choose.note("--kv-memory", "auto", f"{memory / 2**30:.2f}GiB", why)
    spec = KVSpec(
        block_tokens=requested.block_tokens,
        prefix_caching=_prefix_caching(options, model, choose),
        num_blocks=blocks,
        memory_bytes=memory,
        fit=fit,
        least_tokens=least_tokens,
    )
    return with_slots(spec, requested, model, device_spec)


def _prefix_caching(options: Options, model: ModelFacts, choose: Chooser) -> bool:
    """Whether prompts that begin alike share blocks; those of an encoder are read whole."""
    if options.kv.prefix_caching and model.has_encoder:
        why = "an encoder reads each prompt whole, and the decoder's cache follows from all of it"
        choose.note("--prefix-caching", True, False, why)
        return False
    return options.kv.prefix_caching


def _kv_bytes(weight_bytes: int, machine: MachineFacts, device_spec: DeviceSpec) -> int:
    """Memory for the KV cache of one worker. On CUDA the workers measure again after loading."""
    if device_spec.device == "cpu":
        return max(MIN_KV_BYTES, int(machine.free_bytes * CPU_KV_SHARE) - weight_bytes // 4)
    group = device_spec.expert_group  # all cores have a part of the experts, most of the weights
    weights = weight_bytes // (device_spec.world_size * (1 if group is None else group.cores))
    assert device_spec.memory_bytes is not None
    room = device_spec.memory_bytes - weights - RESERVE_BYTES
    if room < MIN_KV_BYTES:
        raise DoesNotFit(
            f"the weights ({weights / 2**30:.1f} GiB per device) leave no room for the KV cache in "
            f"{device_spec.memory_bytes / 2**30:.1f} GiB ({machine.free_bytes / 2**30:.1f} GiB are free): "
            f"{(MIN_KV_BYTES - room) / 2**30:.1f} GiB more are needed; raise --gpu-memory, use "
            "--tensor-parallel, --offload-layers auto, or --kv-memory to insist"
        )
    return room


def _tool_parser(options: ServerOptions, model: ModelFacts, choose: Chooser) -> str:
    """The name of a known format of tool calls, or "none"."""
    parser = choose_tools(model.chat_template, str(model.config.get("model_type")))
    name: str = choose.pick("--tool-parser", options.tool_parser, parser.name, parser.why)
    row = tool_family(name, model.chat_template)
    return name if row is None else row.name


def _reasoning_parser(options: ServerOptions, model: ModelFacts, choose: Chooser) -> str:
    """The name of a known format of reasoning, or "none"."""
    parser = choose_reasoning(model.chat_template, str(model.config.get("model_type")))
    name: str = choose.pick("--reasoning-parser", options.reasoning_parser, parser.name, parser.why)
    row = reasoning_family(name, model.chat_template)
    return name if row is None else row.name


def server_spec(options: ServerOptions) -> ServerSpec:
    """The server's part; ConfigError for an open server without keys."""
    if not _wants_keys(options) and not _is_loopback(options.host):
        raise ConfigError(
            f"--host {options.host} can be reached from other machines: set --api-keys "
            "(or HEADRACE_API_KEYS) or --api-key-file"
        )
    for key in (*options.api_keys, *([options.admin_key] if options.admin_key is not None else [])):
        if not is_key(key):
            raise ConfigError(
                "--api-keys and --admin-key: a key is printable ASCII text without spaces around it"
            )
    if options.admin_key is not None and options.admin_key in options.api_keys:
        raise ConfigError("--admin-key: must differ from every API key")
    admin_digest = None if options.admin_key is None else key_digest(options.admin_key)
    key_file = _absolute(options.api_key_file)
    if key_file is not None:
        digests = read_keys(Path(key_file))
        if not digests:
            raise ConfigError(f"--api-key-file {key_file}: no key in it", field="api_key_file")
        if admin_digest in digests:
            raise ConfigError("--admin-key: must differ from every API key")
    tool_servers(options.tool_server)
    settings = {name: getattr(options, name) for name in ServerSettings.__struct_fields__}
    return ServerSpec(
        **settings,
        api_key_digests=tuple(key_digest(key) for key in options.api_keys),
        api_key_file=key_file,
        admin_key_digest=admin_digest,
        admin_listen=_admin_address(options),
        profile_dir=_absolute(options.profile_dir),
        max_body_bytes=parse_bytes(options.max_body_bytes, field="--max-body-bytes"),
        body_budget_bytes=_body_budget(options),
        max_bytes_per_key=_optional_bytes(options.max_bytes_per_key, "--max-bytes-per-key"),
        file_store_bytes=parse_bytes(options.file_store_bytes, field="--file-store-bytes"),
        response_store=_response_store(options.response_store),
        response_store_bytes=parse_bytes(
            options.response_store_bytes, field="--response-store-bytes"
        ),
        otlp_endpoint=_url(options.otlp_endpoint),
        tls=tls_spec(options),
    )


def _wants_keys(options: ServerOptions) -> bool:
    return bool(options.api_keys) or options.api_key_file is not None


def _admin_address(options: ServerOptions) -> str | None:
    """HOST:PORT or unix:FILE. Where others could reach it, it needs a key."""
    address = options.admin_listen
    if address is None or address.startswith("unix:"):
        return address
    host, _, port = address.rpartition(":")
    host = host or "127.0.0.1"
    if not port.isdecimal() or int(port) > 65535:
        raise ConfigError(
            f"--admin-listen {address}: PORT, HOST:PORT or unix:FILE is expected",
            field="admin_listen",
        )
    if options.admin_key is None and not _is_loopback(host):
        raise ConfigError(f"--admin-listen {address}: others can reach it; set --admin-key")
    return f"{host}:{port}"


def _body_budget(options: ServerOptions) -> int:
    """Bytes for all bodies; half of it, one key's share, must hold the largest one."""
    largest = parse_bytes(options.max_body_bytes, field="--max-body-bytes")
    if options.body_budget_bytes == "auto":
        return 8 * largest
    budget = parse_bytes(options.body_budget_bytes, field="--body-budget-bytes")
    if budget < 2 * largest:
        raise ConfigError(
            f"--body-budget-bytes: {options.body_budget_bytes} given; at least twice "
            f"--max-body-bytes ({options.max_body_bytes}) is needed, of which one key has half"
        )
    return budget


def _optional_bytes(text: str | None, field: str) -> int | None:
    return None if text is None else parse_bytes(text, field=field)


def _absolute(path: str | None) -> str | None:
    return None if path is None else str(Path(path).expanduser().absolute())


def _url(url: str | None) -> str | None:
    if url is not None and not url.startswith(("http://", "https://")):
        raise ConfigError(f"--otlp-endpoint {url}: a URL with http:// or https:// is expected")
    return url


def _response_store(store: str) -> str:
    kinds = ("sqlite:", "postgresql://", "postgres://")
    if store not in ("off", "sqlite") and not store.startswith(kinds):
        raise ConfigError(
            f"--response-store: {store.partition(':')[0]!r} is not known; "
            "allowed: off, sqlite, sqlite:FILE, postgresql://...",
            field="response_store",
        )
    return store


def _is_loopback(host: str) -> bool:
    if host == "localhost" or host.startswith("unix:"):
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
