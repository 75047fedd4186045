"""What a request may not ask of a model that writes blocks of text by diffusion: whatever follows
the tokens one by one, for a block's are decided in an order of their own."""

from __future__ import annotations

from headrace.base.errors import Unsupported
from headrace.base.wire.grammar import GRAMMAR_HOOK
from headrace.base.wire.request import EngineRequest


def check_blockwise(request: EngineRequest) -> None:
    """Unsupported with the field and the reason."""
    for field, asked, why in _asked(request):
        if asked:
            raise Unsupported(
                f"{field}: this model writes blocks of text by diffusion, {why}", field=field
            )


def _asked(request: EngineRequest) -> tuple[tuple[str, bool, str], ...]:
    sampling = request.sampling
    before, scores = (
        "whose tokens do not come one behind the other",
        "which gives a token no score of its own",
    )
    return (
        ("response_format", GRAMMAR_HOOK in request.hook_payloads, before),
        ("repetition_penalty", sampling.repetition_penalty != 1.0, before),
        ("presence_penalty", sampling.presence_penalty != 0.0, before),
        ("frequency_penalty", sampling.frequency_penalty != 0.0, before),
        ("dry_multiplier", sampling.dry_multiplier > 0.0, before),
        ("bad_words", any(sampling.bad_words), before),
        ("logits_processors", bool(sampling.logits_processors), before),
        ("samplers", sampling.has_chain, before),
        ("prediction", bool(request.prediction), "and drafts nothing"),
        ("logprobs", sampling.logprobs is not None or bool(sampling.logprob_ids), scores),
        ("prompt_logprobs", sampling.prompt_logprobs is not None, scores),
        ("pooling", request.pooling is not None, "and embeds nothing"),
        ("capture_layers", bool(sampling.capture_layers), "in several passes over each"),
    )
