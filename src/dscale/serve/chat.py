"""Conversations into prompts: messages and tools as the chat template takes them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from dscale.config import Grammar, InputError
from dscale.models.tokenizer import Tokenizer
from dscale.serve.errors import invalid
from dscale.serve.protocol import ChatBody, Message, Tool

OWN_ARGUMENTS = ("messages", "conversation", "tools", "tokenize", "chat_template", "add_generation_prompt")
TOOL_TURN = """You may call these functions:
{tools}
To call some, answer with nothing but
<tool_call>
[{{"name": "function name", "arguments": {{"argument": "value"}}}}]
</tool_call>
and their results will be given to you. Answer in words when none is needed."""


def render_chat(
    tokenizer: Tokenizer, messages: Sequence[Message], tools: Sequence[Tool], options: dict[str, Any] | None
) -> str:
    """The prompt text of a conversation; ApiError 400 where the template refuses it.

    tools: offered through the template, or in a system message where the template knows of none.
    """
    options = options or {}
    for name in options:
        if name in OWN_ARGUMENTS:
            raise invalid(f"chat_template_kwargs: {name} is the server's own; leave it out", "chat_template_kwargs")
    plain = [message_of(message, index) for index, message in enumerate(messages)]
    offered = [tool.model_dump(exclude_none=True) for tool in tools]
    try:
        if offered and not renders_tools(tokenizer):
            return tokenizer.render(with_tool_turn(plain, offered), **options)
        return tokenizer.render(plain, **({"tools": offered} if offered else {}), **options)
    except InputError as error:
        raise invalid(str(error), "messages") from None


def message_of(message: Message, index: int) -> dict[str, Any]:
    """A message as templates expect it: content as text, arguments of tool calls as objects."""
    plain = message.model_dump(exclude_none=True)
    plain["role"] = "system" if message.role == "developer" else message.role
    plain["content"] = _text(message.content, index)
    if message.role in ("system", "developer", "user", "tool", "function") and message.content is None:
        raise invalid(f"messages.{index}.content: is required for role {message.role}", f"messages.{index}.content")
    if message.tool_calls is not None:
        plain["tool_calls"] = [_call(call, index) for call in message.tool_calls]
    return plain


def _text(content: str | list[dict[str, Any]] | None, index: int) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    where = f"messages.{index}.content"
    for part in content:
        if part.get("type") not in ("text", "input_text"):
            raise invalid(f"{where}: parts of type {str(part.get('type'))[:40]!r} are not supported; only text", where)
        if not isinstance(part.get("text"), str):
            raise invalid(f"{where}: a text part needs text", where)
    return "\n".join(part["text"] for part in content)


def _call(call: dict[str, Any], index: int) -> dict[str, Any]:
    function = call.get("function")
    where = f"messages.{index}.tool_calls"
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise invalid(f"{where}: each needs function.name", where)
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            raise invalid(f"{where}: arguments of {function['name'][:60]!r} are not JSON", where) from None
    return {**call, "type": "function", "function": {**function, "arguments": arguments}}


def renders_tools(tokenizer: Tokenizer) -> bool:
    """True when the chat template shows tools to the model."""
    template = tokenizer.backend.chat_template
    text = "".join(template.values()) if isinstance(template, dict) else str(template or "")
    return "tools" in text


def with_tool_turn(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The conversation with the tools in its system message, calls and results as text, for templates without tools."""
    about = TOOL_TURN.format(tools=json.dumps([tool["function"] for tool in tools]))
    turns = [_spelt(message) for message in messages]
    if turns and turns[0]["role"] == "system":
        return [{"role": "system", "content": f"{turns[0]['content']}\n\n{about}"}, *turns[1:]]
    return [{"role": "system", "content": about}, *turns]


def _spelt(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] in ("tool", "function"):
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    if not message.get("tool_calls"):
        return message
    calls = [
        {"name": call["function"]["name"], "arguments": call["function"]["arguments"]} for call in message["tool_calls"]
    ]
    content = f"{message['content']}\n<tool_call>\n{json.dumps(calls)}\n</tool_call>".strip()
    return {"role": message["role"], "content": content}


def offered_tools(body: ChatBody) -> list[Tool]:
    """Tools in force: none when tool_choice says so; ApiError 400 for a choice that names no tool."""
    tools, choice = body.tools or [], body.tool_choice
    names = [tool.function.name for tool in tools]
    if len(set(names)) < len(names):
        raise invalid("tools: two have the same name", "tools")
    if choice is None or choice == "auto":
        return tools
    if choice == "none":
        return []
    if not tools:
        raise invalid("tool_choice: needs tools", "tool_choice")
    if choice == "required":
        return tools
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    chosen = [tool for tool in tools if tool.function.name == name]
    if not chosen:
        raise invalid(f"tool_choice: must name one of the tools: {', '.join(names)[:200]}", "tool_choice")
    return chosen


def forces_a_call(body: ChatBody) -> bool:
    """True when the answer must be a tool call."""
    return bool(body.tools) and body.tool_choice not in (None, "auto", "none")


def call_grammar(body: ChatBody, tools: Sequence[Tool]) -> Grammar | None:
    """A call of one of the tools as JSON, where tool_choice forces one; None where the model may choose."""
    if not forces_a_call(body):
        return None
    schemas: list[dict[str, Any]] = []
    shared: dict[str, Any] = {}
    for tool in tools:
        parameters = dict(tool.function.parameters or {"type": "object"})
        shared |= {key: parameters.pop(key) for key in ("$defs", "definitions") if key in parameters}
        properties = {"name": {"const": tool.function.name}, "arguments": parameters}
        keys = list(properties)
        schemas.append({"type": "object", "properties": properties, "required": keys, "additionalProperties": False})
    schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
    try:
        return Grammar.json_schema({**schema, **shared})
    except InputError as error:
        raise invalid(f"tools: {error}", "tools") from None
