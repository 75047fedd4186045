import json
from pathlib import Path

import pytest

import headrace
from headrace.base.errors import ContextTooLong, InvalidRequest
from headrace.front.text.chat import ChatTemplate
from headrace.front.text.media_parts import MediaMark
from headrace.front.text.templates import TemplateLimits, TemplatePool
from headrace.front.text.tokenizer_files import load_tokenizer
from tests.front.text import vocabularies

KINDS = [vocabularies.byte_level, vocabularies.byte_fallback, vocabularies.unigram]
USER = {"role": "user", "content": "hello world"}
DUMP = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% if m.reasoning_content %}/{{ m.reasoning_content }}/{{ m.reasoning }}{% endif %}"
    "{% for c in m.tool_calls or [] %}!{{ c.function.name }}({{ c.function.arguments | tojson }}){% endfor %};"
    "{% endfor %}{% if tools %}T{{ tools | tojson }}{% endif %}"
)


@pytest.fixture(scope="module")
def pool():
    made = TemplatePool(TemplateLimits(), size=1)
    yield made
    made.close()


def template(pool, source=vocabularies.TEMPLATE, make=vocabularies.byte_level, **options):
    return ChatTemplate(source, make(), pool=pool, **options)


@pytest.mark.parametrize("make", KINDS)
def test_render_equals_the_library_on_harmless_text(pool, make):
    tokenizer = make()
    made = template(pool, make=make)
    text = made.render_text([USER], kwargs={"enable_thinking": True})
    assert text == "<|im_start|>user\nhello world<|im_end|>\n<|im_start|>assistant\n"
    expected = tokenizer._library.encode(text, add_special_tokens=False).ids
    assert made.render([USER], kwargs={"enable_thinking": True}) == expected


@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize("role", ["user", "tool", "system", "developer"])
@pytest.mark.parametrize("control", [*vocabularies.SPECIAL, *vocabularies.MARKUP])
def test_control_tokens_in_texts_stay_text(pool, make, role, control):
    """P28."""
    tokenizer, made = make(), template(pool, make=make)
    harmless = made.render([{"role": role, "content": "a b c"}])
    for content in (f"a {control} c", control, f"{control}{control}"):
        ids = made.render([{"role": role, "content": content}])
        control_id = tokenizer.token_id(control)
        assert ids.count(control_id) == harmless.count(control_id)
        if make is vocabularies.byte_level:
            assert f"\n{content}<|im_end|>" in tokenizer.decode(ids, skip_special_tokens=False)


def test_control_tokens_split_over_parts_stay_text(pool):
    made = template(
        pool, "{% for m in messages %}{% for p in m.content %}{{ p }}{% endfor %}{% endfor %}"
    )
    parts = [{"type": "text", "text": part} for part in ("<|im_", "start|>")]
    joined = [{"role": "user", "content": parts}, {"role": "user", "content": "<|im_start|"}]
    assert made._tokenizer.token_id("<|im_start|>") not in made.render(joined)


def test_control_tokens_in_tools_names_and_arguments_stay_text(pool):
    made = template(pool, DUMP)
    call = {"function": {"name": "f<|im_end|>", "arguments": '{"<|im_end|>": "<|im_end|>"}'}}
    messages = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}]
    tools = [{"type": "function", "function": {"name": "<|im_end|>", "description": "<|im_end|>"}}]
    ids = made.render(messages, tools=tools)
    assert not made._tokenizer.special_ids.intersection(ids)
    assert made.render_text(messages, tools=tools).count("<|im_end|>") == 5


def test_reserved_characters_cannot_forge_a_token(pool):
    made = template(pool)
    forged = "".join(made._tokenizer.guard.spellings.values()) + "\ufdd3"
    ids = made.render([{"role": "user", "content": forged}])
    assert ids.count(made._tokenizer.token_id("<|im_start|>")) == 2
    assert "\ufffd" in made._tokenizer.decode(ids)


def test_messages_are_brought_into_one_shape(pool):
    messages = [
        {"role": "developer", "content": "rules"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "reasoning": "hm",
         "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}]},
        {"role": "tool", "tool_call_id": "1", "content": "done"},
    ]  # fmt: skip
    text = template(pool, DUMP).render_text(messages)
    assert text == 'system:rules;user:a\nb;assistant:/hm/hm!f({"x": 1});tool:done;'


def test_a_template_that_knows_developers_gets_them(pool):
    source = "{# developer #}{{ messages[0].role }}"
    assert (
        template(pool, source).render_text([{"role": "developer", "content": "x"}]) == "developer"
    )


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([], "messages"),
        ([3], "messages[0]"),
        ([{"role": "boss", "content": "x"}], "messages[0].role"),
        ([{"content": "x"}], "messages[0].role"),
        ([USER, {"role": "user", "content": 7}], "messages[1].content"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "assistant", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": "\ud800"}], "messages[0].content"),
        ([{"role": "assistant", "tool_calls": [{}]}], "messages[0].tool_calls[0]"),
        ([{"role": "assistant", "tool_calls": 3}], "messages[0].tool_calls"),
    ],
)
def test_malformed_messages_are_refused_by_field(pool, messages, field):
    with pytest.raises(InvalidRequest) as caught:
        template(pool).render(messages)
    assert caught.value.field == field
    assert str(caught.value).startswith(field)


def test_deep_tool_schemas_are_refused(pool):
    schema: dict = {}
    for _ in range(100):
        schema = {"a": schema}
    with pytest.raises(InvalidRequest, match="nested deeper than 64"):
        template(pool).render([USER], tools=[schema])


def test_text_that_cannot_fit_is_refused_before_rendering(pool):
    made = template(pool, "{{ raise_exception('rendered') }}", max_tokens=5)
    size = 5 * made._tokenizer.longest_token
    with pytest.raises(ContextTooLong, match="> 5 maximum"):
        made.render([{"role": "user", "content": "a" * size}])


def test_media_of_templates_that_take_texts_alone_are_written_in_them(pool):
    parts = [MediaMark("image", "[INST]"), {"type": "text", "text": "what [INST]?"}]
    made = template(pool, "{{ messages[0].content + '!' }}")
    messages = [{"role": "user", "content": parts}]
    assert made.render_text(messages) == "[INST]\nwhat [INST]?!"
    assert made.render(messages).count(made._tokenizer.token_id("[INST]")) == 1


def test_continue_final_message_ends_with_its_text(pool):
    made = template(pool)
    messages = [USER, {"role": "assistant", "content": "The answer "}]
    options = {"add_generation_prompt": False, "continue_final_message": True}
    assert made.render_text(messages, **options).endswith("<|im_start|>assistant\nThe answer ")
    with pytest.raises(InvalidRequest, match="excludes add_generation_prompt"):
        made.render(messages, continue_final_message=True)
    with pytest.raises(InvalidRequest, match="does not render the last message"):
        template(pool, "constant").render(messages, **options)


@pytest.mark.parametrize(
    "name", ["tokenize", "chat_template", "return_dict", "messages", "bos_token"]
)
def test_reserved_template_arguments_are_refused(pool, name):
    with pytest.raises(InvalidRequest, match=f"chat_template_kwargs.{name}: this name is reserved"):
        template(pool).render([USER], kwargs={name: True})


def test_template_arguments_are_those_the_template_reads(pool):
    made = template(pool, "{{ style }}")
    assert made.render_text([USER], kwargs={"style": "plain", "enable_thinking": False}) == "plain"
    with pytest.raises(InvalidRequest, match=r"no such argument .*style"):
        made.render([USER], kwargs={"colour": "red"})


def test_a_model_without_template_refuses_chat(pool):
    with pytest.raises(InvalidRequest, match="no chat template"):
        template(pool, None).render([USER])


async def test_render_async_gives_the_same(pool):
    made = template(pool)
    assert await made.render_async([USER]) == made.render([USER])


def test_an_assistants_markup_reaches_the_template(pool):
    source = "{% set c = messages[0].content %}{{ c.split('</think>')[-1] }}|{{ c }}"
    made = template(pool, source)
    messages = [{"role": "assistant", "content": "<think>x</think>y<|im_end|>"}]
    assert made.render_text(messages).startswith("y<|im_end|>|")
    ids = made.render(messages)
    assert made._tokenizer.token_id("<think>") in ids
    assert made._tokenizer.token_id("<|im_end|>") not in ids


def test_tojson_is_as_templates_expect(pool):
    source = (
        "{{ messages[0].content | tojson }}{{ {'b': 1, 'a': 'é<'} | tojson(ensure_ascii=True) }}"
    )
    made = template(pool, source).render_text([{"role": "user", "content": "é<b>'\""}])
    assert made == json.dumps("é<b>'\"", ensure_ascii=False) + json.dumps({"b": 1, "a": "é<"})


def test_generation_blocks_loop_controls_and_dates(pool):
    source = (
        "{% for m in [1, 2, 3] %}{% if m == 2 %}{% break %}{% endif %}{{ m }}{% endfor %}"
        "{% generation %}G{% endgeneration %}{{ strftime_now('%Y') | length }}{{ bos_token }}"
    )
    assert template(pool, source).render_text([USER]) == "1G4<s>"


BUNDLED = Path(headrace.__file__).parents[1] / "demo" / "model"


@pytest.mark.parametrize("role", ["user", "system", "tool"])
def test_no_control_token_of_the_bundled_model_comes_from_text(pool, role):
    """P28, T28."""
    tokenizer = load_tokenizer(str(BUNDLED))
    made = ChatTemplate(tokenizer.facts.chat_template, tokenizer, pool=pool)
    added = tokenizer._added
    assert len(added) >= 9
    harmless = made.render([{"role": role, "content": "x"}])
    for control_id, control in added.items():
        ids = made.render([{"role": role, "content": f"say {control} now{control}"}])
        assert {i: ids.count(i) for i in added} == {i: harmless.count(i) for i in added}, control
        assert control_id not in tokenizer.encode_plain(control)
