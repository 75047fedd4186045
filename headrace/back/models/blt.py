"""BLT, the Byte Latent Transformer (Pagnoni et al. 2024, arXiv:2412.09871; transformers 5.23,
modeling_blt.py): bytes are grouped into patches, which a large decoder reads one by one.

    patcher   a small decoder over the bytes: where its entropy is above the threshold, a patch ends
    encoder   layers over the bytes, whose embeddings hashes of n-grams add to; each patch that ends
              becomes S vectors, which read its bytes
    global    layers over the patches
    decoder   layers over the encoder's bytes, each of which reads the newest patch that has ended

Nothing depends on later bytes, so that all of it is cached. The n-th patch lies where the n-th byte
of its row does, in blocks of kind "patches" that are never shared: which text it is, later bytes
than those of the block say. Of a patch that is still open, the bytes' hidden states are kept.

T bytes, E hidden size, P patches, S vectors of a patch, N longest n-gram.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from headrace.back.attention.forms import CacheForm, LatentForm
from headrace.back.attention.plan import AttentionPlan, Batch
from headrace.back.kernels.upload import to_device
from headrace.back.layers.adapters import AdapterSlots
from headrace.back.layers.attention import AttentionSpec
from headrace.back.layers.byte_hashes import ByteHashes, ByteHashSpec
from headrace.back.layers.byte_patches import EndedPatches, PatchAttention, ended_patches, slots_of
from headrace.back.layers.embedding import TokenEmbedding
from headrace.back.layers.group_choice import write_rows
from headrace.back.layers.linear import WholeLinear, add_norm
from headrace.back.layers.logits import LogitsHead, TopOf
from headrace.back.layers.ngram_inputs import values_before
from headrace.back.layers.norm import RMS
from headrace.back.layers.rope import read_rope
from headrace.back.layers.scope import Scope
from headrace.back.layers.vision.encoder import MediaEncoder
from headrace.back.models.blocks import LayerSpec, plain_attention, read_sizes
from headrace.back.models.decoder_layer import DecoderSizes, Layer, Stream
from headrace.back.models.weights import WeightPlan
from headrace.base.config.hf import ConfigReader
from headrace.base.config.resolved import Decision
from headrace.base.errors import ConfigError

PATCHES = "patches"
"""The kind of the global layers' caches (core/kv/kinds.py)."""
IGNORED = (r".*\.rotary_emb\.inv_freq", r"model\.local_encoder\.cross_attn_layers\.\d+\..*")
"""Of the encoder's cross-attentions only the last one's result is read."""


@dataclass(frozen=True, kw_only=True)
class _Part:
    """One of the four decoders: its sizes and its layers, whose first cache has an id."""

    sizes: DecoderSizes
    layers: tuple[Layer, ...]

    @property
    def forms(self) -> tuple[CacheForm, ...]:
        """Of the layers' caches."""
        return tuple(form for layer in self.layers for form in layer.kv_forms)

    def pass_through(self, x_TE: torch.Tensor, batch: Batch) -> torch.Tensor:
        """The residual behind all layers; x_TE is overwritten."""
        stream: Stream = None, x_TE
        for layer in self.layers:
            stream = layer.forward(stream, batch, last=False)
        return add_norm(None, *stream)

    def attention(self, scope: Scope) -> PatchAttention:
        """Between bytes and patches, with the sizes of this part."""
        sizes = self.sizes
        return PatchAttention(
            scope,
            sizes.width,
            heads=sizes.heads,
            kv_heads=sizes.kv_heads,
            head_dim=sizes.head_dim,
            eps=sizes.eps,
        )


class BltModel:
    """`back/models/protocol.py: LoadableModel`. See the top of the file."""

    generates = True
    attention_heads = encoder_tokens = 0
    state = "texts"
    media: MediaEncoder | None = None
    adapters: AdapterSlots | None = None

    def __init__(self, scope: Scope, config: ConfigReader) -> None:
        self._scope, inside = scope, scope / "model"
        self.logits_width = vocabulary = config.int("vocab_size", ge=1)
        self._threshold = config.float("patching_threshold", 1.335442066192627)
        self._vectors = vectors = config.int("cross_attn_k", 2, ge=1)
        window = _window(config, "local_attention_window_len")
        self.kv_forms: tuple[CacheForm, ...] = ()
        self._build_patcher(inside / "patcher", config)
        at = inside / "local_encoder"
        self._encoder = self._part(at, config, "encoder_config", window)
        width, last = self._encoder.sizes.width, self._encoder.sizes.layers - 1
        self._embedding = TokenEmbedding(at / "embed_tokens", vocabulary, width)
        self._hashes = ByteHashes(inside / "encoder_hash_tok_embedding", _hashes(config), width)
        every = _section(config, "encoder_config").bool("cross_attn_all_layers", False)
        cross = at / "cross_attn_layers" / str(last if every else 0)
        self._into_patches = self._encoder.attention(cross)
        self._to_patch = WholeLinear(at / "patch_embedding_projection", width, vectors * width)
        self._build_global(inside / "global_transformer", config, vectors * width)
        self._build_decoder(inside / "local_decoder", config, window)
        self._head = LogitsHead(scope / "lm_head", vocabulary, self._decoder.sizes.width)
        self._add_caches()
        ledger = self._ledger = scope.ledger
        self.weights = WeightPlan(params=tuple(ledger.params), ignored=IGNORED, prefix="model")
        self.decisions: tuple[Decision, ...] = ()
        self.host_kernels: tuple[str, ...] = ()
        self.host_pairs: int | None = None

    def _build_patcher(self, at: Scope, config: ConfigReader) -> None:
        window = _window(_section(config, "patcher_config"), "sliding_window")
        self._patcher = self._part(at, config, "patcher_config", window, theta=10_000.0)
        sizes = self._patcher.sizes
        self._patcher_embedding = TokenEmbedding(at / "embed_tokens", sizes.vocabulary, sizes.width)
        self._patcher_norm = RMS.build(at / "norm", sizes.width, eps=sizes.eps)
        self._patcher_head = LogitsHead(at / "lm_head", sizes.vocabulary, sizes.width)

    def _build_global(self, at: Scope, config: ConfigReader, inputs: int) -> None:
        first = len(self.kv_forms)
        self._global = self._part(at, config, "global_config", None)
        own = tuple(replace(form, kind=PATCHES) for form in self.kv_forms[first:])
        self.kv_forms = (*self.kv_forms[:first], *own)
        width = self._global.sizes.width
        self._to_global = None
        if inputs != width:
            self._to_global = WholeLinear(at / "token_embedding_projection", inputs, width)

    def _build_decoder(self, at: Scope, config: ConfigReader, window: int | None) -> None:
        self._decoder = self._part(at, config, "decoder_config", window)
        sizes = self._decoder.sizes
        if sizes.width != self._encoder.sizes.width:
            raise _section(config, "decoder_config").wrong(
                "hidden_size", f"that of encoder_config ({self._encoder.sizes.width})"
            )
        every = _section(config, "decoder_config").bool("cross_attn_all_layers", True)
        self._from_patches = [
            self._decoder.attention(at / "cross_attn_layers" / str(layer))
            for layer in range(sizes.layers if every else 1)
        ]
        project, width = at / "patch_embedding_projection", self._global.sizes.width
        self._from_global = WholeLinear(project, width, self._vectors * sizes.width)
        self._norm = RMS.build(at / "norm", sizes.width, eps=sizes.eps)

    def _part(
        self,
        scope: Scope,
        config: ConfigReader,
        name: str,
        window: int | None,
        *,
        theta: float = 500_000.0,
    ) -> _Part:
        """The layers of a section of the config; their caches come next."""
        section = _section(config, name)
        sizes = read_sizes(section, eps=1e-5)
        rope = read_rope(
            section,
            head_dim=sizes.head_dim,
            max_positions=scope.max_positions,
            default_theta=theta,
            layout="pairs",
        )
        mixer = AttentionSpec(**plain_attention(sizes), rope=rope, window=window)
        layers: list[Layer] = []
        for i in range(sizes.layers):
            at, cache = scope / "layers" / str(i), len(self.kv_forms)
            layers.append(LayerSpec(mixer=mixer).build(at, cache, sizes, RMS))
            self.kv_forms += layers[-1].kv_forms
        return _Part(sizes=sizes, layers=tuple(layers))

    def _add_caches(self) -> None:
        """Of bytes' hidden states; of ids, patches that have ended and where the next one begins;
        and of the newest patch at each byte."""
        first, span = len(self.kv_forms), max(2, self._hashes.longest)
        self._hidden_cache, self._mark_cache, self._newest_cache = range(first, first + 3)
        self.kv_forms += (
            LatentForm(cache=first, width=self._encoder.sizes.width),
            LatentForm(cache=first + 1, width=3, kind="window", span=span, dtype=torch.float32),
            LatentForm(cache=first + 2, width=self._global.sizes.width, kind="window", span=span),
        )

    def finish_load(self) -> None:
        """Packs the loaded weights."""
        self._ledger.finish()
        self.decisions = self._ledger.decisions()
        self.host_kernels = self._ledger.host_kernels()
        self.host_pairs = self._ledger.host_pairs()

    def forward(self, batch: Batch) -> torch.Tensor:
        """See CausalModel."""
        ids_T, positions_T = batch.token_ids_T, batch.positions_T
        marks, plan = batch.kv[self._mark_cache], self._plan(batch, self._mark_cache)
        span = max(2, self._hashes.longest)
        ended = self._ended(batch, values_before(marks, plan, positions_T, range(1, 2), 0)[:, 0])
        source_T = to_device(ended.source_T, ids_T.device)
        begun = to_device(ended.count_T, ids_T.device), to_device(ended.open_T, ids_T.device)
        # Ids of this step are read by later bytes of it: they are written first.
        write_rows(marks, torch.stack((ids_T, *begun), dim=1).float(), plan.slot_T)
        before_TN3 = values_before(marks, plan, positions_T, range(1, span), 0)
        x_TE = self._embedding.lookup(ids_T)
        x_TE = self._hashes.into(x_TE, ids_T, before_TN3[..., 0].long())
        x_TE = self._encoder.pass_through(x_TE, batch)
        patches_PE = self._patches(x_TE, batch, ended)
        newest = batch.kv[self._newest_cache]
        plan = self._plan(batch, self._newest_cache)
        write_rows(newest, patches_PE[source_T], plan.slot_T)
        return self._decode(x_TE, batch, patches_PE, source_T)

    def logits(self, hidden_NE: torch.Tensor) -> torch.Tensor:
        """Vocabulary logits [N, logits_width], float32."""
        return self._head.logits(hidden_NE)

    @property
    def argmax(self) -> TopOf | None:
        """See CausalModel."""
        return self._head.argmax

    @property
    def top_candidates(self) -> TopOf | None:
        """See CausalModel."""
        return self._head.top_candidates

    def classify(self, hidden_NE: torch.Tensor) -> torch.Tensor:
        """There is no such head."""
        raise AssertionError("the model has no classification head")

    def _plan(self, batch: Batch, cache: int) -> AttentionPlan:
        return batch.plans[batch.group_of_layer[cache]]

    def _ended(self, batch: Batch, before_T3: torch.Tensor) -> EndedPatches:
        """Where patches end, by the patcher; `before_T3`: what is noted at the byte before each.
        The first byte is a patch. What is noted in a step made up to try the model may be anything:
        it is held to what it can be."""
        plan, positions_T = self._plan(batch, self._mark_cache), batch.positions_T
        assert plan.host_query_start is not None and plan.host_kv_len is not None
        x_TE = self._patcher.pass_through(self._patcher_embedding.lookup(batch.token_ids_T), batch)
        log_TV = self._patcher_head.logits(self._patcher_norm.norm(x_TE)).log_softmax(1)
        entropy_T = -(log_TV.exp() * log_TV).sum(1)
        ends_T = (entropy_T > self._threshold) | (positions_T == 0)
        start_R = plan.query_start_R1[:-1].long()
        noted_R2 = before_T3.index_select(0, start_R)[:, 1:].nan_to_num().long()
        noted_R2 = torch.minimum(noted_R2.clamp(min=0), positions_T[start_R][:, None])
        noted = torch.cat((ends_T.long(), noted_R2.flatten())).cpu().numpy()
        count = len(positions_T)
        return ended_patches(
            noted[:count].astype(bool),
            plan.host_query_start,
            plan.host_kv_len,
            count_R=noted[count::2],
            open_R=noted[count + 1 :: 2],
        )

    def _patches(self, x_TE: torch.Tensor, batch: Batch, ended: EndedPatches) -> torch.Tensor:
        """What the global layers give of the newest patch of each row before the step, and of those
        that end in it."""
        hidden, plan = batch.kv[self._hidden_cache], self._plan(batch, self._hidden_cache)
        write_rows(hidden, x_TE, plan.slot_T)
        newest_plan = self._plan(batch, self._newest_cache)
        newest = values_before(
            batch.kv[self._newest_cache], newest_plan, batch.positions_T, range(1, 2), 0
        )
        before_RE = newest[:, 0].index_select(0, newest_plan.query_start_R1[:-1].long())
        if not ended.row_C.size:
            return before_RE
        vectors_CE = self._encoded(hidden, plan, ended)
        if self._to_global is not None:
            vectors_CE = self._to_global.project(vectors_CE)
        return torch.cat((before_RE, self._global_pass(vectors_CE, batch, ended)))

    def _encoded(
        self, hidden: torch.Tensor, plan: AttentionPlan, ended: EndedPatches
    ) -> torch.Tensor:
        """The vectors of each patch that ends, end to end: the maxima of its bytes, projected, and
        what these read of the bytes."""
        row_X, at_X, patch_X = ended.bytes_within()
        slot_X = slots_of(plan, row_X, at_X, hidden.shape[1])
        bytes_XE, whose_X = hidden.flatten(0, 1)[slot_X], to_device(patch_X, hidden.device)
        count, width = ended.row_C.size, bytes_XE.shape[1]
        most_CE = bytes_XE.new_zeros((count, width)).scatter_reduce(
            0, whose_X[:, None].expand_as(bytes_XE), bytes_XE, "amax", include_self=False
        )
        x_CSE = self._to_patch.project(most_CE).view(count, self._vectors, width)
        return (x_CSE + self._into_patches.of_patches(x_CSE, bytes_XE, whose_X)).flatten(1)

    def _global_pass(self, x_CE: torch.Tensor, batch: Batch, ended: EndedPatches) -> torch.Tensor:
        cache = self._global.forms[0].cache
        plan = ended.global_plan(self._plan(batch, cache))
        tokens = self._scope.block_tokens
        slot_C = slots_of(self._plan(batch, cache), ended.row_C, ended.number_C, tokens)
        number_C = to_device(ended.number_C, x_CE.device)
        own = Batch(
            token_ids_T=number_C,
            positions_T=number_C,
            plans=(replace(plan, slot_T=slot_C),) * len(batch.plans),
            group_of_layer=batch.group_of_layer,
            kv=batch.kv,
            logits_at_N=number_C[:0],
        )
        return self._global.pass_through(x_CE, own)

    def _decode(
        self, x_TE: torch.Tensor, batch: Batch, patches_PE: torch.Tensor, source_T: torch.Tensor
    ) -> torch.Tensor:
        patches_PSE = self._from_global.project(patches_PE)
        patches_PSE = patches_PSE.view(len(patches_PE), self._vectors, -1)
        stream: Stream = None, x_TE
        for index, layer in enumerate(self._decoder.layers):
            if index < len(self._from_patches):
                x_TE = add_norm(None, *stream)
                cross = self._from_patches[index]
                stream = None, x_TE + cross.of_bytes(x_TE, patches_PSE, source_T)
            stream = layer.forward(stream, batch, last=False)
        hidden_TE = add_norm(self._norm, *stream)
        alone = batch.last_token_batch is not None
        return hidden_TE.index_select(0, batch.logits_at_N) if alone else hidden_TE


def build(scope: Scope, config: ConfigReader) -> BltModel:
    """BltForCausalLM."""
    if scope.mesh.tp.size > 1:
        raise ConfigError(
            f"--tensor-parallel {scope.mesh.tp.size}: BLT's layers between bytes and patches are not "
            "split; leave it out",
            field="tensor_parallel",
        )
    if config.str("patching_mode", "entropy") != "entropy":
        raise config.wrong("patching_mode", "entropy")
    if not config.bool("patch_in_forward", True):
        raise config.wrong("patch_in_forward", "true")
    if "max_patch_length" in config:
        raise config.wrong("max_patch_length", "null")
    if config.bool("tie_word_embeddings", False):
        raise config.wrong("tie_word_embeddings", "false")
    return BltModel(scope, config)


def _section(config: ConfigReader, name: str) -> ConfigReader:
    section = config.section(name)
    if section is None:
        raise config.wrong(name, "an object: the sizes of this part")
    own = {"vocab_size": config.raw.get("vocab_size"), **section.raw}
    if own.get("intermediate_size") is None and isinstance(own.get("hidden_size"), int):
        own["intermediate_size"] = 8 * own["hidden_size"] // 3
    return ConfigReader(own, f"{config.where}: {name}")


def _window(config: ConfigReader, key: str) -> int | None:
    """In bytes. Without the key it is transformers' default; null: there is none."""
    return config.int(key, None if key in config.raw else 512, ge=1)


def _hashes(config: ConfigReader) -> ByteHashSpec:
    sizes: Sequence[int] = config.list("encoder_hash_byte_group_size", (3, 4, 5, 6, 7, 8), of=int)
    if not sizes or min(sizes) < 1 or max(sizes) > 64:
        raise config.wrong("encoder_hash_byte_group_size", "numbers of bytes from 1 to 64")
    return ByteHashSpec(
        lengths=tuple(sizes),
        rows=config.int("encoder_hash_byte_group_vocab", 500_002, ge=1),
        functions=config.int("encoder_hash_byte_group_nb_functions", 1, ge=1),
    )
