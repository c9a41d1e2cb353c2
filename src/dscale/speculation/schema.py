"""JSON schemas as they can be enforced: rewritten where that is safe, refused where a grammar would let bad text pass.

xgrammar reads over what it does not know. A schema that went through here is one whose every validating keyword it
obeys, so each complete text is valid under the schema as it was given. Rewriting may narrow what is admitted (a type
that follows from the keywords is written out), never widen it. `format` is an annotation and gives way to lengths.
"""

from __future__ import annotations

import copy
import json
from typing import Any

from dscale.config import InputError, require
from dscale.speculation.patterns import refuse_unsafe_pattern

MAX_DEPTH = 64  # nested schemas; compiling is quadratic in it
OF_TYPE = {
    "object": {
        "properties", "required", "additionalProperties", "patternProperties", "propertyNames", "minProperties",
        "maxProperties", "unevaluatedProperties", "dependentRequired", "dependentSchemas", "dependencies",
    },
    "array": {
        "items", "prefixItems", "minItems", "maxItems", "uniqueItems", "contains", "minContains", "maxContains",
        "unevaluatedItems", "additionalItems",
    },
    "string": {"minLength", "maxLength", "pattern", "format"},
    "number": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"},
}  # fmt: skip
OF_TYPE["integer"] = OF_TYPE["number"]
TYPED = set().union(*OF_TYPE.values())
COMBINING = {
    "$ref",
    "enum",
    "const",
    "anyOf",
    "oneOf",
    "allOf",
    "not",
    "if",
    "then",
    "else",
    "$dynamicRef",
    "$recursiveRef",
}
NEVER = {
    "not", "if", "then", "else", "$dynamicRef", "$recursiveRef", "dependentRequired", "dependentSchemas",
    "dependencies", "uniqueItems", "contains", "minContains", "maxContains", "multipleOf", "additionalItems",
}  # fmt: skip
TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")


def enforceable(schema: Any) -> Any:
    """A schema that xgrammar enforces whole and that admits nothing the given one refuses.

    Raises InputError, naming the place and the keyword, when there is none.
    """
    root = copy.deepcopy(schema)
    _Walk(root).visit(root, "#", 0)
    return root


class _Walk:
    """One pass over the schemas that can be reached, each rewritten in place."""

    def __init__(self, root: Any) -> None:
        self.root = root
        self.seen: set[int] = set()

    def visit(self, node: Any, where: str, depth: int) -> None:
        require(depth <= MAX_DEPTH, f"json_schema: nested deeper than {MAX_DEPTH} schemas")
        require(isinstance(node, dict | bool), f"json_schema: {where} is neither an object nor true or false")
        if isinstance(node, bool) or id(node) in self.seen:
            return
        self.seen.add(id(node))
        for key in node.keys() & NEVER:
            harmless = key == "uniqueItems" and node[key] is False
            require(harmless, f"json_schema: {key!r} at {where} cannot be enforced")
        main = next((key for key in ("$ref", "const", "enum", "anyOf", "oneOf", "allOf") if key in node), None)
        if main is None:
            self._typed(node, where, depth)
        elif main in ("const", "enum"):
            _values(node, main, where)
        else:
            _alone(node, main, where)
            self._combined(node, main, where, depth)

    def _combined(self, node: dict[str, Any], main: str, where: str, depth: int) -> None:
        if main == "$ref":
            self.visit(self.resolve(node["$ref"], where), str(node["$ref"]), depth + 1)
            return
        branches = node[main]
        require(
            isinstance(branches, list) and len(branches) > 0, f"json_schema: {main} at {where} is not a filled list"
        )
        for index, branch in enumerate(branches):
            self.visit(branch, f"{where}/{main}/{index}", depth + 1)
        if main == "allOf":
            require(len(branches) == 1, f"json_schema: 'allOf' of several schemas at {where} cannot be enforced")
        if main == "oneOf":
            one = all(self._disjoint(a, b, where) for i, a in enumerate(branches) for b in branches[:i])
            require(
                one, f"json_schema: the branches of 'oneOf' at {where} overlap; give 'anyOf', or a constant that tells"
            )

    def resolve(self, ref: Any, where: str) -> Any:
        """The schema a local reference points to."""
        wrong = f"json_schema: $ref {ref!r} at {where} points nowhere; only references into the schema itself work"
        require(isinstance(ref, str) and (ref == "#" or ref.startswith("#/")), wrong)
        node = self.root
        for part in ref[2:].split("/") if ref != "#" else []:
            part = part.replace("~1", "/").replace("~0", "~")
            try:
                node = node[int(part)] if isinstance(node, list) else node[part]
            except (KeyError, IndexError, ValueError, TypeError):
                raise InputError(wrong) from None
        return node

    def _typed(self, node: dict[str, Any], where: str, depth: int) -> None:
        types = _types(node, where)
        if types:
            node["type"] = types[0] if len(types) == 1 else types
        if "string" in types:
            _check_string(node, where)
        if "integer" in types or "number" in types:
            _check_number(node, where)
        if "array" in types:
            self._array(node, where, depth)
        if "object" in types:
            self._object(node, where, depth)

    def _array(self, node: dict[str, Any], where: str, depth: int) -> None:
        _closed(node, "unevaluatedItems", where)
        require(
            not isinstance(node.get("items"), list), f"json_schema: 'items' at {where} is a list; use 'prefixItems'"
        )
        for index, item in enumerate(node.get("prefixItems", [])):
            self.visit(item, f"{where}/prefixItems/{index}", depth + 1)
        if "items" in node:
            self.visit(node["items"], f"{where}/items", depth + 1)

    def _object(self, node: dict[str, Any], where: str, depth: int) -> None:
        _closed(node, "unevaluatedProperties", where)
        properties, required = node.get("properties", {}), node.get("required", [])
        require(isinstance(properties, dict), f"json_schema: 'properties' at {where} is not an object")
        good = isinstance(required, list) and all(isinstance(name, str) for name in required)
        require(good, f"json_schema: 'required' at {where} is not a list of names")
        patterns = node.get("patternProperties", {})
        require(isinstance(patterns, dict), f"json_schema: 'patternProperties' at {where} is not an object")
        self._open_names(node, where)
        for name in required:
            if name not in properties:
                node["properties"] = properties = {
                    **properties,
                    name: copy.deepcopy(node.get("additionalProperties", True)),
                }
        for name, child in properties.items():
            self.visit(child, f"{where}/properties/{name}", depth + 1)
        for pattern, child in patterns.items():
            refuse_unsafe_pattern(pattern, f"{where}/patternProperties")
            self.visit(child, f"{where}/patternProperties/{pattern}", depth + 1)
        for key in ("additionalProperties", "propertyNames"):
            if key in node:
                self.visit(node[key], f"{where}/{key}", depth + 1)

    def _open_names(self, node: dict[str, Any], where: str) -> None:
        """Names that are not listed: xgrammar keeps their kinds apart, and a repeated name would break a count."""
        listed = "properties" in node or bool(node.get("required"))
        patterns = node.get("patternProperties", {})
        if patterns or "propertyNames" in node:
            alone = not listed and len(patterns) <= 1 and not (patterns and "propertyNames" in node)
            alone = alone and not (patterns and node.get("additionalProperties", False))
            alone = alone and not ("propertyNames" in node and node.get("additionalProperties", True) is not True)
            name = "patternProperties" if patterns else "propertyNames"
            require(alone, f"json_schema: {name!r} at {where} cannot be enforced beside other kinds of properties")
        is_open = not listed or bool(node.get("additionalProperties", False))
        fewest = node.get("minProperties", 0)
        require(
            not (is_open and isinstance(fewest, int) and fewest > max(len(node.get("required", [])), 1)),
            f"json_schema: 'minProperties' at {where} cannot be enforced where names are open; list them",
        )

    def _disjoint(self, a: Any, b: Any, where: str) -> bool:
        """True when no value satisfies both: different types, different constants, or objects told apart by one."""
        a, b = self._follow(a, where), self._follow(b, where)
        if not isinstance(a, dict) or not isinstance(b, dict):
            return False
        left, right = _constants(a), _constants(b)
        if left is not None and right is not None:
            return not left & right
        kinds, others = _kinds(a), _kinds(b)
        if kinds and others and not kinds & others:
            return True
        if kinds != {"object"} or others != {"object"}:
            return False
        shared = set(a.get("required", [])) & set(b.get("required", []))
        for name in shared:
            one, two = (self._follow(x.get("properties", {}).get(name, {}), where) for x in (a, b))
            values, rest = (_constants(x) if isinstance(x, dict) else None for x in (one, two))
            if values is not None and rest is not None and not values & rest:
                return True
        return False

    def _follow(self, node: Any, where: str) -> Any:
        for _ in range(MAX_DEPTH):
            if not isinstance(node, dict) or "$ref" not in node:
                return node
            node = self.resolve(node["$ref"], where)
        raise InputError(f"json_schema: the $ref at {where} refers to itself")


def _alone(node: dict[str, Any], main: str, where: str) -> None:
    """InputError when another validating keyword stands beside this one."""
    beside = sorted((node.keys() & (TYPED | COMBINING | {"type"})) - {main})
    require(not beside, f"json_schema: {', '.join(map(repr, beside))} beside {main!r} at {where} cannot be enforced")


def _values(node: dict[str, Any], main: str, where: str) -> None:
    """Constants: those that a type beside them refuses are dropped."""
    beside = sorted((node.keys() & (TYPED | COMBINING)) - {main})
    require(not beside, f"json_schema: {', '.join(map(repr, beside))} beside {main!r} at {where} cannot be enforced")
    values = [node["const"]] if main == "const" else node["enum"]
    require(isinstance(values, list) and len(values) > 0, f"json_schema: 'enum' at {where} is not a filled list")
    if "type" in node:
        types = _types(node, where)
        values = [value for value in values if any(is_of_type(value, one) for one in types)]
        require(len(values) > 0, f"json_schema: no value of {main!r} at {where} has the type that stands beside it")
        del node["type"]
    node.pop(main)
    node["enum"] = values


def is_of_type(value: Any, name: str) -> bool:
    """Whether a JSON value is of one of JSON Schema's types."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return {
        "object": isinstance(value, dict),
        "array": isinstance(value, list),
        "string": isinstance(value, str),
        "number": number,
        "integer": number and float(value).is_integer(),
        "boolean": isinstance(value, bool),
        "null": value is None,
    }[name]


def _types(node: dict[str, Any], where: str) -> list[str]:
    """Types of a schema, as said or as its keywords imply; none when it admits anything."""
    given = node.get("type")
    types = [given] if isinstance(given, str) else given
    if types is None:
        return [name for name in ("object", "array", "string", "number") if node.keys() & (OF_TYPE[name] - {"format"})]
    good = isinstance(types, list) and len(types) > 0 and all(one in TYPES for one in types)
    require(good, f"json_schema: type {given!r} at {where}; allowed are {', '.join(TYPES)}")
    return list(types)


def _check_string(node: dict[str, Any], where: str) -> None:
    bounded = node.keys() & {"minLength", "maxLength"}
    if "pattern" in node:
        require(not bounded, f"json_schema: 'pattern' beside {sorted(bounded)} at {where} cannot be enforced")
        refuse_unsafe_pattern(node["pattern"], where)
    if bounded or "pattern" in node:
        node.pop("format", None)


def _check_number(node: dict[str, Any], where: str) -> None:
    for key in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
        value = node.get(key, 0)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        require(number, f"json_schema: {key!r} at {where} is not a number")
    for key, other in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        require(not (key in node and other in node), f"json_schema: both {key!r} and {other!r} at {where}; give one")


def _closed(node: dict[str, Any], key: str, where: str) -> None:
    """`unevaluated…`: what is not described is refused anyhow, so true and false change nothing."""
    require(isinstance(node.pop(key, False), bool), f"json_schema: a schema as {key!r} at {where} cannot be enforced")


def _constants(node: dict[str, Any]) -> set[str] | None:
    values = node.get("enum", [node["const"]] if "const" in node else None)
    return {json.dumps(value, sort_keys=True) for value in values} if isinstance(values, list) else None


def _kinds(node: dict[str, Any]) -> set[str]:
    """Disjoint kinds a schema may have; integers are numbers. Empty when that is not plain to see."""
    constants = node.get("enum", [node["const"]] if "const" in node else None)
    if isinstance(constants, list):
        return {name for name in TYPES if name != "integer" and any(is_of_type(one, name) for one in constants)}
    given = node.get("type", [])
    return {"number" if name == "integer" else name for name in ([given] if isinstance(given, str) else given)}
