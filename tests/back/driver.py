"""A minimal core for tests of the runner: gives rows and blocks to requests and writes plans, any split, any order."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from msgspec.msgpack import encode

from headrace.back.attention.plan import AttentionPlan, Batch
from headrace.back.models.protocol import CausalModel
from headrace.base.wire.media import MEDIA_HOOK, MediaContent, MediaInput, MediaPayload
from headrace.base.wire.request import PromptLogprobs, RowSampling
from headrace.base.wire.step import RowLogprobs, RowStart, StepPlan, StepResult, WorkerFacts
from headrace.core.encoder_cache import content_of

GREEDY = RowSampling(temperature=0.0)


@dataclass(kw_only=True, eq=False)
class Sequence:
    """A request as the driver sees it; `unknown` counts tokens sampled in steps whose results are not read yet."""

    request: int
    tokens: list[int]
    num_prompt: int
    sampling: RowSampling
    media: tuple[MediaInput, ...] = ()
    row: int = -1
    num_computed: int = 0
    unknown: int = 0
    started: bool = False
    blocks: list[list[int]] = field(default_factory=list)
    logprobs: list[RowLogprobs] = field(default_factory=list)
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    error: str | None = None

    @property
    def outputs(self) -> list[int]:
        """Tokens after the prompt."""
        return self.tokens[self.num_prompt :]

    @property
    def length(self) -> int:
        """Known tokens and those still on the device."""
        return len(self.tokens) + self.unknown


class Driver:
    """Writes plans for a set of sequences. `plan` decides nothing: the caller names who runs how many tokens.

    Every block has a slab for itself, of which it is the last one: where groups cut slabs differently, blocks of other
    ids lie in the same memory. Recurrent state has no blocks."""

    def __init__(self, facts: WorkerFacts) -> None:
        self.facts = facts
        self.groups = [group for group in facts.groups if group.kind != "state"]
        self.free_rows = list(range(facts.max_rows))[::-1]
        self.free_slabs = list(range(1, facts.num_blocks))[::-1]
        self.ends: list[int] = []
        self.step = 0
        self.inflight: dict[int, list[tuple[Sequence, bool]]] = {}

    def add(
        self,
        prompt: list[int],
        sampling: RowSampling = GREEDY,
        *,
        request: int = 0,
        media: tuple[MediaInput, ...] = (),
    ) -> Sequence:
        """A new sequence; it gets its row at its first plan."""
        return Sequence(
            request=request,
            tokens=list(prompt),
            num_prompt=len(prompt),
            sampling=sampling,
            media=media,
        )

    def release(self, sequence: Sequence) -> None:
        """Gives row and blocks back (the end of a request, or a preemption: it may be planned again)."""
        assert sequence.unknown == 0
        self.ends.append(sequence.row)
        self.free_rows.append(sequence.row)
        for group, blocks in zip(self.groups, sequence.blocks, strict=True):
            self.free_slabs.extend(block // group.blocks_per_slab for block in blocks)
        sequence.row, sequence.num_computed, sequence.started = -1, 0, False
        sequence.blocks = []

    def plan(self, runs: list[tuple[Sequence, int]]) -> StepPlan:
        """The plan in which each sequence runs so many tokens; it is sampled if that reaches its last token."""
        runs = sorted(runs, key=lambda run: run[1] != 1)
        ends, self.ends = self.ends, []
        starts: list[RowStart] = []
        added: list[MediaContent] = []
        updates: list[tuple[int, int, int, int]] = []
        for sequence, count in runs:
            if not sequence.started:
                starts.append(self._start(sequence))
                added += [content_of(one) for one in sequence.media]
            updates += self._grow(sequence, sequence.num_computed + count)
        sample = [s.num_computed + count == s.length for s, count in runs]
        plan = StepPlan(
            step=self.step,
            ends=np.array(ends, np.int32),
            starts=starts,
            block_group=np.array([u[0] for u in updates], np.int32),
            block_row=np.array([u[1] for u in updates], np.int32),
            block_index=np.array([u[2] for u in updates], np.int32),
            block_id=np.array([u[3] for u in updates], np.int32),
            rows=np.array([s.row for s, _ in runs], np.int32),
            num_tokens=np.array([count for _, count in runs], np.int32),
            num_computed=np.array([s.num_computed for s, _ in runs], np.int32),
            sample=np.array(sample, np.bool_),
            hook_payloads={MEDIA_HOOK: encode(MediaPayload(added=tuple(added)))} if added else {},
        )
        for (sequence, count), sampled in zip(runs, sample, strict=True):
            sequence.num_computed += count
            sequence.unknown += sampled
        self.inflight[self.step] = [
            (s, sampled) for (s, _), sampled in zip(runs, sample, strict=True)
        ]
        self.step += 1
        return plan

    def read(self, result: StepResult) -> None:
        """Takes a result over into the sequences."""
        runs = self.inflight.pop(result.step)
        failed = dict(result.failed)
        for index, (sequence, sampled) in enumerate(runs):
            sequence.unknown -= sampled
            if index in failed:
                sequence.error = failed[index].kind
                assert result.tokens[index, 0] == -1
            elif sampled:
                sequence.tokens.append(int(result.tokens[index, 0]))
            else:
                assert result.tokens[index, 0] == -1
        for logprobs in result.logprobs:
            runs[logprobs.index][0].logprobs.append(logprobs)
        for index, prompt_logprobs in result.prompt_logprobs:
            runs[index][0].prompt_logprobs.append(prompt_logprobs)

    def _start(self, sequence: Sequence) -> RowStart:
        sequence.row, sequence.started = self.free_rows.pop(), True
        sequence.blocks = [[] for _ in self.groups]
        return RowStart(
            row=sequence.row,
            request=sequence.request,
            tokens=np.array(sequence.tokens, np.int32),
            num_prompt=sequence.num_prompt,
            num_computed=0,
            sampling=sequence.sampling,
            media=tuple(one.span() for one in sequence.media),
        )

    def _grow(self, sequence: Sequence, length: int) -> list[tuple[int, int, int, int]]:
        updates = []
        for index, group in enumerate(self.groups):
            blocks, tokens = sequence.blocks[index], self.facts.block_tokens * group.block_ratio
            while len(blocks) * tokens < length:
                block = (self.free_slabs.pop() + 1) * group.blocks_per_slab - 1
                updates.append((index, sequence.row, len(blocks), block))
                blocks.append(block)
        return updates


def reference_logits(model: CausalModel, tokens: list[int]) -> torch.Tensor:
    """Logits [len(tokens), V] of one sequence in one piece, without the runner: one block holds everything."""
    count = len(tokens)
    plan = AttentionPlan(
        query_start_R1=torch.tensor([0, count], dtype=torch.int32),
        kv_len_R=torch.tensor([count], dtype=torch.int32),
        block_table_RB=torch.zeros(1, 1, dtype=torch.int32),
        slot_T=torch.arange(count),
        host_query_start=np.array([0, count], np.int32),
        host_kv_len=np.array([count], np.int32),
        num_decodes=0,
        max_query_len=count,
        max_kv_len=count,
    )
    forms = model.kv_forms
    batch = Batch(
        token_ids_T=torch.tensor(tokens),
        positions_T=torch.arange(count),
        plans=(plan,),
        group_of_layer=(0,) * len(forms),
        kv=tuple(torch.zeros(1, 2, at.kv_heads, count, at.head_dim) for at in forms),
        logits_at_N=torch.arange(count),
    )
    return model.logits(model.forward(batch))


def greedy_reference(model: CausalModel, prompt: list[int], count: int) -> list[int]:
    """The greedy continuation of one prompt, recomputed from scratch for every token."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(reference_logits(model, tokens)[-1].numpy().argmax()))
    return tokens[len(prompt) :]
