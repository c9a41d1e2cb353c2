"""compute-sanitizer over small cases of every Triton kernel, and over a tiny engine.

    python benchmarks/gpu_sanitize.py --out gpu_sanitize.json
    python benchmarks/gpu_sanitize.py --tools initcheck --parts 3 --seconds 200 --sanitizer CUDA/bin/compute-sanitizer

Tools: memcheck (out of bounds, misaligned), initcheck (read before written), racecheck (shared memory),
synccheck (barriers). torch's caching of memory is off, so that what lies past a tensor is not another tensor's. The
cases run in a child process, or in --parts of them at a time, each with its share; each case says when it is through,
so that a tool which runs out of time still tells what it has seen. Where compute-sanitizer is not installed the cases
run plainly, and the record says so. Exit code 1: errors.
"""

from __future__ import annotations

import argparse
import glob
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

TOOLS = "memcheck,synccheck,racecheck,initcheck"
PLACES = ("/usr/local/cuda*/bin/compute-sanitizer", "/usr/local/cuda*/compute-sanitizer/compute-sanitizer")
SMALL = {"HIDDEN": 256, "HEADS": 8, "KV": 2, "SIZE": 64, "INNER": 384, "VOCAB": 9000, "LAYERS": 2, "DRAFT_LAYERS": 2}


def find_sanitizer(given: str | None) -> str | None:
    """Where the tool is: as given, on the path, in a CUDA toolkit, in a wheel."""
    wheels = [pattern for entry in sys.path for pattern in glob.glob(f"{entry}/nvidia/*/bin/compute-sanitizer")]
    home = os.environ.get("CUDA_HOME")
    kits = [path for pattern in PLACES for path in sorted(glob.glob(pattern), reverse=True)]
    found = [given, shutil.which("compute-sanitizer"), home and f"{home}/bin/compute-sanitizer", *kits, *wheels]
    return next((path for path in found if path and os.access(path, os.X_OK)), None)


def cases() -> dict[str, Callable[[], Any]]:
    """Small cases by name."""
    import gpu_attention as attention
    import gpu_step_kernels as step
    import torch

    from dscale import LLM, SamplingParams
    from dscale.kernels.attention import AttentionOptions
    from dscale.kernels.triton import linear

    vars(step).update(SMALL)
    made: dict[str, Callable[[], Any]] = {}
    for case in [*step.row_cases(2), *step.vocabulary_cases(2), *step.decision_cases(2)]:
        made[case.name] = lambda case=case: case.make()[0]()
    bench = attention.Bench(deadline=time.monotonic() + 1e6, working_set=1 << 20)
    small = {"heads": 6, "kv": 2, "size": 64}
    ways: dict[str, dict[str, Any]] = {
        "packed": {}, "window": {"window": 20}, "draft": {"causal": False, "path": "draft"},
        "narrow": {"options": AttentionOptions("narrow")}, "wide": {"options": AttentionOptions("wide")},
        "deterministic": {"options": AttentionOptions(deterministic=True)}, "prefill": {"path": "prefill"},
        "deterministic prefill": {"options": AttentionOptions(deterministic=True), "path": "prefill"},
        "float32": {"dtype": torch.float32},
    }  # fmt: skip

    def attend(options: dict[str, Any]) -> None:
        attention.check(bench, "", [5, 0, 1, 16], [40, 9, 700, 0], **small, **options)
        if not bench.errors[-1]["ok"]:
            raise ValueError(f"error {bench.errors[-1]['error']}")

    for name, options in ways.items():
        made[f"attention, {name}"] = lambda options=options: attend(options)

    def products(rows: int, columns: int, depth: int, dtype: torch.dtype) -> None:
        x, weight = (torch.randn(*shape, device=step.DEVICE).to(dtype) for shape in ((rows, depth), (columns, depth)))
        linear.linear(x, weight, weight[:, 0].contiguous())

    for sizes in ((1, 40, 48), (65, 200, 100), (130, 72, 576), (3, 130, 2048)):
        for dtype in (torch.bfloat16, torch.float32):
            made[f"product {sizes} {dtype}"] = lambda sizes=sizes, dtype=dtype: products(*sizes, dtype)

    def engine(policy: str, **options: Any) -> None:
        llm = LLM("random:tiny", policy=policy, dtype="bfloat16", device="cuda", max_requests=2, num_pages=40,
                  max_model_len=160, predictor="random", **options)  # fmt: skip
        prompts, params = [[3, 1, 4] * 12, [1, 5]], SamplingParams(temperature=0.8, top_p=0.9, seed=1, max_tokens=6)
        llm.generate(prompt_token_ids=prompts, sampling_params=params)

    made["engine, dvl, eager"] = lambda: engine("dvl", graphs=False)
    made["engine, auto, deterministic, eager"] = lambda: engine("auto", graphs=False, deterministic=True)
    return made


def child(part: int, parts: int) -> None:
    """Run this part of the cases, one line each."""
    import torch

    torch.manual_seed(0)
    with torch.no_grad():
        for name, run in list(cases().items())[part::parts]:
            began = time.perf_counter()
            try:
                run()
                torch.cuda.synchronize()
                print(f"CASE ok {name} {time.perf_counter() - began:.1f} s", flush=True)
            except Exception as problem:  # the others still count
                text = str(problem).splitlines()[0] if str(problem) else ""
                print(f"CASE failed {name}: {type(problem).__name__}: {text}", flush=True)


def summary(output: str) -> dict[str, Any]:
    """What a run said: cases through, cases failed, the tool's errors (None: it did not get to its summary)."""
    counted = re.findall(r"ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard", output)
    errors = sum(int(number) for pair in counted for number in pair if number) if counted else None
    reports = [line for line in output.splitlines() if line.startswith("=========")]
    return {
        "ok": len(re.findall(r"^CASE ok", output, re.MULTILINE)),
        "failed": re.findall(r"^CASE failed (.*)$", output, re.MULTILINE),
        "errors": errors,
        "reports": [] if errors == 0 else reports[:60],
    }


def run_parts(tool: str | None, sanitizer: str | None, seconds: float, parts: int) -> dict[str, Any]:
    """All parts of the cases at a time, as one result."""
    with ThreadPoolExecutor(parts) as pool:
        return together(list(pool.map(lambda part: run(tool, sanitizer, seconds, part, parts), range(parts))))


def together(made: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One result of the parts' results; errors are not known where they are not of a part."""
    errors, outputs = [one["errors"] for one in made], [one["output"] for one in made if "output" in one]
    found = {
        "ok": sum(one["ok"] for one in made),
        "failed": [name for one in made for name in one["failed"]],
        "errors": None if None in errors else sum(errors),
        "reports": [line for one in made for line in one["reports"]],
        "out_of_time": any(one["out_of_time"] for one in made),
        "seconds": max(one["seconds"] for one in made),
    }
    return found | ({"output": outputs[-1]} if outputs else {})


def run(tool: str | None, sanitizer: str | None, seconds: float, part: int, parts: int) -> dict[str, Any]:
    """One tool over a child, or the child alone."""
    command = [sys.executable, __file__, "--child", f"{part}/{parts}"]
    if tool is not None:
        assert sanitizer is not None
        command = [sanitizer, "--tool", tool, "--print-limit", "20", *command]
    environment = dict(os.environ) | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    began = time.perf_counter()
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        try:
            output, late = process.communicate(timeout=seconds)[0], False
        except subprocess.TimeoutExpired:
            process.kill()
            output, late = process.communicate()[0], True
    made = summary(output) | {"out_of_time": late, "seconds": round(time.perf_counter() - began, 1)}
    return made | ({} if made["ok"] else {"output": output[-3000:]})


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tools", default=TOOLS)
    parser.add_argument("--sanitizer", default=None, help="path of compute-sanitizer")
    parser.add_argument("--seconds", type=float, default=140.0, help="for each tool")
    parser.add_argument("--out", type=Path, default=None, help="JSON record")
    parser.add_argument("--parts", type=int, default=1, help="processes at a time")
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(*map(int, args.child.split("/")))
        return 0
    import torch

    if not torch.cuda.is_available():
        sys.exit("gpu_sanitize: no CUDA device is here")
    sanitizer = find_sanitizer(args.sanitizer)
    record: dict[str, Any] = {"schema": "dscale.gpu_sanitize/1", "sanitizer": sanitizer is not None, "tools": {}}
    if sanitizer is None:
        print("compute-sanitizer is not installed here: the cases run without it")
    for tool in args.tools.split(",") if sanitizer else [None]:
        row = record["tools"][tool or "none"] = run_parts(tool, sanitizer, args.seconds, args.parts)
        print(f"{tool or 'plain'}: {row['ok']} cases ok, failed {row['failed']}, errors {row['errors']}")
        print("\n".join(row["reports"][:20]) or row.get("output", ""), flush=True)
        if args.out is not None:
            args.out.write_text(json.dumps(record, indent=1) + "\n")
    return int(any(row["errors"] or row["failed"] for row in record["tools"].values()))


if __name__ == "__main__":
    sys.exit(main())
