"""`dscale report`: any mix of records in, one page out, as HTML that needs nothing from elsewhere and as Markdown.

    report = build_report([Path("bench.json"), Path("certificate.json")])
    write_report(report, Path("report.html"), Path("report.md"))

Every number comes from a record. Each kind of record has a module that turns it into sections (blocks.py); what the
records lack is told at the end (missing.py).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path

from dscale.config import InputError, require
from dscale.evaluate.report import bench, exactness, experiments, gpu, offline, runs
from dscale.evaluate.report.bench import Bench
from dscale.evaluate.report.blocks import Cards, Figure, Listing, Report, Section, Table, Text
from dscale.evaluate.report.figures import swatch
from dscale.evaluate.report.missing import not_measured
from dscale.evaluate.report.records import TITLES, Source, read_source
from dscale.evaluate.statistics import RESAMPLES
from dscale.train.artifacts import Report as Progress
from dscale.train.artifacts import silent, write_bytes

TITLE = "Speculative decoding, measured"
TEMPLATE = "report.html.j2"
ORDER = ("bench", "certificate", "reproducibility", "figures", "policies", "drafter", "throughput", "step")
BROKEN = (KeyError, TypeError, ValueError, IndexError, AttributeError, ZeroDivisionError, StopIteration)


def build_report(
    paths: Sequence[Path], title: str = TITLE, resamples: int = RESAMPLES, report: Progress = silent
) -> Report:
    """The report of these records. InputError in one line for a file that is no record, unknown or damaged."""
    require(len(paths) > 0, "report: no records were given")
    sources = sorted((read_source(path) for path in paths), key=lambda source: ORDER.index(source.kind))
    sections: list[Section] = []
    benches: list[Bench] = []
    for place, source in enumerate(sources):
        report(f"report, {source.name}", place, len(sources))
        try:
            sections += _sections(source, f"r{place}-", benches, resamples)
        except BROKEN as error:
            raise InputError(f"{source.name}: damaged record of {TITLES[source.kind]}: {_reason(error)}") from None
    report("report, done", len(sources), len(sources))
    try:
        missing = not_measured(sources, [one for one in benches if not one.name.endswith(SPEEDS)])
    except BROKEN as error:
        raise InputError(f"report: damaged record: {_reason(error)}") from None
    return Report(title, tuple(named(sections)), missing, _records(sources), any(one.simulated for one in sources))


SPEEDS = " (speeds)"


def _sections(source: Source, key: str, benches: list[Bench], resamples: int) -> list[Section]:
    """What one record says; benches grows by the benchmarks among them."""
    if source.kind == "bench":
        benches.append(Bench.of(key, source.name, source.bench(), resamples))
        return bench.sections(benches[-1]) + runs.sections(benches[-1])
    if source.kind == "figures":
        made = experiments.sections(key, source.name, source.content)
        if "speeds" in source.content:
            timed = Source(source.name, "bench", source.content["speeds"]).bench()
            benches.append(Bench.of(f"{key}s-", source.name + SPEEDS, timed, resamples))
            found = runs.widths(benches[-1])
            made += [found] if found is not None else []
        return made
    of = {
        "certificate": exactness.certificates, "reproducibility": exactness.reproducibility,
        "policies": offline.policies, "drafter": offline.drafter, "throughput": gpu.throughput, "step": gpu.step,
    }  # fmt: skip
    return of[source.kind](key, source.name, source.content)


def _reason(error: Exception) -> str:
    """One line: a missing field is named."""
    return f"it has no {error}" if isinstance(error, KeyError) else str(error).split("\n", 1)[0]


def named(sections: Sequence[Section]) -> list[Section]:
    """The sections, those of equal titles told apart by their records."""
    titles = [section.title for section in sections]
    return [
        replace(one, title=f"{one.title}: {one.source}") if titles.count(one.title) > 1 else one for one in sections
    ]


def _records(sources: Sequence[Source]) -> Table:
    rows = []
    for source in sources:
        versions = ", ".join(f"{name} {value}" for name, value in source.versions.items()) or "–"
        command = source.content.get("command") or "–"
        rows.append((source.name, TITLES[source.kind], str(command), versions))
    return Table("Records that this report is made of", ("record", "made by", "command", "versions"), tuple(rows))


def to_html(report: Report) -> str:
    """The page. InputError without jinja2."""
    try:
        from jinja2 import Environment, StrictUndefined
    except ImportError:
        raise InputError("report: the page needs jinja2; pip install 'dscale[report]'") from None
    text = resources.files(__package__).joinpath(TEMPLATE).read_text(encoding="utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    kinds = {"Table": Table, "Figure": Figure, "Text": Text, "Listing": Listing, "Cards": Cards}
    environment.tests |= {f"a_{name.lower()}": _is(kind) for name, kind in kinds.items()}
    environment.globals["swatch"] = swatch
    environment.filters["code"] = coded
    return environment.from_string(text).render(report=report)


def coded(text: str) -> str:
    """Escaped text in which what stands between backticks is code."""
    from markupsafe import Markup, escape

    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))


def _is(kind: type):  # type: ignore[no-untyped-def]
    return lambda block: isinstance(block, kind)


def write_report(report: Report, html: Path, markdown: Path | None = None) -> None:
    """Both files, whole or not at all."""
    page = to_html(report)
    write_bytes(html, page.encode())
    if markdown is not None:
        write_bytes(markdown, report.markdown().encode())
