"""`auto` over captured steps, on a machine of made-up step times (an H200's, about) and texts of simulated acceptance:
it keeps up with the best fixed budget, whichever that is, and follows when the text changes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
import torch

from dscale.speculation.auto import Auto
from dscale.speculation.costs import ReplayCosts
from dscale.speculation.policies import Draft, Scorer, StepOutcome
from dscale.speculation.simulated import SimulatedAcceptance
from dscale.speculation.workspace import StepShape

WIDTH, BUDGETS = 16, (4, 6, 8, 12, 16)
POSITIONS = 4096  # of a text, which then begins anew
TIMES = {  # ms a step by requests and rows a request; 1: nothing drafted, 16: whole blocks without scores
    1: {1: 4.30, 4: 5.60, 6: 5.62, 8: 5.64, 12: 5.70, 16: 5.70},
    8: {1: 5.29, 4: 6.80, 6: 6.95, 8: 7.10, 12: 7.40, 16: 7.52},
    12: {1: 5.40, 4: 7.00, 6: 7.30, 8: 7.60, 12: 8.30, 16: 8.80},
    16: {1: 5.45, 4: 7.20, 6: 7.75, 8: 8.24, 12: 9.30, 16: 10.2},
    24: {1: 5.60, 4: 8.30, 6: 9.40, 8: 10.0, 12: 12.1, 16: 13.6},
    28: {1: 3.95, 4: 6.00, 6: 6.75, 8: 7.47, 12: 8.51, 16: 10.2},  # of a smaller target: 8 is 3% better than 12
    32: {1: 5.70, 4: 9.60, 6: 11.2, 8: 11.9, 12: 15.2, 16: 17.1},
}


class NoScorer(Scorer):
    name = "none"

    def read(self, hidden, target, live, initial):
        raise AssertionError("the drafter is not run in these tests")


@dataclass(frozen=True)
class Text:
    """Drafts that pass, int64 [lanes, POSITIONS], and scores q float32 [lanes, POSITIONS, WIDTH]."""

    lengths: np.ndarray
    scores: np.ndarray


@cache
def text(progress: float) -> Text:
    """Of this mean progress of whole blocks."""
    simulation = SimulatedAcceptance(progress=progress).on("cpu")
    position = torch.arange(POSITIONS)
    rows = [simulation.at(torch.full_like(position, seed), position) for seed in range(32)]
    return Text(*(torch.stack(column).numpy() for column in zip(*rows, strict=True)))


def lengths(scores: np.ndarray, budget: int) -> np.ndarray:
    """allocate_exact in numpy: rows of each lane from q [N, WIDTH] when all share budget · N."""
    lanes = len(scores)
    taken = np.argsort(-scores[:, 1:].T.reshape(-1), kind="stable")[: (budget - 1) * lanes]
    return 1 + np.bincount(taken % lanes, minlength=lanes)


class Loop:
    """Requests that decode for ever. tokens, seconds: so far."""

    def __init__(self, lanes: int) -> None:
        self.position = np.arange(lanes) * 97
        self.tokens, self.seconds = 0, 0.0

    def step(self, text: Text, slots: int, milliseconds: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Verified rows, accepted drafts, and q [N, WIDTH]."""
        lanes = len(self.position)
        place = np.arange(lanes), self.position % POSITIONS
        scores = text.scores[place]
        verified = lengths(scores, slots) if slots < WIDTH else np.full(lanes, WIDTH)
        accepted = np.minimum(text.lengths[place], verified - 1)
        self.position += accepted + 1
        self.tokens += int(accepted.sum()) + lanes
        self.seconds += milliseconds / 1e3
        return verified, accepted, scores


@cache
def fixed_speed(lanes: int, slots: int, progress: float = 6.09) -> float:
    """Tokens a second of a fixed budget."""
    loop = Loop(lanes)
    for _ in range(3000):
        loop.step(text(progress), slots, TIMES[lanes][slots])
    return loop.tokens / loop.seconds


def made(beyond: float = 0.0, wrong: dict[int, float] | None = None) -> Auto:
    """`auto` as it is built for a GPU. beyond: ms a row that real steps take beyond their replays; wrong: by rows a
    request, the share by which replays are too slow."""

    def replay(live: int, shape: StepShape) -> float:
        slots, false = int(shape.share), wrong or {}
        return (1 + false.get(slots, 0.0)) * (TIMES[live][slots] - beyond * (slots + 4)) / 1e3

    costs = ReplayCosts(replay)
    auto = Auto(NoScorer(), NoScorer(), WIDTH, costs, False, BUDGETS)
    costs.shapes = auto.shapes
    return auto


def play(auto: Auto, loop: Loop, text: Text, steps: int, noise: float = 0.01, pull: float = 0.0) -> Iterator[StepShape]:
    """Steps of `auto`, whose results it sees one step late; times have this relative noise. pull: share of a step's
    time that what the steps before it verified adds or takes, by the logarithm of the ratio (clocks that lag)."""
    rng, lanes = np.random.default_rng(5), len(loop.position)
    late: StepOutcome | None = None
    heat: float | None = None
    for _ in range(steps):
        shape = auto.shape(lanes)
        load = float(np.log(shape.share))
        heat = load if heat is None else heat + (load - heat) / 5
        took = TIMES[lanes][int(shape.share)] * (1 + pull * (heat - load) + noise * rng.standard_normal())
        verified, accepted, scores = loop.step(text, int(shape.share), took)
        known = torch.from_numpy(scores) if shape.scored and shape.width > 1 else None
        draft = Draft(torch.zeros(lanes, shape.width - 1, dtype=torch.int64), known)
        if late is not None:
            auto.observe(late)
        late = StepOutcome(shape, draft, verified.tolist(), accepted.tolist(), [True] * lanes, took / 1e3)
        yield shape


@pytest.mark.parametrize(
    ("lanes", "beyond"), [(1, 0.0), (8, 0.0), (8, 0.02), (12, 0.02), (16, 0.0), (24, 0.0), (32, 0.02)]
)
def test_it_keeps_up_with_the_best_fixed_budget(lanes: int, beyond: float) -> None:
    loop = Loop(lanes)
    shapes = list(play(made(beyond), loop, text(6.09), 5000))
    best = max(fixed_speed(lanes, slots) for slots in BUDGETS)
    assert len(shapes) == 5000
    assert loop.tokens / loop.seconds >= 0.99 * best


def expected_speed(shapes: list[StepShape], lanes: int) -> float:
    """Tokens a second in the long run of these steps, whatever text they met."""
    slots = [int(shape.share) for shape in shapes]
    seconds = [TIMES[lanes][one] / 1e3 for one in slots]
    tokens = sum(fixed_speed(lanes, one) * took for one, took in zip(slots, seconds, strict=True))
    return tokens / sum(seconds)


MISLEADING = [
    (8, {12: -0.05, 16: 0.05}),
    (16, {8: 0.05, 12: -0.05, 16: -0.05}),
    (24, {6: -0.05, 8: 0.05, 12: -0.05, 16: 0.05}),
    (28, {8: 0.04}),
    (28, {4: -0.05, 6: 0.05, 8: 0.05, 12: -0.05}),
    (32, {4: 0.05, 6: -0.05, 8: 0.05, 12: -0.05, 16: -0.05}),
]


@pytest.mark.parametrize(("lanes", "wrong"), MISLEADING)
def test_replays_that_mislead_are_found_out(lanes: int, wrong: dict[int, float]) -> None:
    """The rival's time is corrected though it is not the choice."""
    shapes = list(play(made(0.01, wrong), Loop(lanes), text(6.09), 2000))
    best = max(fixed_speed(lanes, slots) for slots in (8, 16))
    assert expected_speed(shapes, lanes) >= 0.99 * best
    looks = sum(a.share != b.share for a, b in pairwise(shapes[500:]))
    assert looks < 0.25 * 1500


@pytest.mark.parametrize("wrong", [{}, {8: 0.05}, {8: 0.05, 12: -0.05}])
def test_a_size_is_judged_by_steps_among_their_like(wrong: dict[int, float]) -> None:
    """A step of 8 slots alone among those of 12 takes 2.4% longer than among its like, one of 12 among those of 8 as
    much less: by such steps either would stay the choice, though 8 slots give 3% more."""
    shapes = list(play(made(0.01, wrong), Loop(28), text(6.09), 2000, noise=0.005, pull=0.06))
    assert expected_speed(shapes, 28) >= 0.99 * fixed_speed(28, 8)
    assert sum(shape.share == 8 for shape in shapes[500:]) > 0.7 * 1500


def test_slow_steps_now_and_then_do_not_decide() -> None:
    """One step in fifty takes half as long again, the very first three times as long."""
    auto, loop, rng = made(0.01, {8: 0.03}), Loop(28), np.random.default_rng(3)
    costs, hiccups = auto.costs, iter([3.0, *np.where(rng.random(2000) < 0.02, 1.5, 1.0)])
    observe = costs.observe
    costs.observe = lambda live, shape, seconds: observe(live, shape, seconds * next(hiccups))  # type: ignore[method-assign]
    shapes = list(play(auto, loop, text(6.09), 1500))
    assert expected_speed(shapes, 28) >= 0.99 * fixed_speed(28, 8)


def hardened(easy: Text, told: bool) -> Text:
    """Where hardly any draft passes. told: the scores say so; else they go on promising what the easy text holds."""
    scores = easy.scores * np.float32(0.1) ** np.arange(WIDTH, dtype=np.float32)
    chance = np.random.default_rng(1).random((*easy.lengths.shape, 1))
    return Text((chance < scores[..., 1:]).sum(-1), scores if told else easy.scores)


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("lanes", [8, 32])
def test_it_follows_within_200_steps_when_acceptance_falls_and_returns(lanes: int, told: bool) -> None:
    auto, loop, easy = made(), Loop(lanes), text(6.09)
    before = [shape.share for shape in play(auto, loop, easy, 600)]
    fallen = [shape.share for shape in play(auto, loop, hardened(easy, told), 700)]
    again = [shape.share for shape in play(auto, loop, easy, 600)]
    assert np.mean(np.array(fallen[200:]) == 1) > 0.9
    best = max(before[200:], key=before[200:].count)
    assert best in {8: (12, 16), 32: (8,)}[lanes]
    assert max(again[200:], key=again[200:].count) in {8: (12, 16), 32: (8,)}[lanes]
    assert sum(share in (1, 4) for share in again[200:]) < 4


def test_whole_blocks_are_not_scored_but_some_steps_among_them_are() -> None:
    auto, loop = made(), Loop(1)
    shapes = list(play(auto, loop, text(6.09), 2000))[200:]
    whole = [shape for shape in shapes if shape.share == WIDTH]
    assert not any(shape.scored for shape in whole)
    assert len(whole) > 0.9 * len(shapes)
    assert {shape.share for shape in shapes if shape.scored} == {12}
    lanes = torch.tensor([True, True, False])
    assert auto.lengths(Draft(torch.zeros(3, WIDTH - 1)), whole[0], lanes).tolist() == [WIDTH, WIDTH, 0]


def test_another_load_is_sized_at_its_first_step() -> None:
    auto, loop = made(), Loop(8)
    list(play(auto, loop, text(6.09), 400))
    for lanes, slots in ((32, (8,)), (8, (12, 16)), (24, (8,))):
        shares = [shape.share for shape in play(auto, Loop(lanes), text(6.09), 10)]
        assert sum(share in slots for share in shares) >= 7  # the others are looks


def test_the_only_budget_there_is_is_scored() -> None:
    costs = ReplayCosts(lambda live, shape: shape.share)
    auto = Auto(NoScorer(), NoScorer(), 4, costs, False, BUDGETS)
    assert [(shape.width, shape.rows, shape.scored) for shape in auto.shapes(3)] == [(1, 3, True), (4, 12, True)]


def test_times_of_a_size_are_corrected_by_its_own_steps() -> None:
    """What the first size takes goes to all; then 8 rows prove dearer than replayed, against 4 rows."""
    costs = ReplayCosts(lambda live, shape: shape.share / 1e3)
    auto = Auto(NoScorer(), NoScorer(), WIDTH, costs, False, (4, 8, 16))
    costs.shapes = auto.shapes
    _, four, eight, _ = auto.shapes(2)
    for _ in range(40):
        costs.observe(2, four, 5e-3)  # 1 ms beyond its replay, as all
    assert costs.times(2, WIDTH, np.array([8.0, 16.0, 32.0])) * 1e3 == pytest.approx([5, 9, 17], abs=0.05)
    assert float(costs.times(2, 1, 2.0)) * 1e3 == pytest.approx(2, abs=0.05)
    assert list(costs.doubts(2, four) > 0.01) == [True, False, True, True]
    for shape, seconds in ((eight, 9.5e-3), (four, 5e-3)) * 2:
        for _ in range(40):
            costs.observe(2, shape, seconds)
    assert costs.times(2, WIDTH, np.array([8.0, 16.0])) * 1e3 == pytest.approx([5, 9.5], abs=0.05)
    assert list(costs.doubts(2, four) > 0.01) == [True, False, False, True]
    assert float(costs.times(3, WIDTH, 24.0) - costs.times(3, WIDTH, 12.0)) * 1e3 == pytest.approx(4.5, abs=0.1)
    costs.observe(2, four, 1.0)  # a hiccup
    assert float(costs.times(2, WIDTH, 8.0)) < 6e-3


def test_the_time_of_a_step_is_that_of_the_requests_it_was_launched_for() -> None:
    """Nine requests share a bucket of sixteen; one has ended when the step is read, and eight have one of their own."""
    costs = ReplayCosts(lambda live, shape: (8 if live <= 8 else 16) * shape.share / 1e3)
    auto = Auto(NoScorer(), NoScorer(), WIDTH, costs, False, (4, 8, 16))
    costs.shapes = auto.shapes
    whole, draft = auto.shapes(9)[-1], Draft(torch.zeros(8, WIDTH - 1, dtype=torch.int64), None)
    auto.observe(StepOutcome(whole, draft, [WIDTH] * 8, [3] * 8, [True] * 8, 0.256, launched=9))
    assert costs.times(9, WIDTH, 9.0 * WIDTH) == pytest.approx(0.256, rel=1e-3)
    assert costs.times(8, WIDTH, 8.0 * WIDTH) == pytest.approx(0.128, rel=1e-3)


def test_what_all_sizes_share_is_a_first_guess_for_other_requests() -> None:
    costs = ReplayCosts(lambda live, shape: live * shape.share / 1e3)
    auto = Auto(NoScorer(), NoScorer(), WIDTH, costs, False, (4, 8, 16))
    costs.shapes = auto.shapes
    for _ in range(20):
        costs.observe(2, auto.shapes(2)[2], 16e-3 + 0.2 * 14.5e-3)  # 20% of the mean replay more
    assert costs.times(4, WIDTH, np.array([16.0, 64.0])) * 1e3 == pytest.approx([16 + 5.8, 64 + 5.8], rel=0.01)


def test_a_request_more_or_less_is_no_new_question() -> None:
    """15 and 16 requests share steps and a round number, 16 and 20 share steps, 8 and 7 a number alone."""
    costs = ReplayCosts(lambda live, shape: (8 if live < 8 else 16) * shape.share / 1e3)
    auto = Auto(NoScorer(), NoScorer(), WIDTH, costs, False, (4, 8, 16))
    costs.shapes = auto.shapes
    choice, reviewed = auto.captured, []
    assert choice is not None
    review = choice._review
    choice._review = lambda live: (reviewed.append(live), review(live))  # type: ignore[method-assign]
    for live in (16, 15, 16, 20, 20, 8, 7):
        auto.shape(live)
    assert reviewed == [16, 20, 8, 7]
