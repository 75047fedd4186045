"""The options of the HTTP server, a group of the tree (tree.py)."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from headrace.base.config.bounds import Bytes, BytesOrAuto, Natural, Positive, Processes, Seconds


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What of the HTTP server is used as it was typed: part of `ServerOptions` and of the resolved
    `ServerSpec`, which travels to the API processes."""

    host: Annotated[
        str,
        Meta(
            description="Address to listen on, or unix:FILE for a socket that its owner alone opens."
        ),
    ] = "127.0.0.1"
    port: Annotated[
        int,
        Meta(ge=0, le=65535, description="Port to listen on; 0 takes a free one and prints it."),
    ] = 8000
    grpc_port: Annotated[
        Annotated[int, Meta(ge=0, le=65535)] | None,
        Meta(
            description="Serve gRPC on this port too; 0 takes a free one and prints it. none: it is off."
        ),
    ] = None
    admin_readonly: Annotated[
        bool,
        Meta(
            description="Administration answers questions and changes nothing, whichever way it is asked."
        ),
    ] = False
    context_shift: Annotated[
        bool,
        Meta(
            description="Answers go on where the context ends, and longer prompts are taken: the beginning stays "
            "(context_keep), of the rest the older half goes."
        ),
    ] = False
    context_keep: Annotated[
        Natural,
        Meta(
            description="Tokens of the beginning that stay with context_shift, at most half of the context; what the "
            "tokenizer puts before a text always does."
        ),
    ] = 0
    api_servers: Annotated[Processes, Meta(description="API processes that share the port.")] = 1
    max_connections: Annotated[Positive, Meta(description="Open connections per API process.")] = (
        4096
    )
    header_timeout_s: Annotated[
        Seconds, Meta(description="Time a client has to send its headers.")
    ] = 10.0
    body_timeout_s: Annotated[Seconds, Meta(description="Longest pause while a body arrives.")] = (
        30.0
    )
    keepalive_timeout_s: Annotated[
        Seconds, Meta(description="Time an idle connection stays open.")
    ] = 30.0
    pre_drain_s: Annotated[
        Seconds,
        Meta(
            description="After SIGTERM readiness is false at once, and new requests are still taken for so long: "
            "load balancers need a moment to notice."
        ),
    ] = 0.0
    shutdown_timeout_s: Annotated[
        Seconds,
        Meta(
            description="After SIGTERM running requests may finish within this time; 0 aborts them at once."
        ),
    ] = 30.0
    request_timeout_s: Annotated[
        Seconds,
        Meta(
            description="Longest a request may take; a client may ask for less (timeout_s, X-Request-Timeout-S)."
        ),
    ] = 3600.0
    ping_interval_s: Annotated[
        Seconds,
        Meta(description="A stream that is silent this long gets an SSE comment; 0: never."),
    ] = 15.0
    stream_interval: Annotated[
        Positive | None,
        Meta(
            description="Tokens in a chunk of a stream, where its request names none; 1 and none: what is there."
        ),
    ] = None
    stream_interval_ms: Annotated[
        Annotated[float, Meta(ge=0, le=60_000)] | None,
        Meta(
            description="The same by time: a chunk holds what came in so many milliseconds. The first comes at once."
        ),
    ] = None
    max_requests_per_key: Annotated[
        Positive,
        Meta(
            description="Requests of one key that may be in flight; more get 429. Each API process has its part of it."
        ),
    ] = 1024
    max_tokens_per_key: Annotated[
        Positive | None,
        Meta(
            description="Tokens of one key that may be in flight, prompts and what may follow them; "
            "more get 429. none: no bound."
        ),
    ] = None
    max_n: Annotated[Positive, Meta(description="Largest n and best_of.")] = 128
    max_logprobs: Annotated[
        Annotated[int, Meta(ge=-1, le=1 << 20)],
        Meta(
            description="Largest logprobs, top_logprobs and prompt_logprobs; -1: as many as the vocabulary has, and "
            "a request may say -1 for all of them."
        ),
    ] = 20
    max_embed_tokens: Annotated[
        Positive | None,
        Meta(
            description="Most tokens of a text to embed. What exceeds the model's context is cut into chunks, and the "
            "mean of their vectors, weighted by their tokens, is the text's; none: such a text is refused."
        ),
    ] = None
    force_include_usage: Annotated[
        bool, Meta(description="Streams end with their usage, whether or not they ask for it.")
    ] = False
    per_request_metrics: Annotated[
        bool,
        Meta(
            description="Answers of chats and completions with one choice carry metrics: where their time went."
        ),
    ] = False
    return_tokens_as_token_ids: Annotated[
        bool,
        Meta(description="Tokens in log-probabilities are token_id:N unless a request says no."),
    ] = False
    return_sampling_mask: Annotated[
        bool,
        Meta(
            description="Answers of /inference/v1/generate tell of each token the ids that it was drawn among, unless "
            "a request says no."
        ),
    ] = False
    root_path: Annotated[
        Annotated[str, Meta(pattern=r"^(/[A-Za-z0-9._~-]+)*$")],
        Meta(
            description="Prefix (/llm) under which a proxy serves this server: it may stand before every path, "
            "and /openapi.json names it."
        ),
    ] = ""
    compat: Annotated[
        Literal["none", "vllm"],
        Meta(
            description="vllm: where vLLM contradicts OpenAI, do as vLLM: types and codes of errors, "
            "finish_reason on a stream's last text, X-Request-Id returned."
        ),
    ] = "none"
    trust_request_chat_template: Annotated[
        bool,
        Meta(
            description="Accept chat_template from requests. Leave off for clients you do not trust."
        ),
    ] = False
    allowed_media_domains: Annotated[
        tuple[str, ...],
        Meta(
            description="Hosts that images and videos are fetched from: names, .example.com for all below one, * for "
            "every public host. Private addresses are refused, also behind names and redirects; a network such "
            "as 10.1.0.0/16 permits its own. None: nothing is fetched."
        ),
    ] = ()
    allowed_local_media_path: Annotated[
        str | None,
        Meta(
            description="Folder of this machine whose images and videos requests may name by file: addresses; "
            "none: no file is read."
        ),
    ] = None
    file_store: Annotated[
        str,
        Meta(
            description="Folder where /v1/files and /v1/batches keep their files, made with mode 0700; "
            "auto: files/ in HEADRACE_CACHE_DIR, none: these routes are off."
        ),
    ] = "auto"
    response_ttl_s: Annotated[
        Seconds, Meta(description="A stored response that is not used this long is forgotten.")
    ] = 2_592_000.0
    max_websockets: Annotated[
        Natural, Meta(description="Open WebSocket connections per API process; more get 503.")
    ] = 100
    tokenizer_info: Annotated[
        bool,
        Meta(
            description="Answer /tokenizer_info and GetTokenizer of gRPC: special tokens, chat template and formats "
            "of answers, to whoever has a key."
        ),
    ] = False
    tool_server: Annotated[
        tuple[str, ...],
        Meta(
            description="MCP servers whose tools /v1/responses runs: [LABEL=]HOST:PORT[/PATH] or [LABEL=]URL, "
            "separated by commas; requests name them by label (HOST:PORT without one)."
        ),
    ] = ()
    allow_pull: Annotated[
        bool,
        Meta(
            description="Take POST /api/pull: whoever has a key may have models fetched into the local cache."
        ),
    ] = False
    public_metrics: Annotated[bool, Meta(description="Answer /metrics without a key.")] = True
    metrics_compat: Annotated[
        Literal["none", "vllm"],
        Meta(
            description="vllm: /metrics carries the series dashboards for vLLM ask for beside ours."
        ),
    ] = "none"
    log_slow_s: Annotated[
        Seconds | None,
        Meta(description="Log where the time of a request went that took longer, seconds."),
    ] = None
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="Log level.")
    ] = "info"


class ServerOptions(ServerSettings, frozen=True, kw_only=True):
    """The HTTP server. What stands here has another form once it is resolved: sizes in bytes, paths
    and addresses made whole, digests of keys."""

    api_keys: Annotated[
        tuple[str, ...],
        Meta(description="Keys clients must show; none: no key is asked for (loopback only)."),
    ] = ()
    api_key_file: Annotated[
        str | None,
        Meta(
            description="File of further keys, one a line, read again within a second when it changes."
        ),
    ] = None
    ssl_certfile: Annotated[
        str | None,
        Meta(
            description="Speak TLS with this certificate and its chain (PEM), read again within a second when it "
            "changes."
        ),
    ] = None
    ssl_keyfile: Annotated[
        str | None,
        Meta(
            description="Key of --ssl-certfile (PEM, without a password); none: the same file holds it."
        ),
    ] = None
    ssl_ca_certs: Annotated[
        str | None,
        Meta(
            description="Clients must show a certificate of one of these authorities (PEM), beside their key."
        ),
    ] = None
    admin_key: Annotated[
        str | None, Meta(description="Key of the administrative routes; none: they are off.")
    ] = None
    admin_listen: Annotated[
        str | None,
        Meta(
            description="Serve the admin API (/v1/admin/) apart from the API: PORT on the loopback "
            "interface, HOST:PORT, or unix:FILE; none: it is off."
        ),
    ] = None
    profile_dir: Annotated[
        str | None,
        Meta(
            description="Folder for traces of the workers' steps (`headrace admin profile start`, then stop); "
            "none: profiling is off."
        ),
    ] = None
    max_body_bytes: Annotated[
        Bytes, Meta(description="Largest request body, also after decompression.")
    ] = "32MiB"
    body_budget_bytes: Annotated[
        BytesOrAuto,
        Meta(
            description="Memory of all request bodies of an API process that are being read and prepared, half of it "
            "for one key; the first 64 KiB of each are free. A body that finds no room within a second gets 503, "
            "or 429 by its key's half. At least twice, auto: 8 times --max-body-bytes."
        ),
    ] = "auto"
    max_bytes_per_key: Annotated[
        str | None,
        Meta(
            description="Bytes of one key's bodies that may be in flight (512MiB); more get 429. "
            "none: no bound."
        ),
    ] = None
    tool_parser: Annotated[
        str,
        Meta(
            description="Format of tool calls; auto reads it off the chat template, none leaves them in the text."
        ),
    ] = "auto"
    reasoning_parser: Annotated[
        str,
        Meta(
            description="Format of reasoning; auto reads it off the chat template, none leaves it in the text."
        ),
    ] = "auto"
    file_store_bytes: Annotated[
        Bytes, Meta(description="Most that all files together may take; half of it for one key.")
    ] = "16GiB"
    response_store: Annotated[
        str,
        Meta(
            description="Where /v1/responses keeps what it stores: sqlite (a file in HEADRACE_CACHE_DIR), sqlite:FILE, "
            "postgresql://..., or off."
        ),
    ] = "sqlite"
    response_store_bytes: Annotated[
        Bytes,
        Meta(
            description="Most that is stored, half of it for one key; what was not used longest goes first."
        ),
    ] = "1GiB"
    otlp_endpoint: Annotated[
        str | None,
        Meta(
            description="Send OpenTelemetry traces to this OTLP/HTTP URL (http://host:4318/v1/traces)."
        ),
    ] = None
