"""Conversations saved to files and restored by another engine (BEY-42): what follows is what it was, out of the blocks
of the file; what does not fit is refused with the reason, and leaves the engine as it was."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from headrace.back.kernels.native.library import NativeLibrary, load
from headrace.base.config.tree import (
    DeviceOptions,
    KVOptions,
    ModelOptions,
    Options,
    SchedulerOptions,
)
from headrace.base.errors import ConfigError, HeadraceError, from_wire
from headrace.base.wire.control import Call, Reply
from headrace.base.wire.request import EngineRequest, RowSampling, StopRules
from headrace.core.slots import RememberingRows
from headrace.launch.facts import resolve_options
from tests.e2e.test_hybrid_drafts import SIZES
from tests.e2e.test_speculation import Engine

pytestmark = pytest.mark.skipif(
    not isinstance(load(), NativeLibrary), reason="the native kernels are not built"
)
MODEL = Path(__file__).parents[2] / "demo" / "model"
PROMPT = [(7 * i) % 3000 + 5 for i in range(75)]
PLAIN: dict[str, Any] = {
    **{"vocab_size": 4096, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
    "max_position_embeddings": 512,
}
LATENT: dict[str, Any] = {
    **{**PLAIN, "head_dim": 8, "num_key_value_heads": 4, "moe_intermediate_size": 32},
    **{"q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8},
    **{"v_head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    **{"first_k_dense_replace": 4, "n_group": 1, "topk_group": 1},
}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "hybrid": ("Qwen3_5TextConfig", SIZES),
    "window": (
        "Gemma3TextConfig",
        {**PLAIN, "sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"] * 2},
    ),
    "latent": ("DeepseekV3Config", LATENT),
}


class Slots:
    """Engines over one folder of files."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.files = root / "files"
        self.files.mkdir()
        self._made: list[Engine] = []
        self._next = 0

    def model(self, name: str, seed: int = 9) -> Path:
        """A tiny model with random weights."""
        import transformers

        folder = self.root / f"{name}-{seed}"
        if not folder.exists():
            torch.manual_seed(seed)
            kind, sizes = CONFIGS[name]
            config = getattr(transformers, kind)(**sizes)
            transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
            for file in ("tokenizer.json", "tokenizer_config.json"):
                shutil.copy(MODEL / file, folder / file)
        return folder

    def engine(self, model: Path, **kv: Any) -> Engine:
        """One whose prompts are computed in chunks."""
        tree = Options(
            device=DeviceOptions(device=kv.pop("device", "cpu")),
            model=ModelOptions(model=str(model), max_model_len=256, dtype="float32"),
            kv=KVOptions(slot_save_path=str(self.files), **{"kv_memory": "64MiB", **kv}),
            scheduler=SchedulerOptions(max_running=2, max_step_tokens=32),
        )
        self._made.append(Engine(resolve_options(tree).engine))
        return self._made[-1]

    def say(
        self, engine: Engine, prompt: list[int], count: int = 40, tenant: str = ""
    ) -> tuple[list[int], int]:
        """Greedy tokens behind a prompt, and how many of its tokens were cached."""
        self._next += 1
        engine.core.add(
            EngineRequest(
                id=self._next,
                prompt=np.asarray(prompt, "<i4").tobytes(),
                stop=StopRules(max_tokens=count),
                sampling=RowSampling(temperature=0.0),
                tenant=tenant,
            )
        )
        tokens: list[int] = []
        while True:
            batch = engine.core.step(wait=True).tokens
            if batch is None:
                continue
            tokens += batch.tokens.tolist()
            for finished in batch.finished:
                assert finished.error is None, finished.error
                return tokens, finished.num_cached

    def ask(
        self, engine: Engine, action: str, name: str = "a.bin", *, row: int = 0, tenant: str = ""
    ) -> dict[str, Any]:
        """What the core answers to the call, once it does."""
        rows = engine.core.rows
        assert isinstance(rows, RememberingRows)
        arguments: dict[str, Any] = {"row": row, "action": action, "name": name, "tenant": tenant}
        call = Call(number=1, operation="slot", arguments={**arguments, "core": rows.core})
        reply: Reply | None = engine.core.call(call)
        while reply is None:
            reply = next(iter(engine.core.step(wait=False).replies), None)
        if reply.error is not None:
            raise from_wire(reply.error)
        return msgspec.msgpack.decode(reply.result)

    def close(self) -> None:
        for engine in self._made:
            engine.executor.close()


@pytest.fixture
def slots(tmp_path: Path) -> Iterator[Slots]:
    made = Slots(tmp_path)
    yield made
    made.close()


def at_rest(engine: Engine) -> bool:
    """Nothing is held: all blocks can be had."""
    kv = engine.core.kv
    return kv.pool.refcount_sum() == 0 and kv.snapshots.num_held == 0


KINDS = ("hybrid", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("window", "latent")))


@pytest.mark.parametrize("kind", KINDS)
def test_another_engine_goes_on_where_a_conversation_was_saved(slots: Slots, kind: str) -> None:
    model = slots.model(kind)
    first = slots.engine(model)
    answer, _ = slots.say(first, PROMPT)
    saved = slots.ask(first, "save")
    assert saved["tokens"] >= 64 and saved["num_bytes"] == (slots.files / "a.bin").stat().st_size
    more = PROMPT + answer + [11, 12, 13]
    wanted, _ = slots.say(first, more)

    second = slots.engine(model)
    assert slots.ask(second, "restore", row=1)["tokens"] == saved["tokens"]
    assert slots.say(second, more) == (wanted, saved["tokens"])
    assert at_rest(first) and at_rest(second)
    # what was restored can be saved again, and erased
    assert slots.ask(second, "save", "b.bin", row=1)["tokens"] >= saved["tokens"]
    assert slots.ask(second, "erase", row=0)["tokens"] > 0
    assert slots.say(second, more) == (wanted, 0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("kind", ["hybrid", "window", "latent"])
def test_blocks_of_a_gpu_go_to_files_and_back(slots: Slots, kind: str) -> None:
    """Copied on a stream of their own, behind the steps before."""
    first, second = (slots.engine(slots.model(kind), device="cuda") for _ in range(2))
    answer, _ = slots.say(first, PROMPT)
    saved = slots.ask(first, "save")
    more = PROMPT + answer + [11, 12, 13]
    wanted, _ = slots.say(first, more)
    assert slots.ask(second, "restore")["tokens"] == saved["tokens"]
    assert slots.say(second, more) == (wanted, saved["tokens"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"kv_dtype": "int8"},
        {"kv_dtype": "int4"},
        {"tensor_parallel": 2},
        {"pipeline_parallel": 2},
    ],
)
def test_quantized_caches_and_ranks_have_files_too(slots: Slots, changes: dict[str, Any]) -> None:
    from headrace.back.executor.processes import ProcessExecutor
    from headrace.core.core import EngineCore

    shared = "kv_dtype" not in changes

    def made() -> Engine:
        if not shared:
            return slots.engine(MODEL, **changes)
        engine = slots.engine(MODEL)
        device = msgspec.structs.replace(engine.spec.device, threads=1, **changes)
        engine.executor.close()
        spec = msgspec.structs.replace(engine.spec, device=device)
        engine.executor = ProcessExecutor(spec)
        stages = device.pipeline_parallel
        scheduler = msgspec.structs.replace(spec.scheduler, stages=stages)
        engine.core = EngineCore(
            msgspec.structs.replace(spec, scheduler=scheduler), engine.executor
        )
        return engine

    first = made()
    answer, _ = slots.say(first, PROMPT)
    saved = slots.ask(first, "save")
    names = {file.name for file in slots.files.iterdir()}
    assert names == ({"a.bin.rank0", "a.bin.rank1"} if shared else {"a.bin"})
    second = made()
    assert slots.ask(second, "restore")["tokens"] == saved["tokens"] == 112
    assert slots.say(second, PROMPT) == (answer, 64)


@pytest.mark.slow
def test_what_does_not_fit_is_refused_and_changes_nothing(slots: Slots) -> None:
    first, other = (slots.engine(slots.model("hybrid", seed)) for seed in (9, 10))
    answer, _ = slots.say(first, PROMPT, tenant="me")
    slots.ask(first, "save", tenant="me")
    whole = (slots.files / "a.bin").read_bytes()
    free = other.core.kv.pool.num_free

    def refused(engine: Engine, action: str = "restore", **how: Any) -> str:
        with pytest.raises(HeadraceError) as caught:
            slots.ask(engine, action, **{"name": "a.bin", "tenant": "me", **how})
        assert at_rest(engine) and str(slots.files) not in caught.value.message
        return caught.value.message

    assert "other weights" in refused(other)
    assert "another key" in refused(first, tenant="you")
    assert "no conversation of this key" in refused(first, "save", tenant="you")
    assert "there is no 'b.bin'" in refused(first, name="b.bin")
    for name in ("../a.bin", "", "a/b", ".a", "a.part", "x" * 201):
        assert "plain name" in refused(first, name=name)
    assert "another form" in refused(slots.engine(slots.model("hybrid"), kv_dtype="int8"))
    assert "cache groups is 2 there and 1 here" in refused(slots.engine(MODEL))
    assert "block_tokens is 16 there and 8 here" in refused(
        slots.engine(slots.model("hybrid"), block_tokens=8)
    )
    damages: dict[str, Callable[[bytes], bytes]] = {
        "checksum": lambda data: data[:-1000] + bytes(100) + data[-900:],
        "bytes": lambda data: data[:-1],
        "its header": lambda data: data[:200],
        "no file of": lambda data: b"x" + data[1:],
    }
    for reason, damage in damages.items():
        (slots.files / "a.bin").write_bytes(damage(whole))
        assert reason in refused(first)
    (slots.files / "link").symlink_to(slots.files / "a.bin")
    assert "cannot be read" in refused(first, name="link")
    assert other.core.kv.pool.num_free == free
    (slots.files / "a.bin").write_bytes(whole)
    slots.ask(first, "restore", tenant="me")
    assert slots.say(first, PROMPT, tenant="me")[0] == answer


def test_files_have_a_bound_and_rows_that_run_are_left_alone(slots: Slots) -> None:
    small = slots.engine(slots.model("hybrid"), slot_save_bytes="1KiB")
    with pytest.raises(HeadraceError, match="no conversation of this key"):
        slots.ask(small, "save")
    slots.say(small, PROMPT)
    with pytest.raises(HeadraceError, match="--slot-save-bytes 1024") as full:
        slots.ask(small, "save")
    assert full.value.status == 507 and list(slots.files.iterdir()) == [] and at_rest(small)
    small.core.add(
        EngineRequest(
            id=99,
            prompt=np.asarray(PROMPT, "<i4").tobytes(),
            stop=StopRules(max_tokens=2),
            sampling=RowSampling(temperature=0.0),
        )
    )
    small.core.step(wait=True)
    for action in ("save", "restore", "erase"):
        with pytest.raises(HeadraceError, match="is processing a request"):
            slots.ask(small, action)


def test_a_folder_that_is_none_and_a_cache_that_is_off_are_refused_at_start(tmp_path: Path) -> None:
    def resolved(**kv: Any) -> None:
        resolve_options(Options(model=ModelOptions(model=str(MODEL)), kv=KVOptions(**kv)))

    with pytest.raises(ConfigError, match=r"--slot-save-path: .* is no folder"):
        resolved(slot_save_path=str(tmp_path / "none"))
    with pytest.raises(ConfigError, match=r"--slot-save-path: .*--prefix-caching"):
        resolved(slot_save_path=str(tmp_path), prefix_caching=False)
