"""REINFORCE on the bundled model: products that its training never showed, a reward for the right
one.

    python -m demo.reinforce --steps 30
    python -m demo.reinforce --steps 24 --problems 16 --noise 0.35 --learning-rate 2e-4

The second begins with a model that has lost a part of what it knew.

The engine samples answers and tells their log-probabilities; a copy of the model in PyTorch takes a
step of gradient ascent on the reward; its weights go back into the engine, and the next answers come
from them. Prints a line of JSON for each step:

score            share of right answers among those sampled at temperature 1
logprob_error    greatest difference between the engine's log-probability of a sampled token and the
                 trainer's, which computes it again with the weights it was sampled from
push_s           seconds from the trainer's tensors to an engine that goes on with them
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count, islice
from pathlib import Path
from random import Random

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from demo.tasks.item import is_held_out
from demo.tasks.numbers import multiply
from headrace import LLM, SamplingParams
from headrace.front.client.llm import Output

MODEL = Path(__file__).parent / "model"
MAX_TOKENS = 12


@dataclass(frozen=True, kw_only=True, eq=False)
class Rollout:
    """Answers of the engine to problems that some of them solve: rows of token ids, padded with 0 on
    the right.

    ids_BT int64; sampled_BT bool: tokens that the engine sampled; logprob_BT float32 of those, as it
    told them; advantage_B: the reward above the mean of the same problem's answers, over their
    deviation; score: the mean reward over all problems.
    """

    ids_BT: torch.Tensor
    sampled_BT: torch.Tensor
    logprob_BT: torch.Tensor
    advantage_B: torch.Tensor
    score: float

    def on(self, device: str) -> Rollout:
        """The same on another device."""
        tensors = {
            name: value.to(device)
            for name, value in vars(self).items()
            if isinstance(value, torch.Tensor)
        }
        return replace(self, **tensors)


def ask(llm: LLM, rng: Random, *, problems: int, answers: int) -> Rollout:
    """Samples answers to some problems."""
    products = (multiply(rng) for _ in count())
    held_out = (one for one in products if is_held_out(one.keys))
    conversations = list(islice(held_out, problems))
    asked = [[{"role": "user", "content": one.messages[0]["content"]}] for one in conversations]
    params = SamplingParams(
        temperature=1.0, n=answers, max_tokens=MAX_TOKENS, logprobs=0, seed=rng.getrandbits(32)
    )
    outputs = llm.chat(asked, params, progress=False)
    right = [str(one.messages[-1]["content"]) for one in conversations]
    rewards = torch.tensor(
        [
            [float(answer.text.strip() == expected) for answer in output.outputs]
            for output, expected in zip(outputs, right, strict=True)
        ]
    )
    above = rewards - rewards.mean(dim=1, keepdim=True)
    advantages = above / (rewards.std(dim=1, keepdim=True) + 1e-4)
    # where all answers are as good as each other there is nothing to learn
    tell = [i for i in range(problems) if bool(above[i].any())] or [0]
    return _padded([outputs[i] for i in tell], advantages[tell].flatten(), float(rewards.mean()))


def _padded(outputs: list[Output], advantage_B: torch.Tensor, score: float) -> Rollout:
    rows = [(one.prompt_ids, answer) for one in outputs for answer in one.outputs]
    longest = max(len(prompt) + len(answer.token_ids) for prompt, answer in rows)
    shape = (len(rows), longest)
    ids_BT = torch.zeros(shape, dtype=torch.long)
    sampled_BT, logprob_BT = torch.zeros(shape, dtype=torch.bool), torch.zeros(shape)
    for row, (prompt, answer) in enumerate(rows):
        begin, end = len(prompt), len(prompt) + len(answer.token_ids)
        ids_BT[row, :end] = torch.tensor([*prompt, *answer.token_ids])
        sampled_BT[row, begin:end] = True
        scores = [one.token.logprob for one in answer.logprobs or []]
        logprob_BT[row, begin:end] = torch.tensor(scores)
    return Rollout(
        ids_BT=ids_BT,
        sampled_BT=sampled_BT,
        logprob_BT=logprob_BT,
        advantage_B=advantage_B,
        score=score,
    )


def logprobs_of(policy: torch.nn.Module, ids_BT: torch.Tensor) -> torch.Tensor:
    """Log-probability of each token, float32 [B, T]; that of the first is 0."""
    logits_BTV = policy(ids_BT).logits[:, :-1]
    logprob_BT = torch.log_softmax(logits_BTV.float(), dim=-1)
    return F.pad(logprob_BT.gather(-1, ids_BT[:, 1:, None]).squeeze(-1), (1, 0))


def learn(policy: torch.nn.Module, optimizer: torch.optim.Optimizer, rollout: Rollout) -> float:
    """One step of the policy gradient; the greatest error of the engine's log-probabilities."""
    logprob_BT = logprobs_of(policy, rollout.ids_BT)
    weight_BT = rollout.advantage_B[:, None] * rollout.sampled_BT
    loss = -(weight_BT * logprob_BT).sum() / rollout.sampled_BT.sum()
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    optimizer.step()
    apart_BT = (logprob_BT.detach() - rollout.logprob_BT).abs()
    return float(apart_BT[rollout.sampled_BT].max())


@torch.no_grad()
def weaken(policy: torch.nn.Module, noise: float, seed: int) -> None:
    """Adds to each matrix normal noise of so many times its own deviation."""
    generator = torch.Generator().manual_seed(seed)
    for weight in policy.parameters():
        if weight.dim() == 2:
            values = torch.randn(weight.shape, generator=generator).to(weight)
            weight += noise * weight.std() * values


def train(
    *,
    steps: int,
    problems: int,
    answers: int,
    learning_rate: float,
    seed: int,
    dtype: str,
    device: str,
    noise: float = 0.0,
) -> Iterator[dict[str, object]]:
    """Runs the loop; a record for each step."""
    rng = Random(seed)
    policy = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).to(device)
    weaken(policy, noise, seed)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=learning_rate, weight_decay=0.0)
    with LLM(str(MODEL), device=device, dtype=dtype) as llm:
        if noise:
            llm.update_weights(policy.state_dict(), version="weakened")
        for step in range(steps):
            rollout = ask(llm, rng, problems=problems, answers=answers)
            version = llm.weights_version
            error = learn(policy, optimizer, rollout.on(device))
            began = time.perf_counter()
            llm.update_weights(policy.state_dict(), version=f"step-{step + 1}")
            yield {
                "step": step,
                "weights": version,
                "score": round(rollout.score, 4),
                "logprob_error": float(f"{error:.2e}"),
                "push_s": round(time.perf_counter() - began, 3),
            }


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--problems", type=int, default=48)
    parser.add_argument("--answers", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=3e-5)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--noise", type=float, default=0.0, help="weakens the model first")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", help="of the engine")
    arguments = parser.parse_args()
    for record in train(**vars(arguments)):
        print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
