"""Intervals of benchmarks: hand-computed cases, coverage on synthetic records with a known effect, equal arms."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from dscale.config import InputError
from dscale.evaluate.bench_record import ArmInfo, BenchRecord, RequestRow, Run
from dscale.evaluate.statistics import (
    NO_BOOT_VARIANCE,
    Estimate,
    baseline_at,
    best_of_family,
    compare,
    detectable,
    geometric_mean,
    latency_summary,
    minimum_detectable_effect,
    phrase,
    variation,
)

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))


@pytest.fixture(scope="module")
def check() -> ModuleType:
    import statistics_check

    return statistics_check


def run_of(arm: str, seconds: list[float], tokens: list[int], workload: str = "w", **place: int) -> Run:
    """One worker, one request after the other; prompt i takes seconds[i]."""
    rows, now = [], 0.0
    for index, (takes, made) in enumerate(zip(seconds, tokens, strict=True)):
        rows.append(RequestRow(f"r{index}", f"p{index}", workload, now, now + 0.5, now + takes, 5, made))
        now += takes
    at = {"concurrency": 1, "boot": 0, "run": 0, "order": 0} | place
    return Run(arm, rows=tuple(rows), window_s=now, **at)


def record_of(*runs: Run, arms: tuple[ArmInfo, ...] = (ArmInfo("base", "x", baseline=True), ArmInfo("arm", "x"))):
    return BenchRecord({}, {}, "test", 0, {}, arms, runs)


TOKENS = [10, 20, 30, 40, 50, 60]


def test_one_gain_for_all_prompts_has_an_interval_of_no_width():
    record = record_of(
        run_of("base", [2.0, 4, 6, 8, 10, 12], TOKENS), run_of("arm", [1.6, 3.2, 4.8, 6.4, 8.0, 9.6], TOKENS)
    )
    found = compare(record, "arm", "base", 1, 500)
    assert found.tokens_per_s == pytest.approx(210 / 33.6)
    assert found.change.value == pytest.approx(0.25)
    assert (found.change.low, found.change.high) == pytest.approx((0.25, 0.25))
    assert found.workloads["w"].low == pytest.approx(0.25)
    assert found.hierarchical is None
    assert NO_BOOT_VARIANCE in found.notes
    assert phrase(found) == "+25.0% (+25.0% … +25.0%)"
    assert [(one.arm, one.boot, round(one.tokens_per_s, 2)) for one in found.boots] == [
        ("arm", 0, 6.25),
        ("base", 0, 5),
    ]


def test_the_headline_is_the_ratio_of_windows_not_a_mean_of_ratios():
    record = record_of(
        run_of("base", [1.0, 1, 1, 1, 1, 95], [1, 1, 1, 1, 1, 95]),
        run_of("arm", [0.1, 0.1, 0.1, 0.1, 0.1, 99.5], [1, 1, 1, 1, 1, 95]),
    )
    found = compare(record, "arm", "base", 1, 500)
    assert found.change.value == pytest.approx(100 / 100 - 1)
    assert not found.shown
    assert phrase(found).startswith("no difference shown (")


def test_the_bootstrap_is_the_exact_distribution_on_few_prompts():
    """All (n-1)-fold draws of 5 prompts enumerated; the percentiles of the resampled ratio agree with theirs."""
    base, arm = np.array([2.3, 3.1, 5.7, 4.2, 6.9]), np.array([1.1, 3.4, 2.2, 4.9, 5.3])
    record = record_of(run_of("base", base.tolist(), [10] * 5), run_of("arm", arm.tolist(), [10] * 5))
    grid = np.stack(np.meshgrid(*[np.arange(5)] * 4), -1).reshape(-1, 4)
    exact = base[grid].sum(1) / arm[grid].sum(1) - 1
    found = compare(record, "arm", "base", 1, 40_000).change
    for edge, share in ((found.low, 0.025), (found.high, 0.975)):
        assert np.mean(exact < edge - 1e-9) < share + 0.004
        assert np.mean(exact < edge + 1e-9) > share - 0.004
    assert found.value == pytest.approx(22.2 / 16.9 - 1)


def test_workloads_keep_their_share_of_every_draw():
    """Without any spread within workloads a stratified draw has no spread either; an unstratified one would."""
    sides = {"base": ([2.0] * 5, [4.0] * 5), "arm": ([1.0] * 5, [4.0] * 5)}
    runs = []
    for arm, (first, second) in sides.items():
        one, two = run_of(arm, first, [10] * 5, "a"), run_of(arm, second, [10] * 5, "b")
        later = tuple(replace(row, sent_s=row.sent_s + 10, ended_s=row.ended_s + 10) for row in two.rows)
        runs.append(replace(one, rows=one.rows + later, window_s=one.window_s + two.window_s))
    found = compare(record_of(*runs), "arm", "base", 1, 300)
    assert (found.change.low, found.change.high) == pytest.approx((0.2, 0.2))
    assert found.workloads["a"].value == pytest.approx(1.0)
    assert found.workloads["b"].value == pytest.approx(0.0)
    assert phrase(found.workloads["b"]).startswith("no difference shown")


def test_repeats_of_a_prompt_are_averaged_first():
    """A prompt that was asked three times weighs as one."""
    base = run_of("base", [2.0] * 6, [10] * 6)
    extra = tuple(replace(base.rows[0], id=f"x{i}", sent_s=12.0 + 4 * i, ended_s=16.0 + 4 * i) for i in range(2))
    repeated = replace(base, rows=base.rows + extra, window_s=20.0)
    found = compare(record_of(repeated, run_of("arm", [2.0] * 6, [10] * 6)), "arm", "base", 1, 100)
    assert found.resampled == pytest.approx((2 * 5 + (2 + 4 + 4) / 3) / 12 - 1)
    assert found.change.value == pytest.approx(5.0 / (80 / 20.0) - 1)
    assert any("repeated unequally" in note for note in found.notes)


def test_shares_of_a_busy_closed_loop_agree_with_the_window(check: ModuleType):
    record = check.draw_record(check.Population(prompts=200, boots=2), np.random.default_rng(0))
    found = compare(record, "arm", "base", None, 200)
    assert found.resampled == pytest.approx(found.change.value, abs=0.02)
    assert found.concurrencies == (4,)


def test_failed_requests_and_strangers_are_refused():
    base, arm = run_of("base", [2.0] * 5, [10] * 5), run_of("arm", [1.0] * 5, [10] * 5)
    with pytest.raises(InputError, match="'fast' is not in the record"):
        compare(record_of(base, arm), "fast", "base")
    failed = replace(arm, rows=(replace(arm.rows[0], error="503"), *arm.rows[1:]))
    with pytest.raises(InputError, match="1 requests failed"):
        compare(record_of(base, failed), "arm", "base")
    with pytest.raises(InputError, match="c = 8"):
        compare(record_of(base, arm), "arm", "base", 8)
    with pytest.raises(InputError, match="no prompt"):
        compare(record_of(base, run_of("arm", [1.0] * 5, [10] * 5, "other")), "arm", "base")


def test_few_prompts_show_nothing():
    found = compare(record_of(run_of("base", [2.0] * 3, [10] * 3), run_of("arm", [1.0] * 3, [10] * 3)), "arm", "base")
    assert not found.shown
    assert phrase(found) == "no difference shown (too few prompts: 3)"


def test_intervals_hold_a_known_effect(check: ModuleType):
    found = check.check(check.Population(), 400, 500, seed=5)
    assert 0.93 <= found["coverage"] <= 0.97
    assert found["mean_change"] == pytest.approx(found["true_change"], abs=0.005)


def test_equal_arms_are_rarely_told_apart(check: ModuleType):
    found = check.check(replace(check.Population(), prompts=30).equal(), 300, 400, seed=2)
    assert found["shown"] <= 0.08
    assert found["no_difference_shown"] == 1 - found["shown"]


def test_boots_that_differ_are_held_by_the_hierarchical_interval_alone(check: ModuleType):
    population = check.Population(prompts=20, boot_noise=0.05, boots=8, runs=1).equal()
    found = check.check(population, 80, 300, seed=3)
    assert found["coverage"] < 0.6
    assert found["coverage_hierarchical"] >= 0.88


def test_eight_thousand_resamples_of_hundreds_of_prompts_are_quick(check: ModuleType):
    record = check.draw_record(check.Population(prompts=200, boots=3), np.random.default_rng(0))
    began = time.process_time()
    assert compare(record, "arm", "base").hierarchical is not None
    assert time.process_time() - began < 20  # a guard against loops over resamples, not a speed


def test_geometric_mean_is_over_medians_of_cells():
    base = [run_of("base", [2.0] * 5, [10] * 5, run=i, concurrency=1) for i in range(3)]
    arm = [run_of("arm", [s] * 5, [10] * 5, run=i, concurrency=1) for i, s in enumerate((1.0, 0.5, 100.0))]
    wide = [run_of("base", [2.0] * 5, [10] * 5, concurrency=2), run_of("arm", [0.5] * 5, [10] * 5, concurrency=2)]
    found = geometric_mean(record_of(*base, *arm, *wide), "arm", "base", resamples=100)
    assert found.cells == {("w", 1): pytest.approx(2.0), ("w", 2): pytest.approx(4.0)}
    assert found.change.value == pytest.approx(8**0.5 - 1)
    assert found.repetitions == 1


def test_latency_summary_by_hand():
    rows = [RequestRow(f"r{i}", "p", "w", 1.0, 1.0 + i / 10, 1.0 + i, 5, 1 + i) for i in range(1, 101)]
    found = latency_summary([*rows, replace(rows[0], error="503", ended_s=1e9)])
    assert found.end_to_end.mean == pytest.approx(50.5)
    assert found.end_to_end.p50 == pytest.approx(50.5)
    assert found.end_to_end.p95 == pytest.approx(95.05)
    assert found.end_to_end.p99 == pytest.approx(99.01)
    assert found.first_token.mean == pytest.approx(5.05)
    assert found.between_tokens.p99 == pytest.approx(0.9)
    assert latency_summary([replace(rows[0], first_token_s=None)]).first_token is None


def test_a_tuned_baseline_is_the_best_of_its_family():
    arms = tuple(ArmInfo(f"k{k}", "vllm", baseline=k == 2, family="vllm") for k in (2, 4))
    runs = [run_of("k2", [2.0] * 5, [10] * 5), run_of("k4", [1.0] * 5, [10] * 5)]
    runs += [run_of("k2", [1.0] * 5, [10] * 5, concurrency=4), run_of("k4", [4.0] * 5, [10] * 5, concurrency=4)]
    record = record_of(*runs, arms=arms)
    assert best_of_family(record, "vllm")[1].sweep == {"k2": 5.0, "k4": 10.0}
    assert baseline_at(record, 1) == "k4"
    assert baseline_at(record, 4) == "k2"
    with pytest.raises(InputError, match="family 'sglang'"):
        best_of_family(record, "sglang")


def test_what_can_be_seen_is_told_before_a_run(check: ModuleType):
    assert minimum_detectable_effect(100, 2, 0.25) == pytest.approx(2.80159 * 0.025, rel=1e-4)
    assert minimum_detectable_effect(100, 2, 0.0, 0.01) == pytest.approx(2.80159 * 0.01, rel=1e-4)
    assert detectable(100, 2, 0.021) == "with 2 boots × 100 prompts you can see ±2.1%"
    record = check.draw_record(
        check.Population(prompts=400, boot_noise=0.03, boots=40, runs=1), np.random.default_rng(0)
    )
    prompts, boots = variation(record, "arm", "base", 4)
    interval = compare(record, "arm", "base", 4, 2000).change
    half = (interval.high - interval.low) / 2 / (1 + interval.value)
    assert 1.96 * prompts / 800**0.5 == pytest.approx(half, rel=0.1)
    assert boots == pytest.approx(0.03, rel=0.3)


def test_an_interval_that_spans_zero_is_no_difference():
    assert phrase(Estimate(0.02, -0.01, 0.05, 50)) == "no difference shown (-1.0% … +5.0%)"
    assert phrase(Estimate(-0.02, -0.03, -0.01, 50)) == "-2.0% (-3.0% … -1.0%)"
