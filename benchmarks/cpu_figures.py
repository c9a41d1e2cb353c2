"""The figure experiments on a CPU: fixed widths, signals against acceptance, retention, distribution of progress.

    python benchmarks/cpu_figures.py gsm8k.jsonl humaneval.jsonl mbpp.jsonl mt-bench.jsonl --out RECORD
    python benchmarks/cpu_figures.py … --out RECORD --speeds        on a quiet machine

Each file is JSONL with `turns` (the first is asked), `prompt` or `messages`, one workload each; --limit prompts spread
over it. The first call measures acceptance, which no other process can disturb: every step of policy `full` is recorded
with what the drafter and the predictor thought of it, and every width is served once more. --speeds adds only the times
of the widths to the record that is there (figure_speeds.py). `dscale report` draws the record (kind "figures").
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dscale import LLM, SamplingParams
from dscale.config import InputError, require
from dscale.engine.recorder import Recorder, RequestTrace
from dscale.evaluate.policy_lab import Exact, Seeded, lane_steps, raw_windows
from dscale.evaluate.policy_record import ALL, resampled
from dscale.evaluate.record_file import file_of, read_json, write_record
from dscale.evaluate.survival_models import predictor_survival
from dscale.evaluate.workloads import Workload, read_workloads, tokenise
from dscale.models.drafter_checkpoint import drafter_hash
from dscale.speculation.features import CONFIDENCE
from dscale.speculation.predictor import Predictor
from dscale.train.quality import spearman
from dscale.train.traces import Traces, join_traces, of_request
from dscale.versions import versions

KIND, SCHEMA = "figures", 1
SIGNALS = ("mean_gap", "mean_entropy", "expected")
STEP_FIELDS = ("workload", "prompt", "position", "accepted", *SIGNALS)
ROW_FIELDS = ("workload", "prompt", "tokens", "steps")
WIDTHS = range(4, 17)
Sums = np.ndarray  # float64 [prompts, 2]: kept, accepted


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", help="FILE or FILE=WORKLOAD")
    parser.add_argument("--limit", type=int, default=24, help="prompts of each file")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--context", type=int, default=1152, help="most tokens of a prompt and its answer")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--drafter", default="auto")
    parser.add_argument("--predictor", default="auto")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--lanes", default="8,32", help="requests that share a budget")
    parser.add_argument("--resamples", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--speeds", action="store_true", help="only the times of the widths")
    parser.add_argument("--concurrency", default="1,4,8", help="of the times")
    parser.add_argument("--max-width", type=int, default=None, help="of the times; default the drafter's own")
    parser.add_argument("--runs", type=int, default=3, help="passes of each width, for the times")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    try:
        record = run(args)
    except InputError as error:
        sys.exit(f"cpu_figures: {error}")
    write_record(args.out, record)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """The record, new or with its times added."""
    workloads = read_workloads(args.files, args.limit)
    if not args.speeds:
        return acceptance(args, workloads)
    from figure_speeds import measure_speeds

    record = read_json(args.out) if file_of(args.out).is_file() else about(args, workloads)
    require(record.get("kind") == KIND, f"{args.out}: no record of kind {KIND!r}")
    return record | {"speeds": measure_speeds(args, workloads)}


def about(args: argparse.Namespace, workloads: list[Workload]) -> dict[str, Any]:
    """What every part of the record shares."""
    return {
        "kind": KIND,
        "schema": SCHEMA,
        "versions": versions(),
        "command": "benchmarks/cpu_figures.py " + " ".join(Path(one).name for one in args.files),
        "seed": args.seed,
        "simulated": False,
        "model": args.model,
        "dtype": args.dtype,
        "max_tokens": args.max_tokens,
        "workloads": [
            {"name": one.name, "file": one.source, "sha256": one.sha256, "prompts": len(one.prompts)}
            for one in workloads
        ],
    }


def acceptance(args: argparse.Namespace, workloads: list[Workload]) -> dict[str, Any]:
    """All that does not depend on the clock."""
    traces, predictor, bound = record_steps(args, workloads)
    whole = traces.select(np.flatnonzero(traces.exact))
    q = predictor_survival(predictor, whole, lanes=8)
    signals = signals_of(whole, q)
    record = about(args, workloads) | {
        "drafter_hash": bound,
        "width": traces.width,
        "resamples": args.resamples,
        "recorded": len(traces),
        "cut": len(traces) - len(whole),
    }
    record["steps"] = {"fields": list(STEP_FIELDS), "rows": step_rows(whole, signals)}
    record["progress"] = {name: distribution(part) for name, part in scopes(whole).items()}
    record["signals"] = correlations(whole, signals, args.resamples, args.seed)
    lanes = [int(one) for one in args.lanes.split(",")]
    record["retention"] = [
        arm for count in lanes for arm in retention(whole, predictor, count, args.resamples, args.seed)
    ]
    record["widths"] = {"fields": list(ROW_FIELDS), "policies": widths(args, workloads, traces.width)}
    return record


def engine(args: argparse.Namespace, recorder: Recorder | None = None) -> LLM:
    """Four requests at a time; in bfloat16 as in float32 the CPU's rows do not depend on their neighbours."""
    return LLM(
        args.model, args.drafter, args.predictor, policy="full", dtype=args.dtype, max_requests=4,
        max_model_len=args.context, prefix_caching=False, recorder=recorder,
    )  # fmt: skip


def record_steps(args: argparse.Namespace, workloads: list[Workload]) -> tuple[Traces, Predictor, str]:
    """Every step of policy `full` on all prompts, the shipped predictor, and the drafter's hash."""
    made: list[RequestTrace] = []
    recorder = Recorder(done=made.append)
    llm = engine(args, recorder)
    require(isinstance(llm.predictor, str), f"{args.model}: no predictor ships with it; give --predictor")
    assert isinstance(llm.predictor, str)
    assert llm.drafter is not None
    bound = drafter_hash(llm.drafter)
    predictor = Predictor.load(llm.predictor, bound)
    names = tuple(one.name for one in workloads)
    parts: list[Traces] = []
    for number, workload in enumerate(workloads):
        made.clear()
        llm.generate(
            prompt_token_ids=tokenise(workload, llm.loaded.tokenizer),
            sampling_params=SamplingParams(temperature=0.0, max_tokens=args.max_tokens),
        )
        asked = sorted(made, key=lambda trace: int(trace.id.split("-")[0]))
        first = sum(len(np.unique(part.request)) for part in parts)
        one = [of_request(t, first + i, number, recorder.groups, names) for i, t in enumerate(asked)]
        parts.append(join_traces(one))
        print(f"recorded {workload.name}: {len(parts[-1])} steps", file=sys.stderr, flush=True)
    return join_traces(parts), predictor, bound


def signals_of(traces: Traces, q: np.ndarray) -> dict[str, np.ndarray]:
    """Per step: mean gap of the best two logits, mean entropy (nats), predicted accepted drafts Σ q."""
    drafts = traces.width - 1
    table = traces.features[:, : drafts * CONFIDENCE].reshape(-1, drafts, CONFIDENCE).astype(np.float32)
    values = (table[:, :, 1].mean(1), table[:, :, CONFIDENCE - 1].mean(1), q[:, 1:].sum(1))
    return dict(zip(SIGNALS, values, strict=True))


def scopes(traces: Traces) -> dict[str, np.ndarray]:
    """Accepted drafts of all steps and of each workload's."""
    own = {name: traces.accepted[traces.workload == number] for number, name in enumerate(traces.workloads)}
    return {ALL: traces.accepted} | own


def step_rows(traces: Traces, signals: dict[str, np.ndarray]) -> list[list[Any]]:
    """One row a step, in the order of STEP_FIELDS; prompts are numbered over all workloads."""
    columns = [traces.workload.tolist(), traces.request.tolist(), traces.position.tolist(), traces.accepted.tolist()]
    columns += [np.round(signals[name].astype(np.float64), 3).tolist() for name in SIGNALS]
    return [list(row) for row in zip(*columns, strict=True)]


def distribution(accepted: np.ndarray) -> dict[str, Any]:
    """Steps by the tokens they gave, from 1, and their mean."""
    counts = np.bincount(accepted.astype(np.int64) + 1)[1:]
    return {"counts": counts.tolist(), "mean": float(accepted.mean() + 1), "steps": len(accepted)}


def correlations(traces: Traces, signals: dict[str, np.ndarray], resamples: int, seed: int) -> dict[str, Any]:
    """Spearman of each signal with the accepted drafts: [value, low, high], prompts resampled within workloads."""
    rng, made = np.random.default_rng(seed), {}
    inside = {ALL: np.ones(len(traces), bool)}
    inside |= {name: traces.workload == number for number, name in enumerate(traces.workloads)}
    for scope, mask in inside.items():
        rows = np.flatnonzero(mask)
        groups = [
            [rows[traces.request[rows] == request] for request in np.unique(traces.request[rows][part])]
            for part in (traces.workload[rows] == number for number in np.unique(traces.workload[rows]))
        ]
        drawn = [rows, *(_draw(groups, rng) for _ in range(resamples))]
        made[scope] = {name: interval([spearman(one[at], traces.accepted[at]) for at in drawn])
                       for name, one in signals.items()}  # fmt: skip
    return made


def _draw(groups: list[list[np.ndarray]], rng: np.random.Generator) -> np.ndarray:
    return np.concatenate([group[i] for group in groups for i in rng.integers(0, len(group), len(group))])


def interval(values: Any) -> list[float]:
    """[value, low, high] of the sample and its resamples, rounded."""
    low, high = np.quantile(values[1:], [0.025, 0.975])
    return [round(float(one), 4) for one in (values[0], low, high)]


def retention(traces: Traces, predictor: Predictor, lanes: int, resamples: int, seed: int) -> list[dict[str, Any]]:
    """Σ min(y, k - 1) / Σ y by rows verified: raw windows, seeded and exact sharing, fixed widths, the oracle."""
    rows = lane_steps(traces, lanes, seed)
    y, width = traces.accepted[rows].astype(np.int64), traces.width
    q = predictor_survival(predictor, traces, lanes)[rows]
    passes = (np.arange(width) <= y[..., None]).astype(np.float32)
    owners, owner = np.unique(traces.request[rows].ravel(), return_inverse=True)
    workload = np.zeros(len(owners), np.int64)
    workload[owner.ravel()] = traces.workload[rows].ravel()
    drawn = resampled(workload, resamples, seed)
    arms: list[tuple[str, int | None, np.ndarray]] = [("raw", None, raw_windows(q))]
    for slots in range(2, width + 1):
        total = slots * lanes
        arms += [("exact", slots, Exact(q).lengths(total)), ("seeded", slots, Seeded(q).lengths(total))]
        arms += [("fixed", slots, np.full_like(y, slots)), ("oracle", slots, Exact(passes).lengths(total))]
    made = []
    for name, slots, k in arms:
        sums = np.stack([np.bincount(owner.ravel(), np.ravel(one), len(owners)) for one in (np.minimum(y, k - 1), y)])
        figures = {ALL: kept(sums, drawn)} | {
            traces.workloads[n]: kept(sums[:, workload == n], drawn[:, workload == n]) for n in np.unique(workload)
        }
        made.append({"lanes": lanes, "arm": name, "slots": slots, "used": float(k.mean()), "figures": figures})
    return made


def kept(sums: Sums, drawn: np.ndarray) -> list[float]:
    """[retention, low, high]; sums [2, P], drawn [resamples + 1, P]."""
    left, whole = drawn @ sums.T[:, 0], drawn @ sums.T[:, 1]
    return interval(left / np.maximum(whole, 1))


def widths(args: argparse.Namespace, workloads: list[Workload], width: int) -> dict[str, list[list[int]]]:
    """Every prompt served at each width: rows of ROW_FIELDS by policy."""
    llm, made = engine(args), {}
    params = SamplingParams(temperature=0.0, max_tokens=args.max_tokens)
    asked = [(number, prompt) for number, one in enumerate(workloads) for prompt in tokenise(one, llm.loaded.tokenizer)]
    for rows in (one for one in WIDTHS if one <= width):
        llm.switch(f"fixed:{rows}" if rows < width else "full")
        outputs = llm.generate(prompt_token_ids=[prompt for _, prompt in asked], sampling_params=params)
        made[str(rows)] = [
            [number, place, len(output.outputs[0].token_ids), output.metrics.steps]
            for place, ((number, _), output) in enumerate(zip(asked, outputs, strict=True))
        ]
        tokens, steps = (sum(row[column] for row in made[str(rows)]) for column in (2, 3))
        print(f"width {rows}: {tokens / steps:.3f} tokens a step", file=sys.stderr, flush=True)
    return made


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
