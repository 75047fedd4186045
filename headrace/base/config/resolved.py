"""The configuration after `launch/resolve.py`: no "auto", no text where a number is meant.

`EngineSpec` goes to the core process and its workers, `ServerSpec` to the API processes. Both are
plain frozen structs that cross a process border as JSON. A `Decision` records every choice that was
made for the user.
"""

from __future__ import annotations

from typing import Any

import msgspec

from headrace.base.config.denoising import DenoisingSpec
from headrace.base.config.kv_options import CacheChoices, EncoderFilesSpec, KVPushSpec
from headrace.base.config.media import ImageNorm, MediaSpec, SoundSettings
from headrace.base.config.pooling import DenseSpec, PoolingSpec
from headrace.base.config.quantization_options import QuantizationParts
from headrace.base.config.residual import ControlSpec, HiddenStatesSpec
from headrace.base.config.server_options import ServerSettings
from headrace.base.config.tls import TlsSpec


class Decision(msgspec.Struct, frozen=True, array_like=True):
    """One choice made on the user's behalf: printed at start and by `headrace plan`."""

    field: str
    requested: str
    chosen: str
    why: str


class AdapterSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Low-rank adapters of the model: how many lie on the device beside each other, their greatest
    rank, and how many more host memory keeps. `kinds`: what they may hold beside matrices of linear
    layers (layers/adapters.py). `roots`: folders below which adapters may be loaded
    while the engine runs; `modules`: (name, folder) of those that are loaded at start; `loaded`: of
    those that were loaded since, which a core that is started again loads too; `resolvers`: folders
    in which they are found by name. `of_kinds`: (kind of media, adapter) of requests with such
    media that name none."""

    slots: int
    max_rank: int
    kept: int
    kinds: tuple[str, ...] = ()
    roots: tuple[str, ...] = ()
    modules: tuple[tuple[str, str], ...] = ()
    loaded: tuple[tuple[str, str], ...] = ()
    resolvers: tuple[str, ...] = ()
    of_kinds: tuple[tuple[str, str], ...] = ()


class OffloadSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Weights that lie in host memory: `what` is "layers" or "experts" (routed ones of layers), of
    `count` layers; None: of as few as leave the others `room_bytes` of the device."""

    what: str
    count: int | None = None
    room_bytes: int | None = None


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A model on disk: a folder or a GGUF file. `format`: safetensors, sharded_state, gguf, dummy.

    `config` is config.json as read (for GGUF: rebuilt from its metadata with the same keys).
    `family` names a row of `back/models/registry.py`. `dtype`: float32, bfloat16 or float16.
    `logits_width` bounds every token id. `kv_dtype`: quantized values in the KV cache (int8, fp8
    and others: kernels/kv_write), but in the layers `kv_plain_layers` ("sliding_window": those with
    windows or chunks); None: `dtype`. `quantization`: weights as int8, fp8 or int4, made while it
    loads, but of the parts that `quantization_parts` tells apart; None: as they are. `head`: "lm",
    "sequence" (one class per text) or "token" (one per token) with `num_labels`, "words" or "none";
    `bare`: tensor names have no prefix of the whole model (checkpoints of a base model).
    `deterministic`: only kernels whose results do not depend on the batch. `adapters`: None: it
    takes none. `offload`: None: all weights lie on the device. `reader`: how files are read,
    "buffered" or "direct" (past the file cache); `weights_url`: where they are read from, instead
    of `path`. `manifest`: the file of digests that the files must match; None: not verified.
    `encoder_tokens`: the most that the encoder of an encoder-decoder reads, whose decoder has
    `max_model_len`; 0: of others. `encoder_vocabulary`: the ids that it knows; 0: all of the
    decoder. `spectrogram`: the shape of what an encoder of speech reads (base/wire/media.py:
    encoder_outputs). `image_norm`: what the checkpoint's processor says of the values of colours,
    None: as its family has them. `shares_encoder`: see `--mm-encoder-tp-mode`. `vision_path`: the
    GGUF file with the tower of a GGUF model. `control`: what is added behind layers; None: nothing.
    `prompt_embeds`: vectors may stand in the place of tokens. `hidden_states`: those of requests
    are written to files. `unfused`: kernels that do several operations in one and are left out.
    """

    path: str
    name: str
    format: str
    family: str
    dtype: str
    max_model_len: int
    logits_width: int
    eos_ids: tuple[int, ...]
    config: dict[str, Any]
    seed: int = 0
    quantization: str | None = None
    quantization_parts: QuantizationParts | None = None
    kv_dtype: str | None = None
    kv_plain_layers: tuple[int | str, ...] = ()
    reader: str = "buffered"
    weights_url: str | None = None
    deterministic: bool = False
    head: str = "lm"
    bare: bool = False
    num_labels: int = 0
    dense: tuple[DenseSpec, ...] = ()
    attention_capture: bool = False
    routed_experts: bool = False
    manifest: str | None = None
    adapters: AdapterSpec | None = None
    encoder_tokens: int = 0
    encoder_vocabulary: int = 0
    spectrogram: tuple[int, ...] = ()
    offload: OffloadSpec | None = None
    image_norm: ImageNorm | None = None
    shares_encoder: bool = False
    vision_path: str | None = None
    control: ControlSpec | None = None
    prompt_embeds: bool = False
    hidden_states: HiddenStatesSpec | None = None
    unfused: tuple[str, ...] = ()


class KVTransferSpec(msgspec.Struct, frozen=True, kw_only=True):
    """KV that passes to other servers and comes from them through the folder `path`, whose files
    take at most `max_bytes` and are kept for `lease_s`. `recomputes`: what does not come is
    computed; else its request ends. `push` None: through the folder alone."""

    path: str
    max_bytes: int
    lease_s: float
    recomputes: bool = True
    push: KVPushSpec | None = None


class KVStoreSpec(msgspec.Struct, frozen=True, kw_only=True):
    """KV of prompts that `after` requests began with, in files in `path` of `max_bytes` at most."""

    path: str
    max_bytes: int
    after: int = 2


class KVSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The KV cache. Exactly one of `num_blocks` and `memory_bytes` is set; the workers turn bytes
    into blocks.

    `fit`: memory_bytes is the most that is of use; a worker takes less if its device has less left
    (DeviceSpec). `least_tokens`: one sequence of so many must fit, which the user stated beside the
    memory. `slot_save_path`: where conversations are saved, all files together at most
    `slot_save_bytes`; None: nowhere. `transfer` None: its KV passes to no other server; `store`
    None: it is kept nowhere else. `encoder_files` None: what encoders gave is kept nowhere else.
    """

    block_tokens: int
    prefix_caching: bool
    transfer: KVTransferSpec | None = None
    store: KVStoreSpec | None = None
    slot_save_path: str | None = None
    slot_save_bytes: int = 0
    num_blocks: int | None = None
    memory_bytes: int | None = None
    fit: bool = False
    least_tokens: int | None = None
    choices: CacheChoices = CacheChoices()
    events_path: str | None = None
    layout: str = "layers"
    encoder_files: EncoderFilesSpec | None = None


class SchedulerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """See SchedulerOptions; all numbers decided. Without `chunked` a prompt is computed in one step
    (encoders): then `max_step_tokens` is at least the model's context. `slow_step_s` None:
    by measured steps. `tenant_weights`: by tenant, the digest of a key. `stages`: of a pipeline."""

    max_step_tokens: int
    max_running: int
    policy: str = "fcfs"
    no_evict: bool = False
    scheduler_cls: str | None = None
    inter_prefill_budget: int | None = None
    max_decode_slowdown: float | None = None
    max_partial_prefills: int | None = None
    long_prefill_threshold: int | None = None
    max_long_partial_prefills: int | None = None
    tenant_weights: dict[str, float] = {}
    max_prompt_tokens_per_key: int | None = None
    max_queued_requests: int = 1024
    max_queued_tokens: int = 4_000_000
    overlap: bool = True
    ageing_steps: int = 200
    step_timeout_s: float = 300.0
    slow_step_s: float | None = None
    chunked: bool = True
    stages: int = 1
    mfu_metrics: bool = False


class ContextSpec(msgspec.Struct, frozen=True, kw_only=True):
    """See DeviceOptions, decode_context_parallel_size and dcp_*."""

    ranks: int
    interleave: int
    exchange: str


class ExpertBalanceSpec(msgspec.Struct, frozen=True, kw_only=True):
    """See DeviceOptions, num_redundant_experts and expert_rebalance_steps."""

    redundant: int
    steps: int


class ExpertGroupSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Cores that share out experts, this one's number, and the folder in which they meet (new; "":
    alone until told). `least`: where cores come and go, those that are always there; 0: none do."""

    cores: int
    core: int = 0
    folder: str = ""
    least: int = 0


class DeviceSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Where the model runs. `threads` is per worker, `memory_bytes` what a worker may take of its
    device (None: no bound). `cpus`: where those threads stay, `other_cpus`: where all else of the
    server does (empty: anywhere). `nodes`: NUMA nodes that memory is taken from in turns, if there
    are several. `pipeline_layers`: the layers of each of the `pipeline_parallel` stages, empty: as
    many as make their bytes alike. `sequence_parallel`: see DeviceOptions. `expert_parallel`: of
    mixtures the tensor-parallel ranks have whole experts, of all cores in an `expert_group`; tokens
    come by `token_exchange`; `expert_balance`: how these follow their loads, None: they stay.
    `context`: how those that would hold the same KV share it out; None: each holds it. `records`:
    steps are recorded and replayed."""

    device: str
    executor: str
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    pipeline_layers: tuple[int, ...] = ()
    sequence_parallel: bool = False
    expert_parallel: bool = False
    token_exchange: str = "allreduce"
    expert_balance: ExpertBalanceSpec | None = None
    expert_group: ExpertGroupSpec | None = None
    context: ContextSpec | None = None
    threads: int = 1
    memory_bytes: int | None = None
    cpus: tuple[int, ...] = ()
    other_cpus: tuple[int, ...] = ()
    nodes: tuple[int, ...] = ()
    records: bool = True

    @property
    def world_size(self) -> int:
        """Ranks of one copy of the model, each with a worker and a device of its own."""
        return self.tensor_parallel * self.pipeline_parallel


class GrammarSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Structured output: the tokenizer whose tokens are masked (a folder or a GGUF file), and the
    library."""

    tokenizer_path: str
    backend: str = "llguidance"


class SuffixSpec(msgspec.Struct, frozen=True, kw_only=True):
    """See SpeculationOptions, suffix_decoding_*."""

    max_tree_depth: int
    max_cached_requests: int
    max_spec_factor: float
    min_token_prob: float


class SpeculationSpec(msgspec.Struct, frozen=True, kw_only=True):
    """See SpeculationOptions; all decided. `num_tokens`: drafts of a row in a step at most, of
    which steps of more than `max_rows` decodes have none. `masked`: rows with grammars draft.
    `rates`: with which drafts stand, whatever the model says. `sampled`: drafts are sampled."""

    method: str
    num_tokens: int
    max_rows: int
    max_match: int = 4
    min_match: int = 1
    adaptive: bool = False
    parallel: bool = False
    masked: bool = True
    rates: tuple[float, ...] = ()
    sampled: bool = False
    suffix: SuffixSpec | None = None
    model: ModelSpec | None = None


class EngineSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Everything one engine core and its workers are built from. Without `grammar` there is no
    structured output. `extensions`: those that may be used (base/extensions.py). `denoising`: of a
    model that writes blocks by diffusion; None: of others."""

    model: ModelSpec
    kv: KVSpec
    scheduler: SchedulerSpec
    device: DeviceSpec
    grammar: GrammarSpec | None = None
    speculation: SpeculationSpec | None = None
    denoising: DenoisingSpec | None = None
    extensions: tuple[str, ...] = ()


def max_forward_tokens(spec: EngineSpec) -> int:
    """Query tokens that a forward pass must hold: a step's budget, or rows with all their
    drafts."""
    most = spec.scheduler.max_step_tokens
    if spec.speculation is None:
        return most
    return max(most, max_drafted_tokens(spec))


def max_drafted_tokens(spec: EngineSpec) -> int:
    """Query tokens of a step that verifies drafts at most; 0: none does."""
    speculation = spec.speculation
    return 0 if speculation is None else speculation.max_rows * (1 + speculation.num_tokens)


def verify_queries(spec: EngineSpec) -> int:
    """Query tokens of a row at most in steps that verify drafts; 1: none do."""
    return 1 if spec.speculation is None else 1 + spec.speculation.num_tokens


class TextSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What the front needs to turn messages into tokens and back. `tokenizer_path` is a folder or a
    GGUF file.

    `tool_parser` and `reasoning_parser` name rows of `front/text/parsing/families.py`, or "none";
    `extensions` those that may be used (base/extensions.py).
    `media`: what the model takes beside text; None: nothing.
    `encoder_tokens`, `decoder_start`: of an encoder-decoder the longest prompt, and what its
    decoder begins with, in whose `max_model_len` the answer lies; `encoder_vocabulary`,
    `spectrogram`: see ModelSpec; `hears`, `speech_prompt`: of an encoder that reads sounds of any
    length how its frames are made, and how the decoder is asked (front/text/speech_prompts.py);
    `suppressed_ids`: tokens that no transcript has; `alignment_heads`: the decoder's (layer,
    head) that look at the sound of the word they are about to say; `prompt_width`: numbers of a
    vector that may stand in the place of a token, 0: none may; `io_processor`: see ModelOptions.
    """

    tokenizer_path: str
    chat_template: str | None
    model_names: tuple[str, ...]
    generation_defaults: dict[str, float | int]
    logits_width: int
    eos_ids: tuple[int, ...]
    max_model_len: int
    tool_parser: str = "none"
    reasoning_parser: str = "none"
    extensions: tuple[str, ...] = ()
    generates: bool = True
    pooling: PoolingSpec = PoolingSpec()
    media: MediaSpec | None = None
    encoder_tokens: int = 0
    encoder_vocabulary: int = 0
    decoder_start: tuple[int, ...] = ()
    spectrogram: tuple[int, ...] = ()
    hears: SoundSettings | None = None
    speech_prompt: str = ""
    suppressed_ids: tuple[int, ...] = ()
    alignment_heads: tuple[tuple[int, int], ...] = ()
    prompt_width: int = 0
    io_processor: str | None = None


class ServerSpec(ServerSettings, frozen=True, kw_only=True):
    """The server's settings and what its other options resolve to: sizes in bytes, keys as SHA-256
    hex digests (the keys themselves stay in the parent)."""

    api_key_digests: tuple[str, ...]
    api_key_file: str | None
    admin_key_digest: str | None
    admin_listen: str | None
    profile_dir: str | None
    max_body_bytes: int
    body_budget_bytes: int
    max_bytes_per_key: int | None
    file_store_bytes: int
    response_store: str
    response_store_bytes: int
    otlp_endpoint: str | None
    tls: TlsSpec | None = None


class Resolved(msgspec.Struct, frozen=True, kw_only=True):
    """The resolved tree and how it came about. `replicas`: the engine cores at start, of at most
    `max_replicas`."""

    engine: EngineSpec
    text: TextSpec
    server: ServerSpec
    replicas: int
    max_replicas: int
    decisions: tuple[Decision, ...]
