"""Benchmark records made up with a known effect, for tests of what is made from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from dscale.evaluate.bench_record import ArmInfo, BenchRecord, RequestRow, Run

OFF = ArmInfo("off", "dscale", "off", autoregressive=True, baseline=True)
AUTO = ArmInfo("auto", "dscale", "auto", slots=8)
WORKLOADS = ("code", "maths")


def record(
    arms: Sequence[ArmInfo] = (OFF, AUTO),
    speed: dict[str, float] | None = None,
    levels: Sequence[int] = (1, 4),
    boots: int = 3,
    runs: int = 1,
    prompts: int = 20,
    noise: float = 0.02,
    seed: int = 0,
    **given: object,
) -> BenchRecord:
    """Every arm at every level, alternating. speed: tokens/s of one request by arm (default 50, off's)."""
    rng, made = np.random.default_rng(seed), []
    lengths = rng.integers(40, 129, prompts)
    for level in levels:
        for boot in range(boots):
            for number in range(runs):
                for arm in arms if boot % 2 == 0 else list(arms)[::-1]:
                    rate = (speed or {}).get(arm.name, 50.0) * (1 + noise * rng.standard_normal())
                    made.append(one_run(arm, level, boot, number, len(made), lengths, rate, rng))
    return BenchRecord(
        versions={"dscale": "0.1.0", "torch": "2.13.0", "python": "3.11.7"},
        machine={"processor": "made up", "cores": 2},
        command="dscale bench plan.toml --out bench.json",
        seed=0,
        manifest={"name": "made-up", "sha256": "0123456789abcdef" * 4, "requests": prompts, "distinct": prompts},
        arms=tuple(arms),
        runs=tuple(made),
        **given,  # type: ignore[arg-type]
    )


def one_run(
    arm: ArmInfo,
    level: int,
    boot: int,
    number: int,
    order: int,
    lengths: np.ndarray,
    rate: float,
    rng: np.random.Generator,
) -> Run:
    """A closed loop of `level` workers."""
    free, rows = np.zeros(level), []
    for place, tokens in enumerate(lengths.tolist()):
        worker = int(free.argmin())
        sent = float(free[worker])
        took = tokens / rate * (1 + 0.05 * abs(float(rng.standard_normal())))
        free[worker] = sent + took
        steps = tokens if arm.autoregressive else int(np.ceil(tokens / 4))
        workload = WORKLOADS[place % 2]
        rows.append(
            RequestRow(f"{order}-{place}", f"p{place}", workload, sent, sent + 0.1 * took, sent + took, 30, tokens,
                       steps, tokens - steps, 8 * steps, 15 * steps)
        )  # fmt: skip
    return Run(arm.name, level, boot, number, order, float(free.max()), tuple(rows), counters=counters(rows, arm))


def counters(rows: Sequence[RequestRow], arm: ArmInfo) -> dict[str, object]:
    """What our own server would count; three of four steps accept four drafts, the others none."""
    steps = sum(row.steps or 0 for row in rows)
    if arm.autoregressive:
        return {"steps": steps, "step_seconds": 0.005 * steps}
    passed = [0.75 * steps] * 4 + [0.0] * 11
    return {"steps": steps, "step_seconds": 0.012 * steps, "drafts": steps, "accepted_by_position": passed}


def failing(whole: BenchRecord, arm: str, level: int) -> BenchRecord:
    """The same with one request of a cell failed."""
    place = next(i for i, run in enumerate(whole.runs) if (run.arm, run.concurrency) == (arm, level))
    run = whole.runs[place]
    broken = replace(run, rows=(replace(run.rows[0], error="HTTP 500"), *run.rows[1:]))
    return replace(whole, runs=(*whole.runs[:place], broken, *whole.runs[place + 1 :]))
