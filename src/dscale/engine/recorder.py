"""Records of verification from live traffic: what a predictor would have seen of each draft, and what came of it.

    recorder = Recorder(done=keep)            # keep(trace) is called with each request that ended
    llm = LLM("smollm2-135m", policy="full", recorder=recorder)

Kept are steps of requests whose logits nobody edits (no penalties, bias, min_tokens), in blocks of the engine's full
width; what else was drafted is counted by reason in `skipped`. When an answer ends inside a block, at an end token, a
stop string or the cap, with a draft as its last token, the drafts behind it were accepted or not for nobody: the record
then says "at least that many", as it does when fewer rows than the block has were verified (train/traces.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from torch import Tensor

from dscale.config import require
from dscale.engine.request import Request, Status
from dscale.kernels.top_logits import top_logits
from dscale.models.decoder import Target
from dscale.speculation.features import GROUPS, FeatureReader
from dscale.speculation.policies import Draft, Fixed, Policy, Scorer, StepOutcome
from dscale.speculation.predictor import PredictorConfig
from dscale.speculation.workspace import StepShape


@dataclass(frozen=True)
class RequestTrace:
    """The recorded steps of one request that ended: S steps of blocks of D drafts.

    features float16 [S, F]; drafts int32 [S, D]; accepted and slots int16 [S]; position int32 [S], answer tokens before
    the step. prompt and output: its tokens.
    """

    id: str
    prompt: tuple[int, ...]
    output: tuple[int, ...]
    features: np.ndarray
    drafts: np.ndarray
    accepted: np.ndarray
    slots: np.ndarray
    position: np.ndarray


class _Step(NamedTuple):
    features: np.ndarray
    drafts: np.ndarray
    accepted: int
    slots: int
    position: int


class Recorder:
    """Collects the steps of every request. groups and seed: of the features (speculation/features.py); groups None:
    the confidence features, and whatever the engine's predictor reads."""

    def __init__(
        self,
        groups: tuple[str, ...] | None = ("confidence", "context"),
        seed: int = 0,
        done: Callable[[RequestTrace], None] | None = None,
    ) -> None:
        self.groups, self.seed, self.done = groups or (), seed, done
        self.width = 0
        self.recorded = 0  # steps
        self.skipped: Counter[str] = Counter()  # request steps not kept, by reason
        self._open: dict[str, list[_Step]] = {}

    def follow(self, config: PredictorConfig | None) -> None:
        """Record what this predictor reads, where no groups were asked for."""
        if not self.groups:
            read = ("context",) if config is None else config.features
            self.groups = tuple(group for group in GROUPS if group in read or group == "confidence")
            self.seed = self.seed if config is None else config.projection_seed

    def attach(self, policy: Policy, target: Target) -> Policy:
        """The policy, its drafts now carrying features. InputError when it drafts nothing."""
        require(policy.width > 1, f"recorder: policy {policy.name!r} drafts nothing; there is nothing to record")
        self.width = policy.width
        return SeenPolicy(policy, FeatureReader.build(self.groups, target.head.weight, self.seed))

    def record(self, requests: Sequence[Request], draft: Draft, clean: Sequence[bool]) -> None:
        """One decode step, after its tokens were committed. clean: lanes whose acceptance is the plain target's."""
        features = draft.features
        if features is not None:
            rows, drafts = features.cpu().numpy(), draft.tokens.cpu().numpy().astype(np.int32)
        for lane, request in enumerate(requests):
            reason = self._refuses(request, features is not None, clean[lane])
            if reason:
                self.skipped[reason] += 1
            else:
                self._open.setdefault(request.id, []).append(_observed(request, rows[lane].copy(), drafts[lane].copy()))
                self.recorded += 1
            if request.status is Status.FINISHED:
                self.finish(request)

    def _refuses(self, request: Request, seen: bool, clean: bool) -> str | None:
        step = request.steps[-1]
        if not clean:
            return "edited logits"
        if not seen:
            return "other width"
        return "nothing verified" if step.slots < 2 else None

    def finish(self, request: Request) -> None:
        """Hand on what was recorded of a request that ended; nothing for one without records."""
        steps = self._open.pop(request.id, [])
        if not steps or self.done is None:
            return
        self.done(
            RequestTrace(
                id=request.id,
                prompt=tuple(request.prompt),
                output=tuple(request.output),
                features=np.stack([step.features for step in steps]),
                drafts=np.stack([step.drafts for step in steps]),
                accepted=np.array([step.accepted for step in steps], np.int16),
                slots=np.array([step.slots for step in steps], np.int16),
                position=np.array([step.position for step in steps], np.int32),
            )
        )


def _observed(request: Request, features: np.ndarray, drafts: np.ndarray) -> _Step:
    """The last step of a request. An accepted draft that ended the answer hides what would have followed."""
    step = request.steps[-1]
    hidden = request.status is Status.FINISHED and step.accepted == step.emitted
    slots = min(step.slots, step.accepted + 1) if hidden else step.slots
    return _Step(features, drafts, step.accepted, slots, len(request.output) - step.emitted)


class SeenPolicy(Policy):
    """Any policy, whose drafts of full width carry features besides. It decides nothing of its own."""

    def __init__(self, policy: Policy, reader: FeatureReader) -> None:
        self.policy, self.reader = policy, reader
        self.name, self.width = policy.name, policy.width

    def shape(self, live: int) -> StepShape:
        return self.policy.shape(live)

    def read_draft(self, hidden: Tensor, target: Target, live: Tensor, initial: Tensor) -> Draft:
        if isinstance(self.policy, Fixed):
            return self.read_tokens(hidden, target, live, initial)
        return self._seen(self.policy.read_draft(hidden, target, live, initial), hidden, live, initial)

    def read_tokens(self, hidden: Tensor, target: Target, live: Tensor, initial: Tensor) -> Draft:
        """With the top logits, though the policy has no use for them."""
        top = top_logits(target.logits(hidden.flatten(0, 1)).view(*hidden.shape[:2], -1))
        return self._seen(Draft(top.ids[..., 0], None, top), hidden, live, initial)

    def _seen(self, draft: Draft, hidden: Tensor, live: Tensor, initial: Tensor) -> Draft:
        seen = None
        if hidden.shape[1] == self.width - 1 and draft.top is not None:
            seen = self.reader.read(draft.top, hidden, live.sum(), initial)
        return replace(draft, features=seen)

    def resize(self, draft: Draft, shape: StepShape, live: Tensor) -> StepShape:
        return self.policy.resize(draft, shape, live)

    def lengths(self, draft: Draft, shape: StepShape, live: Tensor) -> Tensor:
        return self.policy.lengths(draft, shape, live)

    def shapes(self, live: int) -> list[StepShape]:
        return self.policy.shapes(live)

    def observe(self, outcome: StepOutcome) -> None:
        self.policy.observe(outcome)

    def scorers(self) -> tuple[Scorer, ...]:
        return self.policy.scorers()

    def rescored(self) -> None:
        self.policy.rescored()
