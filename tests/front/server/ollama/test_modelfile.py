"""Modelfiles: what is read is what is written, and what is unknown is refused by its line (BEY-43)."""

from __future__ import annotations

import pytest

from headrace.base.errors import InvalidRequest
from headrace.front.server.ollama.modelfile import read_modelfile, write_modelfile

TEXT = '''
# a comment
FROM demo:latest
PARAMETER temperature 0.5
parameter stop "<|end|>"
PARAMETER stop AI:
PARAMETER num_predict -1
PARAMETER use_mmap true
SYSTEM """You are
# Bob.
"""
TEMPLATE "{% for message in messages %}{{ message.content }}{% endfor %}"
LICENSE MIT
MESSAGE user What is 1 + 1?
MESSAGE assistant """2
or so"""
'''


def test_every_instruction_is_read() -> None:
    assert read_modelfile(TEXT) == {
        "from": "demo:latest",
        "parameters": {
            "temperature": 0.5,
            "stop": ["<|end|>", "AI:"],
            "num_predict": -1,
            "use_mmap": True,
        },
        "system": "You are\n# Bob.\n",
        "template": "{% for message in messages %}{{ message.content }}{% endfor %}",
        "license": ["MIT"],
        "messages": [
            {"role": "user", "content": "What is 1 + 1?"},
            {"role": "assistant", "content": "2\nor so"},
        ],
    }


def test_what_is_written_is_read_again() -> None:
    fields = read_modelfile(TEXT)
    text = write_modelfile(
        fields["from"],
        system=fields["system"],
        template=fields["template"],
        license=tuple(fields["license"]),
        parameters=fields["parameters"],
        messages=tuple(fields["messages"]),
    )
    assert read_modelfile(text) == fields


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("SYSTEM x", "FROM is missing"),
        ("FROM", "line 1: a word and an argument"),
        ("FROM m\n\nADAPTER ./x.gguf", "line 3: ADAPTER"),
        ("FROM m\nREQUIRES 0.5", "line 2: REQUIRES is none of"),
        ("FROM m\nMESSAGE robot hi", "line 2: MESSAGE: a role"),
        ("FROM m\nPARAMETER seed", "line 2: PARAMETER: a name and a value"),
        ('FROM m\nSYSTEM """x', "line 2: the text that"),
    ],
)
def test_what_is_wrong_is_told_by_its_line(text: str, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said) as refused:
        read_modelfile(text)
    assert refused.value.field == "modelfile"
