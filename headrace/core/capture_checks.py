"""Whether what a request wants to have captured beside its answer is told here, and not too much:
attention weights, chosen experts, hidden states; and whether what it wants to have added to its
hidden states is there."""

from __future__ import annotations

from headrace.base.errors import InvalidRequest
from headrace.base.wire.request import ROUTED_EXPERTS, RowSampling, check_between
from headrace.base.wire.step import WorkerFacts
from headrace.base.wire.transfer import HIDDEN_STATES

MAX_CAPTURE_BYTES = 64 << 20
MOST_SCALE = 1e6


def check_capture(sampling: RowSampling, length: int, facts: WorkerFacts) -> None:
    """Refuses what this engine does not tell, of a request that ends at `length`."""
    if ROUTED_EXPERTS in sampling.capture_layers:
        _check_routed(length, facts)
    if HIDDEN_STATES in sampling.capture_layers and not facts.tells_states:
        raise InvalidRequest(
            "kv_transfer_params.include_output_tokens: this engine writes no hidden states: it needs "
            "--speculative-config's method extract_hidden_states",
            field="kv_transfer_params",
        )
    if sampling.control_vectors:
        _check_vectors(sampling.control_vectors, facts.control_vectors)
    apart = ROUTED_EXPERTS, HIDDEN_STATES
    if layers := tuple(one for one in sampling.capture_layers if one not in apart):
        _check_attention(layers, sampling.capture_heads, length, facts)


def steered_keys(sampling: RowSampling) -> tuple[bytes, ...]:
    """What sets KV that was computed with a request's control vectors apart."""
    named = sorted(sampling.control_vectors.items())
    return tuple(f"control vector {name} {scale!r}".encode() for name, scale in named)


def _check_vectors(wanted: dict[str, float], known: tuple[str, ...]) -> None:
    field = "control_vectors"
    for name, scale in wanted.items():
        if name not in known:
            there = ", ".join(known) or "none: see --control-vector-modules"
            raise InvalidRequest(f"{field}: {name!r:.80} is not loaded ({there})", field=field)
        if not abs(scale) <= MOST_SCALE:
            raise InvalidRequest(
                f"{field}: {name} has the factor {scale}, at most {MOST_SCALE:g} is allowed",
                field=field,
            )


def _check_routed(length: int, facts: WorkerFacts) -> None:
    field = "return_routed_experts"
    if not facts.routed_experts:
        raise InvalidRequest(
            f"{field}: this engine tells no experts: it needs --enable-return-routed-experts, and a model with routed "
            "experts that does not run by way of transformers",
            field=field,
        )
    layers, most = facts.routed_experts
    num_bytes = 4 * length * layers * most
    if num_bytes > MAX_CAPTURE_BYTES:
        raise InvalidRequest(
            f"{field}: {most} experts in {layers} layers over up to {length} tokens are {num_bytes >> 20} MiB, at most "
            f"{MAX_CAPTURE_BYTES >> 20} MiB are told: lower max_tokens",
            field=field,
        )


def _check_attention(
    layers: tuple[int, ...], heads: tuple[int, ...], length: int, facts: WorkerFacts
) -> None:
    field = "attn_capture"
    if not facts.capture_layers:
        raise InvalidRequest(
            f"{field}: this engine tells no attention weights: it needs --attention-capture, one device, and a model "
            "that does not run by way of transformers",
            field=field,
        )
    check_between(f"{field}_layers", min(layers), 0, facts.capture_layers - 1)
    check_between(f"{field}_layers", max(layers), 0, facts.capture_layers - 1)
    if heads:
        if len(heads) != len(layers):
            raise InvalidRequest(
                f"capture_heads has {len(heads)} entries, capture_layers {len(layers)}",
                field="capture_heads",
            )
        check_between("capture_heads", min(heads), 0, facts.capture_heads - 1)
        check_between("capture_heads", max(heads), 0, facts.capture_heads - 1)
    span = max([length, *(group.span or 0 for group in facts.groups)])
    num_bytes = 4 * len(layers) * (1 if heads else facts.capture_heads) * length * span
    if num_bytes > MAX_CAPTURE_BYTES:
        raise InvalidRequest(
            f"{field}: {len(layers)} layers of {facts.capture_heads} heads over up to {length} tokens are "
            f"{num_bytes >> 20} MiB, at most {MAX_CAPTURE_BYTES >> 20} MiB are told: ask for fewer layers, or lower "
            "max_tokens",
            field=field,
        )
