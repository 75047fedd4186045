"""From pooled hidden states to embeddings and scores: what the engine gives is finished here, in
float32 on the host.

L2 norms, shortened (Matryoshka) embeddings, class probabilities, and the late-interaction score of
two token matrices (MaxSim, Khattab and Zaharia 2020). W width, L labels, N tokens."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing

import msgspec
import numpy as np
import numpy.typing as npt

from headrace.base.config.pooling import PoolingSpec
from headrace.base.errors import EngineError, InvalidRequest
from headrace.base.wire.pooling import RowPooling
from headrace.base.wire.request import SamplingParams
from headrace.front.client.events import Ended, Events, Generation, PooledPart
from headrace.front.text.tokenizer import Tokenizer

Float32 = npt.NDArray[np.float32]

NO_TOKENS = SamplingParams(max_tokens=0, temperature=0.0)
"""The sampling side of a request that only pools."""


class PooledAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt's pooled hidden states, float32 [rows, width]: one row, or one per prompt
    token."""

    values: Float32
    num_prompt: int
    num_cached: int


def pooling_generation(prompt_ids: list[int], pooling: RowPooling) -> Generation:
    """A generation that pools its prompt; the caller adds label, tenant and deadline."""
    return Generation(prompt_ids=prompt_ids, params=NO_TOKENS, pooling=pooling)


def behind_lead(ids: Sequence[int], spec: PoolingSpec, tokenizer: Tokenizer) -> int:
    """The first token of a text that has a share in its mean."""
    for lead in spec.leads:
        wanted = [tokenizer.token_id(token) for token in lead]
        for at in range(len(ids) - len(wanted) + 1):
            if ids[at] == wanted[0] and list(ids[at : at + len(wanted)]) == wanted:
                if (first := at + len(wanted)) == len(ids):
                    raise InvalidRequest("the text is empty behind its instruction", field="input")
                return first
    return 0


async def fold_pooled(events: Events, *, num_prompt: int) -> PooledAnswer:
    """The fold of the events of one pooled generation, which end with it."""
    parts: dict[int, Float32] = {}
    num_cached = 0
    async with aclosing(events):
        async for event in events:
            match event:
                case PooledPart():
                    parts[event.start] = event.values
                case Ended():
                    num_cached = event.num_cached
    if not parts:
        raise EngineError("the engine gave no hidden states")
    values = np.concatenate([parts[start] for start in sorted(parts)])
    return PooledAnswer(values=values, num_prompt=num_prompt, num_cached=num_cached)


def finish_embedding(vectors: Float32, *, dimensions: int | None, normalize: bool) -> Float32:
    """Each row cut to its first `dimensions` values, then scaled to length 1; a zero vector
    stays."""
    width = vectors.shape[-1]
    if dimensions is not None:
        if dimensions > width:
            raise InvalidRequest(
                f"dimensions: {dimensions} given; the model's embeddings have {width}",
                field="dimensions",
            )
        vectors = vectors[..., :dimensions]
    if not normalize:
        return vectors
    length = np.linalg.norm(vectors, axis=-1, keepdims=True)
    scaled: Float32 = vectors / np.maximum(length, 1e-12)
    return scaled


def probabilities(logits: Float32, activation: str) -> Float32:
    """Class scores from logits [..., L] by "sigmoid", "softmax" or "none"."""
    if activation == "sigmoid":
        return np.reciprocal(1.0 + np.exp(-np.clip(logits, -88.0, 88.0)), dtype=np.float32)
    if activation == "softmax":
        wide: Float32 = np.exp(logits - logits.max(axis=-1, keepdims=True))
        shares: Float32 = wide / wide.sum(axis=-1, keepdims=True)
        return shares
    return logits


def max_sim(query: Float32, document: Float32) -> float:
    """The sum over query tokens of the greatest dot product with a document token."""
    return float((query @ document.T).max(axis=1).sum())
