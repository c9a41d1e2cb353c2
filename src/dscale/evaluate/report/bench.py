"""Sections of a `dscale bench` record: headline, speed by concurrency, arms, workloads, boots, the baseline's sweep."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import fmean

from dscale.evaluate.bench_record import ArmInfo, BenchRecord, Run
from dscale.evaluate.report.blocks import Block, Card, Cards, Figure, Listing, Section, Table, Text, number
from dscale.evaluate.report.figures import Line, at_concurrencies, draw_lines, panel
from dscale.evaluate.statistics import (
    NO_BOOT_VARIANCE,
    Comparison,
    baseline_at,
    best_of_family,
    compare,
    geometric_mean,
    phrase,
)

Cell = tuple[str, int]  # arm, concurrency


@dataclass(frozen=True)
class Bench:
    """A record ready to be told: cells with failed requests are taken out and named. key: prefix of its anchors."""

    key: str
    name: str
    record: BenchRecord
    failures: dict[Cell, int]
    resamples: int
    compared: dict[Cell, Comparison] = field(default_factory=dict)

    @classmethod
    def of(cls, key: str, name: str, record: BenchRecord, resamples: int) -> Bench:
        """Split the record into what may be told and what failed."""
        failures: dict[Cell, int] = {}
        for run in record.runs:
            if run.failed:
                failures[run.arm, run.concurrency] = failures.get((run.arm, run.concurrency), 0) + len(run.failed)
        runs = tuple(run for run in record.runs if (run.arm, run.concurrency) not in failures)
        return cls(key, name, replace(record, runs=runs), failures, resamples)

    @cached_property
    def closed(self) -> dict[Cell, list[Run]]:
        """Closed-loop runs by cell."""
        found: dict[Cell, list[Run]] = {}
        for run in self.record.runs:
            if run.rate is None:
                found.setdefault((run.arm, run.concurrency), []).append(run)
        return found

    @cached_property
    def levels(self) -> list[int]:
        """Concurrencies of the closed loops."""
        return sorted({level for _, level in self.closed})

    def style(self, arm: str) -> int:
        """Number of an arm's style: its place in the record."""
        return [one.name for one in self.record.arms].index(arm)

    def against(self, level: int) -> str | None:
        """The baseline at a concurrency, None where there is none."""
        if not any(arm.baseline for arm in self.record.arms):
            return None
        name = baseline_at(self.record, level)
        return name if (name, level) in self.closed else None

    def compare(self, arm: str, level: int, baseline: str | None = None) -> Comparison | None:
        """An arm against the baseline (or another arm) at a concurrency; None where either was not run."""
        base = baseline or self.against(level)
        if base is None or base == arm or (arm, level) not in self.closed or (base, level) not in self.closed:
            return None
        if baseline is not None:
            return compare(self.record, arm, base, level, self.resamples, self.record.seed)
        if (arm, level) not in self.compared:
            self.compared[arm, level] = compare(self.record, arm, base, level, self.resamples, self.record.seed)
        return self.compared[arm, level]

    def speed(self, arm: str, level: int) -> float:
        """Tokens per second of a cell's runs."""
        runs = self.closed[arm, level]
        return sum(row.output_tokens for run in runs for row in run.rows) / sum(run.window_s for run in runs)

    @cached_property
    def shown_arms(self) -> list[str]:
        """Arms of the figures: of a family, or of fixed widths of one engine, only the fastest at any concurrency."""
        left: set[str] = set()
        for engine in {arm.engine for arm in self.record.arms}:
            fixed = [a.name for a in self.record.arms if a.engine == engine and (a.policy or "").startswith("fixed:")]
            left |= set(fixed) - {self._fastest(fixed, level) for level in self.levels}
        for family in {arm.family for arm in self.record.arms if arm.family}:
            best = {one.best for one in best_of_family(self.record, family).values()}
            left |= {arm.name for arm in self.record.arms if arm.family == family and arm.name not in best}
        ran = {arm for arm, _ in self.closed}
        return [arm.name for arm in self.record.arms if arm.name not in left and arm.name in ran]

    def _fastest(self, arms: list[str], level: int) -> str | None:
        ran = [arm for arm in arms if (arm, level) in self.closed]
        return max(ran, key=lambda arm: self.speed(arm, level)) if ran else None

    @property
    def subject(self) -> str | None:
        """The arm of the headline: policy auto, else the first that is neither baseline nor its family nor plain."""
        ran = {arm for arm, _ in self.closed}
        bases = {arm.family for arm in self.record.arms if arm.baseline and arm.family}
        other = [a for a in self.record.arms if a.name in ran and not a.baseline and a.family not in (bases or {""})]
        other = [arm for arm in other if not arm.autoregressive] or other
        auto = [arm for arm in other if arm.policy == "auto"]
        return (auto or other)[0].name if other else None


def headline(bench: Bench) -> list[Block]:
    """Cards of the headline arm, one a concurrency, and the line over all of them."""
    subject = bench.subject
    if subject is None:
        return [Text("No arm beside the baseline was run: there is nothing to compare.")]
    cards, bases, notes = [], set(), []
    for level in bench.levels:
        found = bench.compare(subject, level)
        if found is not None:
            bases.add(found.baseline)
            cards.append(_card(bench, found, level))
            notes += [f"{level} at a time: {note}." for note in found.notes if note != NO_BOOT_VARIANCE]
    if not cards:
        return [Text(f"{subject} and the baseline were not run at the same concurrency, or no arm is the baseline.")]
    blocks: list[Block] = [Cards(tuple(cards)), Text(_rule(bench, subject, bases))]
    if notes:
        blocks.append(Listing(tuple(notes)))
    if len(cards) > 1 and len(bases) == 1:
        together = geometric_mean(bench.record, subject, bases.pop(), None, bench.resamples, bench.record.seed)
        blocks.append(
            Text(
                f"Geometric mean over {len(together.cells)} cells (workload × concurrency): {phrase(together.change)}."
            )
        )
    plain = against_plain(bench, subject)
    return [*blocks, plain] if plain is not None else blocks


def _card(bench: Bench, found: Comparison, level: int) -> Card:
    detail = (
        f"{found.arm} {number(found.tokens_per_s, 0)} tokens/s against {found.baseline} "
        f"{number(found.baseline_tokens_per_s, 0)}; {found.change.prompts} prompts, 95% interval"
    )
    boots = len({run.boot for run in bench.closed[found.arm, level]})
    detail += f", {boots} boot{'s' * (boots != 1)}"
    value, _, rest = phrase(found).partition(" (")
    return Card(f"{level} request{'s' * (level != 1)} at a time", value, f"({rest}", detail, found.shown)


def _rule(bench: Bench, subject: str, bases: set[str]) -> str:
    """How arm and baseline were chosen."""
    base = next(arm for arm in bench.record.arms if arm.baseline)
    tuned = f"the fastest of its {base.family} sweep at each concurrency" if base.family else "as it was given"
    names = ", ".join(sorted(bases))
    return f"Throughput of {subject} against {names} ({tuned}), relative change with its 95% interval over prompts."


def against_plain(bench: Bench, subject: str) -> Table | None:
    """The headline arm against every other arm without speculation."""
    plain = [arm.name for arm in bench.record.arms if arm.autoregressive and arm.name != subject]
    rows = []
    for arm in plain:
        found = [bench.compare(subject, level, arm) for level in bench.levels]
        if any(found):
            rows.append((arm, *map(_brief, found)))
    columns = ("arm without speculation", *(f"c = {level}" for level in bench.levels))
    caption = f"Change of {subject} against arms without speculation, 95% intervals over prompts"
    return Table(caption, columns, tuple(rows)) if rows else None


def _brief(found: Comparison | None) -> str:
    """The change and its interval over prompts; the words are those of all intervals there are."""
    if found is None:
        return "–"
    return f"{phrase(found).partition(' (')[0]} ({found.change.low:+.1%} … {found.change.high:+.1%})"


def by_concurrency(bench: Bench) -> Figure | None:
    """Throughput and gain of every shown arm by concurrency."""
    if not bench.closed:
        return None
    lines, gains = [], []
    for arm in bench.shown_arms:
        levels = [level for level in bench.levels if (arm, level) in bench.closed]
        lines.append(Line(arm, levels, [bench.speed(arm, level) for level in levels], bench.style(arm)))
        found = [(level, one) for level in levels if (one := bench.compare(arm, level)) is not None]
        if found:
            values = [[100 * v for v in (o.change.value, o.change.low, o.change.high)] for _, o in found]
            middle, low, high = zip(*values, strict=True)
            gains.append(Line(arm, [level for level, _ in found], middle, bench.style(arm), low, high))
    simulated, levels = bench.record.simulated, bench.levels
    axis = "requests at a time"
    panels = [panel(at_concurrencies(draw_lines(lines, zero=True), levels), "Throughput", axis, "tokens/s", simulated)]
    if gains:
        draw = at_concurrencies(draw_lines(gains, bars=True), levels, even=True)
        panels.append(panel(draw, "Gain over the baseline", axis, "%", simulated))
    return Figure(
        "Throughput and gain by concurrency",
        _told(bench, lines),
        tuple(panels),
        tuple((line.label, line.style) for line in lines),
        _speed_table(bench),
        simulated=simulated,
    )


def _told(bench: Bench, lines: list[Line]) -> str:
    parts = []
    for level in bench.levels:
        speeds = {line.label: dict(zip(line.x, line.y, strict=True)).get(level) for line in lines}
        known = {name: speed for name, speed in speeds.items() if speed is not None}
        best = max(known, key=lambda name: known[name])
        parts.append(f"{best} at {level} ({number(known[best], 0)} tokens/s)")
    return "Fastest by requests at a time: " + ", ".join(parts) + "."


def _speed_table(bench: Bench) -> Table:
    rows = []
    for arm in bench.shown_arms:
        cells = [number(bench.speed(arm, c), 0) if (arm, c) in bench.closed else "–" for c in bench.levels]
        rows.append((arm, *cells))
    columns = tuple(f"c = {level}" for level in bench.levels)
    return Table("Tokens per second by requests at a time", ("arm", *columns), tuple(rows))


def arms_table(bench: Bench) -> Table:
    """Every arm at every concurrency."""
    rows = []
    for level in bench.levels:
        for arm in bench.record.arms:
            runs = bench.closed.get((arm.name, level))
            if runs is not None:
                work = [number(one) for one in per_step(runs)]
                speed = number(bench.speed(arm.name, level), 0)
                requests = str(sum(len(run.rows) for run in runs))
                rows.append((arm.name, str(level), speed, *_change(bench, arm.name, level), *work, requests))
    columns = ("arm", "c", "tokens/s", "change", "95% over prompts", "95% with boots")
    return Table(
        "Arms: throughput, change against the baseline, what a request's step did",
        (*columns, "tokens a step", "rows a step", "ms a step", "requests"),
        tuple(rows),
        "c: requests at a time. Tokens and verified rows are of one request's step, milliseconds of the engine's; a "
        "dash: not told, or fewer than three boots.",
    )


def _change(bench: Bench, arm: str, level: int) -> tuple[str, str, str]:
    """Change in words, its interval over prompts, and the one with boots."""
    found = bench.compare(arm, level)
    if found is None:
        return ("baseline" if arm == bench.against(level) else "–", "–", "–")
    wide = found.hierarchical
    return (
        phrase(found).partition(" (")[0],
        f"{found.change.low:+.1%} … {found.change.high:+.1%}",
        "–" if wide is None else f"{wide.low:+.1%} … {wide.high:+.1%}",
    )


def per_step(runs: list[Run]) -> tuple[float | None, float | None, float | None]:
    """Tokens and verified rows of a request's step, and milliseconds of an engine's step; None where untold."""
    rows = [row for run in runs for row in run.rows]
    stepped = [row for row in rows if row.steps]
    steps = sum(row.steps or 0 for row in stepped)
    tokens = sum(row.output_tokens for row in stepped) / steps if steps else None
    known = [row for row in stepped if row.verified is not None]
    counted = sum(row.steps or 0 for row in known)
    verified = sum(row.verified or 0 for row in known) / counted if counted else None
    took = [r.counters for r in runs if r.counters.get("step_seconds") is not None and r.counters.get("steps")]
    seconds = [1e3 * one["step_seconds"] / one["steps"] for one in took]
    return tokens, verified, fmean(seconds) if seconds else None


def workloads_table(bench: Bench) -> Table | None:
    """The change of every shown arm on each workload."""
    rows, names = [], sorted({row.workload for runs in bench.closed.values() for run in runs for row in run.rows})
    for level in bench.levels:
        for arm in bench.shown_arms:
            found = bench.compare(arm, level)
            if found is not None:
                told = [phrase(found.workloads[name]) if name in found.workloads else "–" for name in names]
                rows.append((arm, str(level), found.baseline, *told))
    columns = ("arm", "c", "against", *names)
    return Table("Change by workload, 95% intervals over its prompts", columns, tuple(rows)) if rows else None


def boots_table(bench: Bench) -> Table | None:
    """Throughput of every boot."""
    rows = []
    for arm in bench.shown_arms:
        told = []
        for level in bench.levels:
            runs = bench.closed.get((arm, level), [])
            told.append(", ".join(number(_boot(runs, boot), 0) for boot in sorted({run.boot for run in runs})) or "–")
        rows.append((arm, *told))
    columns = ("arm", *(f"c = {level}" for level in bench.levels))
    return Table("Boots: tokens/s of each fresh process of the server", columns, tuple(rows)) if rows else None


def _boot(runs: list[Run], boot: int) -> float:
    own = [run for run in runs if run.boot == boot]
    return sum(row.output_tokens for run in own for row in run.rows) / sum(run.window_s for run in own)


def sweeps(bench: Bench) -> list[Block]:
    """A table for each family: its arms over their own knob, the best at each concurrency marked."""
    made: list[Block] = []
    for family in dict.fromkeys(arm.family for arm in bench.record.arms if arm.family):
        found = best_of_family(bench.record, family)
        if not found:
            continue
        names = [arm for arm in bench.record.arms if arm.family == family]
        rows = [
            (arm.name, _knob(arm), *(_swept(found[level].sweep, found[level].best, arm.name) for level in found))
            for arm in names
        ]
        columns = ("arm", "knob", *(f"c = {level}" for level in found))
        based = any(arm.baseline for arm in names)
        note = "Others are compared with its best at each concurrency." if based else ""
        caption = f"Sweep of {family}{', the baseline' if based else ''}: tokens/s, the best marked ★"
        made.append(Table(caption, columns, tuple(rows), note))
    return made


def _knob(arm: ArmInfo) -> str:
    if arm.width is not None:
        return f"width {arm.width}"
    return arm.policy or "–"


def _swept(sweep: dict[str, float], best: str, name: str) -> str:
    if name not in sweep:
        return "–"
    return number(sweep[name], 0) + (" ★" if name == best else "")


def failed_text(bench: Bench) -> list[Block]:
    """A line for every cell with failed requests: it has no throughput."""
    lines = [f"{arm} at c = {c}: {count} requests failed" for (arm, c), count in sorted(bench.failures.items())]
    return [Text("No throughput is told of " + "; ".join(lines) + ".", strong=True)] if lines else []


def describe(bench: Bench) -> Text:
    """Where, with what and on how much it was measured."""
    record, manifest = bench.record, bench.record.manifest
    machine = ", ".join(f"{key} {value}" for key, value in record.machine.items() if not isinstance(value, dict | list))
    versions = ", ".join(f"{key} {value}" for key, value in record.versions.items())
    about = f"Manifest {manifest.get('name', '–')} (SHA-256 {str(manifest.get('sha256', '–'))[:12]}…)"
    requests = f"{manifest.get('requests', '–')} requests, {manifest.get('distinct', '–')} distinct prompts"
    return Text(f"{about}: {requests}. Machine: {machine}. Versions: {versions}.")


def sections(bench: Bench) -> list[Section]:
    """Everything of one record but latency, widths and progress (runs.py)."""
    speed: list[Block | None] = [by_concurrency(bench), arms_table(bench), workloads_table(bench), boots_table(bench)]
    swept = sweeps(bench)
    made = [
        Section(
            f"{bench.key}headline", "Headline", (*failed_text(bench), *headline(bench), describe(bench)), bench.name
        ),
        Section(f"{bench.key}speed", "Throughput", tuple(one for one in speed if one is not None), bench.name),
    ]
    if swept:
        made.append(Section(f"{bench.key}sweep", "Baseline sweep", tuple(swept), bench.name))
    return made
