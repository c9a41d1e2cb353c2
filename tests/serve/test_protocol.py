"""What bodies mean, and what is wrong with them, without a server."""

from __future__ import annotations

import json

import pytest
from pydantic import ValidationError

from dscale.config import Grammar, SamplingParams
from dscale.serve.errors import ApiError, from_validation
from dscale.serve.protocol import ChatBody, CompletionBody, chat_sampling, completion_sampling

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def chat(**fields) -> ChatBody:
    return ChatBody.model_validate({**CHAT, **fields})


def refusal(model, body) -> ApiError:
    with pytest.raises(ValidationError) as caught:
        model.model_validate(body)
    return from_validation(caught.value.errors())


def test_null_and_absent_fields_take_the_defaults():
    names = [name for name in ChatBody.model_fields if name != "messages"]
    assert chat_sampling(chat(**dict.fromkeys(names))) == chat_sampling(chat()) == SamplingParams(max_tokens=None)
    assert completion_sampling(CompletionBody(prompt="a")) == SamplingParams(max_tokens=16)


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_both_names_of_the_cap(name):
    assert chat_sampling(chat(**{name: 7})).max_tokens == 7


@pytest.mark.parametrize(
    ("fields", "grammar"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, Grammar("json_object")),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
            Grammar("json_schema", json.dumps(SCHEMA)),
        ),
        ({"guided_json": SCHEMA}, Grammar("json_schema", json.dumps(SCHEMA))),
        ({"guided_json": json.dumps(SCHEMA)}, Grammar("json_schema", json.dumps(SCHEMA))),
        ({"guided_regex": "a+"}, Grammar("regex", "a+")),
        ({"guided_choice": ["a", "b"]}, Grammar("choice", '["a", "b"]')),
        ({"guided_grammar": 'root ::= "a"'}, Grammar("ebnf", 'root ::= "a"')),
        ({"structured_outputs": {"regex": "b?"}}, Grammar("regex", "b?")),
        ({"structured_outputs": {"json_object": True}}, Grammar("json_object")),
    ],
)
def test_ways_to_ask_for_a_grammar(fields, grammar):
    assert chat_sampling(chat(**fields)).grammar == grammar


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_regex": "a" * 70_000}, "guided_regex"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
    ],
)
def test_grammars_that_make_no_sense(fields, param):
    with pytest.raises(ApiError) as caught:
        chat_sampling(chat(**fields))
    assert caught.value.status_code == 400
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "messages: is required"),
        ({**CHAT, "temperature": "hot"}, "temperature: should be a valid number (given: 'hot')"),
        ({**CHAT, "n": 0}, "n: should be greater than or equal to 1 (given: 0)"),
        ({**CHAT, "n": 129}, "n: should be less than or equal to 128 (given: 129)"),
        ({**CHAT, "stream": 1}, "stream: should be a valid boolean (given: 1)"),
        ({**CHAT, "stop": 5}, "stop: must be text or a list of texts"),
        ({"messages": [{"content": "a"}]}, "messages.0.role: is required"),
        ({"messages": [{"role": "user", "content": 1}]}, "messages.0.content: must be text or a list of text parts"),
        ({**CHAT, "temprature": 1}, "unknown field 'temprature'; did you mean temperature?"),
        ({**CHAT, "functions": [{}]}, "functions is not supported by this server; leave it out"),
        ({**CHAT, "tools": [{"type": "function", "function": {}}]}, "tools.0.function.name: is required"),
    ],
)
def test_messages_name_the_field_in_one_sentence(body, message):
    error = refusal(ChatBody, body)
    assert error.message == message
    assert error.body()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("fields", [{"user": "u"}, {"echo": False}, {"best_of": 1}, {"suffix": None}, {"store": True}])
def test_fields_that_change_nothing_are_taken(fields):
    assert completion_sampling(CompletionBody.model_validate({"prompt": "a", **fields})) == SamplingParams()


def test_retry_after_is_whole_seconds_and_at_least_one():
    assert ApiError(503, "x", retry_after=0.2).response().headers["retry-after"] == "1"
    assert ApiError(503, "x", retry_after=2.5).response().headers["retry-after"] == "3"
    assert "retry-after" not in ApiError(400, "x").response().headers
