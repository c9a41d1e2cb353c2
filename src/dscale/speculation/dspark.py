"""DSpark's way to size verification, as a serving policy (dscale.md §6, `dspark`).

    q_j = Π_{t ≤ j} σ(c_t / T_t)                c_t: log-odds of the drafter's own confidence in draft t
    M   = the token bucket with the highest (N + Σ top-(M-N) of q) · steps per second at M

DSpark's drafter has a confidence head; a plain DFlash drafter has none, so the probability of its top-1 token stands
for it. Temperatures are fitted to what was served, one position after the other with the earlier ones fixed
(sequential temperature scaling). M comes from the q of two steps before, so that no step waits for its own draft; the
step's own q then says which slots are taken.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dscale.kernels.top_logits import top_logits
from dscale.models.decoder import Target
from dscale.speculation.budget import allocate_exact
from dscale.speculation.confidence import signals
from dscale.speculation.costs import Costs
from dscale.speculation.policies import Draft, Policy, Scorer, StepOutcome
from dscale.speculation.transfer import place_tensor
from dscale.speculation.workspace import StepShape

TEMPERATURES = np.exp(np.linspace(np.log(0.25), np.log(8.0), 57))
BUCKET = 8  # rows between token buckets, on recorded traces
SHARES = (1, 2, 4, 6, 8, 10, 12, 16)  # rows a request of the token buckets served: each is a captured step
DELAY = 2  # steps between the scores that size a step and the step (a step more where results are read late)
FIRST_FIT, LAST_FIT = 32, 1024  # steps before the first fit of the temperatures; at most so many between two
KEPT = 2048  # verified blocks that a fit looks at
Ints = NDArray[np.int64]
Floats = NDArray[np.float32]


def tempered(odds: Tensor, temperatures: Tensor) -> Tensor:
    """q [n, D+1] from log-odds [n, D] and T [at least D], float32: Π_{t ≤ j} σ(odds_t / T_t), 1 first."""
    passes = torch.sigmoid(odds / temperatures[: odds.shape[1]]).cumprod(-1)
    return torch.cat([torch.ones_like(passes[:, :1]), passes], dim=-1)


def fit_temperatures(odds: Tensor, accepted: Ints, slots: Ints) -> Floats:
    """T float32 [D]: position by position the temperature of TEMPERATURES with the least log-loss of q_j against
    "at least j drafts passed", over records in which that was seen."""
    values = odds.double().numpy()
    product = np.ones(len(values))
    out = np.ones(values.shape[1], np.float32)
    for j in range(values.shape[1]):
        seen = (j + 1 < slots) | (accepted < slots - 1)
        passed = accepted > j
        best, best_loss = product, np.inf
        for temperature in TEMPERATURES:
            q = product / (1.0 + np.exp(-values[:, j] / temperature))
            chance = np.clip(q, 1e-9, 1 - 1e-9)
            loss = -np.where(passed, np.log(chance), np.log1p(-chance))[seen].sum()
            if loss < best_loss:
                best, best_loss, out[j] = q, loss, temperature
        product = best
    return out


def token_buckets(lanes: int, width: int) -> Ints:
    """Rows of a step, ascending: `lanes`, the multiples of BUCKET above it, and lanes · width."""
    top = lanes * width
    between = np.arange(BUCKET, top, BUCKET)
    return np.concatenate([[lanes], between[between > lanes], [top]]).astype(np.int64)


def best_bucket(q: NDArray, buckets: Ints, per_second: NDArray) -> Ints:
    """The bucket of the most tokens a second for each of S steps: q [S, N, W], steps per second by bucket → [S]."""
    lanes = q.shape[1]
    falling = -np.sort(-q[:, :, 1:].reshape(len(q), -1), axis=1)
    gained = np.concatenate([np.zeros((len(q), 1)), falling.cumsum(1, dtype=np.float64)], axis=1)
    return buckets[((lanes + gained[:, buckets - lanes]) * per_second).argmax(1)]


@dataclass(frozen=True)
class _Verified:
    """Blocks of one step: log-odds [n, D] on the CPU, accepted drafts and verified slots int64 [n]."""

    odds: Tensor
    accepted: Ints
    slots: Ints


class TemperedScorer(Scorer):
    """Product of the drafter's own confidences, each with a temperature that is fitted to what is served.

    The fits come after 32, 64, 128 … steps and then every 1024: each costs tens of milliseconds on the host.
    """

    name = "dspark"

    def __init__(self, width: int, device: torch.device | str = "cpu") -> None:
        self.temperatures = torch.ones(width - 1, device=device)
        self._blocks: deque[_Verified] = deque()
        self._steps, self._next = 0, FIRST_FIT

    def read(self, hidden: Tensor, target: Target, live: Tensor, initial: Tensor) -> Draft:
        top = top_logits(target.logits(hidden.flatten(0, 1)).view(*hidden.shape[:2], -1))
        return Draft(top.ids[..., 0], tempered(signals(top)[0], self.temperatures), top)

    def observe(self, outcome: StepOutcome) -> None:
        if outcome.draft.top is None or outcome.draft.top.values.shape[1] != len(self.temperatures):
            return
        clean = np.array(outcome.clean, bool)
        odds = signals(outcome.draft.top)[0].cpu()[torch.from_numpy(clean)]
        self._blocks.append(_Verified(odds, np.array(outcome.accepted)[clean], np.array(outcome.slots)[clean]))
        while sum(len(one.slots) for one in self._blocks) - len(self._blocks[0].slots) > KEPT:
            self._blocks.popleft()
        self._steps += 1
        if self._steps >= self._next:
            self._next += min(self._next, LAST_FIT)
            self._fit()

    def _fit(self) -> None:
        odds = torch.cat([one.odds for one in self._blocks])
        accepted, slots = (
            np.concatenate([getattr(one, name) for one in self._blocks]) for name in ("accepted", "slots")
        )
        if len(odds):  # in place: a captured step reads this very tensor
            place_tensor(torch.from_numpy(fit_temperatures(odds, accepted, slots)), self.temperatures)


class DSpark(Policy):
    """Whole drafts; the rows verified are the token bucket that promised most by the scores of two steps before."""

    name = "dspark"

    def __init__(self, scorer: Scorer, width: int, costs: Costs) -> None:
        self.scorer, self.width, self.costs = scorer, width, costs
        self.shares = sorted({min(share, width) for share in (*SHARES, width)})
        self._recent: deque[NDArray] = deque(maxlen=DELAY)  # q [N, W] of past steps

    def shape(self, live: int) -> StepShape:
        return self._shape(live, self._share(live))

    def shapes(self, live: int) -> list[StepShape]:
        return [self._shape(live, share) for share in self.shares]

    def _shape(self, live: int, share: int) -> StepShape:
        return StepShape(width=self.width, head=self.width - 1, rows=live * share, share=share)

    def _share(self, live: int) -> int:
        if len(self._recent) < DELAY:
            return self.width
        buckets = live * np.array(self.shares)
        per_second = 1.0 / self.costs.times(live, self.width, buckets.astype(np.float64))
        q = self._recent[0]
        if len(q) != live:  # requests came or went: as many rows of the same kind
            q = q[np.arange(live) * len(q) // live]
        return int(best_bucket(q[None], buckets, per_second)[0]) // live

    def read_draft(self, hidden: Tensor, target: Target, live: Tensor, initial: Tensor) -> Draft:
        return self.scorer.read(hidden, target, live, initial)

    def lengths(self, draft: Draft, shape: StepShape, live: Tensor) -> Tensor:
        assert draft.survival is not None
        return allocate_exact(draft.survival, shape.budget(live), live)

    def observe(self, outcome: StepOutcome) -> None:
        lanes = len(outcome.slots)
        self.costs.observe(outcome.live, outcome.shape, outcome.seconds)
        if outcome.draft.survival is not None:
            self._recent.append(outcome.draft.survival[:lanes].cpu().numpy())
        self.scorer.observe(outcome)
