"""Conversations into prompts, and tool calls out of answers."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dscale.config import Grammar
from dscale.serve.chat import call_grammar, offered_tools, render_chat
from dscale.serve.errors import ApiError
from dscale.serve.protocol import ChatBody
from dscale.serve.tools import ToolCall, ToolParser, parse_calls
from tests.serve.inprocess import TEMPLATE, byte_tokenizer

LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
WALK = {"type": "function", "function": {"name": "walk"}}
CALL = {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"at": "sky"}'}}


def body(messages, **fields) -> ChatBody:
    return ChatBody.model_validate({"messages": messages, **fields})


def render(messages, tools=(), options=None, template=TEMPLATE) -> str:
    tokenizer = byte_tokenizer()
    tokenizer.backend.chat_template = template
    try:
        made = body(messages, tools=list(tools) or None)
        return render_chat(tokenizer, made.messages, made.tools or [], options)
    finally:
        tokenizer.backend.chat_template = TEMPLATE


def test_roles_parts_and_template_options():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": parts}]
    assert render(messages) == "<system>be brief\n<user>a\nb\n<assistant>"
    assert render(messages[1:], options={"enable_thinking": False}) == "<user>a\nb\nquick <assistant>"


def test_tools_go_through_the_template_and_arguments_become_objects():
    messages = [
        {"role": "user", "content": "what is there?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "a cloud", "tool_call_id": "1"},
    ]
    text = render(messages, [LOOK])
    assert text.startswith('tools [{"type": "function", "function": {"name": "look"')
    assert '"arguments": {"at": "sky"}' in text
    assert text.endswith("<tool>a cloud\n<assistant>")


def test_templates_without_tools_get_them_in_the_system_message():
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ chr }}{% endfor %}".replace("chr", repr("\n"))
    messages = [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "what is there?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "a cloud", "tool_call_id": "1"},
    ]
    text = render(messages, [LOOK], template=template)
    system, _, rest = text.partition("<user>")
    assert system.startswith("<system>be kind\n\n")
    assert '[{"name": "look", "parameters": {"type": "object"}}]' in system
    assert '<assistant><tool_call>\n[{"name": "look", "arguments": {"at": "sky"}}]\n</tool_call>' in rest
    assert "<user><tool_response>\na cloud\n</tool_response>" in rest
    assert render(messages[:2], template=template) == "<system>be kind\n<user>what is there?\n"


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([{"role": "user"}], "messages.0.content"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages.0.content"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages.0.content"),
        ([{"role": "assistant", "tool_calls": [{"function": {"name": 3}}]}], "messages.0.tool_calls"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": "{"}}]}],
            "messages.0.tool_calls",
        ),
    ],
)
def test_messages_that_cannot_be_rendered(messages, param):
    with pytest.raises(ApiError) as caught:
        render(messages)
    assert (caught.value.status_code, caught.value.param) == (400, param)


def test_what_the_template_refuses_is_said():
    with pytest.raises(ApiError, match="the chat template refuses them"):
        render([{"role": "user", "content": "a"}], template="{{ raise_exception('no users') }}")


def test_tool_choice():
    def names(**fields) -> list[str]:
        return [tool.function.name for tool in offered_tools(body([{"role": "user", "content": "a"}], **fields))]

    both = [LOOK, WALK]
    assert names(tools=both) == names(tools=both, tool_choice="auto") == ["look", "walk"]
    assert names(tools=both, tool_choice="required") == ["look", "walk"]
    assert names(tools=both, tool_choice="none") == names() == []
    assert names(tools=both, tool_choice={"type": "function", "function": {"name": "walk"}}) == ["walk"]
    for wrong in (
        {"tools": both, "tool_choice": {"function": {"name": "fly"}}},
        {"tool_choice": "required"},
        {"tools": [LOOK, LOOK]},
    ):
        with pytest.raises(ApiError):
            names(**wrong)


def test_a_forced_call_is_json_of_its_parameters():
    parameters = {
        "type": "object",
        "properties": {"at": {"$ref": "#/$defs/place"}},
        "$defs": {"place": {"type": "string"}},
    }
    look = {"type": "function", "function": {"name": "look", "parameters": parameters}}
    made = body([{"role": "user", "content": "a"}], tools=[look], tool_choice="required")
    grammar = call_grammar(made, made.tools)
    assert isinstance(grammar, Grammar)
    schema = json.loads(grammar.text)
    assert schema["properties"]["name"] == {"const": "look"}
    assert schema["$defs"] == {"place": {"type": "string"}}
    assert "$defs" not in schema["properties"]["arguments"]
    made = body([{"role": "user", "content": "a"}], tools=[look])
    assert call_grammar(made, made.tools) is None


ONE, TWO = ToolCall("look", '{"at": "sky"}'), ToolCall("walk", "{}")
ANSWERS = [
    ("plain words < and <tool", "plain words < and <tool", ()),
    ('<tool_call>\n{"name": "look", "arguments": {"at": "sky"}}\n</tool_call>', "", (ONE,)),
    ('<tool_call>[{"name": "look", "arguments": {"at": "sky"}}, {"name": "walk"}]</tool_call>', "", (ONE, TWO)),
    (
        'So:<tool_call>{"name": "walk", "arguments": {}}</tool_call>\n'
        '<tool_call>{"name": "look", "arguments": {"at": "sky"}}</tool_call>\n',
        "So:",
        (TWO, ONE),
    ),
    ('{"name": "look", "parameters": {"at": "sky"}}', "", (ONE,)),
    ('<|python_tag|>{"name": "look", "parameters": {"at": "sky"}}; {"name": "walk", "parameters": {}}', "", (ONE, TWO)),
    ('{"type": "function", "function": {"name": "look", "parameters": {"at": "sky"}}}', "", (ONE,)),
    ('{"answer": 42}', '{"answer": 42}', ()),
    ("{not json", "{not json", ()),
    ("<tool_call>nonsense</tool_call> yes", "<tool_call>nonsense</tool_call> yes", ()),
    ('<tool_call>\n{"name": "walk", "arguments": {}}', "", (TWO,)),
    ("<|python", "<|python", ()),
    ("", "", ()),
]


@pytest.mark.parametrize(("answer", "content", "calls"), ANSWERS)
def test_calls_and_content_of_whole_answers(answer, content, calls):
    piece = ToolParser().push(answer, final=True)
    assert (piece.text.strip() if calls else piece.text, piece.calls) == (content, calls)


@given(st.sampled_from(ANSWERS), st.lists(st.integers(0, 120), max_size=8))
def test_answers_cut_anywhere_give_the_same(answer, cuts):
    text, content, calls = answer
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    parser, got, found = ToolParser(), "", ()
    for start, end in pairwise(places):
        piece = parser.push(text[start:end])
        got, found = got + piece.text, found + piece.calls
    last = parser.push("", final=True)
    got, found = got + last.text, found + last.calls
    assert (got.strip() if calls else got, found) == (content, calls)


@given(st.text(max_size=60))
def test_text_that_is_no_call_is_never_lost(text):
    parser = ToolParser()
    got = "".join(parser.push(letter).text for letter in text) + parser.push("", final=True).text
    assert got == text or parser.calls


@pytest.mark.parametrize("text", ["", "3", "[1]", '{"name": 3}', '{"name": "a", "arguments": [1]}', "[" * 5000])
def test_json_that_is_no_call(text):
    assert parse_calls(text) == ()
