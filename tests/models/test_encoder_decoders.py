"""Encoder-decoders against transformers on tiny random configurations: logits of every position, and greedy tokens
through the whole engine, of requests beside each other and after preemptions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import transformers

from headrace.back.executor.inline import InlineExecutor
from headrace.back.kernels.native.library import NativeLibrary, load
from headrace.base.config.resolved import DeviceSpec, EngineSpec, KVSpec, ModelSpec, SchedulerSpec
from headrace.base.wire.request import EngineRequest, RowSampling, StopRules
from headrace.core.core import EngineCore
from tests.models.encoder_decoder_rank import (
    DECODED,
    READ,
    forced_logits,
    saved,
    spec_of,
    spectrograms,
)
from tests.models.oracle import load_ours, model_spec
from tests.rank_processes import run_ranks

NUM_TOKENS = 12
START = 2


def bart_like(config: Any, **more: Any) -> Any:
    sizes: dict[str, Any] = {
        "vocab_size": 97,
        "d_model": 32,
        "encoder_layers": 2,
        "decoder_layers": 3,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 2,
        "encoder_ffn_dim": 48,
        "decoder_ffn_dim": 40,
        "max_position_embeddings": 64,
        "decoder_start_token_id": START,
        "pad_token_id": 1,
        "eos_token_id": 96,
        "forced_eos_token_id": None,
    }
    return config(**sizes | more)


def t5_like(config: Any, **more: Any) -> Any:
    sizes: dict[str, Any] = {
        "vocab_size": 97,
        "d_model": 32,
        "d_kv": 12,
        "d_ff": 48,
        "num_layers": 2,
        "num_decoder_layers": 3,
        "num_heads": 4,
        "relative_attention_num_buckets": 8,
        "relative_attention_max_distance": 20,
        "decoder_start_token_id": START,
    }
    return config(**sizes | more)


def t5gemma() -> Any:
    sizes: dict[str, Any] = {
        **{"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8},
        **{"query_pre_attn_scalar": 12, "sliding_window": 5, "max_position_embeddings": 64},
        **{"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, "pad_token_id": 1},
        **{"bos_token_id": START, "eos_token_id": 96},
    }
    wide = {"hidden_size": 40, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 12}
    return transformers.T5GemmaConfig(
        encoder=sizes | wide, decoder=sizes, vocab_size=97, decoder_start_token_id=START
    )


def t5gemma2() -> Any:
    """One window of an even size, which reaches farther ahead than back in the encoder."""
    sizes: dict[str, Any] = {
        **{"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "eos_token_id": 96},
        **{"query_pre_attn_scalar": 12, "sliding_window": 6, "max_position_embeddings": 64},
        **{"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
        **{"final_logit_softcapping": 3.0, "pad_token_id": 1, "bos_token_id": START},
    }
    vision = {
        **{"model_type": "siglip_vision_model", "hidden_size": 8, "intermediate_size": 8},
        **{"num_hidden_layers": 1, "num_attention_heads": 1, "image_size": 8, "patch_size": 8},
    }
    encoder = {"text_config": sizes, "vision_config": vision, "mm_tokens_per_image": 1}
    return transformers.T5Gemma2Config(
        encoder=encoder, decoder=sizes, vocab_size=97, decoder_start_token_id=START
    )


def two_encoders(config: Any) -> Any:
    """BERTs or RoBERTas."""
    sizes: dict[str, Any] = {
        **{"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 3, "intermediate_size": 48},
        **{"num_attention_heads": 4, "max_position_embeddings": 66, "pad_token_id": 1},
        **{"bos_token_id": START, "eos_token_id": 96, "type_vocab_size": 2},
    }
    reads = config(**sizes | {"num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 97})
    says = config(**sizes, is_decoder=True, add_cross_attention=True)
    return transformers.EncoderDecoderConfig.from_encoder_decoder_configs(
        reads, says, decoder_start_token_id=START, pad_token_id=1, eos_token_id=96
    )


def prophetnet() -> Any:
    sizes = {
        **{"vocab_size": 97, "hidden_size": 32, "encoder_ffn_dim": 48, "decoder_ffn_dim": 40},
        **{"num_encoder_layers": 3, "num_decoder_layers": 3, "num_encoder_attention_heads": 4},
        **{"num_decoder_attention_heads": 2, "max_position_embeddings": 68, "ngram": 2},
        **{"num_buckets": 8, "relative_max_distance": 20, "decoder_start_token_id": START},
        **{"pad_token_id": 0, "eos_token_id": 96, "bos_token_id": 1},
    }
    return transformers.ProphetNetConfig(**sizes)


def seamless(config: Any) -> Any:
    """Its text side; the rest is as small as it may be."""
    rest = {
        f"{part}_{key}": 8 if key.endswith("dim") else 2
        for part in ("t2u_encoder", "t2u_decoder", "speech_encoder")
        for key in ("ffn_dim", "attention_heads", "layers", "intermediate_size")
    }
    return config(
        **{**rest, "vocab_size": 97, "hidden_size": 32, "encoder_layers": 2, "decoder_layers": 3},
        **{"encoder_attention_heads": 4, "decoder_attention_heads": 2, "encoder_ffn_dim": 48},
        **{"decoder_ffn_dim": 40, "max_position_embeddings": 64, "decoder_start_token_id": START},
        **{"pad_token_id": 0, "eos_token_id": 96, "bos_token_id": 1},
    )


CASES: dict[str, Any] = {
    "t5gemma": t5gemma,
    "t5gemma2": t5gemma2,
    "bart": lambda: bart_like(transformers.BartConfig),
    "bart-scaled": lambda: bart_like(
        transformers.BartConfig, scale_embedding=True, activation_function="relu"
    ),
    "pegasus": lambda: bart_like(transformers.PegasusConfig, scale_embedding=True),
    "marian": lambda: bart_like(transformers.MarianConfig, scale_embedding=True),
    "m2m": lambda: bart_like(transformers.M2M100Config),
    "fsmt": lambda: bart_like(
        transformers.FSMTConfig,
        **{"src_vocab_size": 97, "tgt_vocab_size": 89, "eos_token_id": 88, "vocab_size": 89},
        use_cache=False,  # else transformers takes texts for one token behind a cache
    ),
    "nllb-moe": lambda: bart_like(
        transformers.NllbMoeConfig, num_experts=5, encoder_sparse_step=2, decoder_sparse_step=3
    ),
    "pegasus-x": lambda: bart_like(
        transformers.PegasusXConfig,
        **{"encoder_layers": 3, "block_size": 4, "num_global_tokens": 3, "scale_embedding": True},
    ),
    "bigbird-pegasus": lambda: bart_like(
        transformers.BigBirdPegasusConfig, block_size=2, num_random_blocks=1, use_bias=False
    ),
    "bert2bert": lambda: two_encoders(transformers.BertConfig),
    "roberta2roberta": lambda: two_encoders(transformers.RobertaConfig),
    "seamless": lambda: seamless(transformers.SeamlessM4TConfig),
    "t5": lambda: t5_like(transformers.T5Config),
    "t5-1.1": lambda: t5_like(
        transformers.T5Config, feed_forward_proj="gated-gelu", tie_word_embeddings=False
    ),
    "mt5": lambda: t5_like(transformers.MT5Config),
    "umt5": lambda: t5_like(transformers.UMT5Config, relative_attention_max_distance=128),
    "longt5": lambda: t5_like(
        transformers.LongT5Config,
        **{"encoder_attention_type": "transient-global", "local_radius": 4, "global_block_size": 4},
        **{"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    ),
    "longt5-local": lambda: t5_like(transformers.LongT5Config, local_radius=3),
    "switch": lambda: t5_like(
        transformers.SwitchTransformersConfig,
        **{
            "num_experts": 4,
            "encoder_sparse_step": 2,
            "decoder_sparse_step": 1,
            "router_bias": True,
        },
    ),
    "mvp": lambda: bart_like(transformers.MvpConfig),
    "plbart": lambda: bart_like(transformers.PLBartConfig),
    "blenderbot": lambda: bart_like(transformers.BlenderbotConfig),
    "blenderbot-small": lambda: bart_like(transformers.BlenderbotSmallConfig),
    "led": lambda: bart_like(
        transformers.LEDConfig,
        attention_window=[8, 4],
        max_encoder_position_embeddings=64,
        max_decoder_position_embeddings=64,
    ),
    "prophetnet": lambda: prophetnet(),
    "mbart": lambda: bart_like(transformers.MBartConfig, scale_embedding=True),
}


UNRECORDED = ("t5gemma", "t5gemma2", "prophetnet")
"""Logits are bounded, or results merged, by PyTorch's operations."""
ALIKE = (
    *(
        "bart-scaled",
        "marian",
        "m2m",
        "fsmt",
        "mvp",
        "plbart",
        "blenderbot-small",
        "mt5",
        "longt5-local",
    ),
    *("switch", "pegasus", "t5gemma", "nllb-moe", "seamless", "pegasus-x", "bigbird-pegasus"),
    *("bert2bert", "roberta2roberta", "prophetnet"),
)
"""Every part of their decoders stands in another case: through the whole engine in `make slow` alone."""


def through_the_engine(without: tuple[str, ...] = ()) -> list[Any]:
    """Names of cases."""
    names = [name for name in CASES if name not in without]
    return [pytest.param(n, marks=pytest.mark.slow) if n in ALIKE else n for n in names]


def whisper() -> Any:
    return transformers.WhisperConfig(
        vocab_size=97,
        d_model=32,
        encoder_layers=2,
        decoder_layers=3,
        encoder_attention_heads=4,
        decoder_attention_heads=2,
        encoder_ffn_dim=48,
        decoder_ffn_dim=40,
        num_mel_bins=6,
        max_source_positions=20,
        max_target_positions=64,
        decoder_start_token_id=START,
        pad_token_id=1,
        bos_token_id=1,
        eos_token_id=96,
        begin_suppress_tokens=None,
    )


def oracle_of(name: str, folder: Path) -> Any:
    return saved(CASES[name](), folder)


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_transformers_in_float32(name: str, tmp_path: Path) -> None:
    oracle = oracle_of(name, tmp_path)
    ours = forced_logits(load_ours(spec_of(tmp_path)))
    for logits, read, decoded in zip(ours, READ, DECODED, strict=True):
        with torch.inference_mode():
            theirs = logits_of(oracle, read, decoded)
        assert (logits - theirs).abs().max().item() < 1e-4


def logits_of(oracle: Any, read: list[int], decoded: list[int]) -> torch.Tensor:
    """Those of transformers behind every token of the decoder, [T, V]."""
    reads = torch.tensor([read])
    if oracle.config.model_type != "prophetnet":
        return oracle(input_ids=reads, decoder_input_ids=torch.tensor([decoded])).logits[0]
    # Of several tokens at once transformers takes biases for those of other heads and places.
    encoded, caches, rows = oracle.get_encoder()(reads), None, []
    for token in decoded:
        ids = torch.tensor([[token]])
        out = oracle(encoder_outputs=encoded, decoder_input_ids=ids, past_key_values=caches)
        caches = out.past_key_values
        rows.append(out.logits[0, -1])
    return torch.stack(rows)


def test_speech_has_the_logits_and_tokens_of_transformers(tmp_path: Path) -> None:
    oracle, spec = saved(whisper(), tmp_path), spec_of(tmp_path)
    speech = spectrograms(*spec.spectrogram)
    ours = forced_logits(load_ours(spec), speech)
    for logits, heard, decoded in zip(ours, speech, DECODED, strict=True):
        with torch.inference_mode():
            theirs = oracle(
                input_features=heard[None], decoder_input_ids=torch.tensor([decoded])
            ).logits[0]
        assert (logits - theirs).abs().max().item() < 1e-4
    core, tokens = engine(spec), {i: [] for i in range(2 * len(DECODED))}
    for id in tokens:
        heard, decoded = speech[id % len(DECODED)], DECODED[id % len(DECODED)]
        core.add(
            EngineRequest(
                id=id,
                prompt=np.asarray(decoded, "<i4").tobytes(),
                encoder=heard.numpy().tobytes(),
                stop=StopRules(max_tokens=NUM_TOKENS),
                sampling=RowSampling(temperature=0.0),
            )
        )
    while core.has_work:
        batch = core.step(wait=True).tokens
        if batch is not None:
            for id, token in zip(batch.ids.tolist(), batch.tokens.tolist(), strict=True):
                tokens[id].append(token)
    for id, ours in tokens.items():
        decoded = list(DECODED[id % len(DECODED)])
        with torch.inference_mode():
            encoded = oracle.get_encoder()(speech[id % len(DECODED)][None])
            for _ in range(NUM_TOKENS):
                out = oracle(encoder_outputs=encoded, decoder_input_ids=torch.tensor([decoded]))
                decoded.append(int(out.logits[0, -1].argmax()))
        assert ours == decoded[-NUM_TOKENS:]
    runner, counts = core.executor._resident.runner, []
    for forget in (
        False,
        False,
        True,
    ):  # who asks about a sound once more finds it encoded (MUL-07)
        if forget:
            runner.forget_content()
        heard = speech[0].numpy().tobytes()
        again = request(90, [5], list(DECODED[0]), NUM_TOKENS)
        core.add(msgspec.structs.replace(again, encoder=heard))
        said: list[int] = []
        while core.has_work:
            batch = core.step(wait=True).tokens
            said += [] if batch is None else batch.tokens.tolist()
        assert said == tokens[0]
        counts.append(runner._state.num_encoded)
    assert counts[0] == counts[1] == counts[2] - 1
    wrong = np.full(6 * 40, np.nan, np.float32)
    for encoder, message in (
        (b"", "reads speech, not text"),
        (wrong.tobytes(), "not finite"),
        (wrong[1:].tobytes(), "6 bands of 40 frames take 960"),
    ):
        core.add(msgspec.structs.replace(request(9, [5], [START], 2), encoder=encoder))
        (ended,) = core.step(wait=False).tokens.finished
        assert message in ended.error.message
    core.executor.close()


def engine(
    spec: ModelSpec, *, num_blocks: int = 200, max_running: int = 4, overlap: bool = True
) -> EngineCore:
    whole = EngineSpec(
        model=spec,
        kv=KVSpec(block_tokens=16, prefix_caching=False, num_blocks=num_blocks),
        scheduler=SchedulerSpec(max_step_tokens=16, max_running=max_running, overlap=overlap),
        device=DeviceSpec(device="cpu", executor="inline", threads=1),
    )
    return EngineCore(whole, InlineExecutor(whole))


def request(id: int, read: list[int], start: list[int], num_tokens: int) -> EngineRequest:
    return EngineRequest(
        id=id,
        prompt=np.asarray(start, "<i4").tobytes(),
        encoder=np.asarray(read, "<i4").tobytes(),
        stop=StopRules(max_tokens=num_tokens),
        sampling=RowSampling(temperature=0.0),
    )


def answers(
    core: EngineCore,
    inputs: list[list[int]],
    start: list[int],
    *,
    num_tokens: int = NUM_TOKENS,
    late: int = 0,
) -> tuple[list[list[int]], int]:
    """The tokens of each, of which the last `late` come while the others run; and preemptions."""
    tokens: list[list[int]] = [[] for _ in inputs]
    waiting = [request(i, read, start, num_tokens) for i, read in enumerate(inputs)]
    for one in waiting[: len(waiting) - late]:
        core.add(one)
    waiting = waiting[len(waiting) - late :] if late else []
    preemptions = steps = 0
    while core.has_work or waiting:
        steps += 1
        if waiting and steps % 3 == 0:
            core.add(waiting.pop())
        batch = core.step(wait=True).tokens
        if batch is not None:
            for id, token in zip(batch.ids.tolist(), batch.tokens.tolist(), strict=True):
                tokens[id].append(token)
            preemptions += sum(end.num_preemptions for end in batch.finished)
    return tokens, preemptions


def greedy(oracle: Any, read: list[int], start: list[int], num_tokens: int) -> list[int]:
    decoded = list(start)
    whole = oracle.config.model_type in ("fsmt", "prophetnet")
    with torch.inference_mode():
        encoded = oracle.get_encoder()(torch.tensor([read]))
        for _ in range(num_tokens):
            if whole:
                logits = logits_of(oracle, read, decoded)
            else:
                ids = torch.tensor([decoded])
                logits = oracle(encoder_outputs=encoded, decoder_input_ids=ids).logits[0]
            decoded.append(int(logits[-1].argmax()))
    return decoded[len(start) :]


@pytest.mark.covering(0)
@pytest.mark.parametrize("name", through_the_engine())
@pytest.mark.parametrize("start", [[START], [START, 5, 7]], ids=["start", "forced"])
def test_greedy_tokens_equal_transformers_beside_each_other(
    name: str, start: list[int], tmp_path: Path
) -> None:
    oracle = oracle_of(name, tmp_path)
    core = engine(spec_of(tmp_path))
    generator = torch.Generator().manual_seed(5)
    inputs = [
        torch.randint(3, 96, (length,), generator=generator).tolist()
        for length in (1, 17, 40, 33, 64, 16)
    ]
    expected = [greedy(oracle, read, start, NUM_TOKENS) for read in inputs]
    assert answers(core, inputs, start, late=3)[0] == expected
    assert answers(core, inputs[::-1], start)[0] == expected[::-1], "steps that are replayed"
    core.executor.close()


def test_an_encoder_reads_more_than_its_decoder_says(tmp_path: Path) -> None:
    config = bart_like(
        transformers.LEDConfig,
        attention_window=8,
        max_encoder_position_embeddings=128,
        max_decoder_position_embeddings=32,
    )
    oracle = saved(config, tmp_path)
    core = engine(model_spec(tmp_path, max_model_len=32, encoder_tokens=128))
    inputs = [[7, 9, 11, 5] * 30, [3, 8] * 15]
    expected = [greedy(oracle, read, [START], NUM_TOKENS) for read in inputs]
    assert answers(core, inputs, [START])[0] == expected
    core.executor.close()


def test_requests_that_lost_their_blocks_give_the_same_tokens(tmp_path: Path) -> None:
    oracle = oracle_of("bart", tmp_path)
    core = engine(spec_of(tmp_path), num_blocks=11)
    inputs = [[7, 9, 11], [3, 8] * 15, [5] * 20]
    expected = [greedy(oracle, read, [START], 45) for read in inputs]
    tokens, preemptions = answers(core, inputs, [START], num_tokens=45)
    assert tokens == expected
    assert preemptions > 0
    core.executor.close()


@pytest.mark.skipif(
    not isinstance(load(), NativeLibrary), reason="the native kernels are not built"
)
@pytest.mark.parametrize("name", through_the_engine(UNRECORDED))
def test_decodes_are_recorded(name: str, tmp_path: Path) -> None:
    oracle_of(name, tmp_path)
    core = engine(spec_of(tmp_path))
    answers(core, [[5, 6, 7], [8, 9]], [START])
    replay = core.executor._resident.runner._steps._replay
    assert replay.foreign == () and replay.num_graphs > 0
    core.executor.close()


def test_inputs_that_the_encoder_cannot_read_are_refused_with_the_numbers(tmp_path: Path) -> None:
    oracle_of("bart", tmp_path)
    core = engine(spec_of(tmp_path))
    for read, message in (
        ([5] * 65, "65 tokens, the model's encoder reads 64"),
        ([], "at least one token"),
        ([97], "token id 97"),
    ):
        core.add(request(1, read, [START], 4))
        (ended,) = core.step(wait=False).tokens.finished
        assert message in ended.error.message
    core.executor.close()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "names",
    [("t5", "bart", "whisper"), pytest.param((*CASES,), marks=pytest.mark.slow)],
    ids=["few", "all"],
)
def test_two_ranks_give_the_logits_of_one(names: tuple[str, ...], tmp_path: Path) -> None:
    folders = [tmp_path / name for name in names]
    for name, folder in zip(names, folders, strict=True):
        saved(whisper() if name == "whisper" else CASES[name](), folder)
    run_ranks("tests.models.encoder_decoder_rank", 2, tmp_path / "store", *folders)
    for folder in folders:
        spec = spec_of(folder)
        speech = spectrograms(*spec.spectrogram) if spec.spectrogram else None
        alone = forced_logits(load_ours(spec), speech)
        for rank in range(2):
            for ours, one in zip(torch.load(folder / f"rank{rank}.pt"), alone, strict=True):
                assert (ours - one).abs().max().item() < 1e-5
