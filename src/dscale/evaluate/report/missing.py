"""What was not measured, computed from what the records lack."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dscale.evaluate.bench_record import Run
from dscale.evaluate.report.bench import Bench
from dscale.evaluate.report.records import Source
from dscale.evaluate.statistics import BOOTS_FOR_INTERVAL, FEWEST_PROMPTS

FEW_REQUESTS = 100  # below it the 99th percentile is hardly more than the slowest request
LACKS = {
    "bench": "Served speed: there is no record of `dscale bench`.",
    "certificate": "Losslessness: there is no certificate.",
    "reproducibility": "Reproducibility of the engine itself: there is no record of `dscale reproduce`.",
    "drafter": "The drafter by depth and anchors: there is no record of `dscale evaluate drafter`.",
    "step": "What a step is spent on: there is no breakdown.",
}


def not_measured(sources: Sequence[Source], benches: Sequence[Bench]) -> tuple[str, ...]:
    """Lines, the gravest first."""
    lines = [line for bench in benches for line in of_bench(bench, many=len(benches) > 1)]
    lines += _certified(sources, benches)
    kinds = {source.kind for source in sources}
    lines += [line for kind, line in LACKS.items() if kind not in kinds]
    if not kinds & {"policies", "figures"}:
        lines.append("Policies side by side, and retention before and after allocation: there is no record of either.")
    lines += _simulated(sources)
    lines += _machines(sources)
    return tuple(dict.fromkeys(lines))


def of_bench(bench: Bench, many: bool) -> Iterable[str]:
    """What one benchmark lacks; with several each line names its record."""
    head = f"{bench.name}: " if many else ""
    for line in _bench_lines(bench):
        yield head + line if head else line[0].upper() + line[1:]


def _bench_lines(bench: Bench) -> Iterable[str]:
    record, closed = bench.record, bench.closed
    for (arm, level), count in sorted(bench.failures.items()):
        yield f"{arm} at c = {level}: {count} requests failed, so it has no throughput."
    if not closed:
        yield "no closed loop was run."
        return
    yield from _arms(bench)
    yield from _repeats(bench)
    yield from _requests(bench)
    if len(bench.levels) == 1:
        yield f"one concurrency only ({bench.levels[0]})."
    ran = {arm for arm, _ in closed}
    holes = [
        f"{arm} at c = {c}" for arm in sorted(ran) for c in bench.levels if (arm, c) not in {*closed, *bench.failures}
    ]
    if holes:
        yield f"not every arm at every concurrency: no {', '.join(holes[:8])}{' …' * (len(holes) > 8)}."
    if not any(run.rate is not None for run in record.runs):
        yield "requests that arrive by themselves (open loop)."


def _arms(bench: Bench) -> Iterable[str]:
    arms = [arm for arm in bench.record.arms if any(name == arm.name for name, _ in bench.closed)]
    never = [
        arm.name for arm in bench.record.arms if arm not in arms and arm.name not in {n for n, _ in bench.failures}
    ]
    if never:
        yield f"no run of {', '.join(never)}."
    if not any(arm.autoregressive for arm in arms):
        yield "no arm without speculation."
    base = next((arm for arm in arms if arm.baseline), None)
    if base is None:
        yield "no arm is the baseline, so no gain is told."
    elif base.family is None and not base.autoregressive:
        yield f"the baseline {base.name} was not tuned over its own knob."
    if {arm.engine for arm in arms} <= {"dscale"}:
        yield "no other engine beside ours."


def _repeats(bench: Bench) -> Iterable[str]:
    boots = {cell: len({run.boot for run in runs}) for cell, runs in bench.closed.items()}
    few = {cell: count for cell, count in boots.items() if count < BOOTS_FOR_INTERVAL}
    if few:
        most = max(few.values())
        told = "one boot only" if most == 1 else f"at most {most} boots of some arms"
        yield f"{told}: boot variance is not in those intervals."
    if max(len(runs) for runs in bench.closed.values()) == 1:
        yield "each arm was run once; no repetition."


def _requests(bench: Bench) -> Iterable[str]:
    rows = [row for runs in bench.closed.values() for run in runs for row in run.rows]
    prompts = {(row.workload, row.prompt_id) for row in rows}
    workloads = {workload for workload, _ in prompts}
    if len(workloads) == 1:
        yield f"one workload only ({next(iter(workloads))})."
    few = [name for name in sorted(workloads) if sum(w == name for w, _ in prompts) < FEWEST_PROMPTS]
    if few:
        yield f"fewer than {FEWEST_PROMPTS} prompts of {', '.join(few)}: no interval of their own."
    silent = [arm for arm in _names(bench) if not _any(bench, arm, "first_token_s")]
    if silent:
        yield f"time to first token of {', '.join(silent)}."
    plain = {arm.name for arm in bench.record.arms if arm.autoregressive}
    untold = [arm for arm in _names(bench) if arm not in plain and not _any(bench, arm, "steps")]
    if untold:
        yield f"tokens a step of {', '.join(untold)}: the server does not tell."
    yield from _manifest(bench)
    fewest = min(sum(len(run.rows) for run in runs) for runs in bench.closed.values())
    if fewest < FEW_REQUESTS:
        yield f"tails: with {fewest} requests in a cell the 99th percentile is hardly more than the slowest one."


def _manifest(bench: Bench) -> Iterable[str]:
    manifest = bench.record.manifest
    if manifest.get("temperature") == 0:
        yield "sampled answers: the temperature is 0."
    if manifest.get("max_tokens"):
        yield f"answers beyond {manifest['max_tokens']} tokens."


def _names(bench: Bench) -> list[str]:
    return sorted({arm for arm, _ in bench.closed})


def _any(bench: Bench, arm: str, field: str) -> bool:
    runs: list[Run] = [run for (name, _), of in bench.closed.items() if name == arm for run in of]
    return any(getattr(row, field) is not None for run in runs for row in run.rows)


def _certified(sources: Sequence[Source], benches: Sequence[Bench]) -> Iterable[str]:
    """Policies, dtypes and ways of sampling that no certificate covers."""
    found = [one for source in sources if source.kind == "certificate" for one in source.content["certificates"]]
    if not found:
        return
    given = [one["scope"] for one in found if one["certified"]]
    refused = sorted({str(one["scope"]["policy"]) for one in found if not one["certified"]})
    if refused:
        yield f"Losslessness of {', '.join(refused)}: the certificate was refused."
    known = {str(scope["policy"]) for scope in given}
    arms = [arm for bench in benches for arm in bench.record.arms if arm.engine == "dscale" and not arm.autoregressive]
    left = sorted({arm.policy for arm in arms if arm.policy} - known - set(refused))
    if left:
        yield f"Losslessness of {', '.join(left)}: the certificates given are of {', '.join(sorted(known)) or 'none'}."
    dtypes = {str(arm.settings["dtype"]) for arm in arms if arm.settings.get("dtype")}
    other = sorted(dtypes - {str(scope["dtype"]) for scope in given})
    if other:
        yield f"Losslessness in {', '.join(other)}, in which the benchmark ran."
    if not any(scope["temperature"] > 0 for scope in given):
        yield "Losslessness of sampled text: every certificate is of greedy text."


def _simulated(sources: Sequence[Source]) -> Iterable[str]:
    made_up = [source.name for source in sources if source.simulated]
    if made_up:
        yield f"Real acceptance in {', '.join(made_up)}: it is simulated, and their texts mean nothing."


def _machines(sources: Sequence[Source]) -> Iterable[str]:
    known = {
        str(sorted(m.items())) for s in sources if isinstance(m := s.content.get("machine"), dict) and s.kind == "bench"
    }
    known |= {str(source.content["device"]) for source in sources if isinstance(source.content.get("device"), str)}
    if len(known) == 1:
        yield "Any other machine: all records are of one."
    versions = {source.versions.get("dscale") for source in sources} - {None}
    if len(versions) > 1:
        yield f"One version throughout: the records are of dscale {', '.join(sorted(map(str, versions)))}."
