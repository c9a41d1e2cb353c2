"""Every policy on the same recorded drafts: which rows it would have verified, what it would have kept (dscale.md §6).

N requests are replayed side by side, each lane walking the recorded steps of one request in order and taking the next
request when that one ends, as a server with N lanes would. Of a recorded step with y accepted drafts, verification of
k rows emits 1 + min(y, k - 1) tokens.

Limit: the recorded steps stand where whole blocks would have led. A trimmed verification leaves a request earlier in
its text, and the block drafted there was not recorded; the replay goes on at the next recorded step all the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from dscale.config import require
from dscale.evaluate.cost_curve import MeasuredCosts
from dscale.evaluate.survival_models import Recorded, confidence_replay
from dscale.speculation.auto import Auto
from dscale.speculation.budget import initial_windows
from dscale.speculation.confidence import ConfidenceModel
from dscale.speculation.dspark import DELAY, best_bucket, token_buckets
from dscale.speculation.policies import ConfidenceScorer, Draft, Scorer, StepOutcome
from dscale.speculation.workspace import StepShape
from dscale.train.traces import Traces

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]


def lane_steps(traces: Traces, lanes: int, seed: int) -> Ints:
    """int64 [S, lanes]: the record on each lane at each step. Requests in a seeded random order; the replay ends with
    the last step that fills every lane."""
    order = np.lexsort((traces.position, traces.request))
    _, starts = np.unique(traces.request[order], return_index=True)
    walks = np.split(order, starts[1:])
    require(
        len(walks) >= lanes, f"concurrency: {lanes} requests side by side, but there are only {len(walks)} in the part"
    )
    queue = [walks[i] for i in np.random.default_rng(seed).permutation(len(walks))]
    columns: list[list[np.ndarray]] = [[] for _ in range(lanes)]
    ends = np.zeros(lanes, np.int64)
    for walk in queue:  # the lane that is free first takes the next request, the lowest of several
        lane = int(ends.argmin())
        columns[lane].append(walk)
        ends[lane] += len(walk)
    return np.stack([np.concatenate(parts)[: ends.min()] for parts in columns], axis=1).astype(np.int64)


@dataclass(frozen=True)
class Arm:
    """What a policy did: k [S, N] rows verified, drafted [S] bool, seconds [S]. slots: its budget, None for its own.

    ceiling: retention of the best sharing of as many rows at every step; objective: mean Σ q over the verified slots,
    where q is the policy's own.
    """

    policy: str
    slots: int | None
    k: Ints
    drafted: NDArray[np.bool_]
    seconds: NDArray[np.float64]
    ceiling: float
    objective: float | None = None


def ranks(scores: NDArray) -> Ints:
    """Place of every score in its row [S, C], highest first; among equals the earlier first."""
    order = np.argsort(-scores, axis=1, kind="stable")
    place = np.empty_like(order)
    np.put_along_axis(place, order, np.broadcast_to(np.arange(scores.shape[1]), scores.shape), axis=1)
    return place


class Exact:
    """speculation.budget.allocate_exact for many steps and budgets: q [S, N, W]."""

    def __init__(self, q: Floats) -> None:
        self.steps, self.lanes, self.width = q.shape
        self._place = ranks(q[:, :, 1:].transpose(0, 2, 1).reshape(self.steps, -1))

    def lengths(self, total: int | Ints) -> Ints:
        """k [S, N] for `total` rows a step, one number or one per step."""
        extra = np.clip(np.broadcast_to(total, self.steps), self.lanes, self.lanes * self.width) - self.lanes
        taken = self._place < extra[:, None]
        return 1 + taken.reshape(self.steps, self.width - 1, self.lanes).sum(1)


class Seeded:
    """speculation.budget.allocate_seeded for many steps and budgets: q [S, N, W]."""

    def __init__(self, q: Floats) -> None:
        self.steps, self.lanes, self.width = q.shape
        self.start = raw_windows(q)
        position = np.arange(self.width)
        grow = position >= self.start[..., None]
        drop = (position >= 1) & ~grow
        self._grow = ranks(np.where(grow, q, -1.0).reshape(self.steps, -1))
        self._drop = ranks(np.where(drop, -q, -2.0)[..., ::-1].reshape(self.steps, -1))

    def lengths(self, total: int) -> Ints:
        """k [S, N] for `total` rows a step."""
        missing = np.clip(total, self.lanes, self.lanes * self.width) - self.start.sum(1)

        def count(place: Ints, turns: Ints) -> Ints:
            return (place < turns[:, None]).reshape(self.steps, self.lanes, self.width).sum(-1)

        return self.start + count(self._grow, missing) - count(self._drop, -missing)


def raw_windows(q: Floats) -> Ints:
    """k⁰ of q [S, N, W], before any sharing."""
    return initial_windows(torch.from_numpy(q.reshape(-1, q.shape[-1]))).numpy().reshape(q.shape[:-1])


def objective(q: Floats, k: Ints) -> float:
    """Mean over the steps of Σ_i Σ_{j < k_i} q_{i,j}."""
    chosen = np.arange(q.shape[-1]) < k[..., None]
    return float((q.astype(np.float64) * chosen).sum() / len(q))


@dataclass(frozen=True)
class Lab:
    """One concurrency: the recorded steps side by side, and what steps cost."""

    recorded: Recorded
    rows: Ints  # [S, N]
    costs: MeasuredCosts

    @property
    def lanes(self) -> int:
        """N."""
        return self.rows.shape[1]

    @property
    def width(self) -> int:
        """W."""
        return self.recorded.width

    @cached_property
    def passed(self) -> Ints:
        """y [S, N]: drafts of the whole block that are accepted."""
        return self.recorded.accepted[self.rows]

    @cached_property
    def _passes(self) -> Floats:
        return (np.arange(self.width) <= self.passed[..., None]).astype(np.float32)

    @cached_property
    def _oracle(self) -> Exact:
        return Exact(self._passes)

    def arm(
        self, policy: str, slots: int | None, k: Ints, drafted: bool | NDArray = True, adaptive: bool = False,
        q: Floats | None = None,
    ) -> Arm:  # fmt: skip
        """An arm with its times. adaptive: its decision costs something as well."""
        used, did = k.sum(1), np.broadcast_to(drafted, len(k)).copy()
        with_draft = self.costs.times(self.lanes, self.width, used.astype(np.float64))
        with_draft = with_draft + (self.costs.decide(self.lanes) if adaptive else 0.0)
        plain = self.costs.times(self.lanes, 1, float(self.lanes)) if not did.all() else 0.0
        seconds = np.where(did, with_draft, plain)
        best = np.minimum(self.passed, self._oracle.lengths(used) - 1).sum() / max(self.passed.sum(), 1)
        promised = objective(q, k) if q is not None else None
        return Arm(policy, slots, k, did, seconds, float(best) if self.passed.any() else 1.0, promised)

    def fixed(self) -> list[Arm]:
        """off, fixed:2 … fixed:(W-1), full."""
        ones = np.ones_like(self.rows)
        arms = [self.arm("off", 1, ones, drafted=False)]
        arms += [self.arm(f"fixed:{w}", w, ones * w) for w in range(2, self.width)]
        return [*arms, self.arm("full", self.width, ones * self.width)]

    def shared(self, policy: str, q: Floats, budgets: tuple[int, ...], seeded: bool = False) -> list[Arm]:
        """A budget shared by all lanes, for each number of slots a request."""
        allocate = Seeded(q) if seeded else Exact(q)
        return [self.arm(policy, b, allocate.lengths(b * self.lanes), adaptive=True, q=q) for b in budgets]

    def oracle(self, budgets: tuple[int, ...]) -> list[Arm]:
        """The most that any sharing could keep, and its own budget: exactly the drafts that pass and one row more."""
        own = self.arm("oracle", None, np.minimum(self.passed + 1, self.width), adaptive=True)
        return [*self.shared("oracle", self._passes, budgets), own]

    def confidence(self, budgets: tuple[int, ...]) -> list[Arm]:
        """The online logistic from its day-one parameters, for each budget anew, since what it sees depends on k."""
        out = []
        for slots in budgets:

            def allocate(q: Floats, slots: int = slots) -> Ints:
                return Exact(q).lengths(slots * self.lanes)

            k, q = confidence_replay(self.recorded, self.rows, allocate)
            out.append(self.arm("confidence", slots, k, adaptive=True, q=q))
        return out

    def dspark(self, q: Floats, budgets: tuple[int, ...]) -> list[Arm]:
        """Its scores under fixed budgets, and its own: the token bucket that promises most by the steps-per-second
        table, from the scores of two steps before."""
        buckets = token_buckets(self.lanes, self.width)
        per_second = 1.0 / self.costs.times(self.lanes, self.width, buckets.astype(np.float64))
        best = best_bucket(q, buckets, per_second)
        total = np.concatenate([np.full(min(DELAY, len(q)), buckets[-1]), best[:-DELAY]])
        own = self.arm("dspark", None, Exact(q).lengths(total), adaptive=True, q=q)
        return [*self.shared("dspark", q, budgets), own]

    def auto(self, q: Floats | None, resizes: bool) -> Arm:
        """speculation.auto over these steps, whole blocks or none. q: of the predictor; None scores by confidence."""
        scorer = _RecordedScorer(ConfidenceScorer(ConfidenceModel.day_one(self.width)) if q is None else None)
        policy = _WholeBlocks(scorer, self.width, self.costs, resizes)
        live = torch.ones(self.lanes, dtype=torch.bool)
        k, drafted = np.ones_like(self.rows), np.zeros(len(self.rows), bool)
        for step, records in enumerate(self.rows):
            shape = policy.shape(self.lanes)
            drafted[step] = shape.width > 1
            draft = Draft(torch.zeros(self.lanes, shape.width - 1))
            if drafted[step]:
                top = self.recorded.top.select(torch.from_numpy(records))
                known = scorer.confidence.model.survival(top) if q is None else torch.from_numpy(q[step])
                draft = Draft(draft.tokens, known, top)
            shape = policy.resize(draft, shape, live)
            k[step] = policy.lengths(draft, shape, live).numpy()
            kept = np.minimum(self.recorded.accepted[records], k[step] - 1)
            seen = np.minimum(self.recorded.slots[records], k[step])
            seconds = float(self.costs.times(self.lanes, shape.width, float(k[step].sum())))
            clean = [True] * self.lanes
            policy.observe(StepOutcome(shape, draft, seen.tolist(), kept.tolist(), clean, seconds))
        return self.arm("auto", None, k, drafted, adaptive=True)


class _RecordedScorer(Scorer):
    """Stands for a scorer whose survival is known from the record; the confidence, if any, still learns."""

    name = "recorded"

    def __init__(self, confidence: ConfidenceScorer | None) -> None:
        self._confidence = confidence

    @property
    def confidence(self) -> ConfidenceScorer:
        assert self._confidence is not None
        return self._confidence

    def read(self, hidden: torch.Tensor, target: object, live: torch.Tensor, initial: torch.Tensor) -> Draft:
        raise NotImplementedError("recorded drafts are not read from a drafter")

    def observe(self, outcome: StepOutcome) -> None:
        if self._confidence is not None:
            self._confidence.observe(outcome)


class _WholeBlocks(Auto):
    """auto that drafts whole blocks or none: narrower blocks would be other drafts than the recorded ones."""

    def __init__(self, scorer: Scorer, width: int, costs: MeasuredCosts, resizes: bool) -> None:
        super().__init__(scorer, scorer, width, costs, resizes)
        self.widths = [width]

    def _probe(self, live: int) -> StepShape:
        rows = max(live * min(self.width, 3), self._choice.rows)
        return StepShape(width=self.width, head=self.width - 1, rows=rows)
