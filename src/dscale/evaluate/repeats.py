"""Running the same prompts twice on one boot, of our engine or of a server (reproducibility.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from dscale.config import SamplingParams
from dscale.engine.llm import LLM
from dscale.evaluate.remote import Endpoint, capture_remote
from dscale.evaluate.reproducibility import ArmHazard

Runs = tuple[list[list[int]], list[bool]]  # token ids, and whether each text ended by itself


def repeat_engine(llm: LLM, policy: str, prompts: Sequence[Sequence[int]], params: SamplingParams) -> ArmHazard:
    """Two runs under a policy, all prompts side by side; prompt i has seed params.seed + i in both."""
    llm.switch(policy)
    return _hazard(policy, params, [_run_engine(llm, prompts, params) for _ in range(2)])


def _run_engine(llm: LLM, prompts: Sequence[Sequence[int]], params: SamplingParams) -> Runs:
    each = [replace(params, seed=(params.seed or 0) + index) for index in range(len(prompts))]
    outputs = [one.outputs[0] for one in llm.generate(prompt_token_ids=prompts, sampling_params=each)]
    return [one.token_ids for one in outputs], [one.finish_reason == "stop" for one in outputs]


def repeat_server(
    server: Endpoint,
    arm: str,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    encode: Callable[[str], list[int]],
) -> ArmHazard:
    """Two runs on a server, `concurrency` requests at a time."""
    runs: list[Runs] = []
    for _ in range(2):
        found = capture_remote(server, prompts, params, encode)
        runs.append(([list(one.given.tokens) for one in found], [one.ended for one in found]))
    return _hazard(arm, params, runs)


def _hazard(arm: str, params: SamplingParams, runs: Sequence[Runs]) -> ArmHazard:
    return ArmHazard.of(arm, params.temperature, [texts for texts, _ in runs], [ended for _, ended in runs])
