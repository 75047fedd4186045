"""What heads draft, against their formulas in float32, token by token, over transformers' hidden states (SPC-02)."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from headrace.back.executor.inline import InlineExecutor
from headrace.back.kernels.native.library import NativeLibrary, load
from headrace.back.runner.verification import DraftVerification
from headrace.base.config.resolved import EngineSpec
from headrace.base.config.tree import (
    DeviceOptions,
    ModelOptions,
    Options,
    SchedulerOptions,
    SpeculationOptions,
)
from headrace.base.wire.media import PROMPT as PROMPT_KIND
from headrace.base.wire.media import MediaInput
from headrace.base.wire.request import EngineRequest, RowSampling, StopRules
from headrace.core.core import EngineCore
from headrace.core.encoder_cache import encoder_cache_hooks
from headrace.launch.facts import resolve_options
from tests.back.speculative.checkpoints import DIM, HEADS, KV_HEADS, save_head

pytestmark = pytest.mark.skipif(
    not isinstance(load(), NativeLibrary), reason="the native kernels are not built"
)
MODEL = Path(__file__).parents[3] / "demo" / "model"
PROMPT = list(range(300, 337))
TAPS = {"eagle3": (2, 4, 5), "eagle3-shared": (1, 4, 7)}
DRAFTS = 3


@pytest.fixture(scope="module")
def model() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, 1e-6)


def rotated(x_HD: torch.Tensor, position: int) -> torch.Tensor:
    angles = position * 100000.0 ** -(torch.arange(0, DIM, 2) / DIM)
    cos, sin = (torch.cat((one, one)) for one in (angles.cos(), angles.sin()))
    left, right = x_HD.chunk(2, dim=-1)
    return x_HD * cos + torch.cat((-right, left), dim=-1) * sin


class Formula:
    """A head, one token at a time. Each call takes the token behind a position and the hidden state
    there."""

    def __init__(self, kind: str, tensors: dict[str, torch.Tensor], table: torch.Tensor) -> None:
        self.kind, self.w, self.table = kind.split("-")[0], tensors, table
        self.layer = {"eagle3": "midlayer", "eagle": "layers.0", "mtp": "mtp.layers.0"}[self.kind]
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []

    def first(self, states: list[torch.Tensor], kind: str) -> torch.Tensor:
        """What stands for the model's hidden state [T, E]."""
        if self.kind != "eagle3":
            return states[-1]
        seen = torch.cat([states[i] for i in TAPS[kind]], dim=-1)
        return seen @ self.w["fc.weight"].T

    def __call__(self, token: int, hidden: torch.Tensor) -> torch.Tensor:
        w, layer, embedded = self.w, self.layer, self.table[token]
        if self.kind == "eagle3":
            x = torch.cat(
                (
                    norm(embedded, w["midlayer.input_layernorm.weight"]),
                    norm(hidden, w["midlayer.hidden_norm.weight"]),
                )
            )
            residual = hidden
        elif self.kind == "eagle":
            x = residual = torch.cat((embedded, hidden)) @ w["fc.weight"].T + w["fc.bias"]
        else:
            halves = (
                norm(embedded, w["mtp.pre_fc_norm_embedding.weight"]),
                norm(hidden, w["mtp.pre_fc_norm_hidden.weight"]),
            )
            residual = torch.cat(halves) @ w["mtp.fc.weight"].T
            x = norm(residual, w["mtp.layers.0.input_layernorm.weight"])
        residual = residual + self._attend(x)
        x = norm(residual, w[f"{layer}.post_attention_layernorm.weight"])
        gate, up, down = (w[f"{layer}.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        return residual + (F.silu(x @ gate.T) * (x @ up.T)) @ down.T

    def _attend(self, x: torch.Tensor) -> torch.Tensor:
        prefix = f"{self.layer}.self_attn"
        q, k, v = ((x @ self.w[f"{prefix}.{name}_proj.weight"].T).view(-1, DIM) for name in "qkv")
        if self.kind == "mtp":
            q = norm(q, self.w[f"{prefix}.q_norm.weight"])
            k = norm(k, self.w[f"{prefix}.k_norm.weight"])
        position = len(self.keys)
        self.keys.append(rotated(k, position))
        self.values.append(v)
        keys, values = (
            torch.stack(one).repeat_interleave(HEADS // KV_HEADS, dim=1)
            for one in (self.keys, self.values)
        )
        scores = torch.einsum("hd,thd->ht", rotated(q, position), keys) * DIM**-0.5
        out = torch.einsum("ht,thd->hd", scores.softmax(-1), values)
        return out.flatten() @ self.w[f"{prefix}.o_proj.weight"].T

    def top(self, hidden: torch.Tensor) -> int:
        """The token that it drafts, of the model's."""
        name = {"eagle3": "norm.weight", "eagle": None, "mtp": "mtp.norm.weight"}[self.kind]
        x = hidden if name is None else norm(hidden, self.w[name])
        if self.kind != "eagle3":
            return int((self.table @ x).argmax())
        known = self.w["d2t"] + torch.arange(self.w["d2t"].numel())
        head = self.w.get("lm_head.weight", self.table[known])
        return int(known[int((head @ x).argmax())])


def drafts_of(
    kind: str, tensors: dict[str, torch.Tensor], model: Any, text: list[int], count: int
) -> tuple[list[int], torch.Tensor]:
    """What the formula drafts behind a text, and what it keeps of it."""
    with torch.inference_mode():
        out = model(torch.tensor([text]), output_hidden_states=True)
        states = [state[0] for state in out.hidden_states]
        head = Formula(kind, tensors, model.get_input_embeddings().weight)
        first = head.first(states, kind)
        for position, token in enumerate(text[1:]):
            hidden = head(token, first[position])
        kept, drafts = hidden, [head.top(hidden)]
        while len(drafts) < count:
            hidden = head(drafts[-1], hidden)
            drafts.append(head.top(hidden))
    return drafts, kept


Proposed = list[tuple[list[int], list[int], torch.Tensor]]


@pytest.fixture
def proposed(monkeypatch: pytest.MonkeyPatch) -> Proposed:
    """Texts of rows, the drafts that were proposed for them, and what was kept of them."""
    seen: Proposed = []
    propose = DraftVerification._propose_on_host

    def noted(self: DraftVerification, host: Any, rows: list[int], wanted: list[int]) -> None:
        propose(self, host, rows, wanted)
        for row in rows:
            length, count = int(self._length_M[row]), int(self.count_M[row])
            tokens = self._tables.tokens_MC[row].tolist()
            state_E = self._drafter._state_ME[row].clone()
            seen.append((tokens[:length], tokens[length : length + count], state_E))

    monkeypatch.setattr(DraftVerification, "_propose_on_host", noted)
    return seen


def speculating(drafter: str, **how: Any) -> EngineSpec:
    """The bundled model in float32 with a drafter."""
    settings = {"model": drafter, "num_speculative_tokens": DRAFTS, "adaptive": False, **how}
    scheduler = SchedulerOptions(
        speculative_config=SpeculationOptions(**settings), max_step_tokens=16, max_running=2
    )
    tree = Options(
        device=DeviceOptions(device="cpu"),
        model=ModelOptions(max_model_len=256, dtype="float32"),
        scheduler=scheduler,
    )
    return resolve_options(tree).engine


def run_greedily(
    spec: EngineSpec, prompt: list[int] = PROMPT, media: tuple[MediaInput, ...] = ()
) -> None:
    """A prompt in three chunks, and seven tokens."""
    executor = InlineExecutor(spec)
    facts = executor.facts
    hooks = encoder_cache_hooks(facts.media_tokens, spec.scheduler.max_step_tokens)
    core = EngineCore(spec, executor, hooks=hooks)
    ids = np.asarray(prompt, "<i4").tobytes()
    stop, sampling = StopRules(max_tokens=7, min_tokens=7), RowSampling(temperature=0.0)
    core.add(EngineRequest(id=0, prompt=ids, stop=stop, sampling=sampling, media=media))
    while core.has_work:
        core.step(wait=True)
    executor.close()


@pytest.mark.parametrize(
    "kind", ["eagle3", pytest.param("eagle3-shared", marks=pytest.mark.slow), "eagle", "mtp"]
)
def test_a_head_drafts_what_its_formula_says(
    kind: str, model: Any, tmp_path: Path, proposed: Proposed
) -> None:
    """Over a prompt in three chunks and five steps, each of which throws drafts away."""
    tensors = save_head(tmp_path, kind)
    spec = speculating(str(tmp_path))
    assert spec.speculation is not None and spec.speculation.method == kind.split("-")[0]
    run_greedily(spec)
    proposed = [one for one in proposed if one[1]]
    assert len(proposed) >= 4 and max(len(drafts) for _, drafts, _ in proposed) > 1
    for text, drafts, state_E in proposed:
        expected, kept_E = drafts_of(kind, tensors, model, text, len(drafts))
        assert drafts == expected, len(text)
        torch.testing.assert_close(state_E, kept_E, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["eagle3", "eagle", "mtp"])
def test_a_head_reads_what_an_encoder_gave_as_the_model_does(
    kind: str, model: Any, tmp_path: Path, proposed: Proposed
) -> None:
    """SPC-04: tokens of the prompt that come as vectors, over the ends of two chunks and from the
    first token on, are drafted behind as the tokens themselves are."""
    save_head(tmp_path, kind)
    spec = speculating(str(tmp_path))
    run_greedily(spec)
    plain = list(proposed)
    proposed.clear()
    spans = ((0, 3), (9, 20), (30, 32))
    ids, media = list(PROMPT), []
    for begin, end in spans:
        rows = model.get_input_embeddings().weight[PROMPT[begin:end]].detach().numpy().tobytes()
        ids[begin:end] = [0] * (end - begin)
        key = hashlib.sha256(rows).digest()
        shape = {"num_tokens": end - begin, "grid": (1, 1, end - begin)}
        media.append(MediaInput(kind=PROMPT_KIND, key=key, offset=begin, rows=rows, **shape))
    own = msgspec.structs.replace(spec.model, prompt_embeds=True)
    run_greedily(msgspec.structs.replace(spec, model=own), ids, tuple(media))
    assert len(plain) == len(proposed) and any(drafts for _, drafts, _ in plain)
    for (text, drafts, state_E), (seen, as_vectors, their_E) in zip(plain, proposed, strict=True):
        assert drafts == as_vectors and text[len(PROMPT) :] == seen[len(PROMPT) :]
        torch.testing.assert_close(their_E, state_E, atol=1e-5, rtol=1e-5)
