"""Patterns of JSON strings: which regular expressions xgrammar follows so that every text is JSON and matches."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from re import _constants as sre  # type: ignore[attr-defined]
from re import _parser as sre_parser  # type: ignore[attr-defined]
from typing import Any

from dscale.config import InputError, require

ESCAPED = {ord('"'), ord("\\"), *range(0x20)}  # characters that a JSON string cannot hold as they are


def refuse_unsafe_pattern(pattern: Any, where: str) -> None:
    """InputError unless the pattern, as xgrammar reads it, gives JSON strings that match it.

    It may hold neither look-around nor back-references nor flags, anchors only at its ends. A pattern that forces a
    character JSON escapes, or mixes letters beyond ASCII with classes that hold one, xgrammar would write unescaped.
    """
    require(isinstance(pattern, str), f"json_schema: the pattern at {where} is not text")
    name = f"json_schema: pattern {pattern!r} at {where}"
    try:
        tree = sre_parser.parse(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise InputError(f"{name} is no regular expression ({error})") from None
    _refuse_ignored(tree, name)
    require(
        "json_string=true" in _as_grammar(pattern, where) or not any(_holds_escaped(*node) for node in _nodes(tree)),
        f"json_schema: pattern {pattern!r} at {where} holds characters that JSON escapes; it cannot be enforced",
    )


def refuse_unfollowed_regex(pattern: str) -> None:
    """InputError for parts of a regular expression that xgrammar would read over; what is wrong it says itself."""
    with suppress(re.error, RecursionError, OverflowError):
        _refuse_ignored(sre_parser.parse(pattern), "regex")


def _refuse_ignored(tree: Any, name: str) -> None:
    for code, _ in _nodes(tree):
        named = {sre.ASSERT: "look-around", sre.ASSERT_NOT: "look-around", sre.GROUPREF: "back-references"}.get(code)
        require(named is None, f"{name}: {named} cannot be enforced")
    require(_anchors_outside(tree), f"{name}: only ^ and $ are allowed as anchors, at its ends")
    require(not tree.state.flags & ~re.UNICODE, f"{name}: flags cannot be enforced")


def _as_grammar(pattern: str, where: str) -> str:
    """What xgrammar makes of the pattern; its matching inside a JSON string is marked there."""
    import xgrammar

    try:
        return str(xgrammar.Grammar.from_json_schema(json.dumps({"type": "string", "pattern": pattern})))
    except Exception as error:  # RuntimeError and its own kinds
        reason = " ".join(str(error).split()).partition(": ")[2]
        raise InputError(f"json_schema: pattern {pattern!r} at {where}: {reason}") from None


def _nodes(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Every (code, argument) of a parsed pattern, depth first."""
    for code, argument in tree:
        yield code, argument
        if code is sre.BRANCH:
            for branch in argument[1]:
                yield from _nodes(branch)
        elif code in (sre.MAX_REPEAT, sre.MIN_REPEAT, sre.POSSESSIVE_REPEAT):
            yield from _nodes(argument[2])
        elif code is sre.SUBPATTERN:
            yield from _nodes(argument[3])
        elif code is sre.ATOMIC_GROUP:
            yield from _nodes(argument)


def _anchors_outside(tree: Any) -> bool:
    """True when ^ stands only first and $ only last, in the whole or in each of its alternatives."""
    items = list(tree)
    if len(items) == 1 and items[0][0] is sre.BRANCH:
        return all(_anchors_outside(branch) for branch in items[0][1][1])
    if items and items[0] == (sre.AT, sre.AT_BEGINNING):
        items = items[1:]
    if items and items[-1] == (sre.AT, sre.AT_END):
        items = items[:-1]
    return not any(code is sre.AT for code, _ in _nodes(items))


def _holds_escaped(code: Any, argument: Any) -> bool:
    """True when this node can match a character that JSON escapes."""
    if code is sre.LITERAL:
        return argument in ESCAPED
    if code is sre.IN:
        return any(
            one is sre.NEGATE
            or (one is sre.CATEGORY and value not in (sre.CATEGORY_DIGIT, sre.CATEGORY_WORD))
            or (one is sre.LITERAL and value in ESCAPED)
            or (one is sre.RANGE and any(value[0] <= escaped <= value[1] for escaped in ESCAPED))
            for one, value in argument
        )
    return code in (sre.ANY, sre.NOT_LITERAL)
