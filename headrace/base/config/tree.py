"""The configuration as the user says it: one frozen tree, the only place where an option is
written.

Every field carries its meaning, unit and bounds (msgspec.Meta). The CLI flags, the YAML keys and
docs/CONFIG.md are generated from it by `headrace.base.config.options`. "auto" means "decide for me"
and does not survive `headrace.launch.resolve`, which turns this tree, facts about the model and
facts about the device into `Resolved`.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from headrace.base import extensions
from headrace.base.config.adapter_options import AdapterOptions
from headrace.base.config.bounds import Auto, Length, Natural, Positive, Seconds, Seed
from headrace.base.config.denoising import DiffusionOptions
from headrace.base.config.device_options import DeviceOptions
from headrace.base.config.kv_options import KVOptions as KVOptions
from headrace.base.config.many_options import ManyOptions
from headrace.base.config.quantization_options import QuantizationParts, SchemeName
from headrace.base.config.server_options import ServerOptions
from headrace.base.config.speculation_options import SpeculationOptions as SpeculationOptions


class MediaCounts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Most media of each kind in one prompt."""

    image: Annotated[int, Meta(ge=0, le=4096)] | None = None
    video: Annotated[int, Meta(ge=0, le=4096)] | None = None
    audio: Annotated[int, Meta(ge=0, le=4096)] | None = None


class ModelOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Which model, and how it is read."""

    model: Annotated[
        str,
        Meta(description="A folder, a GGUF file or a hub id; empty serves the bundled demo model."),
    ] = ""
    demo: Annotated[
        Literal["text", "vision", "speech", "mixture"],
        Meta(
            description="Which bundled model is served where no model is named: one that chats, that "
            "sees, that hears, or that has experts."
        ),
    ] = "text"
    revision: Annotated[str, Meta(description="Revision of a hub id; pins every file of it.")] = (
        "main"
    )
    allow_download: Annotated[
        bool,
        Meta(
            description="Fetch a hub id that is not in the local cache. Off: nothing is ever fetched."
        ),
    ] = False
    manifest: Annotated[
        str | None,
        Meta(
            description="A file of SHA-256 digests, as sha256sum writes it. Every weight file must be "
            "listed and every listed file must match before weights are loaded (about 1 s per 2 GB)."
        ),
    ] = None
    extensions: Annotated[tuple[str, ...], Meta(description=extensions.OPTION)] = ()
    io_processor: Annotated[
        str | None,
        Meta(
            description="What turns `data` of /pooling into prompts and vectors into the answer: the name of an "
            "extension."
        ),
    ] = None
    tokenizer: Annotated[
        str | None, Meta(description="A folder with another tokenizer; by default the model's own.")
    ] = None
    mmproj: Annotated[
        str | None,
        Meta(
            description="The GGUF file with the vision tower of a GGUF model; by default the one beside it whose "
            "name begins with mmproj."
        ),
    ] = None
    limit_mm_per_prompt: Annotated[
        MediaCounts | None,
        Meta(
            description="""Most media of each kind in one prompt, as JSON: {"image": 8, "audio": 1}; 0 refuses a """
            "kind. Without it 32 images, 4 videos and 16 sounds."
        ),
    ] = None
    video_pruning_rate: Annotated[
        float,
        Meta(
            ge=0.0,
            lt=1.0,
            description="The share of a video's tokens that are left out: those whose pixels changed least since the "
            "step before. The first step is whole. Of models whose video is Qwen-VL's.",
        ),
    ] = 0.0
    language_model_only: Annotated[
        bool, Meta(description="Take text alone, though the model knows more.")
    ] = False
    control_vectors: Annotated[
        tuple[str, ...],
        Meta(
            description="GGUF files of control vectors (llama.cpp's and repeng's `direction.N`), FILE or FILE:SCALE: "
            "times its scale, each vector is added to the residual behind its layer. Several are summed."
        ),
    ] = ()
    control_vector_modules: Annotated[
        tuple[str, ...],
        Meta(
            description="NAME=FILE: such vectors that requests may ask for, each by its name and a factor "
            "(control_vectors)."
        ),
    ] = ()
    control_vector_layers: Annotated[
        str | None,
        Meta(
            description="FIRST-LAST: the layers behind which control vectors are added. By default 1 to the last; "
            "layer 0 has none."
        ),
    ] = None
    enable_mm_embeds: Annotated[
        bool,
        Meta(
            description="Take vectors in place of images and sound (parts `image_embeds`, `audio_embeds`): what an "
            "encoder elsewhere gave. For clients that are trusted."
        ),
    ] = False
    enable_prompt_embeds: Annotated[
        bool,
        Meta(
            description="Take vectors in place of tokens: `prompt_embeds` of completions, parts `prompt_embeds` of "
            "chats. For clients that are trusted."
        ),
    ] = False
    mm_encoder_tp_mode: Annotated[
        Literal["weights", "data"],
        Meta(
            description="What ranks of tensor parallelism do with images, video and sound: each encodes all of it "
            "(weights), or some, of which all get the result (data). The encoder's weights are whole on every rank."
        ),
    ] = "weights"
    served_model_name: Annotated[
        tuple[str, ...],
        Meta(description="Names clients may use; the first is shown. Default: the model's name."),
    ] = ()
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        Meta(
            description="Type of weights and activations; auto takes the checkpoint's. "
            "bf16, fp16 and fp32 are understood."
        ),
    ] = "auto"
    load_format: Annotated[
        Literal[
            "auto",
            "safetensors",
            "fastsafetensors",
            "runai_streamer",
            "sharded_state",
            "tensorizer",
            "gguf",
            "dummy",
        ],
        Meta(
            description="How weights are read; fastsafetensors: past the system's file cache; runai_streamer: "
            "from --weights-url; sharded_state: a file for each rank, as headrace shard writes them; tensorizer: "
            "from *.tensors files; dummy makes seeded random ones from config.json alone."
        ),
    ] = "auto"
    weights_url: Annotated[
        str | None,
        Meta(
            description="Read the safetensors files by ranged requests from below this http(s) URL: a bucket of an "
            "S3-like store, or any server that answers ranges. The model's folder has the rest."
        ),
    ] = None
    quantization: Annotated[
        SchemeName,
        Meta(
            description="Weights of linear layers, head and tied embedding as int8 or fp8 (e4m3; a scale per "
            "output) or int4 (a scale per 32 inputs), made while loading; -gN: a scale per N inputs, -asym: and "
            "a minimum; fp8-tensor: one scale for all, fp8-block: for 128 x 128; mxfp8, mxfp4: a power of two per "
            "32 inputs; nvfp4: a scale per 16. Experts likewise. On CPUs activations become int8 on the way, but "
            "for those of e4m3 numbers; on CUDA head and embedding stay plain."
        ),
    ] = "none"
    quantization_config: Annotated[
        QuantizationParts | None,
        Meta(
            description="Parts that differ from --quantization, as JSON: "
            """{"linear": "fp8", "moe": "mxfp4", "head": "none", "ignore": ["model.layers.0"]}; """
            "embedding: an untied one; ignore: modules that stay plain."
        ),
    ] = None
    max_model_len: Annotated[
        Length | Auto,
        Meta(
            description="Longest sequence, in tokens, at most the model's; auto and -1 mean the most that both the "
            "model and the KV memory hold."
        ),
    ] = "auto"
    chat_template: Annotated[
        str | None, Meta(description="A file with a Jinja chat template that replaces the model's.")
    ] = None
    deterministic: Annotated[
        bool,
        Meta(
            description="A request gets the same tokens and log-probabilities, bit for bit, whatever runs beside it "
            "and however its prompt is cut, cached or computed again after a preemption. On one H200 decode "
            "steps of 64 rows take 3 % (128 tokens of context) to 13 % longer (1024), and prefill loses "
            "up to a quarter."
        ),
    ] = False
    seed: Annotated[Seed, Meta(description="Seed of dummy weights.")] = 0
    attention_capture: Annotated[
        bool,
        Meta(
            description="Requests may ask for attention weights (attn_capture): for looking into a model, not for "
            "serving many."
        ),
    ] = False
    hidden_states_path: Annotated[
        str | None,
        Meta(
            description="Folder in which the hidden states of each request are left as safetensors, with "
            "--speculative-config's method extract_hidden_states; whoever reads a file removes it."
        ),
    ] = None
    enable_return_routed_experts: Annotated[
        bool,
        Meta(
            description="Requests may ask which experts each token was routed to (return_routed_experts), for trainers "
            "that replay them. Steps with such requests are not recorded."
        ),
    ] = False
    family: Annotated[
        str,
        Meta(
            description="auto, or transformers to force the fallback that runs transformers' own model code."
        ),
    ] = "auto"


class SchedulerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What runs in a step, and who waits."""

    max_step_tokens: Annotated[
        Positive | Auto, Meta(description="Token budget of a step, prefill and decode together.")
    ] = "auto"
    max_running: Annotated[
        Positive | Auto, Meta(description="Most requests that run at the same time.")
    ] = "auto"
    policy: Annotated[
        Literal[
            "fcfs", "priority", "fair", "fair-adapters", "lpm", "dfs-weight", "lof", "routing-key"
        ],
        Meta(
            description="Order of the queue: as requests are due, by priority and then as they are due, or token-fair "
            "between tenants, or between adapters. A request is due at its deadline, at most 10 s after its arrival. "
            "lpm: of which the cache holds most; dfs-weight: branch after branch of the tree of cached prefixes, "
            "that of most requests first; routing-key: whose routing_key most that run have; of these three 64 "
            "may overtake a request. lof: the longest max_tokens first."
        ),
    ] = "fcfs"
    scheduler_cls: Annotated[
        str | None,
        Meta(description="A scheduler of an installed package, by the name of its entry point."),
    ] = None
    no_evict: Annotated[
        bool,
        Meta(
            description="A request starts when its prompt and max_tokens fit beside those of all that run: none ever "
            "loses its place, for fewer at a time."
        ),
    ] = False
    mfu_metrics: Annotated[
        bool,
        Meta(
            description="Count the operations and bytes that steps ask of each device, by the model's shapes: what "
            "FLOPs utilization is computed from."
        ),
    ] = False
    inter_prefill_budget: Annotated[
        Positive | None,
        Meta(
            description="Once a step holds this many prefill tokens, no further prefill joins it. Default: no bound."
        ),
    ] = None
    max_decode_slowdown: Annotated[
        Annotated[float, Meta(ge=1.1, le=1000)] | Auto | None,
        Meta(
            description="While requests decode, prefill may make a step this many times as long as decodes "
            "alone take (measured): shorter gaps between tokens, for some throughput. On one H200, 8B and 16 "
            "users, 3 instead of none took the 99th percentile of the gaps from 46.7 to 26.8 ms, the output from "
            "1,950 to 1,920 tokens a second; 0.6B and 256 users lost an eighth of it. auto: 2 on a CPU, none on "
            "CUDA. none: no bound, for throughput."
        ),
    ] = "auto"
    max_partial_prefills: Annotated[
        Positive | None,
        Meta(
            description="Prompts that may be computed in part at the same time; more wait for one of them to be "
            "complete. Default: no bound."
        ),
    ] = None
    long_prefill_threshold: Annotated[
        Positive | None,
        Meta(
            description="A prompt of more tokens is long: it gets at most so many tokens in a step. "
            "Default: no prompt is long."
        ),
    ] = None
    max_long_partial_prefills: Annotated[
        Positive | None,
        Meta(
            description="Long prompts that may be computed in part at the same time; shorter ones pass those that "
            "wait. Default: no bound."
        ),
    ] = None
    tenant_weights: Annotated[
        tuple[str, ...],
        Meta(
            description="Shares under the fair policy, as SHA256=WEIGHT: the SHA-256 of an API key in hexadecimal, "
            "and a number above 0. A key that is not named has 1."
        ),
    ] = ()
    max_prompt_tokens_per_key: Annotated[
        Positive | None,
        Meta(
            description="Prompt tokens of one key that may wait or run in an engine, whichever API process they came "
            "through; more get 429. Default: no bound."
        ),
    ] = None
    max_queued_requests: Annotated[
        Natural,
        Meta(description="Requests that may wait; one more is refused with 503 and Retry-After."),
    ] = 1024
    max_queued_tokens: Annotated[
        Natural, Meta(description="Prompt tokens that may wait in all; more are refused with 503.")
    ] = 4_000_000
    grammar_backend: Annotated[
        Literal["llguidance", "xgrammar"],
        Meta(
            description="Library behind structured output. xgrammar is an extra (headrace[xgrammar]), compiles "
            "more slowly, and refuses parts of JSON schema that it would not hold."
        ),
    ] = "llguidance"
    overlap: Annotated[
        bool, Meta(description="Plan the next step while the device runs this one.")
    ] = True
    ageing_steps: Annotated[
        Positive,
        Meta(
            description="A request passed over for this many steps gets the freed blocks reserved."
        ),
    ] = 200
    speculative_config: Annotated[
        SpeculationOptions | None,
        Meta(
            description="Speculative decoding, as JSON: "
            """{"method": "ngram", "num_speculative_tokens": 6} drafts what followed the newest tokens earlier """
            "in the request (prompt_lookup_max, prompt_lookup_min of them); "
            """{"method": "eagle3", "model": FOLDER} has a head draft, as do eagle and mtp, draft_model a small """
            "model; auto takes what the checkpoint carries. The tokens stay the same."
        ),
    ] = None
    diffusion_config: Annotated[
        DiffusionOptions | None,
        Meta(
            description="How a diffusion language model writes a block, as JSON: "
            """{"threshold": 0.95, "steps": 4, "block_length": 4, "canvas_length": 256}: docs/SERVING.md."""
        ),
    ] = None
    step_timeout_s: Annotated[
        Seconds,
        Meta(description="A step that takes longer counts as hung: the engine is restarted."),
    ] = 300.0
    slow_step_s: Annotated[
        Seconds | Auto,
        Meta(
            description="Health fails while a step has taken this long and is not done. auto: 20 times what measured "
            "steps let expect of it, at least 10."
        ),
    ] = "auto"


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """The whole tree."""

    model: ModelOptions = ModelOptions()
    kv: KVOptions = KVOptions()
    scheduler: SchedulerOptions = SchedulerOptions()
    device: DeviceOptions = DeviceOptions()
    adapters: AdapterOptions = AdapterOptions()
    server: ServerOptions = ServerOptions()
    many: ManyOptions = ManyOptions()
