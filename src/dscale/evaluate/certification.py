"""Making certificates of our engine: capture, teacher forcing, free-running comparison, verdict (measurement.md §3).

Replay 1 of the engine without speculation has all requests side by side, replay 2 half of them in reverse order: the
floor is what the size of a batch and a request's place in it change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from dscale.config import SamplingParams
from dscale.engine.llm import LLM
from dscale.evaluate.certificate import Evidence, Text, decide, evidence_json, resolution
from dscale.evaluate.certificate_record import Certificate, Scope
from dscale.evaluate.continuations import Continuation, capture, mean_progress
from dscale.evaluate.drafter_agreement import Matches, drafter_agreement
from dscale.evaluate.scoring import Scores, teacher_force


class Certifier:
    """An engine with speculation and one without, over the same prompts of token ids.

    What the engine without speculation says of a text is kept, since exact policies all write the same.
    """

    def __init__(self, llm: LLM, plain: LLM, prompts: Sequence[Sequence[int]], exact: bool) -> None:
        self.llm, self.plain, self.prompts, self.exact = llm, plain, prompts, exact
        self._matches: Matches = {}
        self._texts: dict[SamplingParams, list[Continuation]] = {}
        self._replays: dict[tuple[Continuation, ...], tuple[list[Scores], list[Scores]]] = {}

    def certificate(self, policy: str, params: SamplingParams) -> Certificate:
        """The certificate of one policy and one way of sampling."""
        self.llm.switch(policy)
        given = capture(self.llm, self.prompts, params)
        evidence = gather(given, *self._replayed(given), teacher_force(self.llm, given, blocks=True))
        text = Text.of([one.tokens for one in given], [one.tokens for one in self._plain_texts(params)])
        progress, agreement = mean_progress(given), drafter_agreement(self.llm, given, self._matches)
        verdict = decide(evidence, self.exact, text, progress, agreement)
        scope = scope_of(self.llm, policy, given, params, evidence, self.exact)
        return Certificate(scope, verdict, evidence_json(evidence, self.exact), text, progress, agreement)

    def _plain_texts(self, params: SamplingParams) -> list[Continuation]:
        if params not in self._texts:
            self._texts[params] = capture(self.plain, self.prompts, params)
        return self._texts[params]

    def _replayed(self, given: Sequence[Continuation]) -> tuple[list[Scores], list[Scores]]:
        key = tuple(replace(one, steps=None) for one in given)
        if key not in self._replays:
            half = max(1, min(len(given), self.plain.config.max_requests) // 2)
            second = teacher_force(self.plain, given[::-1], together=half)[::-1]
            self._replays[key] = teacher_force(self.plain, given), second
        return self._replays[key]


def gather(
    given: Sequence[Continuation], first: Sequence[Scores], second: Sequence[Scores], own: Sequence[Scores] | None
) -> Evidence:
    """Evidence of all positions of the continuations, one prompt after the other."""
    counts = [len(one.tokens) for one in given]
    return Evidence(
        violation=np.concatenate([one.wrong for one in first]),
        floor=np.concatenate([a.choice != b.choice for a, b in zip(first, second, strict=True)]),
        own=None if own is None else np.concatenate([one.wrong for one in own]),
        offset=np.concatenate([one.offsets for one in given]),
        margin=np.concatenate([one.margin for one in first]),
        prompt=np.repeat(np.arange(len(given)), counts),
        place=np.concatenate([np.arange(count) for count in counts]),
        boundaries=all(one.steps is not None for one in given),
    )


def scope_of(
    llm: LLM, policy: str, given: Sequence[Continuation], params: SamplingParams, evidence: Evidence, exact: bool
) -> Scope:
    """What these continuations cover."""
    accepted = int(evidence.accepted.sum())
    drafts = policy != "off" and llm.drafter is not None
    shared = drafts and policy.partition(":")[0] in ("dvl", "confidence")
    return Scope(
        policy=policy,
        width=llm.engine.worker.policy.width if drafts else None,
        slots=llm.speculation.slots if shared else None,
        dtype=str(llm.dtype).removeprefix("torch."),
        device=llm.engine.worker.device.type,
        temperature=params.temperature,
        top_p=params.top_p,
        seed=params.seed,
        contexts=contexts_of(given),
        prompts=len(given),
        positions=len(evidence.violation),
        accepted=accepted,
        resolution=resolution(len(evidence.violation) if exact else accepted, int(evidence.floor.sum()), exact),
        exact=exact,
    )


def contexts_of(given: Sequence[Continuation]) -> tuple[int, int]:
    """Fewest and most tokens before a position of these continuations."""
    return min(len(one.prompt) for one in given), max(len(one.prompt) + len(one.tokens) - 1 for one in given)
