"""What a decode step costs on this machine, measured by running the engine: seconds by requests, width and rows.

`dscale evaluate policies` weighs expected progress against this table. Every entry is the median of whole steps of the
engine (draft, verification, sampling, host) with `live` requests in the middle of their answers, so that nothing has to
be added to it. On disk: JSON of schema COSTS.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dscale.config import InputError, SamplingParams, require
from dscale.engine.llm import LLM
from dscale.models.drafter import Drafter
from dscale.models.loader import LoadedTarget
from dscale.speculation.costs import Costs, Numbers
from dscale.speculation.workspace import StepShape
from dscale.train.artifacts import Report, read_json, silent

COSTS = "dscale.costs/1"
MAX_PREFILL = 8192  # tokens


@dataclass(frozen=True)
class CostConfig:
    """slots: rows a request of the drafted steps that are timed; context: tokens of a request when timing starts."""

    slots: tuple[int, ...] = (2, 4, 6, 8, 10, 12, 14, 16)
    context: int = 256
    warm: int = 3  # steps
    repeats: int = 12  # steps, of which the median is taken

    def __post_init__(self) -> None:
        require(len(self.slots) > 0 and min(self.slots) >= 2, f"slots: {list(self.slots)} must be numbers from 2")
        for name in ("context", "warm", "repeats"):
            require(getattr(self, name) >= 1, f"{name}: {getattr(self, name)} must be at least 1")


@dataclass(frozen=True)
class TimedStep:
    """A step of `live` requests that drafts blocks of `width` rows (1: none) and verifies `rows` rows in all.

    decide: seconds of them that an adaptive policy spends on its decision.
    """

    live: int
    width: int
    rows: int
    seconds: float
    decide: float = 0.0


class MeasuredCosts(Costs):
    """Times are a fixed table; steps that are observed change nothing."""

    def __init__(self, steps: list[TimedStep]) -> None:
        require(bool(steps), "costs: no step was timed")
        self.steps = steps

    def times(self, live: int, width: int, rows: Numbers | float) -> Numbers:
        """Seconds of a step, by linear interpolation over its rows; beyond the timed rows the ends go on straight."""
        timed = sorted((one.rows, one.seconds) for one in self._of(live, width))
        if len(timed) == 1:
            return np.full(np.shape(rows), timed[0][1])
        at, seconds = np.array(timed, np.float64).T
        left = np.clip(np.searchsorted(at, rows, side="right") - 1, 0, len(at) - 2)
        slope = (seconds[left + 1] - seconds[left]) / (at[left + 1] - at[left])
        return np.maximum(seconds[left] + slope * (np.asarray(rows) - at[left]), 1e-6)

    def decide(self, live: int) -> float:
        """Seconds that an adaptive policy adds to a drafted step."""
        return max(one.decide for one in self._of(live, 2))

    def require_lives(self, lives: tuple[int, ...]) -> None:
        """InputError unless plain and drafted steps of all these numbers of requests were timed."""
        for live in lives:
            self._of(live, 1)
            self._of(live, 2)

    def observe(self, live: int, shape: StepShape, seconds: float) -> None:
        return

    def _of(self, live: int, width: int) -> list[TimedStep]:
        found = [one for one in self.steps if one.live == live and (one.width > 1) == (width > 1)]
        known = sorted({one.live for one in self.steps})
        what = "drafted steps" if width > 1 else "plain steps"
        require(bool(found), f"costs: no {what} of {live} requests were timed; timed are {known}")
        return found


def to_record(steps: list[TimedStep], **about: Any) -> dict[str, Any]:
    """The JSON object of a cost table; about: device, dtype, model and the like."""
    return {"schema": COSTS, **about, "steps": [asdict(one) for one in steps]}


def read_costs(path: Path) -> tuple[MeasuredCosts, dict[str, Any]]:
    """A cost table and its record; InputError when the file is not one."""
    record = read_json(path, f"a {COSTS} table")
    require(record.get("schema") == COSTS, f"{path}: schema {record.get('schema')!r}, expected {COSTS!r}")
    try:
        steps = [TimedStep(**one) for one in record["steps"]]
    except (KeyError, TypeError) as error:
        raise InputError(f"{path}: its steps are damaged ({error})") from None
    fine = all(one.live > 0 and one.width > 0 and one.rows > 0 and one.seconds > 0 for one in steps)
    require(fine, f"{path}: live, width, rows and seconds of every step must be positive")
    return MeasuredCosts(steps), record


def measure(
    loaded: LoadedTarget,
    drafter: Drafter,
    lives: tuple[int, ...],
    device: str,
    config: CostConfig,
    report: Report = silent,
) -> list[TimedStep]:
    """Time plain and drafted steps for these numbers of requests; the models' dtype and device decide where."""
    width, limit = drafter.config.width, loaded.config.decoder.max_position
    steps_each = config.warm + config.repeats
    require(
        (steps_each + 4) * width < limit,
        f"costs: {steps_each} steps of {width} tokens do not fit the context length {limit}; take fewer",
    )
    grid = sorted({min(slots, width) for slots in config.slots} | {2, width})
    jobs: list[tuple[int, str, float]] = []
    for live in lives:
        jobs += [(live, "off", 1)] + [(live, f"fixed:{slots}", slots) for slots in grid]
        jobs.append((live, "confidence", grid[len(grid) // 2]))
    steps: list[TimedStep] = []
    for number, (live, policy, slots) in enumerate(jobs):
        report("timing steps", number, len(jobs))
        seconds = _typical_step(loaded, drafter, live, policy, slots, device, config)
        if policy == "confidence":
            same = next(one for one in steps if one.live == live and one.rows == round(slots * live) and one.width > 1)
            extra = max(seconds - same.seconds, 0.0)
            steps[steps.index(same)] = TimedStep(live, width, same.rows, same.seconds, extra)
        else:
            steps.append(TimedStep(live, 1 if policy == "off" else width, round(slots * live), seconds))
    report("timing steps", len(jobs), len(jobs))
    return steps


def _typical_step(
    loaded: LoadedTarget, drafter: Drafter, live: int, policy: str, slots: float, device: str, config: CostConfig
) -> float:
    """Median seconds of a decode step in which all `live` requests take part."""
    width = drafter.config.width if policy != "off" else 1
    limit, steps = loaded.config.decoder.max_position, config.warm + config.repeats
    context = min(config.context, limit - (steps + 4) * width)
    at_once = min(live * context, MAX_PREFILL)
    room = (steps + 3 + -(-live * context // at_once)) * width
    context = min(context, limit - room)
    llm = LLM(
        loaded, drafter=drafter, predictor=None, policy=policy, slots=float(slots), device=device, max_requests=live,
        max_model_len=context + room, max_prefill_tokens=at_once, prefix_caching=False, graph_kinds="greedy",
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    params = SamplingParams(temperature=0.0, max_tokens=room, ignore_eos=True)
    for number in range(live):
        prompt = torch.randint(loaded.config.decoder.vocab_size, (context,), generator=generator).tolist()
        llm.engine.add(str(number), prompt, params, seed=0)
    counters = llm.engine.counters
    seconds: list[float] = []
    while llm.engine.busy and len(seconds) < steps:
        taken, began = counters.request_steps, time.perf_counter()
        llm.engine.step()  # it reads tokens from the device, so steady calls take as long as steady steps
        if counters.request_steps - taken == live:
            seconds.append(time.perf_counter() - began)
    require(len(seconds) > config.warm, f"costs: {live} requests never decoded side by side; the cache is too small")
    return statistics.median(seconds[config.warm :])
