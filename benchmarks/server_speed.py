"""`dscale serve` beside vLLM's server on one CPU, and beside our engine without a server: what HTTP costs.

    python benchmarks/server_speed.py --vllm-python VENV/bin/python --prompts gsm8k.jsonl \\
        --out benchmarks/records/server_speed.json
    python benchmarks/server_speed.py --summary benchmarks/records/server_speed.json        # of a record that is there
    python benchmarks/server_speed.py --prompts gsm8k.jsonl --apart --boots 2 --out overhead.json        # without vLLM

The arms are up at the same time and take turns, A B B A, so that only one is under load at any moment: same weights in
bfloat16, same requests, greedy, no prefix cache. The engine in process is the one that serves, driven directly. Written
with dscale.evaluate.bench, so an interrupted record is gone on with. With --apart each arm is alone on the machine, a
process of its own for each boot; memory that was idle for minutes can be slow to come back. The arm `whole` asks the
same server for answers that are not streamed: what is left then is HTTP, chat template and tokenizer.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any

from dscale.cli.bench_view import LiveView
from dscale.evaluate.arm_start import Starter
from dscale.evaluate.bench import Bench, manifest_for, new_record, take_up
from dscale.evaluate.bench_record import BenchRecord, read_record
from dscale.evaluate.bench_summary import Cell, cells
from dscale.evaluate.manifest import Wanted
from dscale.evaluate.plan import Arm, Plan

LENGTH = 1024  # tokens of prompt and answer
MOST = 16  # sequences decoded together, of all arms
VLLM = (
    "${VLLM_PYTHON}", "{here}/vllm_server.py", "--model", "{target}", "--served-model-name", "target", "--port",
    "{port}", "--max-num-seqs", str(MOST), "--max-model-len", str(LENGTH), "--dtype", "bfloat16", "--enforce-eager",
    "--no-enable-prefix-caching",
)  # fmt: skip
SERVE = (
    "{python}", "-m", "dscale", "serve", "smollm2-135m", "--port", "{port}", "--max-requests", str(MOST),
    "--max-model-len", str(LENGTH), "--dtype", "bfloat16", "--no-prefix-caching", "--policy",
)  # fmt: skip


def arms(policies: list[str], vllm: bool) -> tuple[Arm, ...]:
    """vLLM, then each policy served and in process, neighbours in time."""
    env = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    found = [Arm("vllm", "vllm", VLLM, env=env, autoregressive=True, baseline=True)] if vllm else []
    for policy in policies:
        own: dict[str, Any] = {"model": "smollm2-135m", "policy": policy, "dtype": "bfloat16", "max_requests": MOST}
        found.append(Arm(f"served {policy}", "dscale", (*SERVE, policy), policy=policy))
        whole = {"stream": False}
        found.append(Arm(f"served {policy}, whole", "dscale", (*SERVE, policy), policy=policy, body=whole))
        found.append(Arm(f"in process {policy}", settings=own | {"max_model_len": LENGTH}))
    return tuple(found)


def measured(args: argparse.Namespace) -> BenchRecord:
    """Run what the record does not have yet."""
    if args.vllm_python is not None:
        os.environ["VLLM_PYTHON"] = str(args.vllm_python)
    warmup = max(args.concurrency)
    plan = Plan(
        arms(args.policies, args.vllm_python is not None),
        name="server on a CPU",
        prompts=(str(args.prompts),),
        wanted=Wanted(requests=args.num_prompts, warmup=warmup, max_tokens=args.max_tokens),
        concurrency=tuple(args.concurrency),
        runs=args.runs,
        boots=args.boots,
        together=not args.apart,
        start_seconds=600.0,
        target="smollm2-135m",
        here=Path(__file__).resolve().parent,
    )
    manifest = manifest_for(plan)
    record = new_record(plan, manifest, shlex.join(["python", *sys.argv]))
    record = record if args.out is None else take_up(record, args.out)
    with tempfile.TemporaryDirectory(prefix="dscale-speed-") as logs, LiveView() as view:
        return Bench(Starter(plan, manifest, Path(logs)), record, args.out, view).go()


def summary(record: BenchRecord) -> list[dict[str, Any]]:
    """A row for each arm and concurrency. against_vllm: its tokens/s over vLLM's; overhead: of serving, the share of
    the in-process engine's tokens/s that is lost."""
    found = {(cell.arm, cell.concurrency): cell for cell in cells(record)}
    rows = []
    for (arm, concurrency), cell in found.items():
        vllm = found.get(("vllm", concurrency))
        own = arm.split(",")[0].replace("served", "in process")
        inside = found.get((own, concurrency)) if arm.startswith("served") else None
        rows.append(row_of(cell, vllm, inside))
    return rows


def row_of(cell: Cell, vllm: Cell | None, inside: Cell | None) -> dict[str, Any]:
    """One row; times in milliseconds."""
    return {
        "arm": cell.arm,
        "concurrency": cell.concurrency,
        "tokens_per_s": cell.tokens_per_s,
        "spread": cell.spread,
        "first_token_ms": None if cell.first_token is None else 1e3 * cell.first_token,
        "between_tokens_ms": None if cell.between_tokens is None else 1e3 * cell.between_tokens,
        "against_vllm": None if vllm is None else cell.tokens_per_s / vllm.tokens_per_s,
        "overhead": None if inside is None else 1 - cell.tokens_per_s / inside.tokens_per_s,
    }


def shown(row: dict[str, Any]) -> str:
    """A row for people."""

    def one(name: str, form: str) -> str:
        return "–" if row[name] is None else format(row[name], form)

    return (
        f"{row['arm']:19} c={row['concurrency']:<3} {one('tokens_per_s', '8.1f')} tokens/s, first "
        f"{one('first_token_ms', '.0f')} ms, then {one('between_tokens_ms', '.1f')} ms a token; "
        f"{one('against_vllm', '.2f')} of vLLM, overhead {one('overhead', '.1%')}"
    )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm-python", type=Path, help="interpreter of an environment with vLLM (docs/oracles.md)")
    parser.add_argument("--prompts", type=Path, help="JSONL rows with `turns` or `prompt`")
    parser.add_argument("--policies", nargs="+", default=["auto", "off"])
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--num-prompts", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--boots", type=int, default=1)
    parser.add_argument("--apart", action="store_true", help="one arm on the machine at a time")
    parser.add_argument("--summary", type=Path, help="only show what this record says")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.summary is None and args.prompts is None:
        parser.error("give --prompts, or --summary RECORD")
    record = read_record(args.summary) if args.summary is not None else measured(args)
    rows = summary(record)
    print(json.dumps(rows, indent=1) if args.json else "\n".join(map(shown, rows)))
    for note in record.notes:
        print(note, file=sys.stderr)


if __name__ == "__main__":
    main()
