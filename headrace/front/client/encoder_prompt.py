"""The prompt of an encoder-decoder, checked: its encoder reads it, and the answer is what its
decoder says behind tokens of its own."""

from __future__ import annotations

from headrace.base.errors import ContextTooLong, InvalidRequest
from headrace.base.wire.request import SamplingParams
from headrace.front.client.events import Generation
from headrace.front.client.limits import RequestBounds

_PLAIN = SamplingParams()
NOT_WITH_ENCODERS = ("prompt_logprobs", "capture_layers", "beam_width")
"""What asks about a prompt that the model continues."""


def halves_of(generation: Generation, bounds: RequestBounds) -> tuple[list[int], list[int]]:
    """What the encoder reads, and what the decoder begins with."""
    ids, start = generation.prompt_ids, list(generation.decoder_ids or bounds.decoder_start)
    if not bounds.sees_alone:
        return ids, start
    ends = [one.offset + one.num_tokens for one in generation.media]
    end = max(ends, default=0)
    begins = ids[end:]
    return ids[:end], begins if begins[: len(start)] == start else start + begins


def check_encoder_prompt(generation: Generation, bounds: RequestBounds, wanted: int) -> None:
    """Refuses a prompt that the encoder cannot read, and an answer of `wanted` tokens at least that
    does not fit behind what the decoder begins with."""
    reads, start = halves_of(generation, bounds)
    if not reads:
        raise InvalidRequest(
            "prompt: has no image, which is all that this model's encoder reads",
            field=generation.prompt_field,
        )
    num_prompt, num_start = len(reads), len(start)
    if num_prompt > bounds.encoder_tokens:
        raise ContextTooLong(
            f"prompt is too long: {num_prompt} tokens > {bounds.encoder_tokens} that the encoder "
            "reads at most",
            field=generation.prompt_field,
        )
    if num_start + wanted > bounds.context_tokens:
        raise ContextTooLong(
            f"the answer is too long: {num_start} tokens that the decoder begins with and "
            f"{wanted} more > {bounds.context_tokens} maximum",
            field="min_tokens",
        )
    for name in NOT_WITH_ENCODERS:
        if getattr(generation.params, name) != getattr(_PLAIN, name):
            raise InvalidRequest(
                f"{name}: does not go with an encoder-decoder, whose prompt its encoder reads",
                field=name,
            )
