"""Structured output with every policy: does each complete text parse and validate, is it off's, what does it cost?

    python benchmarks/structured_output.py --count 1000 --out benchmarks/records/structured_output.json
    python benchmarks/structured_output.py --count 24 --policies off full        # a minute on two cores

With --out the record is written after every --chunk generations, and a later call goes on where it ends; policies may
be given to calls one after the other.

Schemas are made up, one for each generation: nested objects, bounded strings, arrays and numbers, enums, patterns,
references, unions. Odd generations are sampled at temperature 0.9, even ones greedy. An answer that max_tokens cut is
counted as cut; every other one has to parse and to validate (jsonschema, draft 2020-12).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jsonschema

from dscale import LLM, SamplingParams
from dscale.config import Grammar
from dscale.evaluate.record_file import file_of, read_json, write_record

POLICIES = ("off", "full", "fixed:4", "dvl", "confidence", "auto")
DIGEST = 8  # hex digits kept of an answer's hash
Request = tuple[list[dict[str, str]], SamplingParams]
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


def requests(count: int, max_tokens: int) -> list[Request]:
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


def answers(llm: LLM, made: Sequence[Request], first: int) -> dict[str, Any]:
    """Counts of some generations, which begin at number `first`; digests: eight hex digits of each one's token ids."""
    began = time.perf_counter()
    for _, params in made:
        assert params.grammar is not None
        llm.engine.compile(params.grammar)
    compiled = time.perf_counter()
    outputs = llm.chat([asked for asked, _ in made], [params for _, params in made])
    seconds = time.perf_counter() - compiled
    failures, cut = [], []
    for index, ((_, params), output) in enumerate(zip(made, outputs, strict=True), start=first):
        one = output.outputs[0]
        assert params.grammar is not None
        cut += [index] if one.finish_reason == "length" else []
        why = problem(one.text, params.grammar.text) if one.finish_reason == "stop" else None
        failures += [f"{index}: {why}: {one.text[:200]}"] if why else []
    ids = [output.outputs[0].token_ids for output in outputs]
    return {
        "generations": len(ids),
        "cut": cut,
        "failures": failures,
        "tokens": sum(map(len, ids)),
        "steps": sum(output.metrics.steps for output in outputs),
        "seconds": seconds,
        "compile_seconds": compiled - began,
        "digests": "".join(hashlib.sha256(json.dumps(one).encode()).hexdigest()[:DIGEST] for one in ids),
    }


def added(known: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """Counts of both: every field of `more` is a number, a text or a list, and adds."""
    return known | {name: known[name] + value if name in known else value for name, value in more.items()}


def differing(digests: str, others: str) -> list[int]:
    """Numbers of the generations whose token ids differ, as far as both go."""
    starts = range(0, min(len(digests), len(others)), DIGEST)
    return [at // DIGEST for at in starts if digests[at : at + DIGEST] != others[at : at + DIGEST]]


def line(policy: str, one: dict[str, Any], off: str) -> str:
    """What the terminal says of a policy so far."""
    done, cut = one["generations"], len(one["cut"])
    return (
        f"{policy:12} {done - cut} complete, {cut} cut, {len(one['failures'])} failures, "
        f"{len(differing(one['digests'], off))} differ from off; {one['tokens'] / one['seconds']:.1f} tokens/s, "
        f"{one['tokens'] / one['steps']:.2f} a step, compiling {one['compile_seconds'] / done * 1e3:.1f} ms each"
    )


def opened(path: Path | None, head: dict[str, Any]) -> dict[str, Any]:
    """The record to go on with; one made in another way ends the program."""
    if path is None or not file_of(path).is_file():
        return head | {"policies": {}}
    record = read_json(path)
    other = [name for name, value in head.items() if record.get(name) != value]
    if other:
        sys.exit(f"{path}: was made with another {', '.join(other)}; give another --out")
    return record


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--policies", nargs="+", default=POLICIES)
    parser.add_argument("--max-tokens", type=int, default=400)
    parser.add_argument("--max-requests", type=int, default=16)
    parser.add_argument("--width", type=int, help="block width of these policies; the drafter's own if not given")
    parser.add_argument("--slots", type=float, default=8.0, help="verified rows per request of dvl and confidence")
    parser.add_argument("--chunk", type=int, default=100, help="generations between two writes of the record")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    made = requests(args.count, args.max_tokens)
    head = {"schema": "dscale.structured_output/2", "model": args.model, "max_tokens": args.max_tokens}
    record = opened(args.out, head)
    for policy in args.policies:
        one = record["policies"].get(policy, {"width": args.width, "slots": args.slots})
        if one.get("generations", 0) >= args.count:
            continue
        sizes = {"width": one["width"], "slots": one["slots"], "max_requests": args.max_requests}
        llm = LLM(args.model, policy=policy, dtype=args.dtype, max_model_len=1024, **sizes)
        for first in range(one.get("generations", 0), args.count, args.chunk):
            one = added(one, answers(llm, made[first : first + args.chunk], first))
            record["policies"][policy] = one
            off = record["policies"].get("off", one)["digests"]
            if args.out is not None:
                write_record(args.out, record)
            print(line(policy, one, off), *one["failures"][:5], sep="\n    ", flush=True)


if __name__ == "__main__":
    main()
