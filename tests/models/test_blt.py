"""BLT gives transformers' logits without a cache, whose cached generation finds other patches (MOD-17): in chunks
beside others, through the core, behind preemptions; and its bytes are read as ids."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import tokenizers
import torch
from tokenizers import decoders, pre_tokenizers, processors
from transformers import BltConfig, BltForCausalLM

from headrace.back.runner.start import start_runner
from headrace.base.errors import CheckpointError
from headrace.front.text.tokenizer_files import load_tokenizer
from headrace.launch.locate import LocatedModel
from headrace.launch.model_facts import read_model_facts
from tests.back.runner.test_recurrent import RunnerDriver
from tests.back.tiny_model import tiny_spec
from tests.core.harness import make_request
from tests.models.oracle import BLOCK_TOKENS, load_ours, model_spec, randomize
from tests.models.paged import random_rows, teacher_forced
from tests.models.test_parity import LENGTHS, BothModels, compare, compare_last_tokens

VOCABULARY = 60
PART = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
PART |= {"num_hidden_layers": 2, "vocab_size": VOCABULARY}
ENTROPY = 3.55
"""About half of the bytes are more certain."""
KEYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "a patch a byte": {"patching_threshold": -1.0},
    "one patch": {"patching_threshold": 9.0},
    "whole text": {"local_attention_window_len": None},
    "two hashes": {"encoder_hash_byte_group_nb_functions": 2},
    "wider": {"cross_attn_k": 3},
}
PARTS: dict[str, dict[str, dict[str, Any]]] = {
    "wider": {
        "encoder_config": {"cross_attn_all_layers": True, "num_key_value_heads": 2},
        "decoder_config": {"cross_attn_all_layers": False, "num_key_value_heads": 1},
        "global_config": {"num_key_value_heads": 2},
        "patcher_config": {"sliding_window": None},
    }
}


def config_of(case: str) -> BltConfig:
    own: dict[str, dict[str, Any]] = PARTS.get(case, {})
    keys: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 128,
        "patching_threshold": ENTROPY,
        "local_attention_window_len": 9,
        "encoder_hash_byte_group_size": [3, 4, 8],
        "encoder_hash_byte_group_vocab": 101,
        **KEYS[case],
    }
    shared = {"cross_attn_k": keys.get("cross_attn_k", 2), "hidden_size_global": 64}
    parts: dict[str, dict[str, Any]] = {
        "patcher_config": {**PART, "sliding_window": 11},
        "encoder_config": {**PART, **shared},
        "decoder_config": {**PART, **shared, "cross_attn_all_layers": True},
        "global_config": {**PART, "hidden_size": 64},
    }
    return BltConfig(**keys, **{name: part | own.get(name, {}) for name, part in parts.items()})


def saved(folder: Path, case: str = "plain") -> Any:
    """transformers' model with random weights, whose files are in the folder."""
    torch.manual_seed(3)
    oracle = BltForCausalLM(config_of(case)).eval()
    randomize(oracle)
    oracle.save_pretrained(folder)
    return oracle


def logits_of(oracle: Any, row: list[int]) -> torch.Tensor:
    """[tokens, V]: the row alone and whole."""
    with torch.inference_mode():
        logits: torch.Tensor = oracle(torch.tensor([row]), use_cache=False).logits[0].float()
    return logits


def both(folder: Path, case: str) -> BothModels:
    oracle, rows = saved(folder, case), random_rows(VOCABULARY, LENGTHS)
    return BothModels(rows, [logits_of(oracle, row) for row in rows], load_ours(model_spec(folder)))


def lengths_of(oracle: Any, row: list[int]) -> list[int]:
    """Of the patches that transformers finds."""
    threshold = oracle.config.patching_threshold
    with torch.inference_mode():
        _, lengths, _ = oracle.model.patcher(torch.tensor([row]), patch_size=4, threshold=threshold)
    found: list[int] = lengths[0].tolist()
    return found


@pytest.mark.parametrize(
    "case", ["plain", *(pytest.param(case, marks=pytest.mark.slow) for case in list(KEYS)[1:])]
)
def test_logits_equal_those_of_transformers(case: str, tmp_path: Path) -> None:
    models = both(tmp_path, case)
    rows, theirs, ours = models
    got = teacher_forced(ours, rows, block_tokens=BLOCK_TOKENS, dtype=torch.float32)
    compare(got, theirs, 1e-4)
    compare_last_tokens(models)


def test_the_bytes_of_the_tests_end_short_and_long_patches(tmp_path: Path) -> None:
    lengths = lengths_of(saved(tmp_path), random_rows(VOCABULARY, LENGTHS)[2])
    assert lengths.count(1) > 2 and max(lengths) > 3


def test_answers_beside_others_and_behind_preemptions_are_those_of_transformers(
    tmp_path: Path,
) -> None:
    """Prompts in chunks of 7, some of which begin alike: nobody goes on behind another's blocks."""
    oracle = saved(tmp_path)
    spec = tiny_spec(max_step_tokens=7, block_tokens=BLOCK_TOKENS)
    kv = msgspec.structs.replace(spec.kv, num_blocks=None, memory_bytes=2_000_000)
    spec = msgspec.structs.replace(spec, kv=kv, model=model_spec(tmp_path))
    ours = load_ours(spec.model)
    driver = RunnerDriver(start_runner(spec, ours, device=torch.device("cpu")).runner, spec)
    rows = random_rows(VOCABULARY, (9, 19, 4))
    prompts = {1: rows[0], 2: rows[1], 3: rows[1][:17] + rows[2]}
    for id, prompt in prompts.items():
        driver.add(make_request(id, prompt, max_tokens=ANSWER))
    for _ in range(14):
        driver.step()
    driver.core.scheduler.put_back_all("preempted")
    driver.run()
    assert driver.core.scheduler.num_preemptions == 3
    prompts[4] = prompts[2]
    driver.add(make_request(4, prompts[4], max_tokens=5))
    driver.run()
    for id, prompt in prompts.items():
        answer = driver.tokens[id]
        likeliest = logits_of(oracle, prompt + answer).argmax(1)[len(prompt) - 1 : -1]
        assert answer == likeliest.tolist(), id
    assert [len(driver.tokens[id]) for id in prompts] == [ANSWER, ANSWER, ANSWER, 5]
    assert driver.finished[4].num_cached == 0
    driver.assert_at_rest()


ANSWER = 18


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("max_patch_length", 8),
        ("patching_mode", "space"),
        ("patch_in_forward", False),
        ("tie_word_embeddings", True),
        ("encoder_hash_byte_group_size", [0]),
    ],
)
def test_what_is_not_built_is_refused_by_key(key: str, value: Any, tmp_path: Path) -> None:
    config_of("plain").save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=key):
        load_ours(model_spec(tmp_path, architectures=["BltForCausalLM"], **{key: value}))


def test_facts_are_read_from_the_parts(tmp_path: Path) -> None:
    saved(tmp_path)
    facts = read_model_facts(LocatedModel(path=tmp_path, name="blt", format="safetensors"))
    assert (facts.family, facts.num_layers, facts.hidden_size) == ("blt", 8, 64)
    assert (facts.max_model_len, facts.logits_width) == (128, VOCABULARY)


def test_bytes_are_ids_with_an_offset(tmp_path: Path) -> None:
    """Four control tokens, then a token for each byte; a text begins with one of the four."""
    control = ["<boe>", "<s>", "</s>", "<pad>"]
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    ids = {name: i for i, name in enumerate(control)} | {
        _letter(byte): len(control) + byte for byte in range(256)
    }
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=ids, merges=[]))
    made.pre_tokenizer, made.decoder = letters, decoders.ByteLevel()
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    made.add_special_tokens(control)
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>"}))
    tokenizer = load_tokenizer(tmp_path)
    text = "Grüße 東京 🎉\n"
    assert tokenizer.encode(text) == [1, *(4 + byte for byte in text.encode())]
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) == text


def _letter(byte: int) -> str:
    """What byte-level files write for a byte: itself where it can be seen, else one of the letters from 256 on."""
    seen = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [other for other in range(256) if other not in seen]
    return chr(byte if byte in seen else 256 + hidden.index(byte))
