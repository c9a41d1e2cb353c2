"""What streaming costs on the cores that compute: one server, answers streamed and whole in turns (A B B A).

    python benchmarks/stream_cost.py --prompts gsm8k.jsonl --out benchmarks/records/stream_cost.json

Boots of the engine differ by more than streaming costs (where its memory lies), so server_speed.py cannot tell. Within
one boot it can be told: tokens/s of the same requests, and the seconds of processor time of the HTTP side, the engine
and the client. The rest of what serving costs is what whole answers lose to the engine in process: server_speed.py.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
from pathlib import Path
from typing import Any

from server_process import Server as Process

from dscale.evaluate.load import Measured, Server, Watcher, closed_loop
from dscale.evaluate.manifest import Manifest, Wanted, build_manifest
from dscale.evaluate.record_file import write_record
from dscale.evaluate.workloads import read_workload

MOST = 16  # requests decoded together
KINDS = ("streamed", "whole")


def processor_seconds(pid: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def serve(process: Process, model: str, manifest: Manifest, concurrency: int, kind: str) -> dict[str, Any]:
    """One pass over the requests."""
    extra: dict[str, Any] = {"ignore_eos": True} | ({} if kind == "streamed" else {"stream": False})
    server = Server(process.url, model, extra)
    pids = {"http": process.process.pid, "engine": process.engine_pid, "client": os.getpid()}
    before = {name: processor_seconds(pid) for name, pid in pids.items()}
    done: Measured = asyncio.run(closed_loop(server, manifest.requests, concurrency, 0.0, Watcher()))
    failed = [row.error for row in done.rows if row.error]
    if failed:
        raise SystemExit(f"{len(failed)} of {len(done.rows)} requests failed: {failed[0]}")
    tokens = sum(row.output_tokens for row in done.rows)
    spent = {name: processor_seconds(pid) - before[name] for name, pid in pids.items()}
    return {"kind": kind, "tokens_per_s": tokens / done.window_s, "window_s": done.window_s, "processor_s": spent}


def cell(process: Process, model: str, manifest: Manifest, concurrency: int, repeats: int) -> dict[str, Any]:
    """Both kinds in turns. lost: share of the whole answers' tokens/s, median over pairs, with the range."""
    serve(process, model, manifest, concurrency, "whole")
    runs = [
        serve(process, model, manifest, concurrency, kind)
        for repeat in range(repeats)
        for kind in (KINDS if repeat % 2 == 0 else KINDS[::-1])
    ]
    pairs = [{one["kind"]: one["tokens_per_s"] for one in runs[at : at + 2]} for at in range(0, len(runs), 2)]
    lost = [1 - pair["streamed"] / pair["whole"] for pair in pairs]
    return {"concurrency": concurrency, "lost": statistics.median(lost), "range": [min(lost), max(lost)], "runs": runs}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", required=True, help="JSONL rows with `turns` or `prompt`")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--policies", nargs="+", default=["auto", "off"])
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--per-lane", type=int, default=3, help="requests of a pass for each of c; 8 at least")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--arguments", default="", help="more arguments of dscale serve, parted by blanks")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    record: dict[str, Any] = {"schema": "dscale.stream_cost/1", "model": args.model, "dtype": args.dtype, "cells": []}
    for policy in args.policies:
        given = ["--policy", policy, "--max-requests", MOST, "--max-model-len", 1024, "--dtype", args.dtype]
        process = Process(args.model, [*given, "--no-prefix-caching", *args.arguments.split()])
        try:
            for concurrency in args.concurrency:
                wanted = Wanted(max(8, args.per_lane * concurrency), 0, args.max_tokens)
                manifest = build_manifest([read_workload(args.prompts, 0)], wanted)
                found = {"policy": policy, **cell(process, args.model, manifest, concurrency, args.repeats)}
                record["cells"].append(found)
                print(
                    f"{policy:6} c={concurrency:<3} streamed {found['lost']:+.1%} below whole {found['range']}",
                    flush=True,
                )
        finally:
            process.close()
    if args.out is not None:
        write_record(args.out, record)


if __name__ == "__main__":
    main()
