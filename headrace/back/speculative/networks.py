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
from contextlib import closing
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
from headrace.back.models.load import LoadReport, load_model, open_source
from headrace.back.models.load.part import load_part
from headrace.back.models.registry import DTYPES, build_model, scope_of
from headrace.back.models.weights import WeightPlan
from headrace.back.parallel.mesh import Mesh
from headrace.back.quant.stored import Stored
from headrace.back.speculative.draft_model import DraftModel
from headrace.back.speculative.heads import DraftHead, HeadSpec, PairLayerSpec
from headrace.back.speculative.network import DraftNetwork
from headrace.base.config.hf import ConfigReader
from headrace.base.config.resolved import Decision, ModelSpec, SpeculationSpec
from headrace.base.errors import ConfigError

ANYTHING_ELSE = r"(?!{prefix}\.).*"
FIELD = "speculative_config"


@dataclass(frozen=True, kw_only=True)
class DrafterPlace:
    """What all methods build with: the drafter's checkpoint, the loaded model, the device."""

    spec: ModelSpec
    target: Decoder
    mesh: Mesh
    device: torch.device
    block_tokens: int
    verify_queries: int


def load_network(
    speculation: SpeculationSpec,
    target: object,
    *,
    mesh: Mesh,
    device: torch.device,
    block_tokens: int,
) -> tuple[DraftNetwork, LoadReport]:
    """The network of a method that has one, over a loaded model."""
    if not isinstance(target, Decoder) or not target.taps_until:
        raise _refused(f"method {speculation.method!r} needs a plain decoder as its model")
    assert speculation.model is not None
    place = DrafterPlace(
        spec=speculation.model,
        target=target,
        mesh=mesh,
        device=device,
        block_tokens=block_tokens,
        verify_queries=1 + speculation.num_tokens,
    )
    return NETWORKS[speculation.method](place)


def _draft_model(place: DrafterPlace) -> tuple[DraftNetwork, LoadReport]:
    model, report = load_model(
        place.spec,
        mesh=place.mesh,
        device=place.device,
        block_tokens=place.block_tokens,
        verify_queries=place.verify_queries,
    )
    ours, theirs = model.logits_width, place.target.logits_width
    if ours != theirs:
        raise _refused(f"the draft model knows {ours} tokens, the model {theirs}")
    if not isinstance(model, Decoder) or model.state != "plain" or model.host_kernels:
        raise _refused(f"a draft model of family {place.spec.family} cannot run inside a step")
    return DraftModel(model, place.device, DTYPES[place.spec.dtype]), report


def _eagle3(place: DrafterPlace) -> tuple[DraftNetwork, LoadReport]:
    reader, names = _reader(place.spec), _names(place.spec)
    sizes = _head_sizes(reader, place.target)
    vocabulary = reader.raw.get("draft_vocab_size") or place.spec.config.get("draft_vocab_size")
    known = int(vocabulary or place.target.logits_width)
    own_head: tuple[str, int] | None = ("lm_head", known)
    if names is not None and "lm_head.weight" not in names:
        own_head = ("", known) if known != place.target.logits_width else None
    if own_head == ("", known) and not _shares_rows(place.target.spec):
        raise _refused(
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
    return _load_head(place, spec_of, ignored, renamed=((r"^layers\.0\.", "midlayer."),))


def _eagle(place: DrafterPlace) -> tuple[DraftNetwork, LoadReport]:
    reader, names = _reader(place.spec), _names(place.spec)
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

    return _load_head(place, spec_of, (r"(embed_tokens|lm_head)\.weight",))


@dataclass(frozen=True, kw_only=True)
class MtpNames:
    """How a checkpoint names its head for multi-token prediction. `prefix`: with {layers}, the
    number of the model's own; the others lie below it. See HeadSpec."""

    prefix: str
    joint: tuple[str, str, str]
    norm: str
    layer: str = ""
    hidden_first: bool = False


MTP_NAMES = (
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
"""DeepSeek-V3, GLM-4.5 and others; MiMo; Qwen."""


def _mtp(place: DrafterPlace) -> tuple[DraftNetwork, LoadReport]:
    names, layers = _names(place.spec), place.target.spec.sizes.layers
    mtp = _mtp_names(names, layers)
    if mtp is None:
        raise _refused(f"{place.spec.path} holds no head for multi-token prediction")
    within = place.spec.config.get("num_hidden_layers")
    decoder = _decoder_spec(place) if within != layers else place.target.spec
    sizes, prefix = decoder.sizes, mtp.prefix.format(layers=layers)
    _check_width(sizes.width, sizes.vocabulary, place.target)

    def spec_of(scope: Scope) -> HeadSpec:
        return HeadSpec(
            sizes=sizes,
            taps=(LAST,),
            layer=mtp.layer,
            layer_spec=decoder.layers[-1],
            joint=mtp.joint,
            norms=decoder.norm,
            norm=mtp.norm,
            hidden_first=mtp.hidden_first,
        )

    inside = re.escape(prefix)
    ignored = (
        ANYTHING_ELSE.format(prefix=inside),
        rf"{inside}\.(shared_head\.head|embed_tokens|lm_head)\.weight",
        *decoder.ignored,
    )
    ignored = tuple(one for one in ignored if not re.fullmatch(one, f"{prefix}.x"))
    return _load_head(place, spec_of, ignored, prefix=prefix)


def _mtp_names(names: Collection[str] | None, layers: int) -> MtpNames | None:
    """Those that a checkpoint uses."""
    for one in MTP_NAMES:
        joint = f"{one.prefix.format(layers=layers)}.{one.joint[0]}.weight"
        if names is None or joint in names:
            return one
    return None


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
}
"""`SpeculationSpec.method` -> what loads its network."""


class LoadableHead(DraftHead):
    """A head with what the loader asks for."""

    def __init__(self, scope: Scope, spec: HeadSpec, target: Decoder, plan: WeightPlan) -> None:
        super().__init__(scope, spec, target)
        self._ledger = scope.ledger
        self.weights = replace(plan, params=tuple(scope.ledger.params))
        self.decisions: tuple[Decision, ...] = ()

    def finish_load(self) -> None:
        """See Loadable."""
        self._ledger.finish()
        self.decisions = self._ledger.decisions()
        if self._ledger.host_kernels():
            raise _refused(f"{self._ledger.host_kernels()[0]} needs the host in every step")


def _load_head(
    place: DrafterPlace,
    spec_of: Callable[[Scope], HeadSpec],
    ignored: tuple[str, ...],
    *,
    renamed: tuple[tuple[str, str], ...] = (),
    prefix: str = "",
) -> tuple[DraftNetwork, LoadReport]:
    plan = WeightPlan(params=(), ignored=ignored, renamed=renamed)

    def make(where: torch.device, stored: Stored | None = None) -> LoadableHead:
        scope = scope_of(
            place.spec,
            mesh=place.mesh,
            device=where,
            block_tokens=place.block_tokens,
            verify_queries=place.verify_queries,
            stored=stored,
        )
        inside = scope / prefix if prefix else scope
        return LoadableHead(inside, spec_of(scope), place.target, plan)

    return load_part(place.spec, make, device=place.device)


def _reader(spec: ModelSpec) -> ConfigReader:
    """The config of the head's layer."""
    where = f"{spec.path}/config.json"
    inner = spec.config.get("transformer_layer_config")
    return ConfigReader(spec.config if inner is None else inner, where)


def _names(spec: ModelSpec) -> Collection[str] | None:
    """The tensors of a checkpoint; None: it is made up."""
    if spec.format == "dummy":
        return None
    with closing(open_source(spec)) as source:
        return set(source.entries)


def _head_sizes(reader: ConfigReader, target: Decoder) -> DecoderSizes:
    sizes = read_sizes(reader)
    if sizes.layers != 1:
        raise _refused(f"a head of {sizes.layers} layers; heads have 1")
    _check_width(sizes.width, sizes.vocabulary, target)
    return sizes


def _check_width(width: int, vocabulary: int, target: Decoder) -> None:
    theirs = target.spec.sizes.width
    if width != theirs:
        raise _refused(f"the head's hidden size is {width}, the model's {theirs}")
    if vocabulary != target.logits_width:
        raise _refused(
            f"the head is of a model of {vocabulary} tokens, this one knows {target.logits_width}"
        )


def _taps(place: DrafterPlace) -> tuple[int, ...]:
    """In front of which layers: as the head's config says, or EAGLE-3's own choice."""
    config, layers = place.spec.config, place.target.spec.sizes.layers
    key = "eagle_aux_hidden_state_layer_ids"
    stated = config.get(key) or (config.get("eagle_config") or {}).get(key)
    taps = tuple(int(i) for i in stated) if stated else (2, layers // 2, layers - 3)
    last = min(place.target.taps_until, layers)
    if len(set(taps)) != len(taps) or not all(0 <= layer < last for layer in taps):
        raise _refused(
            f"the head reads hidden states in front of layers {', '.join(map(str, taps))}, "
            f"the model has layers 0 to {last - 1}"
        )
    return taps


def _shares_rows(spec: DecoderSpec) -> bool:
    return spec.sizes.tied and spec.embedding_scale == 1.0


def _width(place: DrafterPlace) -> int:
    return place.target.logits_width


def _refused(reason: str) -> ConfigError:
    return ConfigError(f"--speculative-config: {reason}", field=FIELD)
