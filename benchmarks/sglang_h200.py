"""Tokens per second of SGLang with simulated acceptance: no speculation, DFLASH on its backends, DSCALE.

    python benchmarks/sglang_h200.py --models SITE/_models --arms off+fa3,dflash+fa3,dflash+triton,dscale --out r.json
    python benchmarks/sglang_h200.py --target FOLDER --drafter FOLDER --arms dscale,dflash+triton --device cpu …

The counterpart of gpu_throughput.py: the same closed loop over the same prompts, lengths, seeds and acceptance trace
(by seed and position; --progress or --trace), so that its arms can stand beside those of our engine. A process of
SGLang for each arm serves all concurrencies, one after the other; every c is a loop that starts in the middle.
After --warm-steps decode steps with c requests, tokens are counted for --seconds, prefill inside the window. Steps are
those that sglang_hooks.py writes down.

Arms: off, dflash or dscale, then +BACKEND (fa3, triton, flashinfer; of dscale for prompts), +piecewise or +breakable
(prompt steps as graphs of SGLang's two kinds, piecewise being its default; without either they are launched kernel by
kernel), +eager, +plan (SGLang's SGLANG_ENABLE_OVERLAP_PLAN_STREAM) and for dscale any of +POLICY (full, fixed:W, dvl),
+N slots, +wide, +narrow, +pieces (DSCALE_GRAPHS=0: of a step its two passes alone are graphs), +wait (DSCALE_AHEAD=0)
and +check (DSCALE_CHECK_RANKS=1). +torchnccl lets ranks speak through torch.distributed, where SGLang's own binding of
NCCL fails. "dscale" is dvl at 8 slots with an untrained predictor: its cost is real, and the trace's q take the place
of what it says.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import combinations, count, pairwise, takewhile
from pathlib import Path
from typing import Any

from paired_ratios import REPETITION

BACKENDS = ("fa3", "triton", "flashinfer", "torch_native", "dscale")
LAYOUTS = ("packed", "wide", "narrow")
SWITCHES = {  # variables of an arm's process
    "pieces": ("DSCALE_GRAPHS", "0"),
    "wait": ("DSCALE_AHEAD", "0"),
    "plan": ("SGLANG_ENABLE_OVERLAP_PLAN_STREAM", "1"),
    "check": ("DSCALE_CHECK_RANKS", "1"),
    "torchnccl": ("SGLANG_BENCH_TORCH_NCCL", "1"),
}
PREFILLS = {"piecewise": "tc_piecewise", "breakable": "breakable"}  # SGLang's names
PREFILL_TOKENS = [64, 128, 256, 512, 768, 1024, 1536, 2048]  # captured; more are launched kernel by kernel
RANKS = {  # variables unless they are set: no NVLink multicast, which can put a host's GPUs out of service
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    "NCCL_DEBUG": "WARN",
}
NCCL_ALONE = {  # ranks speak through NCCL alone: other ways need kernels that a cut installation lacks
    "disable_custom_all_reduce": True,
    "enforce_disable_flashinfer_allreduce_fusion": True,
}


def parse_arm(text: str) -> dict[str, Any]:
    """What an arm's name asks for."""
    kind, *parts = text.split("+")
    if kind not in ("off", "dflash", "dscale"):
        sys.exit(f"arm {text!r}: {kind!r} is not known; allowed are off, dflash, dscale")
    arm: dict[str, Any] = {"name": text, "kind": kind, "policy": "dvl", "slots": 8, "layout": "packed", "eager": False}
    arm["switches"] = dict(SWITCHES[part] for part in parts if part in SWITCHES)
    for part in [one for one in parts if one not in SWITCHES]:
        if part in BACKENDS:
            arm["backend"] = part
        elif part in LAYOUTS:
            arm["layout"] = part
        elif part in PREFILLS:
            arm["prefill"] = PREFILLS[part]
        elif part == "eager":
            arm["eager"] = True
        elif part.isdigit():
            arm["slots"] = int(part)
        else:
            arm["policy"] = part
    return arm


def environment(arm: dict[str, Any], args: argparse.Namespace, log: Path) -> dict[str, str]:
    """Variables of an arm's process; the plug-ins' metadata comes before everything else on its path."""
    root = Path(__file__).resolve().parents[1]
    path = [str(log.parent / "site"), str(root / "src"), str(root / "benchmarks"), os.environ.get("PYTHONPATH", "")]
    return {
        **RANKS,
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "SGLANG_BENCH": str(log),
        "SGLANG_PLUGINS": "dscale,dscale_bench",
        "DSCALE_POLICY": arm["policy"],
        "DSCALE_SLOTS": str(arm["slots"]),
        "DSCALE_PREDICTOR": "random",
        "DSCALE_ATTENTION_LAYOUT": arm["layout"],
        "DSCALE_SIMULATE": args.trace or str(args.progress),
        **arm["switches"],
    }


def write_metadata(site: Path) -> None:
    """Entry points of the plug-ins, for machines on which nothing is installed."""
    plugins = {"dscale": "dscale.integrations.sglang.plugin", "dscale_bench": "sglang_hooks"}
    for name, module in plugins.items():
        folder = site / f"{name}_plugin-0.dist-info"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}-plugin\nVersion: 0\n")
        (folder / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{name} = {module}:register\n")


def engine_options(arm: dict[str, Any], args: argparse.Namespace, most: int) -> dict[str, Any]:
    """Arguments of sglang.Engine."""
    options: dict[str, Any] = {
        "model_path": args.target, "skip_tokenizer_init": True, "load_format": args.load, "dtype": args.dtype,
        "device": args.device, "max_running_requests": most, "disable_radix_cache": True, "random_seed": 1,
        "log_level": "info", "watchdog_timeout": 600, "mem_fraction_static": args.memory, "tp_size": args.tp,
        "disable_cuda_graph": arm["eager"] or args.device == "cpu",
    }  # fmt: skip
    if args.device == "cpu":
        options |= {"max_total_tokens": 8192, "speculative_draft_attention_backend": "triton"}
    elif not arm["eager"]:
        options |= {"cuda_graph_max_bs_decode": most}
        if arm.get("prefill"):
            options |= {"cuda_graph_backend_prefill": arm["prefill"], "cuda_graph_bs_prefill": PREFILL_TOKENS}
        else:
            options |= {"disable_prefill_cuda_graph": True}
    if args.tp > 1:
        options |= NCCL_ALONE
    if arm.get("backend"):
        options["attention_backend"] = arm["backend"]
    if arm["kind"] != "off":
        options |= {"speculative_algorithm": arm["kind"].upper(), "speculative_draft_model_path": args.drafter}
    return options


class Loop:
    """c requests at a time; request n has seed n, and the first c bring parts of their answers along as prompts. first:
    number of the first request."""

    def __init__(self, engine: Any, concurrency: int, args: argparse.Namespace, first: int = 0) -> None:
        self.engine, self.concurrency, self.args = engine, concurrency, args
        self.numbers = count(first)
        self.failed: list[str] = []

    async def run(self, seconds: float) -> None:
        """Keep c requests running for so long, then let them end."""
        self.end = time.time() + seconds
        await asyncio.gather(*[self._worker(index) for index in range(self.concurrency)])

    async def _worker(self, index: int) -> None:
        done = self.args.output_tokens * index // self.concurrency
        while True:
            await self._request(next(self.numbers), done)
            done = 0
            if time.time() > self.end or self.failed:
                return

    async def _request(self, number: int, done: int) -> None:
        import torch

        length, left = self.args.prompt_tokens + done, self.args.output_tokens - done
        ids = torch.randint(self.args.vocab, (length,), generator=torch.Generator().manual_seed(number)).tolist()
        params = {"temperature": 0, "max_new_tokens": left, "ignore_eos": True, "sampling_seed": number}
        answer = await self.engine.async_generate(input_ids=ids, sampling_params=params)
        if len(answer["output_ids"]) != left:
            self.failed.append(f"request {number}: {len(answer['output_ids'])} tokens, {left} were asked for")


async def texts(engine: Any, args: argparse.Namespace) -> list[list[int]]:
    """Answers to four fixed prompts, one after the other: together, their shares of the budget would depend on who came
    first. Under one trace they hang on the caches of both models, and arms of one policy must give nearly the same."""
    import torch

    made = []
    for n in range(4):
        ids = torch.randint(args.vocab, (64 + 8 * n,), generator=torch.Generator().manual_seed(n)).tolist()
        params = {"temperature": 0, "max_new_tokens": 64, "ignore_eos": True, "sampling_seed": n}
        made.append((await engine.async_generate(input_ids=ids, sampling_params=params))["output_ids"])
    return made


def agreement(arms: Sequence[dict[str, Any]]) -> dict[str, int]:
    """Tokens before the texts of two arms of one policy and budget part, in all: 256 where they never do."""
    known = [one for one in arms if one.get("texts")]
    found = {}
    for first, other in combinations(known, 2):
        if all(first[key] == other[key] for key in ("kind", "policy", "slots")):
            pairs = zip(first["texts"], other["texts"], strict=True)
            found[f"{first['name']} = {other['name']}"] = sum(alike(*pair) for pair in pairs)
    return found


def alike(first: Sequence[int], other: Sequence[int]) -> int:
    """Tokens before two texts part."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, other, strict=True)))


def measure(rows: Sequence[dict[str, Any]], concurrency: int, args: argparse.Namespace) -> dict[str, Any]:
    """A window of a loop's steps: it opens after --warm-steps decode steps from the first with all requests on."""
    full = next((i for i, row in enumerate(rows) if row["mode"] == "D" and row["requests"] == concurrency), None)
    if full is None:
        return {"problem": f"never {concurrency} requests in a step"}
    decode = [i for i, row in enumerate(rows) if i >= full and row["mode"] == "D"]
    if len(decode) <= args.warm_steps + 1:
        return {"problem": f"{len(decode)} decode steps, {args.warm_steps} of them warm-up"}
    first = decode[args.warm_steps]
    opened = rows[first]["t"]
    window = [row for row in rows[first + 1 :] if row["t"] <= opened + args.seconds]
    seconds = window[-1]["t"] - opened
    steps = [row for row in window if row["mode"] == "D"]
    lanes = max(sum(row["requests"] for row in steps), 1)
    pairs = pairwise(window)
    plain = [b["t"] - a["t"] for a, b in pairs if a["mode"] == b["mode"] == "D" and b["requests"] == concurrency]
    tokens = sum(row["tokens"] for row in window)
    return {
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_s": tokens / seconds,
        "steps": len(steps),
        "prefill_steps": len(window) - len(steps),
        "interval_ms": 1e3 * statistics.median(plain) if plain else None,
        "running": lanes / max(len(steps), 1),
        "mean_progress": sum(row["tokens"] for row in steps) / lanes,
        "graph_steps": sum(row["graph"] for row in steps),
    }


def run_arm(arm: dict[str, Any], args: argparse.Namespace) -> None:
    """In an arm's own process: print one JSON line."""
    import sglang

    wanted = [int(one) for one in args.concurrency.split(",")]
    log = Path(os.environ["SGLANG_BENCH"])
    began = time.time()
    engine = sglang.Engine(**engine_options(arm, args, max(wanted)))
    made: dict[str, Any] = {**arm, "start_s": time.time() - began, "cells": []}
    loop = asyncio.get_event_loop_policy().get_event_loop() if not hasattr(engine, "loop") else engine.loop
    warm = Loop(engine, max(wanted), args)
    loop.run_until_complete(warm.run(0.0))
    made["texts"] = loop.run_until_complete(texts(engine, args))
    for concurrency in wanted:
        for repetition in range(args.repeats):
            before = len(log.read_text().splitlines())
            current = Loop(engine, concurrency, args, REPETITION * repetition)
            loop.run_until_complete(current.run(args.seconds + args.warm_seconds))
            rows = [json.loads(line) for line in log.read_text().splitlines()[before:]]
            cell = {"concurrency": concurrency, "repetition": repetition, **measure(rows, concurrency, args)}
            made["cells"].append(cell | {"failed": current.failed})
            print(f"[{arm['name']}] {json.dumps(cell)}", file=sys.stderr, flush=True)
    state = engine.get_server_info()
    inner = state.get("internal_states", [{}])[0]
    made["memory"] = inner.get("memory_usage")
    made["plugin"] = inner.get("dscale")
    if arm["kind"] == "dscale" and not made["plugin"]:
        sys.exit("DSCALE does not say that it is active")
    Path(args.child_out).write_text(json.dumps(made))
    engine.shutdown()


def spawn(arm: dict[str, Any], args: argparse.Namespace, folder: Path, left: float) -> dict[str, Any]:
    """Run an arm in a process of its own; a failed one is part of the record."""
    work = folder / arm["name"].replace(":", "-")
    work.mkdir(parents=True)
    log, out = work / "steps.jsonl", work / "arm.json"
    log.touch()
    write_metadata(work / "site")
    command = [sys.executable, __file__, *sys.argv[1:], "--child", arm["name"], "--child-out", str(out)]
    keep = Path(args.logs) if args.logs else work
    keep.mkdir(parents=True, exist_ok=True)
    text = keep / f"{work.name}.log"
    run_logged(command, environment(arm, args, log), text, left)
    print("\n".join(line for line in text.read_text().splitlines() if line.startswith(f"[{arm['name']}]")), flush=True)
    if out.is_file():
        return json.loads(out.read_text())
    tail = [line for line in text.read_text().splitlines() if line.strip()][-args.tail :]
    print(f"arm {arm['name']} failed:\n" + "\n".join(line[:300] for line in tail), flush=True)
    return {**arm, "problem": tail[-12:]}


def run_logged(command: Sequence[str], variables: dict[str, str], log: Path, seconds: float) -> str:
    """Run a process, its output in a file, for so long at most; how it ended."""
    with log.open("w") as stream:
        process = subprocess.Popen(
            command, env=variables, stdout=stream, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            return f"exit code {process.wait(timeout=seconds)}"
        except subprocess.TimeoutExpired:
            return f"did not end within {seconds:.0f} s"
        finally:
            _end_group(process)


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """End a process with its children: SGLang's outlive a parent that died."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def main() -> None:
    """All arms, one after the other; the record grows as they end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, help="folder with q8, d8, q4, d4: shapes of targets and drafters")
    parser.add_argument("--size", default="8", help="with --models: 8 or 4")
    parser.add_argument("--target", default="")
    parser.add_argument("--drafter", default="")
    parser.add_argument("--load", default="dummy", help="load format: dummy or auto")
    parser.add_argument("--arms", default="off+fa3,dflash+fa3,dflash+triton,dflash+flashinfer,dscale+fa3")
    parser.add_argument("--concurrency", default="8,16,32")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--warm-seconds", type=float, default=2.0, help="of a loop besides the window")
    parser.add_argument("--warm-steps", type=int, default=40)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--output-tokens", type=int, default=512)
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--progress", type=float, default=6.09)
    parser.add_argument("--trace", default="", help="a trace that gpu_throughput.py --export-trace wrote")
    parser.add_argument("--limit", type=float, default=540.0, help="seconds for all")
    parser.add_argument("--memory", type=float, default=0.85)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tail", type=int, default=30, help="lines shown of a failed arm's log")
    parser.add_argument("--logs", default="", help="folder that keeps the logs of all arms")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    parser.add_argument("--child-out", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.models:
        args.target, args.drafter = str(args.models / f"q{args.size}"), str(args.models / f"d{args.size}")
    if args.child:
        run_arm(parse_arm(args.child), args)
        return
    arms, began = [parse_arm(one) for one in args.arms.split(",")], time.time()
    record = {
        "schema": "dscale.sglang_h200/1",
        "note": "simulated acceptance",
        "arguments": vars(args) | {"models": str(args.models), "out": str(args.out)},
        "arms": [],
    }
    with tempfile.TemporaryDirectory() as folder:
        for arm in arms:
            left = args.limit - (time.time() - began)
            ended = {**arm, "problem": "time is up"} if left < 45 else spawn(arm, args, Path(folder), left)
            record["arms"].append(ended)
            record["agreement"] = agreement(record["arms"])
            print(f"arm {arm['name']} ended after {time.time() - began:.0f} s; {record['agreement']}", flush=True)
            if args.out:
                args.out.parent.mkdir(parents=True, exist_ok=True)
                args.out.write_text(json.dumps(record, indent=1) + "\n")
    sys.exit(1 if any("problem" in one for one in record["arms"]) else 0)


if __name__ == "__main__":
    main()
