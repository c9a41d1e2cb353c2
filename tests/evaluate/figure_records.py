"""Small records of the other kinds that a report is made of, written by hand."""

from __future__ import annotations

from typing import Any

import numpy as np

from dscale.evaluate.certificate import Evidence, Text, decide, evidence_json, resolution
from dscale.evaluate.certificate_record import Certificate, CertificateRecord, Scope

WIDTH = 4


def figures(simulated: bool = False) -> dict[str, Any]:
    """Of benchmarks/cpu_figures.py: two workloads, six steps."""
    steps = [[0, 0, 0, 3, 5.0, 0.1, 2.9], [0, 0, 4, 1, 1.0, 1.0, 1.2], [0, 1, 0, 2, 3.0, 0.5, 2.0]]
    steps += [[1, 2, 0, 0, 0.5, 2.0, 0.3], [1, 2, 1, 1, 2.0, 0.9, 0.8], [1, 3, 0, 3, 4.0, 0.2, 2.5]]
    spans = {"mean_gap": [0.91, 0.8, 0.95], "mean_entropy": [-0.88, -0.93, -0.7], "expected": [0.97, 0.9, 0.99]}
    arms: list[dict[str, Any]] = [_kept("raw", None, 2.4, 0.71)]
    for slots in (2, 3, 4):
        arms += [_kept(arm, slots, slots, kept + 0.05 * slots) for arm, kept in KEPT.items()]
    policies = {str(w): [[0, 0, 12, 14 - 2 * w], [1, 1, 12, 18 - 2 * w]] for w in (2, 3, 4)}
    counts = {"a": [0, 1, 1, 1], "b": [1, 1, 0, 1], "all": [1, 2, 1, 2]}
    return {
        "kind": "figures", "schema": 1, "versions": {"dscale": "0.1.0"}, "command": "benchmarks/cpu_figures.py",
        "seed": 0, "simulated": simulated, "model": "tiny", "dtype": "float32", "max_tokens": 12, "width": WIDTH,
        "workloads": [{"name": name, "file": f"{name}.jsonl", "sha256": "0", "prompts": 2} for name in "ab"],
        "recorded": 7, "cut": 1, "drafter_hash": "0", "resamples": 100,
        "steps": {"fields": ["workload", "prompt", "position", "accepted", *spans], "rows": steps},
        "progress": {
            name: {"counts": own, "mean": sum((k + 1) * n for k, n in enumerate(own)) / sum(own), "steps": sum(own)}
            for name, own in counts.items()
        },
        "signals": dict.fromkeys(("all", "a", "b"), spans),
        "retention": arms,
        "widths": {"fields": ["workload", "prompt", "tokens", "steps"], "policies": policies},
    }  # fmt: skip


KEPT = {"fixed": 0.3, "seeded": 0.42, "exact": 0.43, "oracle": 0.5}


def _kept(arm: str, slots: int | None, used: float, kept: float) -> dict[str, Any]:
    figures = {scope: [kept, kept - 0.04, kept + 0.03] for scope in ("all", "a", "b")}
    return {"lanes": 8, "arm": arm, "slots": slots, "used": used, "figures": figures}


def throughput() -> dict[str, Any]:
    """Of benchmarks/gpu_throughput.py: an ablation at one concurrency, simulated."""
    arms = {
        "control": {"tokens_per_s": 1000.0, "base": "control", "ratio": 1.0, "interval": [1.0, 1.0], "runs": []},
        "tiles": {"tokens_per_s": 1150.0, "base": "control", "ratio": 1.15, "interval": [1.1, 1.2], "runs": []},
        "dvl": {"tokens_per_s": 1010.0, "base": "control", "ratio": 1.01, "interval": [0.97, 1.05], "runs": []},
    }
    return {
        "schema": "dscale.gpu_throughput/1", "note": "simulated acceptance", "acceptance": "mean progress 6.09",
        "model": "random:qwen3-8b", "dtype": "bfloat16", "device": "a GPU", "versions": {"dscale": "0.1.0"},
        "cells": [{"concurrency": 8, "skipped": ["auto: time is up"], "arms": arms}],
    }  # fmt: skip


def step() -> dict[str, Any]:
    """Of benchmarks/gpu_step.py: one arm."""
    row = {"name": "dvl@8", "concurrency": 8, "rows": 64.0, "interval_ms": 8.5, "device_ms": 8.0, "floor_ms": 5.0,
           "times_floor": 1.7, "decide_share": 0.03, "idle_share": 0.06,
           "groups_ms": {"matrix products": 6.0, "attention": 1.5, "predict": 0.24}}  # fmt: skip
    return {
        "schema": "dscale.gpu_step/1", "note": "simulated acceptance", "acceptance": "mean progress 6.09",
        "model": "random:qwen3-8b", "dtype": "bfloat16", "device": "a GPU", "versions": {"dscale": "0.1.0"},
        "rows": [row], "skipped": [],
    }  # fmt: skip


def certificates(
    planted: int = 0, policies: tuple[str, ...] = ("full", "dvl"), exact: bool = True
) -> CertificateRecord:
    """Of `dscale certify`: 600 positions a policy, accepted to depth 3; `planted` accepted drafts of depth 3 are wrong
    with the first policy."""
    made = []
    for place, policy in enumerate(policies):
        offset = np.tile([1, 2, 3, 0], 150)
        wrong = np.zeros(600, bool)
        wrong[np.flatnonzero(offset == 3)[: planted * (place == 0)]] = True
        margin = np.where(wrong, 1.5, np.nan)
        evidence = Evidence(
            wrong, np.zeros(600, bool), wrong, offset, margin, np.arange(600) // 60, np.arange(600) % 60
        )
        text = Text(10, 10 - min(planted * (place == 0), 10), {0: 5} if wrong.any() else {})
        scope = Scope(
            policy,
            16,
            None,
            "float32",
            "cpu",
            0.0,
            1.0,
            None,
            (20, 180),
            10,
            600,
            450,
            resolution(600, 0, exact),
            exact,
        )
        verdict = decide(evidence, exact, text, 4.0)
        made.append(Certificate(scope, verdict, evidence_json(evidence, exact), text, 4.0))
    return CertificateRecord(
        {"dscale": "0.1.0"}, {"processor": "made up", "cores": 2}, "dscale certify tiny", "tiny", exact, {}, tuple(made)
    )
