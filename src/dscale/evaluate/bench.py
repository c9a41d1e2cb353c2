"""`dscale bench`: run a plan's turns one after the other and keep a record that grows run by run.

The record is written after each run, whole or not at all, so an interrupted plan goes on at the next run. A run in
which a request failed stays in the record with its errors, gives no throughput, and is made again by the next call.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dscale.config import require
from dscale.evaluate.arm_process import ArmGone, Served
from dscale.evaluate.arm_start import Starter
from dscale.evaluate.bench_record import ArmInfo, BenchRecord, RequestRow, Run, as_kept, read_record
from dscale.evaluate.load import Watcher
from dscale.evaluate.machine import machine
from dscale.evaluate.manifest import Manifest, build_manifest, read_manifest
from dscale.evaluate.plan import Arm, Plan, Process, Turn, blocked, turns
from dscale.evaluate.prompt_sets import read_prompts
from dscale.evaluate.record_file import file_of, write_record
from dscale.versions import versions

NOT_UP = "could not be measured"
BUSY_CLIENT = 0.8  # of a core: beyond it answers wait for the client now and then


class View(Watcher):
    """Is told what a benchmark is doing; this one says nothing."""

    def turn(self, turn: Turn, number: int, total: int) -> None:
        """A turn begins, the number-th (from 0) of those that were left."""

    def doing(self, what: str) -> None:
        """Starting, warming up, measuring."""

    def ended(self, run: Run) -> None:
        """A run was measured or failed."""

    def told(self, note: str) -> None:
        """Something that must be known."""


def manifest_for(plan: Plan) -> Manifest:
    """The plan's manifest: from its file, or made of its prompts."""
    if plan.manifest is not None:
        return read_manifest(Path(plan.manifest))
    return build_manifest(read_prompts(plan.prompts, 0, plan.wanted.seed), plan.wanted)


def new_record(plan: Plan, manifest: Manifest, command: str) -> BenchRecord:
    """A record without runs."""
    arms = tuple(arm.info() for arm in plan.arms)
    return BenchRecord(versions(), machine(), command, plan.wanted.seed, manifest.summary(), arms, ())


def take_up(record: BenchRecord, path: Path) -> BenchRecord:
    """The record of an earlier call of the same plan, without its failed runs; `record` where there is none.

    InputError when the file holds other work: another manifest, or an arm that is set up otherwise.
    """
    path = file_of(path)
    if not path.exists():
        return record
    found = read_record(path)
    other = "give another --out, or delete it"
    old, new = found.manifest.get("sha256"), record.manifest["sha256"]
    require(old == new, f"{path}: was made with manifest {str(old)[:12]}…, now it is {new[:12]}…; {other}")
    known = {arm.name: arm for arm in found.arms}
    for arm in record.arms:
        same = arm.name not in known or set_up(known[arm.name]) == set_up(arm)
        require(same, f"{path}: arm {arm.name!r} was set up otherwise; {other}")
    arms = []
    for arm in record.arms:
        old = known.pop(arm.name, arm)
        parts = {name: getattr(arm, name) for name in ("baseline", "autoregressive", "family")}
        arms.append(replace(old, **parts))
    runs = tuple(run for run in found.runs if not run.failed)
    notes = tuple(note for note in found.notes if NOT_UP not in note)
    return replace(found, arms=(*arms, *known.values()), runs=runs, notes=notes)


def set_up(arm: ArmInfo) -> dict[str, Any]:
    """What started an arm. Its part in the comparison may change; what it told of itself follows from its settings."""
    return {key: value for key, value in arm.settings.items() if key != "about"}


@dataclass
class Bench:
    """A plan under way. record: as far as it has come; out: its file, None keeps it in memory only."""

    starter: Starter
    record: BenchRecord
    out: Path | None = None
    view: View = field(default_factory=View)
    _begun: set[Process] = field(default_factory=set, init=False)  # by an earlier call, which was interrupted
    _up: dict[Process, Served] = field(default_factory=dict, init=False)
    _warm: set[tuple[Process, int]] = field(default_factory=set, init=False)

    def __post_init__(self) -> None:
        done = {(run.arm, run.boot, run.concurrency) for run in self.record.runs}
        turned = [one for one in turns(self.plan) if (one.arm.name, one.boot, one.concurrency) in done]
        self._begun = {turn.process for turn in turned}

    @property
    def plan(self) -> Plan:
        """What is run."""
        return self.starter.plan

    def todo(self) -> list[Turn]:
        """Turns that the record does not have yet, in order."""
        done = {(run.arm, run.concurrency, run.boot, run.run) for run in self.record.runs if run.rate == self.plan.rate}
        return [one for one in turns(self.plan) if (one.arm.name, one.concurrency, one.boot, one.run) not in done]

    def go(self) -> BenchRecord:
        """Make all runs that are left. Interrupted, the runs made so far are on disk, and what was started is stopped.

        An arm that does not come up, or goes down, is noted, its other turns of that process are left out, and the rest
        is measured.
        """
        order, down, group = self.todo(), set[Process](), None
        self._note(blocked(self.plan))
        with ExitStack() as stack:
            for number, turn in enumerate(order):
                if turn.process in down:
                    continue
                self.view.turn(turn, number, len(order))
                if turn.group(self.plan) != group:
                    group = turn.group(self.plan)
                    self._up.clear()
                    self._warm.clear()
                    stack.close()
                try:
                    alive = self._measure(turn, self._ready(turn, stack))
                except ArmGone as error:
                    self._note(f"{turn.arm.name}, boot {turn.boot}, c = {turn.concurrency}: {NOT_UP}: {error}")
                    alive = False
                if not alive:
                    down.add(turn.process)
        return self.record

    def _ready(self, turn: Turn, stack: ExitStack) -> Served:
        """The arm of a turn, started if it is not up, and warm at this concurrency."""
        if turn.process not in self._up:
            self._up[turn.process] = self._start(turn, stack)
        if (turn.process, turn.concurrency) not in self._warm:
            self.view.doing("warming up")
            self._up[turn.process].warm_up(turn.concurrency)
            self._warm.add((turn.process, turn.concurrency))
        return self._up[turn.process]

    def _start(self, turn: Turn, stack: ExitStack) -> Served:
        if turn.process in self._begun and not turn.arm.base_url:
            self._note(f"{turn.arm.name}, boot {turn.boot}: was interrupted, another process went on with it")
        self.view.doing("starting")
        served = self.starter.up(turn)
        stack.callback(served.close)
        self._learn(turn.arm, served.about())
        return served

    def _learn(self, arm: Arm, about: dict[str, Any]) -> None:
        """Put what an arm says of itself into the record."""

        def told(known: ArmInfo) -> ArmInfo:
            return replace(
                known,
                engine=about.get("engine", known.engine) if known.engine == "server" else known.engine,
                policy=known.policy or about.get("policy"),
                width=known.width or about.get("width"),
                settings=known.settings | {"about": about},
            )

        arms = tuple(told(one) if one.name == arm.name else one for one in self.record.arms)
        made_up = self.record.simulated or bool(about.get("simulated"))
        self.record = replace(self.record, arms=arms, simulated=made_up)

    def _measure(self, turn: Turn, served: Served) -> bool:
        """Measure one run and keep it. False when the arm cannot go on."""
        plan = self.plan
        self.view.doing("measuring")
        counters: dict[str, Any] = {}
        try:
            measured, counters = served.run(turn.concurrency, plan.rate, plan.wanted.seed + turn.run, self.view)
            rows, window, busy = measured.rows, measured.window_s, measured.client_busy
            alive = served.alive() if any(row.error for row in rows) else True
        except ArmGone as error:
            rows, window, alive = failed_rows(self.starter.manifest, str(error)), 0.0, False
            busy = None
        order = max((run.order for run in self.record.runs), default=-1) + 1
        run = Run(turn.arm.name, turn.concurrency, turn.boot, turn.run, order, window, rows, plan.rate, counters, busy)
        run = as_kept(run)
        self.record = replace(self.record, runs=(*self.record.runs, run))
        self._save()
        self.view.ended(run)
        self._note(limited_by_client(run))
        return alive

    def _note(self, note: str | None) -> None:
        if note is not None and note not in self.record.notes:
            self.record = replace(self.record, notes=(*self.record.notes, note))
            self.view.told(note)
            self._save()

    def _save(self) -> None:
        if self.out is not None:
            write_record(self.out, self.record.as_json(), exact=True)  # runs are rounded; settings stay


def limited_by_client(run: Run) -> str | None:
    """What must be known of a run whose client had hardly a moment to spare."""
    if run.client_busy is None or run.client_busy <= BUSY_CLIENT:
        return None
    where = f"{run.arm}, boot {run.boot}, c = {run.concurrency}, run {run.run}"
    return f"{where}: the client used {run.client_busy:.2f} of a core: it, not the server, may have been the limit"


def failed_rows(manifest: Manifest, why: str) -> tuple[RequestRow, ...]:
    """Rows of a run whose process went away before it told of any."""
    return tuple(
        RequestRow(one.id, one.prompt_id, one.workload, 0.0, None, 0.0, 0, 0, error=why) for one in manifest.requests
    )
