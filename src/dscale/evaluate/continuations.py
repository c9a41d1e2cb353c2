"""Continuations of prompts with the steps that made them, and what each of their positions is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from dscale.config import SamplingParams
from dscale.engine.llm import LLM
from dscale.engine.request import StepRecord

FINAL = 0  # offset of a token that no draft proposed


@dataclass(frozen=True)
class Continuation:
    """A prompt's token ids and what an engine emitted after it. steps: what each decode step emitted, None where the
    engine does not tell; params: how it was sampled, with the seed that was used."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    params: SamplingParams
    steps: tuple[StepRecord, ...] | None = None

    @property
    def offsets(self) -> NDArray[np.int64]:
        """[n]: depth in its block of the draft that was accepted at a position, from 1; FINAL for the correction or
        bonus that ended a step. All FINAL where steps are unknown."""
        out = np.full(len(self.tokens), FINAL, np.int64)
        at = 0
        for step in self.steps or ():
            out[at : at + step.accepted] = np.arange(1, step.accepted + 1)
            at += step.emitted
        return out


def sampling_of(temperature: float, max_tokens: int, seed: int) -> SamplingParams:
    """Greedy at temperature 0, else seeded sampling with top_p 0.95."""
    top_p = 0.95 if temperature > 0 else 1.0
    return SamplingParams(temperature=temperature, top_p=top_p, seed=seed, max_tokens=max_tokens)


def capture(llm: LLM, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[Continuation]:
    """What the engine answers, all prompts side by side; prompt i is sampled with seed params.seed + i."""
    base = params.seed or 0
    each = [replace(params, seed=base + index) for index in range(len(prompts))]
    outputs = llm.generate(prompt_token_ids=prompts, sampling_params=each)
    return [
        Continuation(tuple(prompt), tuple(output.outputs[0].token_ids), one, tuple(output.metrics.records))
        for prompt, output, one in zip(prompts, outputs, each, strict=True)
    ]


def mean_progress(continuations: Sequence[Continuation]) -> float | None:
    """Tokens of a step in which something was drafted; None where nothing was, or nobody tells."""
    drafted = [step for one in continuations for step in one.steps or () if step.slots > 1]
    return sum(step.emitted for step in drafted) / len(drafted) if drafted else None
