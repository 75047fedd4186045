"""`bench mm-processor` over the bundled model that sees (API-25)."""

from __future__ import annotations

import json

import pytest

from headrace.cli.bench import main


@pytest.mark.slow
def test_images_are_measured_on_their_way(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--num-prompts", "2", "--images-per-prompt", "2", "--width", "64", "--height", "48"]
    assert main(["mm-processor", "--demo", "vision", *asked, "--warmup", "0", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["prompts"], told["images_per_prompt"]) == (2, 2) and told["prompt_tokens"] > 10
    for rows in (told, told["known"]):
        assert rows["images_per_s"] > 0
        assert all(
            rows[f"{stage}_ms"]["p50"] > 0 for stage in ("prepare", "render", "expand", "total")
        )


@pytest.mark.slow
def test_a_model_that_does_not_see_is_refused() -> None:
    from headrace.base.errors import ConfigError

    with pytest.raises(ConfigError, match="takes no images"):
        main(["mm-processor", "--num-prompts", "1"])
