"""How the KV cache behaves, and whether conversations may be saved (core/slots.py), KV may be
stored (core/kv_store.py) and pass to other servers (core/kv_transfers.py), and where."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from headrace.base.config.kv_options import CacheChoices, EncoderFilesSpec, KVPushSpec
from headrace.base.config.resolved import DeviceSpec, KVSpec, KVStoreSpec, KVTransferSpec
from headrace.base.config.tree import KVOptions
from headrace.base.config.units import parse_bytes
from headrace.base.errors import ConfigError
from headrace.core.kv.hashing import check_hash
from headrace.launch.kv_push import read_key
from headrace.launch.model_facts import ModelFacts

FIELD = "slot_save_path"


def with_slots(
    spec: KVSpec, options: KVOptions, model: ModelFacts, device_spec: DeviceSpec
) -> KVSpec:
    """The cache's spec with its choices and the folders for conversations and for transfers;
    ConfigError where none can be written."""
    check_hash(options.prefix_hash)
    choices = CacheChoices(
        hashing=options.prefix_hash,
        eviction=options.kv_eviction,
        retention=options.kv_retention,
        state_interval=options.state_interval,
        watched_blocks=options.watched_blocks,
    )
    spec = msgspec.structs.replace(spec, choices=choices, layout=options.kv_layout)
    if options.slot_save_path is not None:
        folder = _folder_of(FIELD, options.slot_save_path, spec, model, device_spec)
        most = parse_bytes(options.slot_save_bytes, field="--slot-save-bytes")
        spec = msgspec.structs.replace(spec, slot_save_path=folder, slot_save_bytes=most)
    if options.kv_events_path is not None:
        folder = _folder_of("kv_events_path", options.kv_events_path, spec, model, device_spec)
        spec = msgspec.structs.replace(spec, events_path=folder)
    if options.kv_store_path is not None:
        store = KVStoreSpec(
            path=_folder_of("kv_store_path", options.kv_store_path, spec, model, device_spec),
            max_bytes=parse_bytes(options.kv_store_bytes, field="--kv-store-bytes"),
            after=options.kv_store_after,
        )
        spec = msgspec.structs.replace(spec, store=store)
    if options.encoder_cache_path is not None:
        files = _encoder_files(options, options.encoder_cache_path, model, device_spec)
        spec = msgspec.structs.replace(spec, encoder_files=files)
    if options.kv_transfer_path is None:
        if options.kv_transfer_listen is not None or options.kv_transfer_peers:
            raise ConfigError(
                "--kv-transfer-listen and --kv-transfer-peers go with --kv-transfer-path: files lie there "
                "on their way",
                field="kv_transfer_path",
            )
        return spec
    folder = _folder_of("kv_transfer_path", options.kv_transfer_path, spec, model, device_spec)
    transfer = KVTransferSpec(
        path=folder,
        max_bytes=parse_bytes(options.kv_transfer_bytes, field="--kv-transfer-bytes"),
        lease_s=options.kv_transfer_lease_s,
        recomputes=options.kv_load_failure == "recompute",
        push=push_of(options),
    )
    return msgspec.structs.replace(spec, transfer=transfer)


def push_of(options: KVOptions) -> KVPushSpec | None:
    """Where KV is pushed to and where it comes in; ConfigError where that cannot be."""
    listen, peers = options.kv_transfer_listen, options.kv_transfer_peers
    if listen is None and not peers:
        return None
    for field, address in (
        ("kv_transfer_listen", listen),
        *(("kv_transfer_peers", peer) for peer in peers),
    ):
        host, _, port = (address or "").rpartition(":")
        if address is not None and not (host and port.isdecimal() and int(port) < 1 << 16):
            raise ConfigError(
                f"--{field.replace('_', '-')}: {address!r:.100} given; HOST:PORT is wanted",
                field=field,
            )
    if options.kv_transfer_key_file is None:
        raise ConfigError(
            "--kv-transfer-listen and --kv-transfer-peers need --kv-transfer-key-file: nobody else may "
            "push KV",
            field="kv_transfer_key_file",
        )
    read_key(options.kv_transfer_key_file)
    path = str(Path(options.kv_transfer_key_file).expanduser().absolute())
    return KVPushSpec(key_file=path, peers=peers, listen=listen)


def _encoder_files(
    options: KVOptions, path: str, model: ModelFacts, device_spec: DeviceSpec
) -> EncoderFilesSpec:
    """Where encoders' outputs are kept; ConfigError where they cannot be."""
    folder, reason = Path(path).expanduser(), None
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        reason = f"{path!r} is no folder that can be written to"
    elif folder.stat().st_mode & 0o002:
        reason = f"everybody may write to {path!r}: what others put there would be taken for images"
    elif model.media is None:
        reason = f"{model.architecture} takes no images, video or sounds"
    elif device_spec.world_size > 1:
        reason = "ranks encode together (--tensor-parallel)"
    if reason is not None:
        raise ConfigError(f"--encoder-cache-path: {reason}", field="encoder_cache_path")
    most = parse_bytes(options.encoder_cache_bytes, field="--encoder-cache-bytes")
    return EncoderFilesSpec(path=str(folder.absolute()), max_bytes=most)


def _folder_of(
    field: str, path: str, spec: KVSpec, model: ModelFacts, device_spec: DeviceSpec
) -> str:
    """The folder of an option, made whole; ConfigError where blocks cannot be copied to it."""
    folder, reason = Path(path).expanduser(), None
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        reason = f"{path!r} is no folder that can be written to"
    elif field != FIELD and folder.stat().st_mode & 0o002:
        reason = f"everybody may write to {path!r}: KV of others would be taken for this server's"
    elif device_spec.executor == "null":
        reason = "--executor null computes nothing"
    elif model.head != "lm":
        reason = f"{model.architecture} generates no text"
    elif not spec.prefix_caching:
        reason = "blocks are copied from the prefix cache, which is off (--prefix-caching)"
    if reason is not None:
        raise ConfigError(f"--{field.replace('_', '-')}: {reason}", field=field)
    return str(folder.absolute())
