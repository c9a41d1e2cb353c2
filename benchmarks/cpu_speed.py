"""Speed of DScale's policies, and of vLLM on CPU beside them, on one machine in one run.

    python benchmarks/cpu_speed.py --prompts gsm8k.jsonl --out benchmarks/records/cpu_speed.json
    python benchmarks/cpu_speed.py --prompts gsm8k.jsonl --vllm-python VENV/bin/python --vllm-model FOLDER --out …

Prompts are JSONL rows with `turns` or `prompt`. At concurrency c each arm answers the same 4·c prompts with c running
at a time, greedily, up to --max-tokens or the end token. Arms take turns (A B C C B A …) over --repeats; the record
holds every repetition, the medians, and for each arm the ratio to `off` of the same repetition.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

import dscale
from dscale import LLM, SamplingParams
from dscale.config import resolve_dtype
from dscale.evaluate.record_file import write_record
from dscale.models.loader import load_target

HERE = Path(__file__).parent


def read_prompts(path: Path, count: int) -> list[str]:
    """The first turn of the first `count` rows."""
    rows = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    return [row["turns"][0] if "turns" in row else row["prompt"] for row in rows[:count]]


def dscale_arms(args: argparse.Namespace, concurrency: int) -> dict[str, LLM]:
    """One engine a policy, over one target."""
    loaded = load_target(args.model, resolve_dtype(args.dtype))
    arms = {}
    for spec in args.arms.split(","):
        policy, _, slots = spec.partition("@")
        arms[spec] = LLM(
            loaded, drafter=args.drafter, predictor=args.predictor, policy=policy, slots=float(slots or args.slots),
            width=args.width, dtype=args.dtype, max_requests=concurrency, max_model_len=1024, prefix_caching=False,
        )  # fmt: skip
    return arms


def run_dscale(llm: LLM, prompts: list[str], max_tokens: int) -> dict[str, Any]:
    """Answer all prompts; tokens, seconds, and what the steps did."""
    llm.engine.counters.__init__()  # type: ignore[misc]
    llm.engine.scheduler.pool.clear_cached()
    began = time.perf_counter()
    outputs = llm.chat(
        [[{"role": "user", "content": prompt}] for prompt in prompts],
        SamplingParams(temperature=0.0, max_tokens=max_tokens),
    )
    seconds = time.perf_counter() - began
    tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    counters = llm.engine.counters
    return {
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_s": tokens / seconds,
        "mean_progress": counters.emitted / counters.request_steps,
        "slots_per_request": counters.slots / counters.request_steps,
        "step_ms": 1e3 * counters.decode_seconds / counters.steps,
        "prefill_s": counters.prefill_seconds,
        "shapes": counters.shapes,
        "ids": [output.outputs[0].token_ids for output in outputs],
    }


def run_vllm(args: argparse.Namespace, drafts: int, concurrency: int, count: int) -> dict[str, Any]:
    """One fresh vLLM process through benchmarks/vllm_cpu.py; drafts 0: without speculation."""
    command = [
        args.vllm_python, str(HERE / "vllm_cpu.py"), "--model", args.vllm_model, "--prompts", str(args.prompts),
        "--num-prompts", str(count), "--max-tokens", str(args.max_tokens), "--concurrency", str(concurrency), "--json",
    ]  # fmt: skip
    if drafts:
        command += ["--drafter", args.vllm_drafter, "--num-speculative-tokens", str(drafts)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    if done.returncode != 0:
        sys.exit(f"vLLM failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def measure(args: argparse.Namespace, concurrency: int) -> dict[str, Any]:
    """Every arm at one concurrency, in turns."""
    prompts = read_prompts(args.prompts, args.prompts_per_lane * concurrency)
    arms = dscale_arms(args, concurrency)
    vllm = {f"vllm:{drafts}": int(drafts) for drafts in args.vllm_drafts.split(",")} if args.vllm_python else {}
    names = [*arms, *vllm]
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for llm in arms.values():
        run_dscale(llm, prompts[:concurrency], 24)
    for repeat in range(args.repeats):
        for name in names if repeat % 2 == 0 else names[::-1]:
            run = (
                run_vllm(args, vllm[name], concurrency, len(prompts))
                if name in vllm
                else run_dscale(arms[name], prompts, args.max_tokens)
            )
            runs[name].append(run)
            print(f"c={concurrency} {name:12} {run['tokens_per_s']:8.1f} tokens/s", file=sys.stderr, flush=True)
    reference = runs[names[0]][0].get("ids")
    cell: dict[str, Any] = {"concurrency": concurrency, "prompts": len(prompts), "arms": {}}
    for name, rows in runs.items():
        same = [row.pop("ids", None) == reference for row in rows]
        ratios = [row["tokens_per_s"] / base["tokens_per_s"] for row, base in zip(rows, runs[names[0]], strict=True)]
        cell["arms"][name] = {
            "tokens_per_s": statistics.median(row["tokens_per_s"] for row in rows),
            "ratio": statistics.median(ratios),
            "ratio_range": [min(ratios), max(ratios)],
            "same_text": all(same) if name not in vllm else None,
            "runs": rows,
        }
    return cell


def step_curve(args: argparse.Namespace) -> list[dict[str, float]]:
    """Milliseconds of a verification pass by rows, and of a draft pass by drafted rows."""
    llm = LLM(
        args.model, drafter=args.drafter, predictor=None, policy="full", dtype=args.dtype, width=args.width,
        max_requests=16, max_model_len=1024,
    )  # fmt: skip
    worker = llm.engine.worker
    return [
        {"rows": rows, "verify_ms": 1e3 * min(worker.measure_verify(rows) for _ in range(3))}
        | ({"draft_ms": 1e3 * min(worker.measure_draft(rows) for _ in range(3))} if rows > 1 else {})
        for rows in (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
    ]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--drafter", default="auto")
    parser.add_argument("--predictor", default="auto")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument(
        "--arms", default="off,full,dvl,auto", help="policies, each optionally with @slots; the first is the base"
    )
    parser.add_argument("--slots", type=float, default=6.0)
    parser.add_argument("--width", type=int, default=None)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--concurrency", default="1,4,8,16")
    parser.add_argument("--prompts-per-lane", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--vllm-python", default=None)
    parser.add_argument("--vllm-model", default=None)
    parser.add_argument("--vllm-drafter", default=None)
    parser.add_argument("--vllm-drafts", default="0", help="drafts a step of the vLLM arms; 0: no speculation")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    record = {
        "schema": "dscale.cpu_speed/1",
        "date": time.strftime("%Y-%m-%d"),
        "versions": {"dscale": dscale.__version__, "torch": torch.__version__, "python": platform.python_version()},
        "threads": torch.get_num_threads(),
        "arguments": {
            key: str(value) for key, value in vars(args).items() if key not in ("out", "vllm_python", "prompts")
        }
        | {"prompts": args.prompts.name},
        "curve": step_curve(args) if args.drafter != "none" else [],
        "cells": [measure(args, int(c)) for c in args.concurrency.split(",")],
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    write_record(args.out, record)
    for cell in record["cells"]:
        row = "  ".join(f"{name} {arm['tokens_per_s']:.1f} ({arm['ratio']:.2f}×)" for name, arm in cell["arms"].items())
        print(f"c={cell['concurrency']:<3} {row}")


if __name__ == "__main__":
    main()
