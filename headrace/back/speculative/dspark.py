"""A block drafter whose drafts know each other (DSpark, arXiv 2607.05147): DFlash's pass over a
block, and behind it a Markov head, which adds to the logits of each place what the token before it
makes likely. So the network runs once for a block, and a product of low rank runs draft by draft.

    block:  x_QE as DFlash's, but each place says the token behind it: the newest token's place too
    draft:  token_i = argmax(U x_i + W2 W1[token_(i-1)]), U the model's output head

W1 [V, r], W2 [V, r], r the rank of the head. The authors' confidence heads, which foretell how far
a block stands, are not read: how many drafts pay is measured here. A pass has a place more than
drafts, as DFlash's; with a draft less than `block_size` it is the block that was trained.
"""

from __future__ import annotations

import torch

from headrace.back.kernels.norm_columns.op import OP as NORM_COLUMNS
from headrace.back.kernels.norm_columns.op import NormColumns, NormColumnsProblem
from headrace.back.layers.embedding import TokenEmbedding
from headrace.back.layers.logits import LogitsHead
from headrace.back.layers.scope import Scope, not_loaded
from headrace.back.models.blocks import Decoder
from headrace.back.models.load import LoadReport
from headrace.back.speculative.dflash import SHARED, DFlashHead, check_block, dflash_spec
from headrace.back.speculative.drafter_place import DrafterPlace, load_part_of, refused
from headrace.back.speculative.network import BlockDrafts, DraftNetwork


class MarkovHead:
    """A `ChainedChoice` (network.py)."""

    def __init__(self, scope: Scope, vocabulary: int, rank: int, target: Decoder) -> None:
        self._scope, self._target, self._vocabulary = scope, target, vocabulary
        self._before = TokenEmbedding(scope / "markov_w1", vocabulary, rank)
        self._behind = LogitsHead(scope / "markov_w2", vocabulary, rank)
        self._add: NormColumns = not_loaded
        scope.on_finish(self._finish)

    def _finish(self) -> None:
        kind = self._scope.kind
        problem = NormColumnsProblem(
            device=kind, dtype=torch.float32, width=self._vocabulary, eps=None
        )
        self._add = self._scope.bind(NORM_COLUMNS, problem, None)

    def behind(self, logits_RV: torch.Tensor, token_R: torch.Tensor) -> torch.Tensor:
        """See ChainedChoice."""
        sum_RV = logits_RV.new_empty(logits_RV.shape)
        self._add(logits_RV, sum_RV, 0, self._behind.logits(self._before.lookup(token_R)))
        return sum_RV


def load_dspark(place: DrafterPlace) -> tuple[DraftNetwork, LoadReport]:
    """The drafter of a checkpoint, by the names of the method's authors."""
    check_block(place, ahead=True)
    rank, vocabulary = _markov_rank(place), place.target.logits_width

    def build(scope: Scope) -> DFlashHead:
        spec = dflash_spec(place, scope)
        choice = MarkovHead(scope / "markov_head", vocabulary, rank, place.target) if rank else None
        block = BlockDrafts(mask=spec.mask, whole=True, ahead=True, choice=choice)
        return DFlashHead(scope, spec, place.target, block)

    return load_part_of(place, build, (*SHARED, r"confidence_head\..*", "t2d"))


def _markov_rank(place: DrafterPlace) -> int:
    """r, 0 where the drafts do not know each other; ConfigError for heads of other kinds."""
    config, path = place.spec.config, place.spec.path
    kind = str(config.get("markov_head_type") or "vanilla").lower()
    rank = config.get("markov_rank") or 0
    if not isinstance(rank, int) or rank < 0:
        raise refused(f"{path}: markov_rank is {rank!r}, a number of 0 at least is wanted")
    if rank and kind != "vanilla":
        raise refused(f"{path}: markov_head_type is {kind!r}; only vanilla heads are read")
    known = config.get("draft_vocab_size") or place.target.logits_width
    if known != place.target.logits_width:
        raise refused(
            f"{path}: draft_vocab_size is {known}, the model knows {place.target.logits_width} "
            "tokens; both must be equal"
        )
    return rank
