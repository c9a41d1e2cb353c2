"""Is the drafter read as it was trained? What a text cannot show: wrong drafts are refused, and only speed is lost.

The trainer's own forward pass drafts at every position of the captured text. A step of the engine should have accepted
what a block anchored there matches, as far as the step verified it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dscale.config import InputError
from dscale.engine.llm import LLM
from dscale.evaluate.continuations import Continuation
from dscale.evaluate.conversations import Answered, Conversation, check_offline
from dscale.evaluate.drafter import EvaluateConfig, Pair, match_answered

TOLERANCE = 0.05  # of the accepted drafts: what rounding may cost or bring


@dataclass(frozen=True)
class Agreement:
    """Over drafted steps: how many accepted another number of drafts than the trainer's pass; drafts accepted by the
    engine and by the pass."""

    steps: int
    differing: int
    accepted: int
    expected: int

    @property
    def suspicious(self) -> bool:
        """Whether the engine accepts clearly less than the pass says."""
        return self.accepted < (1 - TOLERANCE) * self.expected


Matches = dict[tuple[tuple[int, ...], ...], list[np.ndarray]]  # of texts that were looked at before


def drafter_agreement(llm: LLM, given: Sequence[Continuation], known: Matches) -> Agreement | None:
    """None without a drafter, without steps of whole blocks, or where the pass does not attend as the engine does.

    known: kept between calls for the same prompts, since exact policies all write the same text.
    """
    if llm.drafter is None or not any(step.drafted for one in given for step in one.steps or ()):
        return None
    if llm.simulate is not None or llm.engine.worker.policy.width != llm.drafter.config.width:
        return None
    if llm.drafter.fp8:
        return None
    length = max(len(one.prompt) + len(one.tokens) for one in given)
    try:
        check_offline(llm.loaded.model, llm.drafter, length)
    except InputError:
        return None
    key = tuple(one.tokens for one in given)
    if key not in known:
        talks = [Answered(list(one.prompt), list(one.tokens), None) for one in given]
        pair = Pair(llm.loaded, llm.drafter, "")
        known[key] = match_answered(pair, EvaluateConfig(batch=len(talks)), talks, length)
    rows = [row for one, match in zip(given, known[key], strict=True) for row in _steps(llm, one, match)]
    if not rows:
        return None
    accepted, expected = np.array(rows, np.int64).T
    return Agreement(len(rows), int((accepted != expected).sum()), int(accepted.sum()), int(expected.sum()))


def _steps(llm: LLM, given: Continuation, match: np.ndarray) -> list[tuple[int, int]]:
    """(accepted, expected) of every step that drafted from a whole block."""
    possible, at, out = Conversation(match, None).accepted, 0, []
    narrow = llm.speculation.policy == "auto"  # drafts narrower blocks too, and those draft otherwise
    for step in given.steps or ():
        whole = step.drafted == match.shape[1] if narrow else step.drafted > 0
        if step.slots > 1 and whole:
            out.append((step.accepted, min(int(possible[at]), step.slots - 1)))
        at += step.emitted
    return out
