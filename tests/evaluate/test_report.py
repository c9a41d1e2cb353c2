"""Reports: what they say of records with a known effect, what they refuse, and that the page stands alone."""

from __future__ import annotations

import json
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from dscale.config import InputError
from dscale.evaluate.bench_record import ArmInfo
from dscale.evaluate.report.bench import Bench
from dscale.evaluate.report.blocks import Table
from dscale.evaluate.report.build import build_report, to_html, write_report
from dscale.evaluate.report.figures import Line, draw_lines, panel
from dscale.evaluate.report.runs import step_shares
from dscale.evaluate.reproducibility import ArmHazard, ReproducibilityRecord
from dscale.evaluate.statistics import compare, phrase
from tests.evaluate import bench_records, figure_records
from tests.evaluate.bench_records import AUTO

RESAMPLES = 400
RECORDS = Path(__file__).parents[2] / "benchmarks" / "records"
SWEPT = (
    ArmInfo("vllm", "vllm", autoregressive=True, baseline=True, family="vllm"),
    ArmInfo("vllm-7", "vllm", width=8, family="vllm"),
    ArmInfo("vllm-15", "vllm", width=16, family="vllm"),
    ArmInfo("off", "dscale", "off", autoregressive=True),
    AUTO,
)


def written(folder: Path, *contents: Any) -> list[Path]:
    """Files of records, r0.json and so on."""
    paths = []
    for place, one in enumerate(contents):
        content = one.as_json() if hasattr(one, "as_json") else one
        paths.append(folder / f"r{place}.json")
        paths[-1].write_text(json.dumps(content))
    return paths


def markdown(folder: Path, *contents: Any) -> str:
    return build_report(written(folder, *contents), resamples=RESAMPLES).markdown()


def test_headline_is_the_bootstraps_own_interval(tmp_path: Path) -> None:
    record = bench_records.record(speed={"auto": 75.0})
    text = markdown(tmp_path, record)
    for level in (1, 4):
        found = compare(record, "auto", "off", level, RESAMPLES)
        assert 0.4 < found.change.value < 0.6
        value, _, interval = phrase(found).partition(" (")
        assert f"**{value}** ({interval}" in text
    assert "Geometric mean over 4 cells (workload × concurrency): +" in text
    assert "boot variance" not in text.split("What was not measured")[1]


def test_a_headline_outside_its_interval_says_why(tmp_path: Path) -> None:
    record = bench_records.record(speed={"auto": 75.0})
    runs = [replace(run, window_s=1.3 * run.window_s) if run.arm == "auto" else run for run in record.runs]
    text = markdown(tmp_path, replace(record, runs=tuple(runs)))
    assert "- 1 at a time: by shares of prompts, which the interval is about, the change is +" in text
    assert "by shares of prompts" not in markdown(tmp_path, record)


def test_an_interval_over_zero_is_no_difference(tmp_path: Path) -> None:
    record = bench_records.record(noise=0.05, seed=3)
    found = compare(record, "auto", "off", 1, RESAMPLES)
    assert not found.shown
    line = next(line for line in markdown(tmp_path, record).splitlines() if line.startswith("- 1 request at a time"))
    assert "**no difference shown** (" in line
    assert f"{found.change.low:+.1%} … {found.change.high:+.1%}; with boots" in line


def test_the_best_of_the_sweep_is_what_others_are_compared_with(tmp_path: Path) -> None:
    record = bench_records.record(SWEPT, {"vllm-7": 90.0, "vllm-15": 60.0, "auto": 100.0}, noise=0.001)
    text = markdown(tmp_path, record)
    assert "against vllm-7 (the fastest of its vllm sweep at each concurrency)" in text
    rows = [line for line in text.splitlines() if line.startswith("| vllm")]
    assert sum("★" in line for line in rows) == 1
    assert next(line for line in rows if "★" in line).startswith("| vllm-7 | width 8 |")
    shown = Bench.of("", "x", record, RESAMPLES).shown_arms
    assert shown == ["vllm-7", "off", "auto"]
    assert "Change of auto against arms without speculation" in text


def test_what_was_not_measured_is_computed(tmp_path: Path) -> None:
    few = bench_records.record(levels=(2,), boots=1, prompts=8)
    rows = tuple(replace(row, first_token_s=None, steps=None) for row in few.runs[0].rows)
    silent = replace(few, runs=tuple(replace(run, rows=rows) if run.arm == "auto" else run for run in few.runs))
    told = build_report(written(tmp_path, silent), resamples=RESAMPLES).missing
    for line in (
        "One boot only: boot variance is not in those intervals.",
        "Each arm was run once; no repetition.",
        "One concurrency only (2).",
        "Fewer than 5 prompts of code, maths: no interval of their own.",
        "Time to first token of auto.",
        "Tokens a step of auto: the server does not tell.",
        "No other engine beside ours.",
        "Losslessness: there is no certificate.",
        "Any other machine: all records are of one.",
    ):
        assert line in told, (line, told)
    assert not any("without speculation" in line for line in told)
    whole = build_report(
        written(tmp_path, bench_records.record(SWEPT, runs=2, prompts=60)), resamples=RESAMPLES
    ).missing
    assert not any("boot" in line or "repetition" in line or "engine" in line.split(":")[0] for line in whole[:2])


def test_failed_requests_leave_no_throughput(tmp_path: Path) -> None:
    broken = bench_records.failing(bench_records.record(speed={"auto": 90.0}), "auto", 4)
    text = markdown(tmp_path, broken)
    assert "No throughput is told of auto at c = 4: 1 requests failed." in text
    assert "Auto at c = 4: 1 requests failed, so it has no throughput." in text
    arms = text.split("Arms: throughput")[1].split("**")[1].split("\n\n")[1]
    assert "| auto | 1 |" in arms
    assert "| auto | 4 |" not in arms


def test_steps_from_counts_by_position() -> None:
    bench = Bench.of("", "x", bench_records.record(), RESAMPLES)
    shares = step_shares(bench, "auto")
    assert shares is not None
    assert shares[0] == pytest.approx(0.25)
    assert shares[4] == pytest.approx(0.75)
    assert sum(shares) == pytest.approx(1)
    assert step_shares(bench, "off") is None


def test_figure_experiments(tmp_path: Path) -> None:
    text = markdown(tmp_path, figure_records.figures())
    assert "Means: a 3.00, b 2.50, all 2.67. 33.3% of all steps give all 4." not in text  # counts by hand:
    assert "Means: a 3.00, b 2.33, all 2.67. 33.3% of all steps give all 4." in text
    assert "| 2 | 1.20 | 0.86 | 1.00 |" in text  # widths: 12/10, 12/14, 24/24
    assert "| all | 0.91 (0.80 … 0.95) | -0.88 (-0.93 … -0.70) | 0.97 (0.90 … 0.99) |" in text
    assert "| 8 | 2.40 | 71.0% (67.0 … 74.0) | – | – | – | – |" in text
    assert "| 8 | 4 | – | 50.0% (46.0 … 53.0) | 62.0%" in text
    assert "simulated" not in text


def test_simulated_acceptance_stands_on_every_figure(tmp_path: Path) -> None:
    contents = [bench_records.record(simulated=True), figure_records.figures(True), figure_records.throughput()]
    report = build_report(written(tmp_path, *contents, figure_records.step()), resamples=RESAMPLES)
    figures = [block for section in report.sections for block in section.blocks if hasattr(block, "panels")]
    assert len(figures) >= 9
    for figure in figures:
        assert figure.simulated, figure.title
        assert all("simulated acceptance" in panel for panel in figure.panels)
    assert to_html(report).count('<span class="tag">simulated acceptance</span>') == len(figures)
    assert any(line.startswith("Real acceptance in r0.json") for line in report.missing)


def test_certificates(tmp_path: Path) -> None:
    text = markdown(tmp_path, bench_records.record(), figure_records.certificates())
    assert "- full: **certified** 0 violations on 450 accepted drafts, floor 0" in text
    assert "| full | certified | 0.000% ± 0.000 |" in text
    assert "| 3 | 0 / 0 / 150 | 0 / 0 / 150 |" in text
    assert "- Losslessness of auto: the certificates given are of dvl, full." in text
    assert "- Losslessness of sampled text: every certificate is of greedy text." in text
    assert "✗" not in text.split("Certificate by offset")[1].split("Marked")[0]


def test_a_refused_certificate_says_where(tmp_path: Path) -> None:
    report = build_report(written(tmp_path, figure_records.certificates(planted=9)), resamples=RESAMPLES)
    text = report.markdown()
    assert "- full: **refused** 9 violations on 450 accepted drafts" in text
    assert "| 3 | 9 / 0 / 150 ✗ | 0 / 0 / 150 |" in text
    assert "full: worst at offset 3" in text
    assert "full: 9 of 10 texts differ from those without speculation" in text
    assert "Losslessness of full: the certificate was refused." in report.missing
    figure = next(block for block in report.sections[0].blocks if hasattr(block, "panels"))
    assert [name for name, _ in figure.legend] == ["full", "full, floor"]


def test_reproducibility(tmp_path: Path) -> None:
    texts = [[1, 2, 3, 4], [5, 6, 7, 8]]
    arm = ArmHazard.of("full", 0.0, [texts, [[1, 2, 9, 4], texts[1]]], [[False] * 2] * 2)
    record = ReproducibilityRecord({}, {}, "dscale reproduce tiny", "tiny", "float32", {}, (arm,), notes=("a note",))
    report = build_report(written(tmp_path, record), resamples=RESAMPLES)
    assert "| full | greedy | 1.43e-01 (2.6e-02 … 5.1e-01) | 1 of 2 | 50.0% (9.5 … 90.5) | 7 |" in report.markdown()
    assert "- a note" in report.markdown()
    assert not any("Reproducibility" in line for line in report.missing)


def test_gpu_records(tmp_path: Path) -> None:
    text = markdown(tmp_path, figure_records.throughput(), figure_records.step())
    assert "| tiles | path-aware tiles, whole blocks, no graphs | 1.15× (1.10 … 1.20) |" in text
    assert "| dvl | path-aware tiles, 8 rows a request, captured steps | no difference shown (0.97 … 1.05) |" in text
    assert "c = 8, time is up: auto" in text
    assert "| dvl@8 | 8 | 64 | 8.50 | 8.00 | 5.00 | 1.70× | 3.0% | 6.0% |" in text


def test_the_projects_own_drafter_record(tmp_path: Path) -> None:
    text = build_report([RECORDS / "acceptance_curves.json"]).markdown()
    assert "| all | 80 | 5.23 (4.90 … 5.59) | 4.13 (3.89 … 4.41) | 4.13 (3.89 … 4.41) | 3.37 |" in text


class Page(HTMLParser):
    """Addresses, ids, headings and tables of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.ids: list[str] = []
        self.tags: list[str] = []
        self.unscoped = self.unnamed = 0
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.tags.append(tag)
        self.links += [value for name in ("href", "src", "xlink:href") if (value := given.get(name))]
        self.ids += [value] if (value := given.get("id")) else []
        self.unscoped += tag == "th" and given.get("scope") not in ("row", "col")
        self.unnamed += given.get("role") == "img" and len(given.get("aria-label") or "") < 30


def test_the_page_stands_alone(tmp_path: Path) -> None:
    paths = written(tmp_path, bench_records.record(SWEPT), figure_records.figures(), figure_records.step())
    report = build_report([*paths, RECORDS / "acceptance_curves.json"], "A <b>title</b>", RESAMPLES)
    write_report(report, tmp_path / "report.html", tmp_path / "report.md")
    text = (tmp_path / "report.html").read_text()
    page = Page(text)
    assert "://" not in text.replace("data:,", "")
    assert {link for link in page.links if not link.startswith("#")} == {"data:,"}
    assert {link[1:] for link in page.links if link.startswith("#")} <= set(page.ids)
    assert len(page.ids) == len(set(page.ids))
    assert "script" not in page.tags
    assert page.tags.count("h1") == 1
    assert page.tags.count("svg") > 8
    assert (page.unscoped, page.unnamed) == (0, 0)
    assert "A &lt;b&gt;title" in text
    assert (tmp_path / "report.md").read_text() == report.markdown()
    assert len(text) < 1_000_000


def test_panels_take_the_pages_colours() -> None:
    svg = panel(draw_lines([Line("x", [1, 2], [3, 4], 0, [2, 3], [4, 5])]), "Title", "x", "y")
    assert "var(--c0)" in svg
    assert "currentColor" in svg
    assert "#0d0e" not in svg
    assert ">Title<" in svg


def test_columns_of_numbers() -> None:
    made = Table("t", ("a", "b", "c"), (("x", "1.0", "no difference"), ("y", "–", "+3%"), ("z", "-2%", "1")))
    assert made.numeric == (False, True, False)
    assert "| x | 1.0 | no difference |" in made.markdown()
    assert "| --- | ---: | --- |" in made.markdown()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([], "no record but a list"),
        ({"kind": "manifest", "schema": 1}, "unknown record (kind 'manifest', schema 1)"),
        ({"schema": ["x"]}, "unknown record"),
        (figure_records.step() | {"rows": [figure_records.step()["rows"][0] | {"name": 3}]}, "damaged record"),
        ({"schema": "dscale.costs/1"}, "unknown record (kind None, schema 'dscale.costs/1')"),
        ({"kind": "bench", "schema": 2}, "bench of schema 2; this version reads 1"),
        ({"kind": "bench", "schema": 1, "runs": []}, "damaged record of dscale bench: it has no 'row_fields'"),
        (figure_records.figures() | {"signals": {}}, "damaged record of benchmarks/cpu_figures.py: it has no 'all'"),
        (figure_records.step() | {"rows": [3]}, "damaged record of benchmarks/gpu_step.py"),
        ({"schema": "dscale.evaluate_policies/1"}, "damaged record of dscale evaluate policies"),
    ],
)
def test_what_is_no_record_is_refused_in_one_line(tmp_path: Path, content: Any, message: str) -> None:
    (path,) = written(tmp_path, content)
    with pytest.raises(InputError) as caught:
        build_report([path], resamples=RESAMPLES)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_no_json(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{")
    with pytest.raises(InputError, match="cannot read a record"):
        build_report([tmp_path / "x.json"])
    with pytest.raises(InputError, match="cannot read a record"):
        build_report([tmp_path / "nowhere.json"])
