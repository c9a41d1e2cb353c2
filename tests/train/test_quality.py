"""Metrics of survival against hand-computed cases, scipy, and the engine's own allocators."""

import numpy as np
import pytest
import torch
from scipy import stats

from dscale.speculation.budget import allocate_exact, allocate_seeded
from dscale.train.quality import (
    Outcomes,
    area_under_curve,
    average_ranks,
    by_workload,
    calibration_error,
    length_scores,
    position_scores,
    quality,
    reliability,
    requirement,
    retention,
    share,
    shared_lengths,
    signal_correlations,
    spearman,
)
from dscale.train.variants import comparison, history_features, path_features
from tests.train.made_up_traces import made_up


def outcomes(accepted, slots=None, width=4, prompt=None, workload=None):
    count = len(accepted)
    return Outcomes(
        torch.tensor(accepted),
        torch.tensor(slots) if slots is not None else torch.full((count,), width),
        np.array(prompt) if prompt is not None else np.arange(count),
        np.array(workload) if workload is not None else np.zeros(count, np.int64),
        ("a", "b"),
        width,
    )


def perfect(accepted, width=4):
    return (torch.arange(width) <= torch.tensor(accepted)[:, None]).float()


def random_q(*shape):
    drawn = torch.rand(*shape, generator=torch.Generator().manual_seed(len(shape))).cumprod(-1)
    coarse = (drawn * 8).round() / 8  # many ties
    coarse[..., 0] = 1.0
    return coarse


def test_a_perfect_predictor():
    accepted = [0, 3, 1, 2] * 16
    metrics = quality(perfect(accepted), outcomes(accepted))
    assert metrics["r2"] == pytest.approx(1.0)
    assert metrics["mae"] == metrics["brier"] == metrics["ece"] == 0
    assert metrics["retention_raw"] == pytest.approx((0 + 2 + 0 + 1) / 6, abs=1e-4)
    assert metrics["retention_4_fixed"] == 1.0
    assert metrics["mean_accepted"] == 1.5


def test_lengths_by_hand_with_a_cut_block():
    q = torch.tensor([[1, 0.8, 0.5, 0.2], [1, 0.6, 0.6, 0.1], [1, 0.9, 0.4, 0.4]])
    scores = length_scores(q, outcomes([2, 1, 1], [4, 2, 4]))  # of the second block only draft 1 was verified
    expected = np.array([1.5, 0.6, 1.7])
    y = np.array([2, 1, 1])
    assert scores["r2"] == pytest.approx(1 - ((expected - y) ** 2).sum() / ((y - y.mean()) ** 2).sum())
    assert scores["mae"] == pytest.approx(np.abs(expected - y).mean())
    chances = np.array([0.8, 0.5, 0.2, 0.6, 0.9, 0.4, 0.4])
    labels = np.array([1, 1, 0, 1, 1, 0, 0])
    assert scores["brier"] == pytest.approx(((chances - labels) ** 2).mean())
    assert scores["log_loss"] == pytest.approx(-np.log(np.where(labels, chances, 1 - chances)).mean())


def test_retention_counts_what_fits():
    assert retention(torch.tensor([0, 5, 2]), torch.tensor([4, 4, 4])) == pytest.approx(5 / 7)


@pytest.mark.parametrize("total", [8, 13, 24, 40, 48, 90])
@pytest.mark.parametrize(("name", "allocate"), [("exact", allocate_exact), ("seeded", allocate_seeded)])
def test_lengths_are_those_the_engine_would_choose(total, name, allocate):
    q = random_q(40, 8, 6)
    live = torch.ones(8, dtype=torch.bool)
    assert torch.equal(shared_lengths(q, total, name), torch.stack([allocate(one, total, live) for one in q]))


def test_sharing_by_hand():
    """Two requests share 6 of 8 slots: the one that accepts 3 takes them from the one that accepts none."""
    accepted = [3, 0]
    shared = share(perfect(accepted), 3, 2)
    assert dict(zip(shared.rows.tolist(), shared.k.tolist(), strict=True)) == {0: 4, 1: 2}
    assert shared.retention(torch.tensor(accepted)) == 1.0
    assert retention(torch.tensor(accepted), torch.tensor([3, 3])) == pytest.approx(2 / 3)


def test_reliability_and_calibration_by_hand():
    chance = torch.tensor([0.05, 0.15, 0.11, 1.0], dtype=torch.float64)
    label = torch.tensor([0.0, 1.0, 0.0, 1.0], dtype=torch.float64)
    curve = reliability(chance, label)
    assert [one["count"] for one in curve] == [1, 2, 1]
    assert curve[1]["predicted"] == pytest.approx(0.13)
    assert curve[1]["observed"] == 0.5
    assert calibration_error(chance, label) == pytest.approx((0.05 + 2 * 0.37 + 0) / 4)


def test_ranks_spearman_and_auc_agree_with_scipy():
    rng = np.random.default_rng(0)
    a, b = rng.integers(0, 20, 300), rng.normal(size=300)
    b += 0.1 * a
    assert average_ranks(a) == pytest.approx(stats.rankdata(a))
    assert spearman(a, b) == pytest.approx(stats.spearmanr(a, b).statistic)
    assert spearman(a, np.ones(300)) == 0
    label = (a + rng.normal(size=300) * 5 > 10).astype(float)
    wins = stats.mannwhitneyu(a[label == 1], a[label == 0]).statistic / (label.sum() * (1 - label).sum())
    assert area_under_curve(a, label) == pytest.approx(wins)
    assert area_under_curve(a, np.ones(300)) is None


def test_positions_leave_out_what_was_not_verified():
    q = torch.tensor([[1, 0.8, 0.5, 0.2], [1, 0.6, 0.6, 0.1], [1, 0.9, 0.4, 0.4]])
    rows = position_scores(q, outcomes([2, 1, 1], [4, 2, 4]))
    assert [row["count"] for row in rows] == [3, 2, 2]
    assert [row["rate"] for row in rows] == [1.0, 0.5, 0.0]
    assert rows[1]["auc"] == 1.0
    assert rows[2]["auc"] is None
    assert rows[1]["brier"] == pytest.approx((0.25 + 0.16) / 2)


def test_retention_is_of_whole_blocks_only():
    accepted = [3, 3, 1] * 8
    slots = [4, 4, 2] * 8
    metrics = quality(perfect(accepted), outcomes(accepted, slots))
    assert metrics["retention_raw"] == pytest.approx(2 / 3, abs=1e-4)
    none = quality(perfect(accepted), outcomes(accepted, [2] * 24))
    assert not any(name.startswith("retention") for name in none)
    assert requirement(none, 4) is None


def test_requirement_reads_the_budget_of_mean_progress_plus_two():
    accepted = [0, 9] * 32
    found = outcomes(accepted, width=10)
    assert found.required_slots == 8  # round(1 + 4.5 + 2) to even
    made = requirement(quality(perfect(accepted, 10), found, 8), 8)
    assert made["fixed"] == pytest.approx(7 / 9, abs=1e-4)
    assert made["shared_of_8"] == 1.0
    assert made["points_over_fixed_of_8"] == pytest.approx(100 * 2 / 9, abs=0.02)
    assert made["r2_met"]
    assert made["retention_met_of_8"]


def test_workloads_are_told_apart():
    made = by_workload(perfect([0, 3, 1]), outcomes([0, 3, 1], workload=[0, 1, 1]))
    assert made["a"]["mean_accepted"] == 0
    assert made["b"]["mean_accepted"] == 2
    assert made["b"]["records"] == 2


def test_simple_signals():
    traces = made_up(400)
    table = traces.features[:, : 3 * 18].reshape(-1, 3, 18).astype(np.float32)
    want = stats.spearmanr(table[:, :, 17].mean(1), traces.accepted).statistic
    assert signal_correlations(traces)["mean_entropy"] == pytest.approx(want, abs=1e-6)


def test_path_and_history_by_hand():
    traces = made_up(4)
    traces.drafts[0] = [5, 5, 5]
    traces.drafts[1] = [5, 6, 5]
    traces.drafts[2:] = [1, 2, 3]
    traces.request[:] = [1, 0, 0, 0]
    traces.position[:] = [9, 8, 0, 3]
    traces.accepted[:] = [2, 0, 3, 1]
    path = path_features(traces).reshape(4, 5, 3)
    table = traces.features[:, : 3 * 18].reshape(-1, 3, 18).astype(np.float32)
    assert path[0, 3].tolist() == [0, 1, 1]
    assert path[1, 3].tolist() == [0, 0, 0]
    assert path[0, 4].tolist() == [0, 1, 1]
    assert path[1, 4].tolist() == [0, 0, 1]
    assert path[2, 0, 2] == pytest.approx(table[2, :, 16].sum(), rel=1e-3)
    assert path[2, 1, 1] == table[2, :2, 1].min()
    assert path[2, 2, 2] == table[2, :, 17].max()
    history = history_features(traces)
    assert history[:, 0].tolist() == [-1, 1, -1, 3]
    assert history[:, 1].tolist() == [-1, 3, -1, -1]
    assert history[:, 2] == pytest.approx(np.log1p([9, 8, 0, 3]))


def test_comparison_resamples_prompts_and_pairs_the_differences():
    rng = np.random.default_rng(0)
    accepted = rng.integers(0, 4, 640)
    found = outcomes(accepted.tolist(), prompt=np.repeat(np.arange(64), 10))
    good = perfect(accepted.tolist())
    noisy = torch.where(torch.from_numpy(rng.random(640) < 0.5)[:, None], good, torch.full((1, 4), 0.5))
    noisy[:, 0] = 1
    table = comparison({"noisy": noisy, "good": good, "same": noisy}, found, 3)
    assert table["good"]["r2"]["value"] == 1.0
    assert table["good"]["r2"]["difference"]["low"] > 0.1
    assert table["same"]["r2"]["difference"] == {"value": 0, "low": 0, "high": 0}
    assert table["noisy"]["r2"]["low"] < table["noisy"]["r2"]["value"] < table["noisy"]["r2"]["high"]
    assert table["noisy"]["r2"]["value"] == pytest.approx(length_scores(noisy, found)["r2"], abs=1e-4)
    assert table["noisy"]["retention"]["value"] == pytest.approx(
        share(noisy, 3, 8).retention(torch.from_numpy(accepted)), abs=1e-4
    )
