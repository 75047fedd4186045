"""Requests of Ollama's routes: fields, types and bounds, as its clients send them.

Unknown fields are ignored, unknown options refused. Messages are checked where they are
translated. What an answer streams unless it is asked not to is Ollama's own default."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from headrace.front.server.conversation.request import Effort, NumScores, StopText
from headrace.front.server.http.limits import Count, Keywords, Name

Think = bool | Effort
Form = Literal["", "json"] | dict[str, Any]
KeepAlive = float | Annotated[str, Meta(max_length=64)]
MAX_STOPS = 16
ModelId = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,199}$")]
"""A name that a client may give."""


class OllamaOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to sample (bounds: those of every chat), and how a model is loaded: the latter is this
    server's business, so that `num_batch` to `use_mlock` change nothing. `num_ctx`: what the
    context must hold at least. `repeat_last_n`: -1, all text; penalties look at no less."""

    seed: int | None = None
    num_predict: Annotated[int, Meta(ge=-2, lt=2**31)] | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    tfs_z: Literal[1] | None = None
    repeat_last_n: Annotated[int, Meta(ge=-1, lt=2**31)] | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    penalize_newline: Literal[True] | None = None
    mirostat: int | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    stop: Annotated[list[StopText], Meta(max_length=MAX_STOPS)] | StopText | None = None
    num_ctx: Annotated[int, Meta(ge=1, lt=2**31)] | None = None
    num_keep: int | None = None
    num_batch: int | None = None
    num_gpu: int | None = None
    main_gpu: int | None = None
    num_thread: int | None = None
    numa: bool | None = None
    low_vram: bool | None = None
    f16_kv: bool | None = None
    use_mmap: bool | None = None
    use_mlock: bool | None = None


class OllamaCommon(msgspec.Struct, frozen=True, kw_only=True):
    """What chats and prompts share. `options`: see OllamaOptions."""

    model: Name | None = None
    stream: bool | None = None
    format: Form | None = None
    options: Keywords | None = None
    keep_alive: KeepAlive | None = None
    think: Think | None = None
    logprobs: bool | None = None
    top_logprobs: NumScores | None = None

    @property
    def streams(self) -> bool:
        """Whether the answer comes as lines."""
        return self.stream is not False


class OllamaChatRequest(OllamaCommon, frozen=True, kw_only=True):
    """POST /api/chat. Without messages the model is loaded, or with keep_alive 0 unloaded."""

    messages: Annotated[list[dict[str, Any]], Meta(max_length=4096)] | None = None
    tools: Annotated[list[dict[str, Any]], Meta(max_length=1024)] | None = None


class OllamaGenerateRequest(OllamaCommon, frozen=True, kw_only=True):
    """POST /api/generate. The prompt goes through the chat template, unless it is `raw` or has a
    `suffix`. `context`: tokens of an earlier answer, which none of ours gives."""

    prompt: str | None = None
    suffix: Annotated[str, Meta(max_length=2**22)] | None = None
    images: Annotated[list[str], Meta(max_length=256)] | None = None
    system: str | None = None
    template: Annotated[str, Meta(max_length=65536)] | None = None
    context: list[int] | None = None
    raw: bool | None = None
    width: Count | None = None
    height: Count | None = None
    steps: Count | None = None


class OllamaEmbedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """POST /api/embed. `truncate`: a text that is too long loses its end; else it is refused."""

    input: str | Annotated[list[str], Meta(min_length=1, max_length=2048)]
    model: Name | None = None
    truncate: bool | None = None
    dimensions: Annotated[int, Meta(ge=1, lt=2**31)] | None = None
    options: Keywords | None = None
    keep_alive: KeepAlive | None = None


class OllamaEmbeddingsRequest(msgspec.Struct, frozen=True, kw_only=True):
    """POST /api/embeddings."""

    prompt: str
    model: Name | None = None
    options: Keywords | None = None
    keep_alive: KeepAlive | None = None


class OllamaModelRequest(msgspec.Struct, frozen=True, kw_only=True):
    """POST /api/show and DELETE /api/delete; `name` is what `model` was called before."""

    model: Name | None = None
    name: Name | None = None
    verbose: bool | None = None


class OllamaCopyRequest(msgspec.Struct, frozen=True, kw_only=True):
    """POST /api/copy: the same under another name."""

    source: Name
    destination: ModelId


class OllamaPullRequest(msgspec.Struct, frozen=True, kw_only=True):
    """POST /api/pull."""

    model: Name | None = None
    name: Name | None = None
    insecure: Literal[False] | None = None
    stream: bool | None = None


class OllamaCreateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """POST /api/create: the fields of a Modelfile, or its text. What would make new weights
    (`files`, `adapters`, `quantize`) is refused."""

    model: ModelId | None = None
    name: ModelId | None = None
    base: Name | None = msgspec.field(default=None, name="from")
    modelfile: str | None = None
    system: str | None = None
    template: Annotated[str, Meta(max_length=65536)] | None = None
    license: str | list[str] | None = None
    parameters: Keywords | None = None
    messages: Annotated[list[dict[str, Any]], Meta(max_length=1024)] | None = None
    files: Keywords | None = None
    adapters: Keywords | None = None
    quantize: str | None = None
    quantization: str | None = None
    stream: bool | None = None
