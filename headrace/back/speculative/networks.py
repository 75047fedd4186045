"""Drafters with weights, by method: what their checkpoints are called and hold, and how they are
built over a loaded model and loaded. A pair that cannot work is a ConfigError that names the
numbers.

Names are those of published checkpoints: EAGLE-3 (`midlayer`, or `layers.0` as the speculators
library writes it), EAGLE, and multi-token prediction as it lies in the model's own checkpoint, of
which there are three ways (`MTP_NAMES`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

import torch

from headrace.back.attention.plan import LAST
from headrace.back.layers.attention import AttentionSpec
from headrace.back.layers.mlp import GatedMLPSpec
from headrace.back.layers.norm import PRE, RMS
from headrace.back.layers.rope import read_rope
from headrace.back.layers.scope import Scope
from headrace.back.models.blocks import Decoder, DecoderSpec, plain_attention, read_sizes
from headrace.back.models.decoder_layer import DecoderSizes, LayerSpec
from headrace.back.models.load import LoadReport, load_model
from headrace.back.models.registry import DTYPES, build_model
from headrace.back.parallel.mesh import Mesh
from headrace.back.speculative.dflash import load_dflash
from headrace.back.speculative.draft_model import DraftModel
from headrace.back.speculative.drafter_place import (
    BuildNetwork,
    DrafterPlace,
    check_width,
    checked_taps,
    load_part_of,
    names_of,
    reader_of,
    refused,
)
from headrace.back.speculative.dspark import load_dspark
from headrace.back.speculative.heads import DraftHead, HeadSpec, PairLayerSpec
from headrace.back.speculative.medusa import load_medusa
from headrace.back.speculative.mlp_speculator import load_mlp_speculator
from headrace.back.speculative.network import BlockDrafts, DraftNetwork
from headrace.base.config.hf import ConfigReader
from headrace.base.config.resolved import SpeculationSpec

ANYTHING_ELSE = r"(?!{prefix}\.).*"
MASK_KEYS = ("pard_token", "ptd_token_id", "mask_token_id")
"""Of the config of a draft model that drafts all tokens at once: what stands for open places."""


def load_network(
    speculation: SpeculationSpec,
    target: object,
    *,
    device: torch.device,
    block_tokens: int,
) -> tuple[DraftNetwork, LoadReport]:
    """The network of a method that has one, over a loaded model. Where ranks share that, each has
    the whole network, and drafts what the others draft: a draft is too little work to share."""
    if not isinstance(target, Decoder) or not target.taps_until:
        raise refused(f"method {speculation.method!r} needs a plain decoder as its model")
    assert speculation.model is not None
    place = DrafterPlace(
        spec=speculation.model,
        target=target,
        device=device,
        block_tokens=block_tokens,
        verify_queries=1 + speculation.num_tokens,
        num_drafts=speculation.num_tokens,
        parallel=speculation.parallel,
    )
    return NETWORKS[speculation.method](place)


def _draft_model(place: DrafterPlace) -> tuple[DraftNetwork, LoadReport]:
    model, report = load_model(
        place.spec,
        mesh=Mesh(),
        device=place.device,
        block_tokens=place.block_tokens,
        verify_queries=place.verify_queries,
    )
    ours, theirs = model.logits_width, place.target.logits_width
    if ours != theirs:
        raise refused(f"the draft model knows {ours} tokens, the model {theirs}")
    if not isinstance(model, Decoder) or model.state != "plain" or model.host_kernels:
        raise refused(f"a draft model of family {place.spec.family} cannot run inside a step")
    block = _parallel(place) if place.parallel else None
    return DraftModel(model, place.device, DTYPES[place.spec.dtype], block), report


def _parallel(place: DrafterPlace) -> BlockDrafts:
    """Drafts of one pass, by the config's mask."""
    config = place.spec.config
    mask = next((config[key] for key in MASK_KEYS if config.get(key) is not None), None)
    if not isinstance(mask, int) or not 0 <= mask < place.target.logits_width:
        raise refused(
            f"parallel_drafting: {place.spec.path} names no token for open places "
            f"({', '.join(MASK_KEYS)}: {mask!r})"
        )
    return BlockDrafts(mask=mask, whole=False, ahead=True)


def _head(place: DrafterPlace, spec_of: Callable[[Scope], HeadSpec]) -> BuildNetwork:
    return lambda scope: DraftHead(scope, spec_of(scope), place.target)


def _eagle3(place: DrafterPlace) -> tuple[DraftNetwork, LoadReport]:
    reader, names = reader_of(place.spec), names_of(place.spec)
    sizes = _head_sizes(reader, place.target)
    vocabulary = reader.raw.get("draft_vocab_size") or place.spec.config.get("draft_vocab_size")
    known = int(vocabulary or place.target.logits_width)
    own_head: tuple[str, int] | None = ("lm_head", known)
    if names is not None and "lm_head.weight" not in names:
        own_head = ("", known) if known != place.target.logits_width else None
    if own_head == ("", known) and not _shares_rows(place.target.spec):
        raise refused(
            f"{place.spec.path} holds no lm_head.weight for its {known} tokens, and the model's "
            "head is not its embedding"
        )
    taps = _taps(place)

    def spec_of(scope: Scope) -> HeadSpec:
        bias = reader.bool("attention_bias", False)
        rope = read_rope(reader, head_dim=sizes.head_dim, max_positions=scope.max_positions)
        plain = {**plain_attention(sizes), "width": 2 * sizes.width}
        attention = AttentionSpec(**plain, rope=rope, qkv_bias=bias, out_width=sizes.width)
        return HeadSpec(
            sizes=sizes,
            taps=taps,
            layer="midlayer",
            layer_spec=PairLayerSpec(attention=attention, feed_forward=GatedMLPSpec()),
            joint=None,
            norms=RMS,
            norm="norm",
            own_head=own_head,
            fc_bias=names is not None and "fc.bias" in names,
        )

    ignored = ("t2d", r"embed_tokens\.weight", *(() if known != _width(place) else ("d2t",)))
    renamed = ((r"^layers\.0\.", "midlayer."),)
    return load_part_of(place, _head(place, spec_of), ignored, renamed=renamed)


def _eagle(place: DrafterPlace) -> tuple[DraftNetwork, LoadReport]:
    reader, names = reader_of(place.spec), names_of(place.spec)
    sizes = _head_sizes(reader, place.target)

    def spec_of(scope: Scope) -> HeadSpec:
        bias = reader.bool("attention_bias", False)
        rope = read_rope(reader, head_dim=sizes.head_dim, max_positions=scope.max_positions)
        attention = AttentionSpec(**plain_attention(sizes), rope=rope, qkv_bias=bias)
        return HeadSpec(
            sizes=sizes,
            taps=(LAST,),
            layer="layers.0",
            layer_spec=LayerSpec(mixer=attention, placement=replace(PRE, before_attention=None)),
            joint=("fc", None, None),
            norms=RMS,
            norm=None,
            fc_bias=reader.bool("bias", True) if names is None else "fc.bias" in names,
        )

    return load_part_of(place, _head(place, spec_of), (r"(embed_tokens|lm_head)\.weight",))


@dataclass(frozen=True, kw_only=True)
class MtpNames:
    """How a checkpoint names its head for multi-token prediction. `prefix`: with {layers}, the
    number of the model's own; the others lie below it. `head`: its own output head, if it is not
    the model's over again. See HeadSpec."""

    prefix: str
    joint: tuple[str, str, str]
    norm: str
    layer: str = ""
    hidden_first: bool = False
    head: str | None = None

    @property
    def mark(self) -> str:
        """The tensor by which it is known."""
        return f"{self.prefix}.{self.head or self.joint[0]}.weight"


MTP_NAMES = (
    MtpNames(
        prefix="model.layers.{layers}",
        joint=("eh_proj", "enorm", "hnorm"),
        norm="transformer.shared_head.norm",
        head="transformer.shared_head.output",
    ),
    MtpNames(
        prefix="model.layers.{layers}",
        joint=("eh_proj", "enorm", "hnorm"),
        norm="shared_head.norm",
    ),
    MtpNames(
        prefix="model.mtp_layers.0",
        joint=("input_proj", "token_layernorm", "hidden_layernorm"),
        norm="final_layernorm",
        hidden_first=True,
    ),
    MtpNames(
        prefix="mtp",
        joint=("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden"),
        norm="norm",
        layer="layers.0",
    ),
)
"""Step; DeepSeek-V3, GLM-4.5 and others; MiMo; Qwen."""


def _mtp(place: DrafterPlace) -> tuple[DraftNetwork, LoadReport]:
    names, layers = names_of(place.spec), place.target.spec.sizes.layers
    mtp = _mtp_names(names, layers)
    if mtp is None:
        raise refused(f"{place.spec.path} holds no head for multi-token prediction")
    within = place.spec.config.get("num_hidden_layers")
    decoder = _decoder_spec(place) if within != layers else place.target.spec
    sizes, prefix = decoder.sizes, mtp.prefix.format(layers=layers)
    check_width(sizes.width, sizes.vocabulary, place.target)

    def spec_of(scope: Scope) -> HeadSpec:
        return HeadSpec(
            sizes=sizes,
            taps=(LAST,),
            layer=mtp.layer,
            layer_spec=decoder.draft_layer or decoder.layers[-1],
            joint=mtp.joint,
            norms=decoder.norm,
            norm=mtp.norm,
            hidden_first=mtp.hidden_first,
            own_head=mtp.head and (mtp.head, sizes.vocabulary),
        )

    inside = re.escape(prefix)
    ignored = (
        ANYTHING_ELSE.format(prefix=inside),
        rf"{inside}\.(shared_head\.head|embed_tokens|lm_head)\.weight",
        *decoder.ignored,
    )
    ignored = tuple(one for one in ignored if not re.fullmatch(one, f"{prefix}.x"))
    return load_part_of(place, _head(place, spec_of), ignored, prefix=prefix)


def _mtp_names(names: Collection[str] | None, layers: int) -> MtpNames | None:
    """Those that a checkpoint uses."""
    if names is None:
        return MTP_NAMES[-1]
    return next((one for one in MTP_NAMES if one.mark.format(layers=layers) in names), None)


def _decoder_spec(place: DrafterPlace) -> DecoderSpec:
    """What the config of a head's own folder says of its layer."""
    planned = build_model(
        place.spec,
        mesh=Mesh(),
        device=torch.device("meta"),
        block_tokens=place.block_tokens,
        planned="cpu",
    )
    assert isinstance(planned, Decoder), place.spec.family
    return planned.spec


NETWORKS: dict[str, Callable[[DrafterPlace], tuple[DraftNetwork, LoadReport]]] = {
    "draft_model": _draft_model,
    "eagle3": _eagle3,
    "eagle": _eagle,
    "mtp": _mtp,
    "medusa": load_medusa,
    "mlp_speculator": load_mlp_speculator,
    "dflash": load_dflash,
    "dspark": load_dspark,
}
"""`SpeculationSpec.method` -> what loads its network."""


def _head_sizes(reader: ConfigReader, target: Decoder) -> DecoderSizes:
    sizes = read_sizes(reader)
    if sizes.layers != 1:
        raise refused(f"a head of {sizes.layers} layers; heads have 1")
    check_width(sizes.width, sizes.vocabulary, target)
    return sizes


def _taps(place: DrafterPlace) -> tuple[int, ...]:
    """In front of which layers: as the head's config says, or EAGLE-3's own choice."""
    config, layers = place.spec.config, place.target.spec.sizes.layers
    key = "eagle_aux_hidden_state_layer_ids"
    stated = config.get(key) or (config.get("eagle_config") or {}).get(key)
    taps = tuple(int(i) for i in stated) if stated else (2, layers // 2, layers - 3)
    return checked_taps(place, taps)


def _shares_rows(spec: DecoderSpec) -> bool:
    return spec.sizes.tied and spec.embedding_scale == 1.0


def _width(place: DrafterPlace) -> int:
    return place.target.logits_width
