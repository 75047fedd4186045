"""Losses of one model beside another: the arithmetic, and the command over two real ones."""

from __future__ import annotations

import json
import math

import pytest

from headrace.base.errors import ConfigError
from headrace.bench.losses import AnswerScores, compare, divergence
from headrace.cli.eval import main
from headrace.front.client.events import ScoredToken, TokenScore


def scored(id: int, probabilities: dict[int, float]) -> ScoredToken:
    top = sorted(probabilities, key=lambda one: -probabilities[one])
    scores = [
        TokenScore(id=one, logprob=math.log(probabilities[one]), text="", data=b"", rank=rank + 1)
        for rank, one in enumerate(top)
    ]
    return ScoredToken(token=next(score for score in scores if score.id == id), top=scores[:3])


def test_divergence_is_that_of_the_distributions_where_both_name_all() -> None:
    p, q = {1: 0.5, 2: 0.3, 3: 0.2}, {1: 0.4, 2: 0.4, 3: 0.2}
    expected = sum(p[i] * math.log(p[i] / q[i]) for i in p)
    assert divergence(scored(1, p), scored(1, q)) == pytest.approx(expected)
    assert divergence(scored(1, p), scored(1, p)) == pytest.approx(0.0, abs=1e-12)


def test_ids_that_one_of_them_does_not_name_are_taken_together() -> None:
    p, q = {1: 0.5, 2: 0.3, 3: 0.15, 4: 0.05}, {1: 0.6, 4: 0.2, 2: 0.15, 3: 0.05}
    expected = 0.5 * math.log(0.5 / 0.6) + 0.3 * math.log(0.3 / 0.15) + 0.2 * math.log(0.2 / 0.25)
    assert divergence(scored(1, p), scored(1, q)) == pytest.approx(expected)
    true = sum(p[i] * math.log(p[i] / q[i]) for i in p)
    assert divergence(scored(1, p), scored(1, q)) <= true


def test_perplexities_and_agreement_are_over_all_tokens() -> None:
    ours = [AnswerScores(ids=(1, 2), scores=(scored(1, {1: 0.5, 2: 0.5}), scored(2, {2: 1.0})))]
    theirs = [AnswerScores(ids=(1, 2), scores=(scored(1, {2: 0.75, 1: 0.25}), scored(2, {2: 1.0})))]
    loss = compare("t", ours, theirs)
    assert loss is not None and (loss.tokens, loss.agreement) == (2, 0.5)
    assert loss.perplexity == pytest.approx(2**0.5) and loss.against == pytest.approx(2.0)
    assert compare("t", [], []) is None
    with pytest.raises(ConfigError, match="different tokens"):
        compare("t", [AnswerScores(ids=(3,), scores=())], [AnswerScores(ids=(1,), scores=())])


@pytest.mark.slow
def test_the_command_compares_a_quantized_model_with_the_plain_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["--tasks", "copy", "--count", "4", "--json", "--dtype", "bfloat16"]
    from headrace.launch.locate import bundled_model

    model = str(bundled_model())
    assert main([model, "--quantization", "int4", "--against", model, *words]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    loss = found["all"]["loss"]
    assert loss["tokens"] > 20 and found["copy"]["against_share"] == 1.0
    assert 1.0 <= loss["against"] < 1.2 and loss["perplexity"] != loss["against"]
    assert 0 < loss["divergence"] < 0.1 and loss["agreement"] > 0.9
