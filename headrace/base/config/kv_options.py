"""Options of the KV cache."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from headrace.base.config.bounds import Bytes, BytesOrAuto, Natural, Positive, Seconds


class CacheChoices(msgspec.Struct, frozen=True, kw_only=True):
    """See KVOptions: how blocks are named, which of them go first, whether requests say so too,
    and at the ends of how many blocks the state of recurrent layers is kept. `watched_blocks`: of
    every so many blocks the ages of one are counted; 0: of none."""

    hashing: str = "blake2b"
    eviction: str = "lru"
    retention: bool = False
    state_interval: int = 1
    watched_blocks: int = 0


class KVPushSpec(msgspec.Struct, frozen=True, kw_only=True):
    """KV that passes over TCP: to the `peers` (host:port), and from others to `listen`, None: from
    nobody. `key_file` holds the secret that all of them know."""

    key_file: str
    peers: tuple[str, ...] = ()
    listen: str | None = None


class EncoderFilesSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What encoders gave for media, kept in the folder `path`, whose files take at most
    `max_bytes`."""

    path: str
    max_bytes: int


class KVOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The KV cache."""

    kv_memory: Annotated[
        BytesOrAuto,
        Meta(
            description="Memory for the KV cache, such as 4GiB; auto takes a share of what is free."
        ),
    ] = "auto"
    kv_blocks: Annotated[
        Positive | None, Meta(description="Number of KV blocks; overrides kv_memory.")
    ] = None
    block_tokens: Annotated[
        Literal[8, 16, 32, 64, 128], Meta(description="Tokens in a KV block.")
    ] = 16
    kv_dtype: Annotated[
        Literal[
            "auto",
            "int8",
            "fp8",
            "fp8_e5m2",
            "int4",
            "nvfp4",
            "nvfp4-4over6",
            "int4-rotated",
            "int3-rotated",
            "turboquant-4bit",
            "turboquant-3bit",
        ],
        Meta(
            description="Type of the KV cache; auto takes that of the activations. int8, fp8 (e4m3) and fp8_e5m2 keep "
            "values with a scale per token and head: about half the memory; int4 takes about a quarter, with a scale "
            "and a smallest value, nvfp4 with scales of 16 dimensions (nvfp4-4over6: that end at 4 or 6); int4-rotated "
            "and int3-rotated (a fifth) rotate heads first, turboquant-4bit and -3bit (as much) then take levels for "
            "normal values. On CUDA heads of less than a byte a value are of a power "
            "of two."
        ),
    ] = "auto"
    kv_dtype_skip_layers: Annotated[
        tuple[str, ...],
        Meta(
            description="Layers whose KV cache keeps the type of the activations, by number from 0, or sliding_window: "
            "all with a window or chunks."
        ),
    ] = ()
    prefix_caching: Annotated[
        bool,
        Meta(description="Reuse the KV of prompts that begin alike (within one tenant and salt)."),
    ] = True
    kv_layout: Annotated[
        Literal["layers", "blocks"],
        Meta(
            description="What lies side by side: all blocks of a layer, or all layers of a block, which is "
            "then copied to files and other servers as one range. On Hopper GPUs attention of prompts reads blocks "
            "through TMA only with layers."
        ),
    ] = "layers"
    slot_save_path: Annotated[
        str | None,
        Meta(
            description="Folder in which POST /slots/{id}?action=save puts the KV of a row's last conversation, and "
            "action=restore finds it. Default: none are saved."
        ),
    ] = None
    slot_save_bytes: Annotated[
        Bytes, Meta(description="The most that all files in slot_save_path may take together.")
    ] = "16GiB"
    kv_transfer_path: Annotated[
        str | None,
        Meta(
            description="Folder through which the KV of prompts passes between servers, below /dev/shm or on a file "
            "system that they share: one computes a prompt, another answers it (kv_transfer_params)."
        ),
    ] = None
    kv_transfer_bytes: Annotated[
        Bytes, Meta(description="The most that all files in kv_transfer_path may take together.")
    ] = "4GiB"
    kv_transfer_lease_s: Annotated[
        Seconds,
        Meta(
            description="So long KV that nobody fetches is kept, and a request waits for KV that is to come."
        ),
    ] = 30.0
    kv_transfer_listen: Annotated[
        str | None,
        Meta(
            description="HOST:PORT at which other servers push the KV of prompts into kv_transfer_path, where there is "
            "no folder that both see; the first engine core listens. Default: nowhere."
        ),
    ] = None
    kv_transfer_peers: Annotated[
        tuple[str, ...],
        Meta(
            description="HOST:PORT of the servers (their kv_transfer_listen) to which requests may have KV pushed."
        ),
    ] = ()
    kv_transfer_key_file: Annotated[
        str | None,
        Meta(
            description="File with the secret of the servers that push KV to each other, of 32 bytes at least."
        ),
    ] = None
    kv_load_failure: Annotated[
        Literal["recompute", "fail"],
        Meta(
            description="What becomes of a request whose KV does not come: its prompt is computed here, or it ends."
        ),
    ] = "recompute"
    kv_store_path: Annotated[
        str | None,
        Meta(
            description="Folder in which the KV of prompts that come again is kept, beyond the cache and the server's "
            "end: on a disk, or in host memory (below /dev/shm) for a GPU. Of models with full attention in all layers."
        ),
    ] = None
    kv_store_bytes: Annotated[
        Bytes,
        Meta(
            description="The most that all files in kv_store_path may take together; what was not used longest goes."
        ),
    ] = "16GiB"
    kv_store_after: Annotated[
        Positive,
        Meta(
            description="So many requests must begin alike before their KV is stored: what comes once costs nothing."
        ),
    ] = 2
    encoder_cache_path: Annotated[
        str | None,
        Meta(
            description="Folder in which what an encoder gave for images, video and sounds is kept, for all servers of "
            "the model that see it: an input is encoded once. Without --tensor-parallel. Default: it is kept nowhere."
        ),
    ] = None
    encoder_cache_bytes: Annotated[
        Bytes,
        Meta(
            description="The most that all files in encoder_cache_path may take; what was not used longest goes."
        ),
    ] = "4GiB"
    mm_encoder_only: Annotated[
        bool,
        Meta(
            description="Load the encoders of images, video and sound alone, no decoder: what requests to /pooling "
            "carry is encoded into encoder_cache_path, for the servers that answer. No text is generated."
        ),
    ] = False
    kv_eviction: Annotated[
        Literal["lru", "lfu"],
        Meta(
            description="Which cached block goes first when room is needed: the least recently used one, or the least "
            "frequently found one."
        ),
    ] = "lru"
    kv_retention: Annotated[
        bool,
        Meta(
            description="Requests may say how much parts of their prompts are worth keeping (kv_retention): cached "
            "blocks of lower priorities go first."
        ),
    ] = False
    prefix_hash: Annotated[
        Literal["blake2b", "sha256", "sha256_cbor", "xxhash", "xxhash_cbor"],
        Meta(
            description="How cached blocks are named. All begin with a secret of the process; xxhash is no "
            "cryptographic function, and needs the library of that name."
        ),
    ] = "blake2b"
    state_interval: Annotated[
        Positive,
        Meta(
            description="The state of recurrent layers is kept at the ends of every so many blocks: more leave room "
            "for more prompts, and are found less often."
        ),
    ] = 1
    watched_blocks: Annotated[
        Natural,
        Meta(
            description="Of one in so many blocks that are taken the metrics tell how long it lived, lay idle and when "
            "it was found again: 100 costs little. Default: of none.",
        ),
    ] = 0
    kv_events_path: Annotated[
        str | None,
        Meta(
            description="Folder in which each engine core has a Unix socket (core-0.kv ...) that tells which blocks "
            "the prefix cache holds, for routers. Default: none."
        ),
    ] = None
