"""Does `auto` keep up with the best fixed budget when what it believes of step times is wrong? Without a GPU.

    python benchmarks/auto_choice.py --out record.json                           448 cases of 2,000 steps, minutes
    python benchmarks/auto_choice.py --concurrency 28 --errors 0.1 --steps 500
    python benchmarks/auto_choice.py --pull 0 --steps 1000                                  clocks that do not lag

A closed loop of the policy as it is built for a GPU. Times of a step are those of an H200 (medians of recorded runs,
sizes between them interpolated by eye) with what a log of steps showed there (docs/log.md): noise, spells of some
steps, hiccups, and clocks that follow what the steps before verified, so that a step of one size among those of another
is not what it is among its like. Replays are off by ± --errors a size, in all combinations. Drafts pass as in
simulated.py; requests are 512 tokens long, and a new one sits out a step. A case's figure is what the budgets it chose
give in the long run (tokens a step of each, over 1,000 requests, by its seconds), over the better of 8 and 16 slots:
the luck of the text does not enter. 0.99 is asked.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dscale.evaluate.record_file import write_record
from dscale.speculation.auto import Auto
from dscale.speculation.costs import ReplayCosts
from dscale.speculation.policies import Draft, Scorer, StepOutcome
from dscale.speculation.simulated import SimulatedAcceptance
from dscale.speculation.workspace import StepShape

WIDTH, BUDGETS = 16, (4, 6, 8, 12, 16)
TIMES = {  # ms a step by requests: nothing drafted, then by budget
    "4b": {8: (3.60, 4.75, 4.80, 4.83, 4.90, 4.93), 12: (3.65, 4.85, 4.98, 5.14, 5.43, 5.90),
           16: (3.70, 5.05, 5.25, 5.44, 6.17, 6.51), 20: (3.75, 5.30, 5.75, 6.23, 6.86, 8.71),
           24: (3.80, 5.60, 6.20, 6.78, 7.65, 8.71), 28: (3.95, 6.00, 6.75, 7.40, 8.44, 10.1),
           32: (4.00, 6.20, 6.95, 7.69, 9.20, 10.7)},
    "8b": {8: (5.29, 6.72, 6.80, 6.81, 7.12, 7.26), 12: (5.40, 7.10, 7.35, 7.60, 8.08, 8.80),
           16: (5.45, 7.37, 7.77, 8.00, 9.16, 10.2), 20: (5.55, 7.95, 8.45, 8.92, 10.3, 12.0),
           24: (5.60, 8.40, 9.20, 10.0, 12.1, 14.0), 28: (5.68, 9.40, 10.3, 11.5, 14.0, 16.5),
           32: (5.70, 9.70, 10.7, 11.9, 14.7, 17.2)},
}  # fmt: skip
PROMPT, OUTPUT, REQUESTS = 512, 512, 1024
NOISE, SPELL, LASTS = 0.006, 0.0125, 0.8  # shares of a step; how much of a spell is left one step later
HICCUPS = 0.01  # of the steps, up to twice as long
PULL, INERTIA = 0.06, 8  # of a step's time by the logarithm of what the steps before it verified; steps that count


class Unread(Scorer):
    """The drafter is not run here."""

    name = "unread"

    def read(self, hidden, target, live, initial):
        raise AssertionError("no draft is read")


@cache
def text() -> tuple[np.ndarray, np.ndarray]:
    """Drafts that pass int64 and scores float32 [.., WIDTH], by request and position of its answer."""
    simulation, places = SimulatedAcceptance().on("cpu"), torch.arange(PROMPT, PROMPT + OUTPUT)
    rows = [simulation.at(torch.full_like(places, seed), places) for seed in range(REQUESTS)]
    return torch.stack([row[0] for row in rows]).numpy(), torch.stack([row[1] for row in rows]).numpy()


class Requests:
    """Requests that decode, and the next ones where they end. position: in the answer, of each lane."""

    def __init__(self, lanes: int, first: int = 0) -> None:
        self.number, self.next = np.arange(first, first + lanes), first + lanes
        self.position = np.arange(lanes) * OUTPUT // lanes
        self.waiting = np.zeros(lanes, bool)

    @property
    def live(self) -> int:
        """Requests of the next step; at least one, however many begin."""
        return int((~self.waiting).sum()) or len(self.waiting)

    def step(self, slots: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Rows verified, drafts accepted and scores of the live lanes; 1 slot: nothing is drafted."""
        if self.waiting.all():
            self.waiting[:] = False
        lanes = np.flatnonzero(~self.waiting)
        self.waiting[:] = False
        lengths, scores = text()
        at = self.number[lanes] % REQUESTS, self.position[lanes]
        q = scores[at]
        taken = np.argsort(-q[:, 1:].T.reshape(-1), kind="stable")[: (slots - 1) * len(lanes)]
        verified = 1 + np.bincount(taken % len(lanes), minlength=len(lanes))
        accepted = np.minimum(lengths[at], verified - 1)
        self.position[lanes] += accepted + 1
        for lane in lanes[self.position[lanes] >= OUTPUT]:
            self.number[lane], self.next = self.next, self.next + 1
            self.position[lane], self.waiting[lane] = 0, True
        return verified, accepted, q


@cache
def long_run(lanes: int, slots: int) -> float:
    """Tokens a request and step of a fixed budget."""
    requests, tokens, steps = Requests(lanes), 0, 0
    while slots > 1 and requests.next < REQUESTS:
        _, accepted, _ = requests.step(slots)
        tokens, steps = tokens + int(accepted.sum()) + len(accepted), steps + len(accepted)
    return tokens / steps if steps else 1.0


@dataclass(frozen=True)
class Case:
    """One loop. errors: by which share the replay of each budget is too slow; pull, inertia: of the clocks."""

    model: str
    lanes: int
    errors: tuple[float, ...]
    seed: int
    pull: float = PULL
    inertia: float = INERTIA

    def times(self) -> dict[int, float]:
        """Seconds of a step by slots, 1: nothing is drafted."""
        return {slots: ms / 1e3 for slots, ms in zip((1, *BUDGETS), TIMES[self.model][self.lanes], strict=True)}

    def policy(self) -> Auto:
        """`auto`, whose replays are off and shorter than real steps, more so the more rows there are."""
        times, errors = self.times(), dict(zip(BUDGETS, self.errors, strict=True))

        def replay(live: int, shape: StepShape) -> float:
            slots = int(shape.share)
            return times[slots] * (1 + errors.get(slots, 0.0)) / (1 + 1e-4 * slots * self.lanes)

        costs = ReplayCosts(replay)
        auto = Auto(Unread(), Unread(), WIDTH, costs, False, BUDGETS)
        costs.shapes = auto.shapes
        return auto

    def chosen(self, steps: int) -> list[int]:
        """Slots of each step; what a step gave is known one step later."""
        auto, times, requests = self.policy(), self.times(), Requests(self.lanes, 37 * self.seed)
        rng, spell, late, slots, heat = np.random.default_rng(self.seed), 0.0, None, [], None
        for number in range(steps):
            shape = auto.shape(requests.live)
            slots.append(int(shape.share))
            verified, accepted, scores = requests.step(slots[-1])
            spell = LASTS * spell + np.sqrt(1 - LASTS**2) * SPELL * rng.standard_normal()
            load = float(np.log(slots[-1]))
            heat = load if heat is None else heat + (load - heat) / self.inertia
            slow = 1 + spell + self.pull * (heat - load) + NOISE * rng.standard_normal()
            slow *= 3.0 if number == 0 else 1 + rng.random() * (rng.random() < HICCUPS)
            known = torch.from_numpy(scores) if shape.scored and shape.width > 1 else None
            draft = Draft(torch.zeros(len(verified), shape.width - 1, dtype=torch.int64), known)
            if late is not None:
                auto.observe(late)
            clean = [True] * len(verified)
            late = StepOutcome(shape, draft, verified.tolist(), accepted.tolist(), clean, times[slots[-1]] * slow)
        return slots

    def run(self, steps: int) -> dict[str, Any]:
        """Its row of the record."""
        slots, times = self.chosen(steps), self.times()
        speed = {one: long_run(self.lanes, one) / times[one] for one in times}
        got = sum(long_run(self.lanes, one) for one in slots) / sum(times[one] for one in slots)
        counts = {str(one): count for one, count in sorted(Counter(slots).items())}
        told = {"model": self.model, "concurrency": self.lanes, "errors": self.errors, "steps": counts}
        return {**told, "over_8_and_16": got / max(speed[8], speed[16]), "over_all": got / max(speed.values())}


def main(given: Sequence[str] | None = None) -> dict[str, Any]:
    """Run all cases, print the worst of each model and concurrency; returns the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="4b,8b", help="whose step times, of 4b and 8b")
    parser.add_argument("--concurrency", default="8,12,16,20,24,28,32", help="of these")
    parser.add_argument("--errors", type=float, default=0.05, help="of the replay of each budget, up or down")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--pull", type=float, default=PULL, help="of the clocks, by the logarithm of verified rows")
    parser.add_argument("--inertia", type=float, default=INERTIA, help="steps over which they forget")
    parser.add_argument("--out", type=Path, default=None, help="JSON record with every case")
    args = parser.parse_args(given)
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    print(
        "| model | c | worst over best of 8, 16 | median | replays off by (4, 6, 8, 12, 16 slots) |\n"
        + "| --- " * 5
        + "|"
    )
    for model, lanes in product(args.models.split(","), map(int, args.concurrency.split(","))):
        signs = product((-args.errors, args.errors), repeat=len(BUDGETS))
        cases = [Case(model, lanes, errors, seed, args.pull, args.inertia) for seed, errors in enumerate(signs)]
        some = sorted((case.run(args.steps) for case in cases), key=lambda row: row["over_8_and_16"])
        worst, median = some[0], some[len(some) // 2]["over_8_and_16"]
        errors = ", ".join(f"{one:+g}" for one in worst["errors"])
        print(f"| {model} | {lanes} | {worst['over_8_and_16']:.4f} | {median:.4f} | {errors} |", flush=True)
        rows += some
    record = {"schema": "dscale.auto_choice/1", "arguments": {key: str(one) for key, one in vars(args).items()},
              "worst": min(row["over_8_and_16"] for row in rows), "cases": rows}  # fmt: skip
    if args.out is not None:
        write_record(args.out, record)
    return record


if __name__ == "__main__":
    main()
