"""Real weights on a GPU: are the texts right, what does the deterministic mode cost, and how fast is real acceptance?

    python benchmarks/gpu_real.py --prompts gsm8k.jsonl,mt-bench.jsonl --seconds 560 --out gpu_real.json
    python benchmarks/gpu_real.py --parts a,b --count 20 --out exact.json
    python benchmarks/gpu_real.py --model random:tiny --device cpu --count 4 --concurrency 1,2 --window 0.3

a  float32: the texts of every policy against this machine's CPU (`off`, greedy, in a child process that sees no GPU,
   while part b runs). Where two texts part, the margin between the CPU's two best logits there, in nats, is recorded.
b  deterministic mode in bfloat16: `off` alone and in company, full, dvl, auto, and dvl with few pages, small prefill
   chunks and shared prefixes (so that tokens are recomputed) against `off`, greedy and seeded; beside it the same of
   the ordinary mode, for contrast.
c  tokens/s of the deterministic mode over the ordinary one, by policy and concurrency.
d  tokens/s of off, full, dvl and auto by concurrency at temperatures 0 and 1, real acceptance.

c and d are closed loops: c requests run at a time, the next prompt enters when one ends (at its end token or after
--output-tokens; the first ones are shortened so that ends are spread). Arms take turns (A B B A) over --repeats; ratios
to `off` are paired by repetition, with 95% intervals of the mean log ratio. The record is written after every part and
every concurrency; past --seconds what is left is skipped and named.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from gpu_smoke import QUESTIONS
from gpu_throughput import Arm, Loop, auto_over_best, release, window
from paired_ratios import REPETITION, compare, geometric_means, turns

import dscale
from dscale import LLM, SamplingParams
from dscale.config import PAGE_SIZE, resolve_dtype
from dscale.engine.graphs import kinds_for
from dscale.engine.pages import pages_for
from dscale.engine.placement import resolve_device
from dscale.engine.request import Request
from dscale.evaluate.record_file import write_record
from dscale.evaluate.workloads import read_workload, tokenise
from dscale.models.loader import LoadedTarget, load_target
from dscale.models.shapes import is_shape

SCHEMA = "dscale.gpu_real/1"
POLICIES = ("off", "full", "dvl", "auto")
COST_ARMS = "off,off+deterministic,full,full+deterministic,dvl,dvl+deterministic"
KINDS = {
    "greedy": SamplingParams(temperature=0.0, ignore_eos=True),
    "seeded": SamplingParams(temperature=0.8, top_p=0.95, ignore_eos=True),
}
LANES = 16  # requests that decode together in parts a and b


def log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def prompt_ids(loaded: LoadedTarget, args: argparse.Namespace) -> list[list[int]]:
    """--count prompts as token ids, spread over the files; repeated where there are fewer."""
    if loaded.own_tokenizer is None:  # random weights: random prompts
        vocabulary = loaded.config.decoder.vocab_size
        made = [torch.Generator().manual_seed(number) for number in range(args.count)]
        return [torch.randint(vocabulary, (20 + 3 * (n % 7),), generator=g).tolist() for n, g in enumerate(made)]
    rows: list[list[int]] = []
    files = args.prompts.split(",") if args.prompts else []
    for file in files:
        rows += tokenise(read_workload(file, -(-args.count // len(files))), loaded.own_tokenizer)
    rows = rows or [loaded.own_tokenizer.chat([{"role": "user", "content": one}]) for one in QUESTIONS]
    fitting = [row for row in rows if len(row) + args.output_tokens + 1 <= args.max_model_len]
    return [fitting[number % len(fitting)] for number in range(args.count)]


def build(loaded: LoadedTarget, arm: Arm, args: argparse.Namespace, **options: Any) -> LLM:
    """An engine of an arm with as many pages as its requests can hold."""
    given = "random" if is_shape(args.model) else "auto"
    lanes = options.pop("max_requests", LANES)
    defaults = {"num_pages": lanes * pages_for(args.max_model_len + 2 * PAGE_SIZE) + 2, "prefix_caching": False}
    return LLM(
        loaded, drafter="none" if arm.policy == "off" else given, predictor=given, policy=arm.policy, slots=arm.slots,
        dtype=str(loaded.model.embedding.dtype).removeprefix("torch."), device=args.device, max_requests=lanes,
        max_model_len=args.max_model_len, graphs=not arm.eager, attention_layout=arm.layout,
        deterministic=arm.deterministic, **{**arm.bits, **defaults, **options},
    )  # fmt: skip


def answers(llm: LLM, prompts: Sequence[list[int]], params: SamplingParams, tokens: int) -> list[list[int]]:
    """Token ids of every answer; prompt n has seed n."""
    each = [replace(params, max_tokens=tokens, seed=number) for number in range(len(prompts))]
    return [one.outputs[0].token_ids for one in llm.generate(prompt_token_ids=prompts, sampling_params=each)]


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Where two texts part; None when they are equal."""
    for at, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return at
    return None if len(one) == len(other) else min(len(one), len(other))


def differences(texts: Sequence[list[int]], reference: Sequence[list[int]]) -> dict[str, Any]:
    """How many texts are equal and where the others part: {prompt: token}."""
    parted = {n: first_difference(*pair) for n, pair in enumerate(zip(texts, reference, strict=True))}
    parted = {n: at for n, at in parted.items() if at is not None}
    tokens = sum(map(len, reference))
    return {"texts": len(texts), "tokens": tokens, "different": len(parted), "parted_at": parted}


# Part a


def start_reference(args: argparse.Namespace, folder: str) -> tuple[subprocess.Popen[bytes], Path]:
    """The CPU's float32 texts, made by a child that sees no GPU."""
    out = Path(folder) / "reference.json"
    given = [value for value in sys.argv[1:] if value] if args.given is None else args.given
    command = [sys.executable, __file__, *given, "--device", "cpu", "--reference-to", str(out)]
    threads = str(min(max((os.cpu_count() or 2) - 2, 1), 16))
    environment = {"OMP_NUM_THREADS": threads} | dict(os.environ) | {"CUDA_VISIBLE_DEVICES": ""}
    return subprocess.Popen(command, env=environment), out


def write_reference(args: argparse.Namespace) -> None:
    """In the child: texts by `off`, and the margin between the two best tokens at every token."""
    loaded = load_target(args.model, torch.float32, "cpu")
    llm, prompts = build(loaded, Arm.parse("off"), args), prompt_ids(loaded, args)
    params = replace(KINDS["greedy"], max_tokens=args.reference_tokens, logprobs=2)
    outputs = [one.outputs[0] for one in llm.generate(prompt_token_ids=prompts, sampling_params=params)]
    margins = [[margin(list(token.top.values())) for token in one.logprobs] for one in outputs]
    made = {"texts": [one.token_ids for one in outputs], "margins": margins, "threads": torch.get_num_threads()}
    args.reference_to.write_text(json.dumps(made))


def margin(top: list[float]) -> float:
    """Nats between the best two."""
    best = sorted(top, reverse=True)
    return round(best[0] - best[1], 6)


def part_a(args: argparse.Namespace, child: subprocess.Popen[bytes], out: Path, deadline: float) -> dict[str, Any]:
    loaded = load_target(args.model, torch.float32, args.device)
    prompts, texts = prompt_ids(loaded, args), {}
    for policy in POLICIES:
        if time.perf_counter() < deadline:
            llm = build(loaded, Arm.parse(policy), args, graph_kinds="greedy")
            texts[policy] = answers(llm, prompts, KINDS["greedy"], args.reference_tokens)
            del llm
            release()
    try:
        child.wait(max(deadline - time.perf_counter(), 1))
        reference = json.loads(out.read_text())
    except (subprocess.TimeoutExpired, OSError, ValueError) as problem:
        child.kill()
        return {"skipped": f"the CPU's texts: {type(problem).__name__}"}
    made: dict[str, Any] = {"reference": f"CPU, float32, off, {reference['threads']} threads", "policies": {}}
    for policy, rows in texts.items():
        found = differences(rows, reference["texts"])
        found["margins_there"] = {n: reference["margins"][n][at] for n, at in found["parted_at"].items()}
        made["policies"][policy] = found
        log(f"a  float32 {policy:5} {found['texts'] - found['different']} of {found['texts']} texts equal the CPU's")
    return made


# Part b


def scenes(args: argparse.Namespace) -> dict[str, tuple[str, dict[str, Any]]]:
    """What is compared with `off`: arm and options of the engine, by name."""
    made: dict[str, tuple[str, dict[str, Any]]] = {policy: (policy, {}) for policy in POLICIES}
    made["off, 3 at a time"] = ("off", {"max_requests": 3})
    made["off, eager"] = ("off+eager", {})
    few = LANES * pages_for(args.max_model_len) // 4
    recomputed = {"num_pages": few, "prefix_caching": True, "max_prefill_tokens": 48}
    return made | {"dvl, recomputed": ("dvl", recomputed), "off, recomputed": ("off", recomputed)}


def part_b(args: argparse.Namespace, loaded: LoadedTarget, deadline: float) -> dict[str, Any]:
    prompts, reference = prompt_ids(loaded, args), {}
    made: dict[str, Any] = {"dtype": str(loaded.model.embedding.dtype), "lanes": LANES, "rows": [], "skipped": []}
    jobs = [(True, name, *scene) for name, scene in scenes(args).items()]
    jobs += [(False, policy, policy, {}) for policy in ("off", "dvl")]
    for deterministic, name, policy, options in jobs:
        if time.perf_counter() > deadline:
            made["skipped"].append(f"{name}, deterministic {deterministic}")
            continue
        arm = replace(Arm.parse(policy), deterministic=deterministic)
        llm = build(loaded, arm, args, **options)
        for kind, params in KINDS.items():
            texts = answers(llm, prompts, params, args.exact_tokens)
            known = reference.setdefault((deterministic, kind), texts)
            row = {"deterministic": deterministic, "arm": name, "kind": kind} | differences(texts, known)
            row |= {"preemptions": llm.engine.scheduler.preemptions, "prefix_hits": llm.engine.scheduler.prefix_hits}
            row["progress"] = llm.engine.counters.emitted / max(llm.engine.counters.request_steps, 1)
            made["rows"].append(row)
            log(f"b  {'deterministic' if deterministic else 'ordinary'} {name:17} {kind}: {row['different']} differ")
        del llm
        release()
    exact = [row["different"] for row in made["rows"] if row["deterministic"]]
    return made | {"differences": sum(exact), "compared": len(exact)}


# Parts c and d


class RealLoop(Loop):
    """The closed loop over real prompts, with real ends."""

    def __init__(
        self, llm: LLM, concurrency: int, args: argparse.Namespace, prompts: list[list[int]], first: int = 0
    ) -> None:
        self.prompts = prompts
        super().__init__(llm, concurrency, args, first)

    def _add(self, done: int = 0) -> Request:
        number = next(self._numbers)
        left = max(self.args.output_tokens - done, 1)
        params = SamplingParams(temperature=self.args.temperature, max_tokens=left, seed=number)
        return self.engine.add(f"real-{number}", self.prompts[number % len(self.prompts)], params, number)


def measure(
    llm: LLM, concurrency: int, args: argparse.Namespace, prompts: list[list[int]], repetition: int = 0
) -> dict[str, Any]:
    """One window of one arm, which finds no prompt in the cache; each repetition has other requests."""
    llm.engine.scheduler.pool.clear_cached()
    first = REPETITION * repetition
    row = window(RealLoop(llm, concurrency, args, prompts, first), args.window)
    return {**row, "repetition": repetition, "first_request": first}


def engines(
    loaded: LoadedTarget, arms: str, args: argparse.Namespace, grid: Sequence[tuple[int, float]]
) -> dict[str, LLM]:
    """One engine an arm, which serves every concurrency and temperature of the grid."""
    most, kinds = max(concurrency for concurrency, _ in grid), kinds_for(temperature for _, temperature in grid)
    made: dict[str, LLM] = {}
    for name in arms.split(","):
        began = time.perf_counter()
        made[name] = build(loaded, Arm.parse(name), args, max_requests=most, max_prefill_tokens=2048, graph_kinds=kinds)
        log(f"   {name} built in {time.perf_counter() - began:.1f} s")
    return made


def cell(
    arms: dict[str, LLM], concurrency: int, args: argparse.Namespace, prompts: list[list[int]], deadline: float
) -> dict[str, Any]:
    """All arms at one concurrency and temperature, in turns."""
    made: dict[str, Any] = {"concurrency": concurrency, "temperature": args.temperature, "skipped": [], "arms": {}}
    made["arms"] = {name: {"runs": []} for name in arms}
    for repeat, name in turns(list(arms), args.repeats):
        if time.perf_counter() > deadline:
            made["skipped"].append(f"{name}, repetition {repeat}")
            continue
        run = measure(arms[name], concurrency, args, prompts, repeat)
        made["arms"][name]["runs"].append(run)
    compare(made["arms"])
    made |= auto_over_best(made["arms"])
    shown = [f"{name} {arm['tokens_per_s']:.0f}" for name, arm in made["arms"].items() if "tokens_per_s" in arm]
    log(f"   c={concurrency:<4} temperature {args.temperature:g}: " + ", ".join(shown))
    return made


def costs(cells: Sequence[dict[str, Any]]) -> dict[str, dict[int, float]]:
    """Tokens/s of the deterministic mode over the ordinary one: {policy: {concurrency: ratio}}."""
    made: dict[str, dict[int, float]] = {}
    for one in cells:
        for name, arm in one["arms"].items():
            exact = one["arms"].get(f"{name}+deterministic", {})
            if "tokens_per_s" in arm and "tokens_per_s" in exact:
                made.setdefault(name, {})[one["concurrency"]] = round(exact["tokens_per_s"] / arm["tokens_per_s"], 4)
    return made


def loops(
    args: argparse.Namespace, loaded: LoadedTarget, arms: str, grid: Sequence[tuple[int, float]], record: Record,
    part: str, deadline: float,
) -> None:  # fmt: skip
    """Cells of a grid of (concurrency, temperature), each written as soon as it is there."""
    prompts = prompt_ids(loaded, args)
    made: dict[str, Any] = {"arms": arms, "window_s": args.window, "cells": []}
    built = engines(loaded, arms, args, grid)
    for concurrency, args.temperature in grid:
        made["cells"].append(cell(built, concurrency, args, prompts, deadline))
        made["cost"] = costs(made["cells"])
        made["geometric_mean"] = {
            str(kind): geometric_means([one for one in made["cells"] if one["temperature"] == kind])
            for kind in sorted({one["temperature"] for one in made["cells"]})
        }
        record.put(part, made)


class Record:
    """The JSON record, on disk after every change."""

    def __init__(self, args: argparse.Namespace) -> None:
        on_gpu = resolve_device(args.device) != "cpu"
        self.path = args.out
        self.content: dict[str, Any] = {
            "schema": SCHEMA,
            "model": args.model,
            "device": torch.cuda.get_device_name() if on_gpu else f"CPU, {torch.get_num_threads()} threads",
            "versions": {"dscale": dscale.__version__, "torch": torch.__version__, "python": platform.python_version()},
            "date": time.strftime("%Y-%m-%d"),
            "arguments": {key: str(value) for key, value in vars(args).items() if key != "given"},
        }

    def put(self, part: str, made: dict[str, Any]) -> None:
        self.content[part] = made
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_record(self.path, self.content)


def table(part: dict[str, Any]) -> str:
    """Markdown of the cells of part c or d: tokens/s, with the ratio to off and its interval."""
    names = part["arms"].split(",")
    lines = ["| c | temperature | " + " | ".join(names) + " |", "| --- " * (len(names) + 2) + "|"]
    for one in part["cells"]:
        shown = []
        for arm in (one["arms"][name] for name in names):
            text = f"{arm['tokens_per_s']:.0f}" if "tokens_per_s" in arm else "–"
            if arm.get("interval"):
                text += f" · {arm['ratio']:.2f}× ({arm['interval'][0]:.2f}…{arm['interval'][1]:.2f})"
            shown.append(text)
        lines.append(f"| {one['concurrency']} | {one['temperature']:g} | " + " | ".join(shown) + " |")
    return "\n".join(lines)


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--prompts", default="", help="JSONL files with turns, prompt or messages, by commas")
    parser.add_argument("--parts", default="a,b,c,d")
    parser.add_argument("--seconds", type=float, default=560.0, help="past this nothing new begins")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="bfloat16", help="of parts b, c and d")
    parser.add_argument("--count", type=int, default=50, help="prompts")
    parser.add_argument("--reference-tokens", type=int, default=128, help="of a text in part a")
    parser.add_argument("--exact-tokens", type=int, default=256, help="of a text in part b")
    parser.add_argument("--output-tokens", type=int, default=256, help="of a text in parts c and d, at most")
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.add_argument("--concurrency", default="8,32,1,128,16,64,2,4", help="of part d; the ones that matter first")
    parser.add_argument("--cost-concurrency", default="1,8,32", help="of part c")
    parser.add_argument("--temperatures", default="0,1", help="of part d")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--window", type=float, default=1.0, help="seconds of a measured window")
    parser.add_argument("--warm-steps", type=int, default=20)
    parser.add_argument("--out", type=Path, default=None, help="JSON record")
    parser.add_argument("--reference-to", type=Path, default=None, help=argparse.SUPPRESS)
    args = parser.parse_args(given)
    args.given = None if given is None else list(given)
    return args


def main(given: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the parts, write the record as it grows, print the tables; returns the record."""
    args = arguments(given)
    if args.reference_to is not None:
        write_reference(args)
        return {}
    deadline, parts = time.perf_counter() + args.seconds, args.parts.split(",")
    args.device = resolve_device(args.device)
    record = Record(args)
    with tempfile.TemporaryDirectory() as folder:
        reference = start_reference(args, folder) if "a" in parts else None
        loaded = load_target(args.model, resolve_dtype(args.dtype), args.device)
        if "b" in parts:
            record.put("b", part_b(args, loaded, deadline))
        if reference is not None:  # before anything is timed: the child keeps the processor busy
            record.put("a", part_a(args, *reference, deadline))
    if "c" in parts and time.perf_counter() < deadline:
        grid = [(int(concurrency), 0.0) for concurrency in args.cost_concurrency.split(",")]
        loops(args, loaded, COST_ARMS, grid, record, "c", deadline)
        release()
    if "d" in parts and time.perf_counter() < deadline:
        kinds = [float(one) for one in args.temperatures.split(",")]
        grid = [(int(concurrency), kind) for concurrency in args.concurrency.split(",") for kind in kinds]
        loops(args, loaded, ",".join(POLICIES), grid, record, "d", deadline)
    for part in ("c", "d"):
        if part in record.content:
            print(table(record.content[part]) + "\n")
    return record.content


if __name__ == "__main__":
    main()
