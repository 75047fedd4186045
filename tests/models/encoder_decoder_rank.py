"""Tiny encoder-decoders: their files, their logits by our model; and one rank of them as a process.

python -m tests.models.encoder_decoder_rank RANK RANKS STORE FOLDER...
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from headrace.back.attention.plan import AttentionPlan, Batch, EncoderBatch
from headrace.back.parallel.mesh import tensor_parallel_mesh
from headrace.back.runner.kv_layout import lay_out
from headrace.back.runner.memory import KVCounts, KVMemory
from headrace.base.config.resolved import ModelSpec
from tests.models.oracle import BLOCK_TOKENS, load_ours, model_spec, randomize
from tests.references.nllb_moe import use_chosen_experts

READ = ([5, 9, 33, 2, 71, 8, 8, 8, 40, 41, 17, 3, 90], [60], [4, 5, 6, 7] * 5)
DECODED = ([2, 6, 7], [2, 8, 15, 16, 23, 42], [2])


def saved(config: Any, folder: Path, *, seed: int = 3) -> Any:
    """A random model of the config, in float32, saved under `folder`."""
    from transformers import AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq

    torch.manual_seed(seed)
    speech = getattr(config, "num_mel_bins", None) is not None
    kind = AutoModelForSpeechSeq2Seq if speech else AutoModelForSeq2SeqLM
    model = kind.from_config(config, attn_implementation="eager").eval()
    randomize(model, seed=seed)
    for module in model.modules():
        if hasattr(module, "create_weight"):  # sines and cosines
            module.weight.data.copy_(module.create_weight())
    if config.model_type == "fsmt":
        as_published(model.model)
    bias = getattr(model, "final_logits_bias", None)
    if bias is not None:
        bias.copy_(torch.randn(bias.shape, generator=torch.Generator().manual_seed(seed)))
    model.save_pretrained(folder)
    use_chosen_experts(model)
    if config.model_type == "bigbird_pegasus":
        attend_in_blocks(model.get_encoder())
    return model


def as_published(fsmt: Any) -> None:
    """Sines and cosines are what they were, and the head is the decoder's embedding."""
    decoder = fsmt.decoder
    for table in (fsmt.encoder.embed_positions, decoder.embed_positions):
        table.make_weight(*table.weight.shape, table.padding_idx)
    decoder.output_projection.weight.data.copy_(decoder.embed_tokens.weight)


def attend_in_blocks(encoder: Any) -> None:
    """After a short text transformers 5.23 attends in no block any more, of a longer one too."""
    kind = encoder.config.attention_type
    encoder.register_forward_pre_hook(lambda *_: encoder.set_attention_type(kind))


def spec_of(folder: Path, **changes: Any) -> ModelSpec:
    """Its description."""
    return model_spec(folder, max_model_len=64, encoder_tokens=64, **changes)


def spectrograms(bands: int, frames: int) -> torch.Tensor:
    """One for each text of DECODED."""
    return torch.randn(len(DECODED), bands, frames, generator=torch.Generator().manual_seed(9))


def forced_logits(model: Any, speech: torch.Tensor | None = None) -> list[torch.Tensor]:
    """The logits [tokens, V] of every text of DECODED behind that of READ, or behind speech, all in
    one step."""
    layout = lay_out(model.kv_forms, block_tokens=BLOCK_TOKENS, dtype=torch.float32)
    memory = KVMemory(layout, KVCounts(num_blocks=99), device=torch.device("cpu"))
    blocks = iter(range(1, 99))
    plans, slots = [], []
    read_lens, lens = ([len(ids) for ids in each] for each in (READ, DECODED))
    if speech is not None:
        read_lens = [speech.shape[2] // 2] * len(DECODED)
    for group in layout.groups:
        held = read_lens if group.kind == "cross" else lens
        table = np.zeros((len(held), 8), np.int32)
        for row, length in enumerate(held):
            for i in range(-(-length // BLOCK_TOKENS)):
                table[row, i] = next(blocks)
        at = [
            int(table[row, p // BLOCK_TOKENS]) * BLOCK_TOKENS + p % BLOCK_TOKENS
            for row, length in enumerate(held)
            for p in range(length)
        ]
        query_start = np.concatenate([[0], np.cumsum(lens)]).astype(np.int32)
        cross = group.kind == "cross"
        slots.append(torch.tensor(at if cross else [], dtype=torch.int64))
        plans.append(
            AttentionPlan(
                query_start_R1=torch.from_numpy(query_start),
                kv_len_R=torch.tensor(held, dtype=torch.int32),
                block_table_RB=torch.from_numpy(table),
                slot_T=torch.zeros(sum(lens), dtype=torch.int64) if cross else torch.tensor(at),
                host_query_start=query_start,
                host_kv_len=np.array(held, np.int32),
                num_decodes=0,
                max_query_len=max(lens),
                max_kv_len=8 * BLOCK_TOKENS,
            )
        )
    encoder = EncoderBatch(
        token_ids_S=torch.tensor([i for ids in READ for i in ids]),
        positions_S=torch.tensor([p for length in read_lens for p in range(length)]),
        query_start=np.concatenate([[0], np.cumsum(read_lens)]).astype(np.int32),
        slots_GS=tuple(slots),
        spectrograms=speech,
    )
    batch = Batch(
        token_ids_T=torch.tensor([i for ids in DECODED for i in ids]),
        positions_T=torch.tensor([p for ids in DECODED for p in range(len(ids))]),
        plans=tuple(plans),
        group_of_layer=layout.group_of_cache,
        kv=memory.caches,
        logits_at_N=torch.arange(sum(lens)),
        encoder=(encoder,),
    )
    with torch.inference_mode():
        return list(model.logits(model.forward(batch)).split(lens))


def main(rank: int, ranks: int, store: str, folders: list[str]) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    for folder in folders:
        spec = spec_of(Path(folder))
        model = load_ours(spec, mesh=tensor_parallel_mesh())
        speech = spectrograms(*spec.spectrogram) if spec.spectrogram else None
        torch.save(forced_logits(model, speech), Path(folder) / f"rank{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:])
    # The interpreter's own shutdown sometimes ends a gloo thread that still runs, and with it the process (SIGABRT).
    os._exit(0)
