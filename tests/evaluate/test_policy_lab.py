"""Policies over recorded steps: by hand, by brute force, and against the policies that serve."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch

from dscale.config import InputError
from dscale.evaluate.cost_curve import MeasuredCosts, TimedStep
from dscale.evaluate.policy_lab import Exact, Lab, Seeded, lane_steps, objective
from dscale.evaluate.policy_record import checks, resampled, summarise
from dscale.evaluate.survival_models import dspark_survival, predictor_survival, recorded
from dscale.speculation.budget import allocate_exact, allocate_seeded
from dscale.speculation.confidence import ConfidenceModel, signals
from dscale.speculation.dspark import fit_temperatures, tempered
from dscale.speculation.policies import ConfidenceScorer, Draft, SharedBudget, StepOutcome
from dscale.speculation.predictor import Predictor, PredictorConfig
from tests.evaluate.traces import GROUPS, made_up


def machine(live: int, width: int, row: float = 0.01, base: float = 1.0, decide: float = 0.0) -> MeasuredCosts:
    """base seconds a step and `row` a verified row; drafting takes 0.1 s."""
    rows = [live, live * width]
    drafted = [TimedStep(live, width, count, base + 0.1 + row * count, decide) for count in rows]
    return MeasuredCosts([TimedStep(live, 1, live, base + row * live), *drafted])


def by_hand() -> tuple[Lab, object]:
    """Two requests of two steps, W = 4: accepted 3, 0 and 1, 2; times 2 s for 4 rows, 3 s for 8, 1 s without draft."""
    traces = made_up(2, width=4)
    first = [int(np.flatnonzero(traces.request == r)[i]) for r in (0, 1) for i in (0, 1)]
    traces = replace(traces.select(np.array(first)), accepted=np.array([3, 0, 1, 2], np.int16))
    costs = MeasuredCosts([TimedStep(2, 1, 2, 1.0), TimedStep(2, 4, 4, 2.0), TimedStep(2, 4, 8, 3.0)])
    return Lab(recorded(traces), np.array([[0, 2], [1, 3]]), costs), traces


def test_figures_by_hand() -> None:
    lab, traces = by_hand()
    arms = [*lab.fixed(), *lab.oracle((2, 3))]
    made = {(a["policy"], a["slots"]): a for a in summarise(traces, lab.rows, arms, 100, 0)}

    def figures(name: str, slots: int | None) -> list[float]:
        own = made[(name, slots)]["figures"]["all"]
        return [own[key][0] for key in ("retention", "progress", "slots", "tokens_per_s", "vs_full")]

    full = 10 / 6
    assert figures("off", 1) == pytest.approx([0, 1, 1, 4 / 2, 2 / full - 1])
    assert figures("fixed:2", 2) == pytest.approx([3 / 6, 7 / 4, 2, 7 / 4, 7 / 4 / full - 1])
    assert figures("fixed:3", 3) == pytest.approx([5 / 6, 9 / 4, 3, 9 / 5, 9 / 5 / full - 1])
    assert figures("full", 4) == pytest.approx([1, 10 / 4, 4, full, 0])
    assert figures("oracle", 2) == pytest.approx([4 / 6, 8 / 4, 2, 8 / 4, 8 / 4 / full - 1])
    # own budget: k = 4, 2 then 1, 3: six and four rows, 2.5 and 2 seconds
    assert figures("oracle", None) == pytest.approx([1, 10 / 4, 10 / 4, 10 / 4.5, 10 / 4.5 / full - 1])
    # the one of two requests with all of a step's time halved: request 0 made 4 + 1 tokens in (3 + 3) / 2 seconds
    own = {traces.workloads[0]: 10 / 6}
    assert made[("full", 4)]["figures"][traces.workloads[0]]["tokens_per_s"][0] == pytest.approx(own["a"])
    assert all(checks(list(made.values())).values())


def test_oracle_equals_brute_force() -> None:
    traces = made_up(30, width=4, seed=3)
    lab = Lab(recorded(traces), lane_steps(traces, 3, 0), machine(3, 4))
    for arm in lab.oracle((1, 2, 3, 4))[:-1]:
        for records, k in zip(lab.rows, arm.k, strict=True):
            y = traces.accepted[records]
            options = [one for one in product(range(1, 5), repeat=3) if sum(one) == arm.slots * 3]
            assert int(k.sum()) == arm.slots * 3
            assert np.minimum(y, k - 1).sum() == max(np.minimum(y, np.array(one) - 1).sum() for one in options)


@pytest.mark.parametrize("coarse", [False, True])
def test_allocations_are_those_of_serving(coarse: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    q = torch.rand(25, 5, 7, generator=generator).sort(dim=-1, descending=True).values
    q = (q * 4).round() / 4 if coarse else q  # ties
    q[..., 0] = 1.0
    live = torch.ones(5, dtype=torch.bool)
    exact, seeded = Exact(q.numpy()), Seeded(q.numpy())
    for total in (3, 5, 6, 14, 22, 34, 35, 60):
        for got, allocate in ((exact.lengths(total), allocate_exact), (seeded.lengths(total), allocate_seeded)):
            want = torch.stack([allocate(step, total, live) for step in q])
            assert got.tolist() == want.tolist()
        assert objective(q.numpy(), exact.lengths(total)) >= objective(q.numpy(), seeded.lengths(total)) - 1e-9
    totals = np.arange(5, 30)
    want = torch.stack([allocate_exact(step, int(total), live) for step, total in zip(q, totals, strict=True)])
    assert exact.lengths(totals).tolist() == want.tolist()


def test_lanes_walk_whole_requests_in_order() -> None:
    traces = made_up(20, seed=5)
    shuffled = traces.select(np.random.default_rng(0).permutation(len(traces)))
    rows = lane_steps(shuffled, 4, seed=2)
    assert len(np.unique(rows)) == rows.size
    assert rows.size > 0.75 * len(traces)
    seen: list[int] = []
    for lane in rows.T:
        request, position = shuffled.request[lane], shuffled.position[lane]
        edges = np.flatnonzero(np.diff(request)) + 1
        for part, at in zip(np.split(request, edges), np.split(position, edges), strict=True):
            assert at.tolist() == (np.arange(len(part)) * 3).tolist()
            seen.append(int(part[0]))
        for part in np.split(request, edges)[:-1]:
            assert len(part) == (traces.request == part[0]).sum()
    assert len(seen) == len(set(seen))
    assert not np.array_equal(rows, lane_steps(shuffled, 4, seed=3))
    with pytest.raises(InputError, match="concurrency: 21 requests side by side, but there are only 20"):
        lane_steps(traces, 21, 0)


def test_confidence_is_the_policy_that_serves() -> None:
    traces = made_up(60, seed=7)
    record = recorded(traces)
    lab = Lab(record, lane_steps(traces, 4, 0), machine(4, 6))
    assert len(lab.rows) > 3 * ConfidenceScorer.REFIT_EVERY
    (arm,) = lab.confidence((3,))
    policy = SharedBudget(ConfidenceScorer(ConfidenceModel.day_one(6)), 6, 3, allocate_exact)
    live = torch.ones(4, dtype=torch.bool)
    for records, k in zip(lab.rows, arm.k, strict=True):
        top = record.top.select(torch.from_numpy(records))
        draft = Draft(torch.zeros(4, 5), policy.scorer.model.survival(top), top)
        slots = policy.lengths(draft, policy.shape(4), live)
        assert k.tolist() == slots.tolist()
        kept = np.minimum(record.accepted[records], k - 1).tolist()
        policy.observe(StepOutcome(policy.shape(4), draft, slots.tolist(), kept, [True] * 4, 1.0))


def test_recorded_confidence_is_what_the_drafter_thought() -> None:
    traces = made_up(10, sharpness=2.0)
    odds, logit = signals(recorded(traces).top)
    true = traces.features[:, : 5 * 18].reshape(-1, 5, 18)[..., 0].astype(np.float32) - 16
    moderate = np.abs(true) < 1.5
    assert np.allclose(odds.numpy()[moderate], 2 * true[moderate], atol=0.03)
    assert np.allclose(logit.numpy(), true / 16, atol=1e-3)


def test_temperatures_undo_overconfidence_and_halves_share_no_prompt() -> None:
    traces = made_up(3000, width=4, sharpness=2.0, seed=1)
    record = recorded(traces)
    odds = signals(record.top)[0]
    temperatures = fit_temperatures(odds, record.accepted, record.slots)
    assert np.allclose(temperatures, 2.0, atol=0.35)
    q = tempered(odds, torch.from_numpy(temperatures)).numpy()
    for j in (1, 2, 3):
        assert q[:, j].mean() == pytest.approx((record.accepted >= j).mean(), abs=0.02)
    for prompt in np.unique(traces.prompt):
        assert len(set(record.half[traces.prompt == prompt].tolist())) == 1
    changed = replace(record, accepted=np.where(record.half == 0, 0, record.accepted))
    before, after = dspark_survival(record), dspark_survival(changed)
    assert np.array_equal(before[record.half == 0], after[record.half == 0])  # its own half says nothing to it
    assert not np.array_equal(before[record.half == 1], after[record.half == 1])


def test_dspark_budget_is_of_two_steps_before_and_follows_the_table() -> None:
    traces = made_up(80, width=6, seed=2)
    lab = Lab(recorded(traces), lane_steps(traces, 4, 0), machine(4, 6, row=0.05))
    q = dspark_survival(lab.recorded)[lab.rows]
    own = lab.dspark(q, (3,))[-1]
    buckets = [4, 8, 16, 24]
    assert own.k[:2].sum(1).tolist() == [24, 24]
    for step in range(2, len(q)):
        scores = np.sort(q[step - 2, :, 1:].ravel())[::-1]
        rates = [(4 + scores[: b - 4].sum()) / (1.1 + 0.05 * b) for b in buckets]
        assert own.k[step].sum() == buckets[int(np.argmax(rates))]
    assert own.slots is None


def test_auto_takes_what_the_machine_favours() -> None:
    traces = made_up(200, width=6, seed=4)
    record, rows = recorded(traces), lane_steps(traces, 4, 0)
    q = dspark_survival(record)[rows]
    free = Lab(record, rows, machine(4, 6, row=1e-4)).auto(q, resizes=False)
    assert free.k[-40:].mean() > 5.5
    dear = Lab(record, rows, machine(4, 6, row=0.2)).auto(q, resizes=False)
    assert 1 < dear.k[-40:].mean() < 4
    steps = [TimedStep(4, 1, 4, 0.1), TimedStep(4, 6, 4, 2.0), TimedStep(4, 6, 24, 9.0)]
    never = Lab(record, rows, MeasuredCosts(steps)).auto(None, resizes=True)
    assert not never.drafted[-40:].all()
    assert never.seconds[~never.drafted].tolist() == [0.1] * int((~never.drafted).sum())
    assert (never.k[~never.drafted] == 1).all()


def test_predictor_is_told_the_number_of_lanes_and_reads_its_groups() -> None:
    traces = made_up(10, width=6)
    predictor = Predictor(PredictorConfig(6, "x", features=("context",), hidden_units=1))
    with torch.no_grad():
        for parameter in predictor.parameters():
            parameter.zero_()
        predictor.first.weight[0, 0] = 1.0
        predictor.second.weight[:] = 0.1
    q = predictor_survival(predictor, traces, 32)
    assert q.shape == (len(traces), 6)
    assert np.allclose(q[:, 1:], 1 / (1 + np.exp(-3.2)))
    assert traces.groups == GROUPS
    with pytest.raises(InputError, match="predictor: for width 5; the traces have 6"):
        predictor_survival(Predictor(PredictorConfig(5, "x", features=("context",))), traces, 8)


def test_resamples_keep_each_workload_whole() -> None:
    workload = np.array([0, 1, 0, 0, 1])
    drawn = resampled(workload, 50, 0)
    assert drawn[0].tolist() == [1] * 5
    assert (drawn[:, workload == 0].sum(1) == 3).all()
    assert (drawn[:, workload == 1].sum(1) == 2).all()
    assert len(np.unique(drawn, axis=0)) > 10


def test_good_scores_win_and_all_checks_hold() -> None:
    traces = made_up(400, width=6, seed=9)
    lab = Lab(recorded(traces), lane_steps(traces, 8, 0), machine(8, 6, row=0.05, decide=0.01))
    q = dspark_survival(lab.recorded)[lab.rows]
    arms = [*lab.fixed(), *lab.confidence((2, 3)), *lab.dspark(q, (2, 3)), *lab.oracle((2, 3))]
    arms += lab.shared("dvl seeded", q, (2, 3), seeded=True) + lab.shared("dvl exact", q, (2, 3))
    made = summarise(traces, lab.rows, arms, 200, 0)
    assert checks(made) == dict.fromkeys(checks(made), True)
    figures = {(arm["policy"], arm["slots"]): arm["figures"]["all"] for arm in made}
    assert figures[("dvl exact", 3)]["retention"][1] > figures[("fixed:3", 3)]["retention"][2]
    assert figures[("confidence", 3)]["retention"][1] > figures[("fixed:3", 3)]["retention"][2]
    assert figures[("dvl exact", 3)]["retention"][0] < figures[("oracle", 3)]["retention"][0]
    value, low, high = figures[("dvl exact", 3)]["tokens_per_s"]
    assert low < value < high
    worse = [dict(arm, objective=0.0) if arm["policy"] == "dvl exact" else arm for arm in made]
    assert not checks(worse)["exact allocation promises no less than seeded"]
    worse = [dict(arm, ceiling=0.5) for arm in made]
    assert not checks(worse)["no policy keeps more than the oracle of as many rows"]
