"""What `dscale bench` shows: a live line on stderr while it runs, a table on stdout at the end."""

from __future__ import annotations

import time
from collections import Counter
from types import TracebackType

from rich.box import SIMPLE
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from dscale.cli.options import errors
from dscale.evaluate.bench import View
from dscale.evaluate.bench_record import RequestRow, Run
from dscale.evaluate.bench_summary import Cell
from dscale.evaluate.load import Progress
from dscale.evaluate.plan import Turn

SHOWN_FAILURES = 10
EVERY_SECONDS = 0.2


class LiveView(View):
    """The turn, tokens/s so far, and requests done, running and failed; off without a terminal, where a line a run is
    written instead."""

    def __init__(self) -> None:
        self._live = Live(Text(""), console=errors, transient=True, auto_refresh=False) if errors.is_terminal else None
        self._turn = self._what = ""
        self._began = self._shown_at = 0.0

    def __enter__(self) -> LiveView:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()

    def turn(self, turn: Turn, number: int, total: int) -> None:
        """A turn begins."""
        self._turn = f"[{number + 1}/{total}] {turn.arm.name}, c = {turn.concurrency}, boot {turn.boot}, run {turn.run}"

    def doing(self, what: str) -> None:
        """Show it."""
        self._what, self._began = what, time.perf_counter()
        self._show(what)

    def changed(self, progress: Progress) -> None:
        """Show how far the run has come, now and then: the terminal shares the machine with what is measured."""
        now = time.perf_counter()
        if self._live is not None and now - self._shown_at >= EVERY_SECONDS:
            self._shown_at = now
            speed = progress.tokens / max(time.perf_counter() - self._began, 1e-9)
            failed = f", {progress.failed} failed" if progress.failed else ""
            done = f"{progress.done}/{progress.total} done, {progress.running} running{failed}"
            self._show(f"{speed:,.1f} tokens/s so far, {done}")

    def ended(self, run: Run) -> None:
        """One line that stays."""
        failed = len(run.failed)
        what = f"{failed} of {len(run.rows)} requests failed" if failed else f"{run.tokens_per_s:,.1f} tokens/s"
        errors.print(f"{self._turn}: {what}", highlight=False, markup=False)

    def told(self, note: str) -> None:
        """One line that stays."""
        errors.print(f"dscale bench: {note}", highlight=False, markup=False, soft_wrap=True)

    def _show(self, text: str) -> None:
        if self._live is not None:
            self._live.update(Text(f"{self._turn}: {text}"), refresh=True)


def to_table(found: list[Cell]) -> Table:
    """One row for each arm and concurrency; with several runs, the lowest and the highest beside their mean."""
    table = Table(title="output tokens per second, and seconds of a request", title_justify="left", box=SIMPLE,
                  pad_edge=False, padding=(0, 1, 0, 0))  # fmt: skip
    table.add_column("arm", no_wrap=True)
    several = any(cell.runs > 1 for cell in found)
    names = ("c", "tokens/s", *(("runs",) if several else ()), "p50", "p95", "first", "tokens\na step",
             "rows\na step", "ms\na step")  # fmt: skip
    for name in names:
        table.add_column(name, justify="right")
    for cell in found:
        runs = (f"{cell.spread[0]:.1f}…{cell.spread[1]:.1f}",) if several else ()
        table.add_row(
            Text(cell.arm), str(cell.concurrency), f"{cell.tokens_per_s:.1f}", *runs,
            *(f"{one:.2f}" for one in (cell.latency_p50, cell.latency_p95)),
            _shown(cell.first_token), _shown(cell.progress or cell.accepted_length), _shown(cell.verified),
            _shown(cell.step_ms),
        )  # fmt: skip
    return table


def _shown(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def print_failures(failed: list[tuple[Run, RequestRow]]) -> None:
    """The ids of failed requests with what went wrong, on stderr; alike ones are counted."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print(f"dscale bench: {len(failed)} requests failed, so no throughput is shown:", markup=False)
    for run, row in failed[:SHOWN_FAILURES]:
        console.print(f"  {run.arm}, c = {run.concurrency}, {row.id}: {row.error}", markup=False)
    if len(failed) > SHOWN_FAILURES:
        rest = Counter(row.error for _, row in failed[SHOWN_FAILURES:])
        for error, count in rest.most_common():
            console.print(f"  {count} more: {error}", markup=False)
