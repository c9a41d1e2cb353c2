"""Structured output with every policy: does each complete text parse and validate, is it off's, what does it cost?

    python benchmarks/structured_output.py --count 1000 --out benchmarks/records/structured_output.json
    python benchmarks/structured_output.py --count 24 --policies off full        # a minute on two cores

Schemas are made up, one for each generation: nested objects, bounded strings, arrays and numbers, enums, patterns,
references, unions. Odd generations are sampled at temperature 0.9, even ones greedy. An answer that max_tokens cut is
counted as cut; every other one has to parse and to validate (jsonschema, draft 2020-12).
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path
from typing import Any

import jsonschema

from dscale import LLM, SamplingParams
from dscale.config import Grammar

POLICIES = ("off", "full", "fixed:4", "dvl", "confidence", "auto")
NOUNS = ("city", "river", "book", "recipe", "animal", "planet", "song", "machine", "sport", "painter")
FIELDS = ("name", "kind", "size", "year", "colour", "notes", "tags", "parts", "owner", "rating", "is_new", "origin")


def made_up_schema(rng: random.Random) -> dict[str, Any]:
    """An object schema of two to five properties, at most two levels below it."""
    schema = made_up_object(rng, 2)
    if rng.random() < 0.3:
        schema["$defs"] = {"part": made_up_object(rng, 0)}
        schema["properties"]["part"] = {"$ref": "#/$defs/part"}
        schema["required"] = [*schema["required"], "part"]
    return schema


def made_up_object(rng: random.Random, levels: int) -> dict[str, Any]:
    """An object whose first property is required; the others by chance."""
    names = rng.sample(FIELDS, rng.randint(2, 5 if levels else 3))
    properties = {name: made_up_value(rng, levels) for name in names}
    required = [name for index, name in enumerate(names) if index == 0 or rng.random() < 0.7]
    return {"type": "object", "properties": properties, "required": required}


def made_up_value(rng: random.Random, levels: int) -> dict[str, Any]:
    """A value's schema: simple ones, and with levels left arrays, objects and unions."""
    low = rng.randint(-50, 50)
    simple: list[dict[str, Any]] = [
        {"type": "string", "maxLength": rng.randint(3, 40)},
        {"type": "string", "minLength": 2, "maxLength": 12},
        {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 3000)},
        {"type": "boolean"},
        {"type": ["string", "null"], "maxLength": 20},
        {"enum": rng.sample(["red", "green", 1, 2.5, None, "naïve", 'say "hi"'], 3)},
        {"const": rng.choice(["v1", 7, True])},
        {"type": "string", "pattern": rng.choice(["^[A-Z][a-z]{2,8}$", "^[0-9]{4}-[0-9]{2}$", "^(a|b|c)[.!]?$"])},
        {"type": "string", "format": "date"},
    ]
    if levels == 0 or rng.random() < 0.6:
        return rng.choice(simple)
    kind = rng.randrange(3)
    if kind == 0:
        item = made_up_value(rng, levels - 1)
        return {"type": "array", "items": item, "minItems": rng.randint(0, 1), "maxItems": rng.randint(1, 4)}
    return made_up_object(rng, levels - 1) if kind == 1 else {"anyOf": rng.sample(simple, 2)}


def requests(count: int, max_tokens: int) -> list[tuple[list[dict[str, str]], SamplingParams]]:
    """Conversations and parameters, the same for every policy."""
    made = []
    for index in range(count):
        rng = random.Random(index)
        grammar = Grammar.json_schema(made_up_schema(rng))
        asked = [{"role": "user", "content": f"Describe a {rng.choice(NOUNS)} as JSON, shortly."}]
        style: dict[str, Any] = (
            {"temperature": 0.9, "top_p": 0.95, "seed": index} if index % 2 else {"temperature": 0.0}
        )
        made.append((asked, SamplingParams(max_tokens=max_tokens, grammar=grammar, **style)))
    return made


def problem(text: str, schema: str) -> str | None:
    """Why a complete text is wrong, if it is."""
    try:
        jsonschema.Draft202012Validator(json.loads(schema)).validate(json.loads(text))
    except ValueError as error:
        return f"does not parse: {error}"
    except jsonschema.ValidationError as error:
        return f"does not validate: {error.message}"
    return None


def run(llm: LLM, made: list[tuple[list[dict[str, str]], SamplingParams]], expected: list[list[int]] | None) -> dict:
    """Counts of one policy; the token ids under "ids"."""
    began = time.perf_counter()
    outputs = llm.chat([asked for asked, _ in made], [params for _, params in made])
    seconds = time.perf_counter() - began
    ids = [output.outputs[0].token_ids for output in outputs]
    failures, cut = [], 0
    for index, ((_, params), output) in enumerate(zip(made, outputs, strict=True)):
        one = output.outputs[0]
        cut += one.finish_reason == "length"
        assert params.grammar is not None
        why = problem(one.text, params.grammar.text) if one.finish_reason == "stop" else None
        failures += [f"{index}: {why}: {one.text[:200]}"] if why else []
    tokens, steps = sum(map(len, ids)), sum(output.metrics.steps for output in outputs)
    differing = [index for index, pair in enumerate(zip(ids, expected or ids, strict=True)) if pair[0] != pair[1]]
    counts = {"generations": len(ids), "complete": len(ids) - cut, "cut": cut, "failures": failures}
    speed = {"tokens": tokens, "seconds": seconds, "tokens_per_s": tokens / seconds, "tokens_a_step": tokens / steps}
    return {**counts, "differ_from_off": differing, **speed, "ids": ids}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--policies", nargs="+", default=POLICIES)
    parser.add_argument("--max-tokens", type=int, default=400)
    parser.add_argument("--max-requests", type=int, default=16)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    made = requests(args.count, args.max_tokens)
    results: dict[str, dict] = {}
    expected: list[list[int]] | None = None
    for policy in args.policies:
        llm = LLM(args.model, policy=policy, dtype=args.dtype, max_requests=args.max_requests, max_model_len=1024)
        began = time.perf_counter()
        for _, params in made:
            assert params.grammar is not None
            llm.engine.compile(params.grammar)
        compiling = (time.perf_counter() - began) / len(made)
        one = run(llm, made, expected)
        ids = one.pop("ids")
        expected = ids if policy == "off" else expected
        results[policy] = {**one, "compile_ms": compiling * 1e3}
        print(
            f"{policy:12} {one['complete']} complete, {one['cut']} cut, {len(one['failures'])} failures, "
            f"{len(one['differ_from_off'])} differ from off; {one['tokens_per_s']:.1f} tokens/s, "
            f"{one['tokens_a_step']:.2f} a step, compiling {compiling * 1e3:.1f} ms each",
            flush=True,
        )
        for line in one["failures"][:5]:
            print("   ", line)
    if args.out is not None:
        record = {"schema": "dscale.structured_output/1", "model": args.model, "max_tokens": args.max_tokens}
        args.out.write_text(json.dumps(record | {"policies": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
