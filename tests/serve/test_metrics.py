"""Metrics: what a scrape says after known snapshots and requests, and that the dashboard asks for nothing else."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

pytest.importorskip("prometheus_client", reason="needs the extra `serve`")

from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from dscale.serve.messages import RefitState, Snapshot, Usage
from dscale.serve.metrics import Metrics

DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana-dashboard.json"


def snapshot(time: float = 10.0, **changes: object) -> Snapshot:
    """Two requests after 10 request steps that drafted 30 tokens, verified 25 of them and accepted 12."""
    counters = {"steps": 5, "request_steps": 10, "drafted_steps": 10, "emitted": 22, "drafted": 30, "accepted": 12}
    counters |= {"slots": 35, "decode_seconds": 0.5, "prefill_seconds": 0.25, "preemptions": 1}
    counters |= {"prefix_queries": 100, "prefix_hits": 40}
    values = {"running": 2, "waiting": 3, "budget": 3.5, "pages_used": 10, "pages": 40, "counters": counters}
    values |= {"drafted_at": [10, 10, 10], "verified_at": [10, 9, 6], "accepted_at": [6, 4, 2]}
    values |= {"predicted": [5.5, 3.5, 1.5], "calibrated": [6.0, 4.0, 2.0], "step_seconds": [0.002, 0.004, 0.2]}
    return Snapshot(time, "dvl", **(values | changes))


def scraped(metrics: Metrics) -> dict[tuple[str, ...], float]:
    """Samples by name and the values of their labels, model_name left out."""
    found = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            labels = {key: value for key, value in sample.labels.items() if key != "model_name"}
            found[sample.name, *labels.values()] = sample.value
    return found


@pytest.fixture
def metrics() -> Metrics:
    return Metrics(CollectorRegistry(), "m")


def test_an_engine_without_snapshots_has_no_engine_series(metrics: Metrics) -> None:
    assert not [name for name, *_ in scraped(metrics) if "running" in name]


def test_gauges_and_sums_are_those_of_the_last_snapshot(metrics: Metrics) -> None:
    metrics.observe(snapshot(running=9))
    metrics.observe(snapshot())
    found = scraped(metrics)
    assert found["vllm:num_requests_running",] == 2
    assert found["vllm:num_requests_waiting",] == 3
    assert found["vllm:kv_cache_usage_perc",] == 0.25
    assert found["dscale:budget_slots",] == 3.5
    assert found["dscale:policy_info", "dvl"] == 1
    assert found["vllm:generation_tokens_total",] == 22
    assert found["vllm:num_preemptions_total",] == 1
    assert found["vllm:prefix_cache_queries_total",] == 100
    assert found["vllm:prefix_cache_hits_total",] == 40
    assert found["vllm:spec_decode_num_drafts_total",] == 10
    assert found["vllm:spec_decode_num_draft_tokens_total",] == 30
    assert found["vllm:spec_decode_num_accepted_tokens_total",] == 12
    assert found["dscale:verified_slots_total",] == 35
    assert found["dscale:verified_draft_tokens_total",] == 25
    assert found["dscale:trimmed_draft_tokens_total",] == 5


def test_positions_count_from_zero_for_vllm_and_from_one_here(metrics: Metrics) -> None:
    metrics.observe(snapshot())
    found = scraped(metrics)
    at = {name: [found[f"dscale:{name}_total", str(j)] for j in (1, 2, 3)] for name in (
        "drafted_tokens_at", "verified_tokens_at", "trimmed_tokens_at", "accepted_tokens_at", "predicted_accepted_at",
        "calibration_accepted_at")}  # fmt: skip
    assert at["drafted_tokens_at"] == [10, 10, 10]
    assert at["verified_tokens_at"] == [10, 9, 6]
    assert at["trimmed_tokens_at"] == [0, 1, 4]
    assert at["accepted_tokens_at"] == [6, 4, 2]
    assert at["predicted_accepted_at"] == [5.5, 3.5, 1.5]
    assert at["calibration_accepted_at"] == [6, 4, 2]
    per_pos = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    assert [found[per_pos, str(j)] for j in (0, 1, 2)] == [6, 4, 2]
    assert (per_pos, "3") not in found


def test_step_times_add_up_over_snapshots(metrics: Metrics) -> None:
    metrics.observe(snapshot())
    metrics.observe(snapshot(step_seconds=[0.002]))
    found = scraped(metrics)
    assert found["dscale:decode_step_seconds_count",] == 4
    assert found["dscale:decode_step_seconds_sum",] == pytest.approx(0.208)
    assert found["dscale:decode_step_seconds_bucket", "0.0025"] == 2
    assert found["dscale:decode_step_seconds_bucket", "0.005"] == 3


def test_idle_time_is_the_share_since_the_snapshot_before_and_absent_on_a_cpu(metrics: Metrics) -> None:
    metrics.observe(snapshot(10.0))
    metrics.observe(snapshot(11.0))
    assert ("dscale:gpu_idle_ratio",) not in scraped(metrics)
    counters = snapshot().counters
    metrics.observe(snapshot(12.0, counters=counters | {"device_idle_seconds": 3.0}))
    metrics.observe(snapshot(14.0, counters=counters | {"device_idle_seconds": 3.5}))
    assert scraped(metrics)["dscale:gpu_idle_ratio",] == 0.25


def test_a_finished_request_is_counted_once(metrics: Metrics) -> None:
    usage = Usage(prompt_tokens=7, completion_tokens=5, steps=2, drafted=14, accepted=3, slots=9)
    metrics.finished(usage, 0.2, 1.0, [0.1, 0.1, 0.3, 0.3], "stop")
    metrics.finished(Usage(prompt_tokens=7), None, 0.5, [], "abort")
    found = scraped(metrics)
    assert found["vllm:request_success_total", "stop"] == 1
    assert found["vllm:request_success_total", "abort"] == 1
    assert found["vllm:prompt_tokens_total",] == 14
    assert found["vllm:time_to_first_token_seconds_sum",] == 0.2
    assert found["vllm:time_to_first_token_seconds_count",] == 1
    assert found["vllm:inter_token_latency_seconds_count",] == 4
    assert found["vllm:inter_token_latency_seconds_sum",] == pytest.approx(0.8)
    assert found["vllm:request_time_per_output_token_seconds_sum",] == pytest.approx(0.2)
    assert found["vllm:e2e_request_latency_seconds_sum",] == 1.5
    assert found["vllm:request_generation_tokens_sum",] == 5
    assert found["dscale:request_progress_sum",] == 2.5
    assert found["dscale:request_progress_count",] == 1


def test_series_carry_the_model_by_vllms_label(metrics: Metrics) -> None:
    metrics.observe(snapshot())
    metrics.finished(Usage(completion_tokens=2, steps=1), 0.1, 0.2, [0.1], "stop")
    for family in text_string_to_metric_families(metrics.render().decode()):
        assert all(sample.labels["model_name"] == "m" for sample in family.samples), family.name


def refits() -> RefitState:
    """Three refits: the predictor was bettered twice, and once nothing came of it."""
    outcomes = {"predictor": {"accepted": 2, "rejected": 0}, "refit": {"failed": 1}}
    return RefitState(version=2, records=900, outcomes=outcomes, log_loss={"predictor": {"old": 0.5, "new": 0.25}})


def test_refits_are_shown_where_they_were_asked_for(metrics: Metrics) -> None:
    metrics.observe(snapshot())
    assert not [name for name, *_ in scraped(metrics) if "refit" in name or "version" in name]
    metrics.observe(snapshot(refit=refits()))
    found = scraped(metrics)
    assert found["dscale:predictor_version",] == 2
    assert found["dscale:refit_records",] == 900
    assert found["dscale:refits_total", "accepted", "predictor"] == 2
    assert found["dscale:refits_total", "rejected", "predictor"] == 0
    assert found["dscale:refits_total", "failed", "refit"] == 1
    assert found["dscale:refit_log_loss", "predictor", "old"] == 0.5
    assert found["dscale:refit_log_loss", "predictor", "new"] == 0.25


def test_the_dashboard_asks_only_for_series_that_exist(metrics: Metrics) -> None:
    metrics.observe(snapshot(10.0, counters=snapshot().counters | {"device_idle_seconds": 1.0}))
    metrics.observe(snapshot(11.0, counters=snapshot().counters | {"device_idle_seconds": 1.5}, refit=refits()))
    metrics.finished(Usage(completion_tokens=2, steps=1), 0.1, 0.2, [0.1], "stop")
    names = {name for name, *_ in scraped(metrics)}
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    asked = set()
    for panel in panels:
        assert panel["targets"], panel["title"]
        for target in panel["targets"]:
            asked |= set(re.findall(r"(?:vllm|dscale):\w+", target["expr"]))
    asked |= set(re.findall(r"(?:vllm|dscale):\w+", json.dumps(dashboard["templating"])))
    assert asked <= names
    own = {re.sub(r"_(bucket|sum|count|created)$", "", name) for name in names if not name.endswith("_created")}
    shown = {re.sub(r"_(bucket|sum|count)$", "", name) for name in asked}
    assert {name for name in own if name.startswith("dscale:")} - shown == set()  # what only we count is all shown


def test_the_dashboard_has_distinct_panels_that_do_not_overlap() -> None:
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= cells
