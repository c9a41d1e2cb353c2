"""How easy a text is to draft, as a model to draw acceptance from (measurement.md §7; used by simulated.py).

Two stages. Every REGION positions of a text lie in one of REGIONS classes of ease, every anchor besides in one of
ANCHORS classes of its own; all classes are equally likely, and ρ is the share of the variance that lasts for a region:

    m(r, x) = centre + spread · (√ρ · Φ⁻¹((r + ½) / REGIONS) + √(1 - ρ) · Φ⁻¹((x + ½) / ANCHORS))
    q_j(m)  = σ(m)^j                                                    j = 0 … 15
    P(at least j drafts of a whole block pass) = q_j(m)

So q is the true chance given what a predictor sees (both classes), and stays so under every policy, because given the
classes of an anchor its length does not depend on how the anchor was reached. `centre` and `spread` are solved for the
mean progress of a walk that verifies whole blocks and for the Spearman correlation of Σ q with the accepted length
along it; both are exact sums over a Markov chain of the anchor's place in its region. The shape is checked by what it
was not fitted to: shared budgets of 8 slots a request keep 87…90% of the accepted drafts (N = 8…32), raw windows k⁰
64%; the paper has 91.5% and 71% for Qwen3 (dscale.md §2).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from dscale.config import require

REGION = 32  # positions of a text that share their ease
REGIONS, ANCHORS = 16, 64  # classes; powers of two
WIDTH = 16  # of a block: at most 15 drafts pass
PERSISTENCE = 0.35  # ρ
DIGITS = 4  # to which centre and spread are rounded, so that every machine makes the same table
Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Ease:
    """Parameters of the model: see the module's text."""

    centre: float
    spread: float
    persistence: float = PERSISTENCE

    def survival(self) -> Numbers:
        """q [REGIONS · ANCHORS, WIDTH], row r · ANCHORS + x; 1 first, nonincreasing."""
        lasting, own = np.sqrt(self.persistence), np.sqrt(1 - self.persistence)
        seen = lasting * normal_classes(REGIONS)[:, None] + own * normal_classes(ANCHORS)
        odds = self.centre + self.spread * seen.reshape(-1, 1)
        return (1.0 / (1.0 + np.exp(-odds))) ** np.arange(WIDTH)


def normal_classes(count: int) -> Numbers:
    """Middles, by mass, of `count` equally likely parts of the standard normal distribution: [count]."""
    return np.array([NormalDist().inv_cdf((index + 0.5) / count) for index in range(count)])


@dataclass(frozen=True)
class Walk:
    """What a walk that verifies whole blocks meets: anchors [REGIONS], the share of its anchors in regions of each
    class; progress, tokens a step."""

    anchors: Numbers
    progress: float


def lengths(survival: Numbers) -> Numbers:
    """P(exactly j drafts pass), j = 0 … 15, from q [..., WIDTH]."""
    return survival - np.append(survival[..., 1:], np.zeros_like(survival[..., :1]), axis=-1)


def walk(survival: Numbers) -> Walk:
    """The stationary walk over regions in random order, from q [REGIONS · ANCHORS, WIDTH].

    visits[r, e, o]: chance to stand at place o of a region of class r that was entered at place e < WIDTH.
    """
    step = lengths(survival).reshape(REGIONS, ANCHORS, WIDTH).mean(1)  # step[r, t - 1]: t tokens
    visits = np.zeros((REGIONS, WIDTH, REGION + WIDTH))
    visits[:, np.arange(WIDTH), np.arange(WIDTH)] = 1.0
    for place in range(REGION):
        visits[:, :, place + 1 : place + 1 + WIDTH] += visits[:, :, place, None] * step[:, None, :]
    inside, exits = visits[:, :, :REGION].sum(2), visits[:, :, REGION:]
    entries = stationary(exits.mean(0))
    steps = inside @ entries  # [REGIONS]
    return Walk(steps / steps.sum(), float(REGION / steps.mean()))


def stationary(transition: Numbers) -> Numbers:
    """The distribution π with π · transition = π, of a matrix [S, S] whose rows sum to 1."""
    size = len(transition)
    equations = np.vstack([transition.T - np.eye(size), np.ones(size)])
    return np.linalg.lstsq(equations, np.append(np.zeros(size), 1.0), rcond=None)[0]


def rank_correlation(survival: Numbers, anchors: Numbers) -> float:
    """Spearman correlation, over the anchors of a walk, of the expected with the accepted length."""
    weight = np.repeat(anchors / ANCHORS, ANCHORS)
    joint = weight[:, None] * lengths(survival)
    expected = survival[:, 1:].sum(1)
    order = expected.argsort(kind="stable")
    rank = np.empty_like(expected)
    rank[order] = middles(weight[order])
    reached = middles(joint.sum(0))
    a, b = rank - 0.5, reached - 0.5  # mean ranks are one half
    spread = np.sqrt((weight * a**2).sum() * (joint.sum(0) * b**2).sum())
    return float((a[:, None] * joint * b).sum() / spread)


def middles(mass: Numbers) -> Numbers:
    """Mid-ranks in [0, 1] of ordered values that have these masses."""
    return mass.cumsum() - mass / 2


@lru_cache
def fit(progress: float, spearman: float, persistence: float = PERSISTENCE) -> Ease:
    """The model of this mean progress of whole blocks and this rank correlation; InputError where there is none."""
    require(1.0 < progress < WIDTH, f"simulated acceptance: progress {progress} must lie between 1 and {WIDTH}")
    require(0.0 < spearman < 1.0, f"simulated acceptance: spearman {spearman} must lie between 0 and 1")
    require(0.0 <= persistence <= 1.0, f"simulated acceptance: persistence {persistence} must lie in [0, 1]")

    def centred(spread: float) -> Ease:
        def error(centre: float) -> float:
            return walk(Ease(centre, spread, persistence).survival()).progress - progress

        return Ease(root(error, -12.0, 12.0), spread, persistence)

    def correlation(spread: float) -> float:
        survival = centred(spread).survival()
        return rank_correlation(survival, walk(survival).anchors) - spearman

    require(
        correlation(0.02) < 0 < correlation(8.0),
        f"simulated acceptance: no model has progress {progress} and spearman {spearman}; give less extreme values",
    )
    found = centred(round(root(correlation, 0.02, 8.0), DIGITS))
    return Ease(round(found.centre, DIGITS), found.spread, persistence)


def root(error: Callable[[float], float], low: float, high: float) -> float:
    """Where a rising function crosses zero, by the Illinois variant of regula falsi; the nearer end where it does
    not."""
    left, right = error(low), error(high)
    if left >= 0 or right <= 0:
        return low if left >= 0 else high
    for _ in range(60):
        middle = high - right * (high - low) / (right - left)
        value = error(middle)
        if abs(value) < 1e-7 or high - low < 1e-7:
            return middle
        if value > 0:
            high, right, left = middle, value, left / 2
        else:
            low, left, right = middle, value, right / 2
    return middle
