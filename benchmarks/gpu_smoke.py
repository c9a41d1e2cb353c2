"""First look at the engine on a CUDA GPU: is every policy right, with graphs and without, read late and at once?

    python benchmarks/gpu_smoke.py                          SmolLM2 with its drafter, under 120 s
    python benchmarks/gpu_smoke.py --policies dvl,auto --dtypes float32 --seconds 60 --out smoke.json

Eight prompts are answered together, greedily and seeded, by each policy in each dtype. The tokens are compared with
`off`, eager, every step read at once, in the same dtype: in float32 they must be equal (a GPU's sums may depend on the
number of rows, so a near-tie of logits can part two texts; the table says where the first one parts), in bfloat16 the
share of equal beginnings counts. Beside that: tokens/s of the second run, milliseconds a step on the device, capture
time and memory, and how many times a step made the host wait (torch's sync debug mode). Every case stands alone: what
fails prints its traceback and the rest goes on; past --seconds the rest is skipped.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from dscale import LLM, SamplingParams
from dscale.config import resolve_dtype
from dscale.models.loader import LoadedTarget, load_target

QUESTIONS = (
    "What is the capital of France, and what is it known for?",
    "Natalia sold clips to 48 friends in April, and half as many in May. How many did she sell altogether?",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Explain in three sentences why the sky is blue.",
    "A farmer has 12 hens. Each lays 5 eggs a week. How many eggs are there after 3 weeks?",
    "Give me three names for a small black dog.",
    "What does a compiler do?",
    "Write a Python function that counts the vowels of a word.",
)
POLICIES = "off,full,fixed:4,dvl,dvl:seeded,confidence,auto"
MODES = ((True, 1), (False, 1), (True, 0), (False, 0))  # graphs, lag; the ones that matter first


def ask(llm: LLM, params: SamplingParams) -> tuple[list[list[int]], float]:
    """Tokens of the eight answers, and seconds."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    outputs = llm.chat([[{"role": "user", "content": question}] for question in QUESTIONS], params)
    return [output.outputs[0].token_ids for output in outputs], time.perf_counter() - began


def agreement(tokens: list[list[int]], reference: list[list[int]]) -> tuple[int, float]:
    """Texts that are equal, and the share of tokens before the first difference."""
    same = total = equal = 0
    for one, other in zip(tokens, reference, strict=True):
        first = next(
            (at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
        )
        same, total, equal = same + first, total + max(len(one), len(other)), equal + (one == other)
    return equal, same / max(total, 1)


def host_waits(llm: LLM, params: SamplingParams) -> dict[str, int]:
    """Calls that made the host wait for the device while answering once more, by place."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            ask_quietly(llm, params)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    places = Counter(f"{Path(one.filename).name}:{one.lineno}" for one in seen if "synchroniz" in str(one.message))
    return dict(places.most_common(6))


def ask_quietly(llm: LLM, params: SamplingParams) -> None:
    llm.chat([[{"role": "user", "content": question}] for question in QUESTIONS], params)


def case(
    loaded: LoadedTarget, policy: str, graphs: bool, lag: int, args: argparse.Namespace, known: dict[str, Any]
) -> dict[str, Any]:
    """One engine: right or not, and how fast. known: the reference texts by kind, filled by the first case."""
    began = time.perf_counter()
    llm = LLM(
        loaded, policy=policy, dtype=args.dtype, device="cuda", graphs=graphs, lag=lag, slots=args.slots,
        max_requests=len(QUESTIONS), max_model_len=1024, prefix_caching=False, memory_fraction=0.05,
    )  # fmt: skip
    row: dict[str, Any] = {"built_s": round(time.perf_counter() - began, 2)}
    for kind, params in args.kinds.items():
        ask(llm, params)  # kernels are compiled
        counters = llm.engine.counters
        counters.__init__()  # type: ignore[misc]
        tokens, seconds = ask(llm, params)
        known.setdefault(kind, tokens)
        equal, share = agreement(tokens, known[kind])
        row[kind] = {
            "equal_texts": equal,
            "equal_share": round(share, 4),
            "tokens_per_s": round(sum(map(len, tokens)) / seconds, 1),
            "step_ms": round(1e3 * counters.decode_seconds / max(counters.steps, 1), 3),
            "steps": counters.steps,
            "progress": round(counters.emitted / max(counters.request_steps, 1), 3),
            "shapes": counters.shapes,
        }
    row["host_waits"] = host_waits(llm, args.kinds["greedy"])
    runner = llm.engine.worker.graphs
    if runner is not None:
        row["graphs"] = vars(runner.counters) | {"text": str(runner.counters)}
    row["pages_held"] = llm.engine.scheduler.pool.held
    return row


def transformers_texts(loaded: LoadedTarget, args: argparse.Namespace) -> dict[str, Any]:
    """float32 greedy against the recorded answers of transformers (tests/models/smollm2_greedy.json)."""
    path = Path(__file__).parent.parent / "tests" / "models" / "smollm2_greedy.json"
    answers = json.loads(path.read_text())["answers"]
    llm = LLM(
        loaded, policy="dvl", dtype="float32", device="cuda", slots=args.slots, max_requests=8, max_model_len=1024,
        memory_fraction=0.05, graph_kinds="greedy",
    )  # fmt: skip
    params = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
    outputs = llm.generate(prompt_token_ids=[one["prompt"] for one in answers], sampling_params=params)
    equal, share = agreement([one.outputs[0].token_ids for one in outputs], [list(one["tokens"]) for one in answers])
    return {"equal_texts": equal, "of": len(answers), "equal_share": round(share, 4)}


def line(name: str, row: dict[str, Any]) -> str:
    """A row of the table."""
    if "error" in row:
        return f"{name:34} FAILED  {row['error']}"
    parts = [f"{name:34}"]
    for kind in ("greedy", "seeded"):
        if kind in row:
            one = row[kind]
            parts.append(
                f"{kind} {one['equal_texts']}/8 {100 * one['equal_share']:5.1f}% {one['tokens_per_s']:8.0f} tok/s"
            )
            parts.append(f"{one['step_ms']:7.2f} ms")
    parts.append(f"waits {sum(row.get('host_waits', {}).values())}")
    if "graphs" in row:
        parts.append(row["graphs"]["text"])
    return "  ".join(parts)


def attempt(rows: dict[str, dict[str, Any]], name: str, run: Any) -> None:
    """Run a case; a failure prints its traceback and becomes a row."""
    try:
        rows[name] = run()
    except Exception as error:
        traceback.print_exc()
        rows[name] = {"error": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"}
    print(line(name, rows[name]) if "of" not in rows[name] else f"{name:34} {rows[name]}", flush=True)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--policies", default=POLICIES)
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--slots", type=float, default=6.0)
    parser.add_argument("--seconds", type=float, default=110.0)
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("gpu_smoke: no CUDA device is here")
    deadline = time.perf_counter() + args.seconds
    args.kinds = {
        "greedy": SamplingParams(temperature=0.0, max_tokens=args.max_tokens),
        "seeded": SamplingParams(temperature=0.8, top_p=0.95, seed=5, max_tokens=args.max_tokens),
    }
    rows: dict[str, dict[str, Any]] = {}
    targets = {dtype: load_target(args.model, resolve_dtype(dtype), "cuda") for dtype in args.dtypes.split(",")}
    known: dict[str, dict[str, Any]] = {dtype: {} for dtype in targets}
    jobs = [(dtype, "off", False, 0) for dtype in targets]
    jobs += [(dtype, policy, *mode) for mode in MODES for dtype in targets for policy in args.policies.split(",")]
    for dtype, policy, graphs, lag in dict.fromkeys(jobs):
        name = f"{dtype} {policy} {'graphs' if graphs else 'eager'} lag {lag}"
        if time.perf_counter() > deadline:
            print(f"{name:34} skipped: out of time")
            continue
        args.dtype = dtype
        job = (targets[dtype], policy, graphs, lag, args, known[dtype])
        attempt(rows, name, lambda job=job: case(*job))
        if (graphs, lag, policy) == (True, 1, "dvl") and dtype == "float32":
            attempt(rows, "float32 dvl against transformers", lambda: transformers_texts(targets["float32"], args))
    record = {
        "schema": "dscale.gpu_smoke/1",
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "rows": rows,
    }
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(record, indent=1, default=str) + "\n")
    failed = [name for name, row in rows.items() if "error" in row]
    print(f"{len(rows)} cases, {len(failed)} failed" + "".join(f"\n  {name}" for name in failed))


if __name__ == "__main__":
    main()
