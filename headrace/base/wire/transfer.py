"""What a request says of KV that passes between servers: a prompt is computed by one and answered
by another (core/kv_transfers.py)."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from headrace.base.errors import InvalidRequest

TRANSFER_HOOK = "kv_transfer"
"""Key of a `KVTransfer` in `EngineRequest.hook_payloads`."""

HIDDEN_STATES = -2
"""In `capture_layers` of a request: hidden states, those of the answer's tokens too."""

TransferId = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._:-]{8,128}$")]


class KVTransfer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Of one sequence. `sends`: the name under which the KV of its prompt goes out when it has
    ended; `receives`: the one under which it comes in. `is_sent`: whoever sends it has said that
    it has ended, so that there is nothing to wait for. `peer`: host:port of the server that it is
    pushed to; "": it lies in a folder that both see."""

    sends: str = ""
    peer: str = ""
    receives: str = ""
    is_sent: bool = False


class KVTransferParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`kv_transfer_params` of a request, under the names of vLLM's connectors, and of the answer to
    one that sends.

    A router asks a server for the prompt (`do_remote_decode`, max_tokens 1), and hands what it
    answers to another server with the same request, or chooses a `transfer_id` and asks both at
    once. Both look into one folder, or the first is told where the second one listens
    (`remote_host`, `remote_port`): one of the peers that its operator has named.

    `include_output_tokens`: the file of hidden states holds the answer's too.
    """

    do_remote_decode: bool | None = None
    do_remote_prefill: bool | None = None
    transfer_id: TransferId | None = None
    remote_request_id: TransferId | None = None
    remote_engine_id: None = None
    remote_block_ids: None = None
    remote_host: Annotated[str, Meta(max_length=253)] | None = None
    remote_port: Annotated[int, Meta(ge=1, le=65535)] | None = None
    include_output_tokens: bool | None = None

    def __post_init__(self) -> None:
        if (self.remote_host is None) != (self.remote_port is None):
            raise ValueError("remote_host and remote_port go together")
        if self.remote_host is not None and not self.do_remote_decode:
            raise ValueError("remote_host is where do_remote_decode has the KV pushed to")
        if self.do_remote_prefill and self.transfer_id is None:
            raise ValueError("do_remote_prefill needs a transfer_id")

    def payloads(self, label: str) -> dict[str, msgspec.Raw]:
        """What the engine is told, by hook; `label`: the public id of the answer."""
        if not self.do_remote_decode and not self.do_remote_prefill:
            return {}
        name = self.transfer_id or label
        transfer = KVTransfer(
            sends=name if self.do_remote_decode else "",
            receives=name if self.do_remote_prefill else "",
            is_sent=self.remote_request_id is not None,
            peer="" if self.remote_host is None else f"{self.remote_host}:{self.remote_port}",
        )
        return {TRANSFER_HOOK: pack_transfer(transfer)}

    def answer(self, label: str) -> dict[str, object] | None:
        """What the next server is to be told, once this one has computed the prompt."""
        if not self.do_remote_decode:
            return None
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "transfer_id": self.transfer_id or label,
            "remote_request_id": label,
        }


def pack_transfer(transfer: KVTransfer) -> msgspec.Raw:
    """The transfer as it stands in `EngineRequest.hook_payloads`."""
    return msgspec.Raw(msgspec.msgpack.encode(transfer))


def unpack_transfer(raw: msgspec.Raw) -> KVTransfer:
    """The transfer of a request; InvalidRequest if it is none."""
    try:
        return msgspec.msgpack.decode(raw, type=KVTransfer)
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"kv_transfer_params: {error}", field="kv_transfer_params") from None
