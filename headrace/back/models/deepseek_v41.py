"""DeepSeek V4.1: V4 whose layers share compressed caches and the choices among them, with streams
that a branch reads by the weights of the one before, and tables of n-grams at some layers. Its
tower and drafters are not read."""

from __future__ import annotations

from dataclasses import replace

from headrace.back.layers.compressed_attention import CompressedAttentionSpec
from headrace.back.layers.compressed_entries import GroupIndexSpec
from headrace.back.layers.engram import EngramSpec
from headrace.back.layers.scope import Scope
from headrace.back.layers.shared_entries import (
    BestBlocks,
    BlockSpec,
    EntryGroup,
    SharedEntriesSpec,
)
from headrace.back.layers.single_pass_streams import SinglePassSpec
from headrace.back.models.blocks import Decoder, DecoderSizes, DecoderSpec, read_sizes
from headrace.back.models.deepseek_v4 import (
    DRAFTS,
    NAMES,
    RENAMED,
    experts_of,
    rope_of,
    streams_of,
)
from headrace.back.models.hyper_layer import HyperLayerSpec
from headrace.base.config.hf import ConfigReader
from headrace.base.config.resolved import Decision

IGNORED = (
    *DRAFTS,
    r"(vision|aligner)\..*",
    r"image_(start|end|newline)",
    r".*\.ffn\.gate\.bias_vl",  # for tokens of images
)
TEXT_ALONE = Decision("model.parts", "auto", "text", "images are not read")
CLASSES = "engram_token_classes"
"""The class of each token, added to the config by its tokenizer (launch/token_classes.py)."""


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """DeepseekV41ForCausalLM, by the keys of its text part (expert_keys.py)."""
    if config.raw.get("vision_config"):
        scope.ledger.note(TEXT_ALONE)
    if config.float("gate_temp", 1.0) != 1.0:
        raise config.wrong("gate_temp", "1")
    inner = config.int("moe_intermediate_size", ge=1)
    sizes = read_sizes(config, inner=inner, kv_heads=1)
    streams = SinglePassSpec(hyper=streams_of(config, sizes.eps))
    entries = shared_entries(config, sizes.layers)
    engrams = _engrams(config, sizes)
    layers = tuple(
        HyperLayerSpec(
            mixer=_attention(scope, config, sizes, entries[layer]),
            feed_forward=experts_of(config, inner, bias=True),
            streams=streams,
            ngrams=engrams.get(layer),
        )
        for layer in range(sizes.layers)
    )
    spec = DecoderSpec(
        sizes=sizes, layers=layers, streams=streams, names=NAMES, renamed=RENAMED, ignored=IGNORED
    )
    return Decoder(scope, spec)


def _attention(
    scope: Scope, config: ConfigReader, sizes: DecoderSizes, over: SharedEntriesSpec | None
) -> CompressedAttentionSpec:
    groups = config.int("o_groups", 8, ge=1)
    if sizes.heads % groups:
        raise config.wrong("o_groups", f"a divisor of num_attention_heads ({sizes.heads})")
    rope = rope_of(scope, config, sizes, compressed=over is not None)
    if config.int("index_head_dim", 128, ge=1) < rope.rotary_dim:
        raise config.wrong("index_head_dim", f"at least qk_rope_head_dim ({rope.rotary_dim})")
    return CompressedAttentionSpec(
        width=sizes.width,
        heads=sizes.heads,
        head_dim=sizes.head_dim,
        q_rank=config.int("q_lora_rank", ge=1),
        out_groups=groups,
        out_rank=config.int("o_lora_rank", 1024, ge=1),
        window=config.int("sliding_window", 128, ge=1),
        rope=rope,
        eps=sizes.eps,
        head_norm=False,
        compression=over,
    )


def shared_entries(config: ConfigReader, layers: int) -> list[SharedEntriesSpec | None]:
    """Of each layer, by `compress_ratios` and the lists of sources, whether it makes entries,
    chooses among them or reads what was chosen; None: it has a window alone."""
    ratios = config.list("compress_ratios", of=int)
    if len(ratios) < layers or min(ratios) < 0:
        raise config.wrong("compress_ratios", f"{layers} numbers, 0 of a window alone")
    makers = config.list("kv_source_layer_ids", of=int)
    choosers = config.list("index_source_layer_ids", of=int)
    if not set(makers) <= set(choosers):
        raise config.wrong("index_source_layer_ids", f"all of kv_source_layer_ids ({makers})")
    index = GroupIndexSpec(
        heads=config.int("index_n_heads", 32, ge=1),
        dim=config.int("index_head_dim", 128, ge=1),
        top_groups=config.int("index_topk", 512, ge=1),
    )
    first = config.int("candidate_source_layer_id", -1)
    blocks = None if first < 0 else _blocks(config, index)
    specs: list[SharedEntriesSpec | None] = []
    among, maker = EntryGroup(), -1
    for layer, ratio in enumerate(ratios[:layers]):
        if layer in makers:
            among, maker = EntryGroup(), layer
        if ratio:
            _check_source(config, layer, maker, first)
        narrows = blocks is not None and layer >= first
        over = SharedEntriesSpec(
            group=ratio,
            top_groups=index.top_groups,
            among=among,
            makes=layer in makers,
            index=index if layer in choosers else None,
            blocks=replace(blocks, narrows=layer == first) if blocks and narrows else None,
        )
        specs.append(over if ratio else None)
    return specs


def _check_source(config: ConfigReader, layer: int, maker: int, first: int) -> None:
    """`maker`: whose entries the layer reads, -1: nobody's; `first`: the layer whose blocks bind
    those behind it, -1: none does."""
    ratios = config.list("compress_ratios", of=int)
    if maker < 0 or ratios[maker] != ratios[layer]:
        needed = f"one up to layer {layer} with its ratio ({ratios[layer]})"
        raise config.wrong("kv_source_layer_ids", needed)
    if 0 <= first <= layer and maker != first:
        needed = f"the last of kv_source_layer_ids ({maker})"
        raise config.wrong("candidate_source_layer_id", needed)


def _blocks(config: ConfigReader, index: GroupIndexSpec) -> BlockSpec:
    blocks = BlockSpec(
        most=config.int("candidate_topk_blocks", 2048, ge=1),
        entries=config.int("candidate_block_size", 8, ge=1),
        narrows=True,
        best=BestBlocks(),
    )
    if blocks.most * blocks.entries < index.top_groups:
        raise config.wrong(
            "candidate_topk_blocks", f"so many that they hold index_topk ({index.top_groups})"
        )
    return blocks


def _engrams(config: ConfigReader, sizes: DecoderSizes) -> dict[int, EngramSpec]:
    """Those of the layers that have one."""
    layers = config.list("engram_layer_ids", [], of=int) or []
    if not layers:
        return {}
    rows = config.list("engram_num_embeddings", of=int, length=len(layers))
    count = config.int("engram_compressed_vocab_size", ge=1)
    classes = config.list(CLASSES, None, of=int)
    if classes is None:
        if count != sizes.vocabulary:
            raise config.wrong(
                "engram_compressed_vocab_size",
                f"{sizes.vocabulary}, or a tokenizer.json beside config.json that says which "
                "tokens read alike",
            )
        classes = list(range(count))
    if len(classes) < sizes.vocabulary:
        classes = [*classes, *[0] * (sizes.vocabulary - len(classes))]
    pad = config.int("engram_pad_token_id", 2, aliases=("engram_pad_id",), ge=0)
    if pad >= sizes.vocabulary:
        raise config.wrong("engram_pad_token_id", f"below vocab_size ({sizes.vocabulary})")
    specs = {}
    for index, layer in enumerate(layers):
        spec = EngramSpec(
            streams=config.int("hc_mult", 4, ge=1, le=16),
            layer=layer,
            index=index,
            classes=classes,
            num_classes=count,
            pad=classes[pad],
            longest=config.int("engram_max_ngram_size", 4, ge=2, le=16),
            heads=config.int("engram_n_heads", 8, ge=1),
            dim=config.int("engram_head_dim", 256, ge=1),
            base=config.int("engram_vocab_size", ge=1),
            rows=rows[index],
            eps=sizes.eps,
        )
        if sum(spec.sizes) > spec.rows:
            raise config.wrong("engram_num_embeddings", f"at least {sum(spec.sizes)} for {layer}")
        specs[layer] = spec
    return specs
