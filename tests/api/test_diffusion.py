"""BEY-40: a model that writes blocks by diffusion behind the server: chats, streams, usage, and what it refuses."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.api.clients import openai_client
from tests.api.model_folder import write_model_folder
from tests.api.serving import serving
from tests.references.block_diffusion import SDAR
from tests.references.canvas_diffusion import DREAM, LLADA

pytestmark = [pytest.mark.serial, pytest.mark.slow]
ASKED = {"role": "user", "content": "a mill wheel"}


def write_folder(folder: Path, config: dict[str, Any]) -> Path:
    """A folder whose weights are made up."""
    write_model_folder(folder)
    held = json.loads((folder / "config.json").read_text())
    kept = {key: held[key] for key in ("vocab_size", "eos_token_id", "max_position_embeddings")}
    kept["embedding_size"] = held["vocab_size"]
    mask = {"mask_token_id": held["vocab_size"] - 1, "torch_dtype": "float32"}
    (folder / "config.json").write_text(json.dumps({**config, **kept, **mask}))
    return folder


@pytest.mark.parametrize(
    ("config", "diffusion"),
    [
        (SDAR, '{"steps": 2, "threshold": 0.5}'),
        (LLADA, '{"steps": 2, "threshold": 0.5, "block_length": 8}'),
        (DREAM, '{"steps": 5, "canvas_length": 20}'),
    ],
    ids=["sdar", "llada", "dream"],
)
def test_chats_are_answered_block_by_block(
    config: dict[str, Any], diffusion: str, tmp_path: Path
) -> None:
    folder = write_folder(tmp_path / "sdar", config)
    flags = ("--load-format", "dummy", "--threads", "1", "--max-running", "4", "--kv-blocks", "64")
    with (
        serving(None, str(folder), *flags, "--diffusion-config", diffusion) as served,
        openai_client(served.url) as client,
    ):

        def ask(content: str, **more: Any) -> Any:
            return client.chat.completions.create(
                model="sdar",
                messages=[{"role": "user", "content": content}],
                **{"temperature": 0.0, "max_tokens": 30, **more},
                extra_body={"ignore_eos": True},
            )

        whole = ask("a mill wheel")
        assert whole.usage.completion_tokens == 30 and whole.choices[0].finish_reason == "length"
        text, usage = "", None
        for chunk in ask("a mill wheel", stream=True, stream_options={"include_usage": True}):
            text += chunk.choices[0].delta.content or "" if chunk.choices else ""
            usage = chunk.usage or usage
        assert text == whole.choices[0].message.content and usage.completion_tokens == 30
        contents = [
            f"{name} turns in the headrace" for name in ("fox", "dog", "mill", "wheel", "水車")
        ]
        alone = [ask(content).choices[0].message.content for content in contents]
        with ThreadPoolExecutor(5) as threads:
            beside = list(threads.map(lambda one: ask(one).choices[0].message.content, contents))
        assert beside == alone
        sampled = {"temperature": 1.0, "top_p": 0.9, "seed": 3}
        assert ask("wheel", **sampled).choices == ask("wheel", **sampled).choices
        refused = (
            ("response_format", {"response_format": {"type": "json_object"}}),
            ("logprobs", {"logprobs": True}),
            ("frequency_penalty", {"frequency_penalty": 0.5}),
        )
        for field, more in refused:
            with pytest.raises(openai.BadRequestError, match="writes blocks") as error:
                ask("a mill wheel", **more)
            assert error.value.param == field
        assert served.at_rest()
