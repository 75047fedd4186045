"""Which parameters of sampling do not go together: beside beam search, and beside steps of an order
of their own."""

from __future__ import annotations

from headrace.base.errors import InvalidRequest
from headrace.base.wire.request import SamplingParams
from headrace.base.wire.sampler_chain import SAMPLERS

_PLAIN = SamplingParams()
CHAIN_FIELDS = ("samplers", "mirostat", "top_n_sigma", "dynatemp_range", "adaptive_target")
"""What makes a request choose its tokens by a chain of its own."""
# Beam search ranks by the model's own log-probabilities: what would change them is refused.
_NOT_WITH_BEAMS = (
    *("best_of", "stop", "bad_words", "logit_bias", "allowed_token_ids", "prompt_logprobs"),
    *("logprob_token_ids", "top_p", "min_p", "typical_p", "repetition_penalty", "presence_penalty"),
    *("frequency_penalty", "dry_multiplier", "xtc_probability", "logprobs_mode"),
    *("structured_outputs", "capture_layers", "repetition_detection", "logits_processors"),
    "sampling_mask",
    *CHAIN_FIELDS,
)


def check_beam(params: SamplingParams) -> None:
    """Refuses what beam search would ignore. Temperature may be its default or 0."""
    changed = [name for name in _NOT_WITH_BEAMS if getattr(params, name) != getattr(_PLAIN, name)]
    changed += ["top_k"] if params.top_k > 0 else []
    if changed:
        raise InvalidRequest(f"{changed[0]}: does not go with beam search", field=changed[0])
    if params.temperature not in (0.0, 1.0):
        raise InvalidRequest(
            f"temperature: {params.temperature:g} given; beam search takes 0 or 1 (it does not "
            "sample)",
            field="temperature",
        )


def check_chain(params: SamplingParams) -> None:
    """Refuses steps that there are not, and what is not told of such requests."""
    names = params.samplers
    if not isinstance(names, tuple) or len({*names}) < len(names) or {*names} - {*SAMPLERS}:
        raise InvalidRequest(
            f"samplers: {names!r:.200} is not each at most once of {', '.join(SAMPLERS)}",
            field="samplers",
        )
    if not isinstance(params.mirostat, int) or params.mirostat not in (0, 1, 2):
        raise InvalidRequest(
            f"mirostat: {params.mirostat!r:.80} is not 0, 1 or 2", field="mirostat"
        )
    for field, is_set in (
        ("sampling_mask", params.sampling_mask),
        ("logprobs_mode", params.logprobs_mode == "processed"),
    ):
        if is_set:
            raise InvalidRequest(
                f"{field}: does not go with {', '.join(CHAIN_FIELDS)}", field=field
            )
    if params.mirostat and params.adaptive_target >= 0.0:
        raise InvalidRequest("adaptive_target: does not go with mirostat", field="adaptive_target")
