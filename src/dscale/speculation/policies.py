"""Policies: how many rows of each drafted block the target verifies (dscale.md §6). Drafting stays full length.

off        nothing is drafted; the target decodes one token per request and step
full       every block is verified whole, as DFlash does
fixed:w    the first w rows of every block
dvl        predicted survival q, one budget of `slots` rows per request shared by all (exact or seeded allocation)
confidence the same with q from the draft's own top-1 logit, refit online; needs no trained predictor
dspark     q from products of the draft's tempered confidences; the budget from a table of step times and q of two steps
           before (dspark.py)
auto       the budget, or none, that promises the most committed tokens per second (auto.py)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from dscale.kernels.top_logits import TopLogits, argmax, top_logits
from dscale.models.decoder import Target
from dscale.speculation.confidence import ConfidenceModel
from dscale.speculation.features import FeatureProjections
from dscale.speculation.predictor import Predictor
from dscale.speculation.survival import predicted_survival
from dscale.speculation.transfer import place_tensor
from dscale.speculation.workspace import StepShape

Allocate = Callable[[Tensor, Tensor | int, Tensor], Tensor]  # (q [N, W], total slots, live [N]) → k [N]


@dataclass
class Draft:
    """Drafted tokens [N, D] of every lane and, where a policy wants it, what is believed about them.

    survival q [N, D+1]: probability that at least j drafts are accepted. top: the head's best logits [N, D, …].
    features float16 [N, F]: of blocks that are recorded (engine/recorder.py). ranked: top is for those who learn from
    the step, too; else it stays on the device.
    """

    tokens: Tensor
    survival: Tensor | None = None
    top: TopLogits | None = None
    features: Tensor | None = None
    ranked: bool = True

    @classmethod
    def empty(cls, count: int, device: torch.device) -> Draft:
        """Nothing drafted for `count` lanes."""
        return cls(torch.zeros(count, 0, dtype=torch.int64, device=device))

    def select(self, lanes: Tensor) -> Draft:
        """The same of these lanes, int64."""
        survival, features = (None if one is None else one[lanes] for one in (self.survival, self.features))
        top = None if self.top is None else self.top.select(lanes)
        return Draft(self.tokens[lanes], survival, top, features, self.ranked)


@dataclass
class StepOutcome:
    """What a policy may learn from, on the host: slots and accepted drafts per lane, seconds the step took.

    clean: lanes whose acceptance speaks of the plain target (no penalties, no bias, not cut at an end).
    launched: requests the step was made for, some of which may have ended before it did; 0: these lanes alone.
    """

    shape: StepShape
    draft: Draft
    slots: list[int]
    accepted: list[int]
    clean: list[bool]
    seconds: float
    launched: int = 0

    @property
    def live(self) -> int:
        """Requests that the step's time is that of."""
        return self.launched or len(self.slots)


class Policy(ABC):
    """Decides the size of a step before it starts and the length of each request's verification within it."""

    name: str
    width: int = 1  # of the blocks it drafts; 1: it drafts nothing
    resizes: bool = False  # whether `resize` may change a step's rows

    @abstractmethod
    def shape(self, live: int) -> StepShape:
        """Size of the next step for `live` requests; decided on the host, without reading the device.

        Its share makes the like step of a captured bucket (StepShape.over), so there should be few shares.
        """

    def shapes(self, live: int) -> list[StepShape]:
        """Every size that `shape` may ask for with `live` requests, for capturing them beforehand."""
        return [self.shape(live)]

    def read_draft(self, hidden: Tensor, target: Target, live: Tensor, initial: Tensor) -> Draft:
        """Drafts from hidden rows [N, D, H] of the drafter: the head's top-1, and signals where the policy wants them.

        live [N] bool: lanes in use; initial [N] bool: the request's first step after its prompt.
        """
        return self.read_tokens(hidden, target, live, initial)

    def read_tokens(self, hidden: Tensor, target: Target, live: Tensor, initial: Tensor) -> Draft:
        """Drafts alone, of a step whose shape is not scored; arguments as of `read_draft`."""
        count, drafts, _ = hidden.shape
        return Draft(argmax(target.logits(hidden.flatten(0, 1))).view(count, drafts))

    def resize(self, draft: Draft, shape: StepShape, live: Tensor) -> StepShape:
        """The shape with its rows changed once the draft is known; only where sizes need not be known beforehand."""
        return shape

    @abstractmethod
    def lengths(self, draft: Draft, shape: StepShape, live: Tensor) -> Tensor:
        """k int64 [N]: rows to verify per lane, anchor included, in all at most shape.rows; 0 on lanes not live."""

    def observe(self, outcome: StepOutcome) -> None:
        """Learn from a finished step; where results are read late, one step after the next was sized."""
        return

    def scorers(self) -> tuple[Scorer, ...]:
        """What scores its drafts, the one for whole blocks first; none where nothing does."""
        return ()

    def rescored(self) -> None:
        """Forget how far the scores could be trusted: a scorer was given new parameters."""
        return


class Off(Policy):
    """Autoregressive decoding: one row per request."""

    name = "off"

    def shape(self, live: int) -> StepShape:
        return StepShape(width=1, head=0, rows=live, share=1)

    def lengths(self, draft: Draft, shape: StepShape, live: Tensor) -> Tensor:
        return live.long()


class Fixed(Policy):
    """The same number of rows for every request: the first `rows` of a block of `width`."""

    def __init__(self, width: int, rows: int) -> None:
        self.width, self.rows = width, min(rows, width)
        self.name = "full" if self.rows == width else f"fixed:{rows}"

    def shape(self, live: int) -> StepShape:
        if self.rows == 1:
            return StepShape(width=1, head=0, rows=live, share=1)
        return StepShape(width=self.width, head=self.rows - 1, rows=live * self.rows, share=self.rows)

    def lengths(self, draft: Draft, shape: StepShape, live: Tensor) -> Tensor:
        return live.long() * (shape.head + 1)


class Scorer(ABC):
    """Turns the drafter's output into drafts with survival probabilities q."""

    name: str

    @abstractmethod
    def read(self, hidden: Tensor, target: Target, live: Tensor, initial: Tensor) -> Draft:
        """Drafts, q and top logits from hidden rows [N, D, H]."""

    def observe(self, outcome: StepOutcome) -> None:
        """Refit from a finished step, where the scorer learns online."""
        return


class PredictorScorer(Scorer):
    """The trained predictor (§2)."""

    name = "dvl"

    def __init__(self, predictor: Predictor, projections: FeatureProjections | None) -> None:
        self.predictor, self.projections = predictor, projections

    def read(self, hidden: Tensor, target: Target, live: Tensor, initial: Tensor) -> Draft:
        top = top_logits(target.logits(hidden.flatten(0, 1)).view(*hidden.shape[:2], -1))
        q = predicted_survival(self.predictor, top, hidden, live, initial, self.projections)
        return Draft(top.ids[..., 0], q, top, ranked=False)


class ConfidenceScorer(Scorer):
    """The draft's own top-1 logit, calibrated online (§6); refits once every few steps, from all of them."""

    name = "confidence"
    REFIT_EVERY = 12  # steps

    def __init__(self, model: ConfidenceModel) -> None:
        self.model = model  # what drafts are scored with
        on_host = model.weight.device.type == "cpu"
        self.learner = model if on_host else ConfidenceModel.day_one(model.width)  # what is refit
        self._pending: list[StepOutcome] = []

    def read(self, hidden: Tensor, target: Target, live: Tensor, initial: Tensor) -> Draft:
        top = top_logits(target.logits(hidden.flatten(0, 1)).view(*hidden.shape[:2], -1))
        return Draft(top.ids[..., 0], self.model.survival(top), top)

    def observe(self, outcome: StepOutcome) -> None:
        if outcome.draft.top is not None and any(outcome.clean):
            self._pending.append(outcome)
        if len(self._pending) >= self.REFIT_EVERY:
            self._refit()

    def take(self, weight: Tensor) -> None:
        """Score with these parameters [W+1] from now on, and learn on from them."""
        place_tensor(weight, self.learner.weight)
        if self.learner is not self.model:
            place_tensor(weight, self.model.weight)

    def _refit(self) -> None:
        pending, self._pending = self._pending, []
        for width in {one.shape.width for one in pending}:
            self._learn([one for one in pending if one.shape.width == width])
        if self.learner is not self.model:
            place_tensor(self.learner.weight, self.model.weight)

    def _learn(self, rows: list[StepOutcome]) -> None:
        tops = [row.draft.top for row in rows if row.draft.top is not None]
        device = tops[0].values.device
        clean = torch.tensor([one for row in rows for one in row.clean], device=device)
        slots = torch.tensor([one for row in rows for one in row.slots], device=device)[clean]
        accepted = torch.tensor([one for row in rows for one in row.accepted], device=device)[clean]

        top = TopLogits(*(torch.cat([getattr(top, field.name) for top in tops])[clean] for field in fields(TopLogits)))
        self.learner.observe(top, accepted, slots)


class SharedBudget(Policy):
    """One budget for all requests, spent where q promises most."""

    def __init__(self, scorer: Scorer, width: int, slots: float, allocate: Allocate, name: str | None = None) -> None:
        self.scorer, self.width, self.slots, self.allocate = scorer, width, slots, allocate
        self.name = name or scorer.name

    def shape(self, live: int) -> StepShape:
        rows = min(max(round(self.slots * live), live), live * self.width)
        return StepShape(width=self.width, head=self.width - 1, rows=rows, share=self.slots)

    def read_draft(self, hidden: Tensor, target: Target, live: Tensor, initial: Tensor) -> Draft:
        return self.scorer.read(hidden, target, live, initial)

    def lengths(self, draft: Draft, shape: StepShape, live: Tensor) -> Tensor:
        assert draft.survival is not None
        return self.allocate(draft.survival, shape.budget(live), live)

    def observe(self, outcome: StepOutcome) -> None:
        self.scorer.observe(outcome)

    def scorers(self) -> tuple[Scorer, ...]:
        return (self.scorer,)
