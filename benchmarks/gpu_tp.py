"""Tensor parallel on one host: is the text that of one GPU, do the ranks agree, and how fast are the arms?

    python benchmarks/gpu_tp.py --out record.json                        two GPUs, 8B shape, c = 8, 16, 32, about 100 s
    python benchmarks/gpu_tp.py --ranks 1 --out record.json              the same on one GPU, to compare with
    python benchmarks/gpu_tp.py --model random:tiny --device cpu --concurrency 4 --seconds 0.5          in miniature

1. Text in float32 of random:tiny, and of SmolLM2 where its weights are in the cache: the ranks together against one
   process, greedy and seeded, with full and dvl. Sums over ranks are taken in another order than in one process, so two
   logits that are nearly equal may change places; `first_difference` says where, and after how many tokens.
2. In the same runs the ranks compare what each made of every step (check_ranks); a difference ends the run.
3. Tokens per second, as of gpu_throughput.py, with simulated acceptance. Each arm has one engine for the largest
   concurrency, and these share the ranks. NVLink multicast is off (NCCL_NVLS_ENABLE=0) unless the environment says so.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from gpu_throughput import Arm, acceptance, add_loop_arguments, cell, head, release, table
from paired_ratios import geometric_means

from dscale import LLM, SamplingParams
from dscale.config import RankFailed
from dscale.engine.crew import Crew
from dscale.engine.graphs import kinds_for
from dscale.engine.pages import pages_for
from dscale.engine.placement import default_dtype, resolve_device
from dscale.evaluate.record_file import write_record
from dscale.models.aliases import cached_alias

POLICIES = ("full", "dvl")
GREEDY = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.8, top_p=0.95, seed=11, max_tokens=48, ignore_eos=True)


def correctness(args: argparse.Namespace, device: str) -> list[dict[str, Any]]:
    """One row for each model, policy and way of sampling."""
    crew = Crew.start(args.ranks, device, check=True)
    sources = ["random:tiny"] + (["smollm2-135m"] if cached_alias("smollm2-135m") is not None else [])
    rows: list[dict[str, Any]] = []
    try:
        for source in sources:
            rows += [row for policy in POLICIES for row in compare_texts(source, policy, args, device, crew)]
    finally:
        release()
        crew.close()
    return rows


def compare_texts(source: str, policy: str, args: argparse.Namespace, device: str, crew: Crew) -> list[dict[str, Any]]:
    """The text of the ranks beside that of one process."""
    options: dict[str, Any] = {"policy": policy, "dtype": "float32", "device": device, "num_pages": 128}
    options |= {"predictor": "random" if source.startswith("random:") else "auto", "max_requests": 8}
    one, many = LLM(source, **options), LLM(source, tensor_parallel=args.ranks, check_ranks=True, crew=crew, **options)
    vocabulary, rows = one.loaded.config.decoder.vocab_size, []
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(vocabulary, (5 + 3 * index,), generator=generator).tolist() for index in range(12)]
    for name, params in (("greedy", GREEDY), ("seeded", SEEDED)):
        row: dict[str, Any] = {"model": source, "policy": policy, "sampling": name, "texts": len(prompts)}
        expected = _texts(one, prompts, params)
        try:
            got = _texts(many, prompts, params)
        except RankFailed as problem:
            return [*rows, row | {"failed": str(problem)}]
        different = [index for index in range(len(prompts)) if got[index] != expected[index]]
        row |= {"different": len(different), "steps_compared": many.engine.counters.steps, "ranks_differed": 0}
        if different:
            pair = zip(expected[different[0]], got[different[0]], strict=True)
            row["first_difference"] = [different[0], next(at for at, (a, b) in enumerate(pair) if a != b)]
        rows.append(row)
        print(json.dumps(row), file=sys.stderr, flush=True)
    many.close()
    return rows


def _texts(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> list[list[int]]:
    return [one.outputs[0].token_ids for one in llm.generate(prompt_token_ids=prompts, sampling_params=params)]


class Engines:
    """One engine an arm, for the largest concurrency, made when it is first asked for."""

    def __init__(self, args: argparse.Namespace, device: str, most: int, crew: Crew | None) -> None:
        self.args, self.device, self.most, self.crew = args, device, most, crew
        self.seconds: dict[str, float] = {}
        self._made: dict[str, LLM] = {}

    def __call__(self, arm: Arm, concurrency: int) -> LLM:
        if arm.name not in self._made:
            began = time.perf_counter()
            self._made[arm.name] = self._make(arm)
            self.seconds[arm.name] = time.perf_counter() - began
        return self._made[arm.name]

    def forget(self) -> None:
        """Let go of all engines: captured collectives must not outlive the group of the ranks."""
        self._made.clear()
        release()

    def _make(self, arm: Arm) -> LLM:
        args = self.args
        length = args.prompt_tokens + args.output_tokens + 1
        shared = {} if self.crew is None else {"tensor_parallel": args.ranks, "crew": self.crew}
        return LLM(
            args.model, drafter="none" if arm.policy == "off" else args.drafter, predictor="random", policy=arm.policy,
            slots=arm.slots, simulate=acceptance(args), dtype=args.dtype, device=self.device, max_requests=self.most,
            max_model_len=length, max_prefill_tokens=args.prefill_tokens, prefix_caching=False,
            num_pages=self.most * pages_for(length + 64) + 2, attention_layout=arm.layout,
            deterministic=arm.deterministic, graphs=not arm.eager,
            graph_kinds=kinds_for([args.temperature]), **shared,
        )  # fmt: skip


def throughput(args: argparse.Namespace, device: str, record: dict[str, Any], deadline: float) -> None:
    """Cells of the record, each written as soon as it is there."""
    levels = [int(one) for one in args.concurrency.split(",")]
    crew = Crew.start(args.ranks, device) if args.ranks > 1 else None
    engines = Engines(args, device, max(levels), crew)
    try:
        for concurrency in levels:
            record["cells"].append(cell(args, concurrency, deadline, engines))
            record["geometric_mean"] = geometric_means(record["cells"])
            record["build_seconds"] = engines.seconds
            write(args.out, record)
    finally:
        engines.forget()
        if crew is not None:
            crew.close()


def write(path: Path | None, record: dict[str, Any]) -> None:
    """The record so far."""
    if path is not None:
        write_record(path, record)


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_loop_arguments(parser)
    parser.set_defaults(arms="off,control,full,dvl,auto", repeats=1, seconds=1.5, limit=100.0, warm_steps=20)
    parser.add_argument("--ranks", type=int, default=2, help="GPUs (on a CPU: processes)")
    parser.add_argument("--skip", default="", help="correctness or throughput: leave this part out")
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> dict[str, Any]:
    """Run, write the record, print the table; returns the record."""
    args, began = arguments(given), time.perf_counter()
    device = resolve_device(args.device)
    on_gpu = device != "cpu"
    if on_gpu:
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    dtype = str(default_dtype(device)).removeprefix("torch.") if args.dtype == "auto" else args.dtype
    record = head("dscale.gpu_tp/1", args, dtype, on_gpu)
    record |= {"ranks": args.ranks, "correctness": [], "geometric_mean": {}}
    if args.ranks > 1 and args.skip != "correctness":
        record["correctness"] = correctness(args, device)
        release()
        write(args.out, record)
    if args.skip != "throughput":
        throughput(args, device, record, began + args.limit)
    record["seconds"] = time.perf_counter() - began
    write(args.out, record)
    print(table(record))
    return record


if __name__ == "__main__":
    main()
