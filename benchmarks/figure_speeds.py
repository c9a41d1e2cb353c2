"""Times of fixed widths for cpu_figures.py: closed loops on one engine whose policy is switched from run to run.

Widths take turns, up and down again, so that a slow minute of the machine does not fall on one of them alone. What
comes out is a record as `dscale bench` writes it: one boot, every request a row.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from typing import Any

from dscale.evaluate.bench_record import ArmInfo, BenchRecord, Run, as_kept
from dscale.evaluate.inprocess import InProcess
from dscale.evaluate.load import Watcher
from dscale.evaluate.machine import machine
from dscale.evaluate.manifest import Manifest, Wanted, build_manifest
from dscale.evaluate.workloads import Workload
from dscale.versions import versions

FEWEST, PER_LANE, WARMUP = 24, 6, 8  # requests of a run: the fewest, of each of c; of a warm-up
WIDTHS = range(4, 17)


def measure_speeds(args: argparse.Namespace, workloads: list[Workload]) -> dict[str, Any]:
    """The benchmark of `off` and all widths at each of --concurrency, --runs passes each."""
    levels = [int(one) for one in args.concurrency.split(",")]
    most = max(FEWEST, PER_LANE * max(levels))
    manifest = build_manifest(workloads, Wanted(most, WARMUP, args.max_tokens, seed=args.seed))
    runs: list[Run] = []
    arms: tuple[ArmInfo, ...] = ()
    settings = {"model": args.model, "drafter": args.drafter, "policy": "full", "dtype": args.dtype}
    for level in levels:
        own = manifest.first(max(FEWEST, PER_LANE * level))
        serving = InProcess(settings, own, level)
        arms = arms_of(serving, args.max_width)
        for policy in (arm.policy for arm in arms):
            switch(serving, policy)
            serving.warm_up()
        for number in range(args.runs):
            for arm in arms if number % 2 == 0 else arms[::-1]:
                runs.append(timed(serving, own, arm, level, number, len(runs)))
    return BenchRecord(
        versions(), machine(), f"benchmarks/cpu_figures.py --speeds --concurrency {args.concurrency}", args.seed,
        manifest.summary(), arms, tuple(runs),
    ).as_json()  # fmt: skip


def arms_of(serving: InProcess, most: int | None) -> tuple[ArmInfo, ...]:
    """off, which is the baseline, and every width of the drafter from 4 up to `most`."""
    about = serving.about()
    own = int(about["width"])
    settings = {name: about[name] for name in ("dtype", "device")}
    made = [ArmInfo("off", "dscale", "off", baseline=True, autoregressive=True, settings=settings)]
    for width in (one for one in WIDTHS if one <= min(own, most or own)):
        policy = f"fixed:{width}" if width < own else "full"
        made.append(ArmInfo(policy, "dscale", policy, width, settings=settings))
    return tuple(made)


def switch(serving: InProcess, policy: str | None) -> None:
    """The policy of the runs to come."""
    serving.llm.switch(policy or "off")


def timed(serving: InProcess, manifest: Manifest, arm: ArmInfo, level: int, number: int, order: int) -> Run:
    """One pass of one width."""
    switch(serving, arm.policy)
    measured, counters = serving.run(None, 0, Watcher())
    run = Run(arm.name, level, 0, number, order, measured.window_s, measured.rows, counters=counters)
    print(f"c={level} {arm.name:9} {run.tokens_per_s:7.1f} tokens/s", file=sys.stderr, flush=True)
    return as_kept(replace(run, counters={name: value for name, value in counters.items() if name != "shapes"}))
