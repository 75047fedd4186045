"""The options of speculative decoding: the fields of `--speculative-config`."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta


class DraftLayers(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`hf_config` of `DraftConfig`."""

    eagle_aux_hidden_state_layer_ids: tuple[Annotated[int, Meta(ge=0)], ...] = ()
    """extract_hidden_states: the layers in front of which hidden states are taken; the number of
    layers: behind the last one, before the norm."""


class DraftConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`draft_model_config` of `SpeculationOptions`, as vLLM's users write it."""

    hf_config: DraftLayers = DraftLayers()


class SpeculationOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Speculative decoding, under the names vLLM's users know. The tokens are those of plain
    decoding; only the number of steps changes."""

    method: str = "auto"
    """ngram: drafts are what followed the newest tokens earlier in the same request. suffix: there,
    or in earlier requests. draft_model, eagle, eagle3, mtp, medusa, mlp_speculator, dflash,
    dspark: a network drafts them.
    extract_hidden_states: nothing is drafted; those of each request are written to a file in
    --hidden-states-path. auto: what the named model is, or the checkpoint carries, else ngram."""
    model: str | None = None
    """The draft model or head: a folder, a GGUF file or a hub id. mtp: None is the model itself."""
    revision: str = "main"
    """Of a hub id."""
    num_speculative_tokens: Annotated[int, Meta(ge=1, le=15)] | None = None
    """Drafts of a request in a step at most. None: as many as the method is good for."""
    disable_by_batch_size: Annotated[int, Meta(ge=1)] | None = None
    """Steps of more decoding requests draft nothing. None: 8 on a CPU, 64 elsewhere."""
    draft_tensor_parallel_size: Annotated[int, Meta(ge=1, le=1)] = 1
    """A network that drafts is not shared: every device has the whole."""
    prompt_lookup_max: Annotated[int, Meta(ge=1, le=64)] | None = None
    """ngram: newest tokens looked for at most. None: 5, or prompt_lookup_min if greater."""
    prompt_lookup_min: Annotated[int, Meta(ge=1, le=64)] | None = None
    """ngram: and at least. None: 2, or prompt_lookup_max if less."""
    suffix_decoding_max_tree_depth: Annotated[int, Meta(ge=1, le=256)] = 24
    """suffix: newest tokens that are compared at most."""
    suffix_decoding_max_cached_requests: Annotated[int, Meta(ge=0)] = 10000
    """suffix: earlier requests that are searched at most (65,536 tokens in all). 0: each request
    searches itself alone, so that nobody's drafts tell of others."""
    suffix_decoding_max_spec_factor: Annotated[float, Meta(gt=0.0)] = 1.0
    """suffix: drafts at most for each token that was found again."""
    suffix_decoding_min_token_prob: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.1
    """suffix: the share of places, of those found, that must go on as drafted."""
    parallel_drafting: bool = False
    """draft_model: it was trained to draft all tokens in one pass (PARD)."""
    rejection_sample_method: Literal["standard", "block", "synthetic"] = "standard"
    """How drafts are verified. Drafts are single tokens, so that block verification lets stand what
    the standard one does. synthetic: drafts stand by synthetic_acceptance_rates, whatever the model
    says, for measuring; the answers are not the model's."""
    synthetic_acceptance_rates: tuple[Annotated[float, Meta(ge=0.0, le=1.0)], ...] = ()
    """synthetic: the rate with which the first draft stands, the first two do, and so on."""
    draft_sample_method: Literal["greedy", "probabilistic"] = "greedy"
    """greedy: networks draft the most likely tokens. probabilistic: they sample their drafts as the
    request's tokens are, with its temperature, top_k, top_p and min_p, and the noise of each
    position, so that more of them stand at high temperatures."""
    draft_model_config: DraftConfig | None = None
    """extract_hidden_states: of which layers."""
    adaptive: bool = True
    """Draft only what pays, by measured times of steps and by how often drafts stand."""
