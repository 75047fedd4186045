"""How a checkpoint pools: by its modules, by the layout of its authors, or by its architecture's
name alone (back/models/pooling_families.py)."""

from __future__ import annotations

from pathlib import Path

import msgspec

from headrace.back.models.pooling_families import (
    BGE_M3,
    GRITLM,
    JINA_RANKING,
    SPLADE,
    VOYAGE,
    WEIGH_WORDS,
)
from headrace.base.config.hf import ConfigReader
from headrace.base.config.pooling import DenseSpec
from headrace.base.errors import CheckpointError
from headrace.launch.colbert import matrix_of, read_colbert
from headrace.launch.late_vision import read_late_vision
from headrace.launch.pooling_modules import Modules, read_modules
from headrace.launch.two_towers import read_two_towers

RANKING_TOKENS = ("<|embed_token|>", "<|rerank_token|>")
"""What stands behind each document and behind the query where Jina's reranker reads them."""
_EMBED = ("|", "embed", "|", ">", "<0x0A>")
GRIT_LEADS = (("\u2581<", *_EMBED), ("<0x0A>", "<", *_EMBED))
"""What stands before a text that GritLM embeds, by itself or behind an instruction."""
LEXICAL = Modules(how="lexical", normalize=False)


def modules_of(folder: Path, config: ConfigReader, whole: ConfigReader) -> Modules | None:
    """What follows the layers; None: nothing says so. `config`: of the text part of `whole`."""
    stated = (
        read_modules(folder)
        or read_colbert(folder, config)
        or read_late_vision(folder, whole)
        or read_two_towers(folder, whole)
    )
    return _by_name(folder, config, stated)


def head_of(head: str, family: str, modules: Modules | None, where: str) -> str:
    """The head behind the layers, `head` unless modules say otherwise."""
    if modules is None or modules.how != LEXICAL.how:
        return head
    if family not in WEIGH_WORDS:
        raise CheckpointError(
            f"{where}: weights of words (SPLADE) are read of {', '.join(WEIGH_WORDS)}, not of {family}",
            field="architectures",
        )
    return "words"


def _by_name(folder: Path, config: ConfigReader, stated: Modules | None) -> Modules | None:
    """What an architecture of these pools; `stated`: what modules.json says, which goes on holding
    beside it, and is the answer for any other architecture."""
    named = config.list("architectures", (), of=str)[:1]
    if named == (JINA_RANKING,):
        first = _dense(folder, "projector.0", activation="relu")
        dense = (first, _dense(folder, "projector.2"))
        return Modules(how="tokens", normalize=True, dense=dense, listwise=RANKING_TOKENS)
    if named == (VOYAGE,):
        known = stated or Modules(how="mean", normalize=True)
        linear = (_dense(folder, "linear", of="pooled"),)
        return msgspec.structs.replace(known, dense=known.dense or linear)
    if named == (BGE_M3,):
        return _bge_m3(folder, config, stated or Modules(how="cls", normalize=True))
    if named == (GRITLM,):
        known = stated or Modules(how="mean", normalize=True)
        return msgspec.structs.replace(known, leads=GRIT_LEADS)
    return LEXICAL if named == (SPLADE,) else stated


def _bge_m3(folder: Path, config: ConfigReader, stated: Modules) -> Modules:
    """One vector for a text, one for each token but the first, and a weight for each token but the
    first and the last (Chen et al. 2024)."""
    ends = config.int("bos_token_id", 0, ge=0), config.int("eos_token_id", 2, ge=0)
    dense = (
        _dense(folder, "colbert_linear"),
        _dense(folder, "sparse_linear", of="weights", activation="relu"),
    )
    return msgspec.structs.replace(stated, dense=dense, ends=ends)


def _dense(
    folder: Path, name: str, *, of: str = "tokens", activation: str = "identity"
) -> DenseSpec:
    """A matrix beside the model's own tensors, of the size that it has."""
    _, (outputs, inputs), bias = matrix_of(folder, f"{name}.weight")
    return DenseSpec(
        path="",
        name=name,
        inputs=inputs,
        outputs=outputs,
        bias=bias,
        activation=activation,
        of=of,
    )
