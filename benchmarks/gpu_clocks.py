"""Does the time of a step depend on the steps before it? Sizes in rows, alone among others, and after a switch.

    python benchmarks/gpu_clocks.py --model random:qwen3-8b --concurrency 16,28 --out record.json
    python benchmarks/gpu_clocks.py --model random:tiny --device cpu --concurrency 2 --rounds 1     in miniature

The closed loop of gpu_throughput.py with a script in place of `auto`'s choice, for two sizes a < b (slots a request):

    row      --row steps of each size, one row after the other, --rounds times
    alone    one step of a size after every 15 of the other, --row steps in all, --rounds times for each

Times are the device's, of steps with every lane live; medians in ms. `after` is the time of a row's steps by how many
of its like stood before them, 0, 1, 2, 3-4, 5-8, 9-16, and more, over the row's last half: were there no memory of the
steps before, all would be 1, and a size alone would take what it takes in its row. `auto` judges sizes by rows because
of what this shows or does not (speculation/step_times.py).
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import gpu_throughput
from gpu_step_tables import clocks
from gpu_throughput import Arm, Loop

from dscale import LLM
from dscale.config import require
from dscale.evaluate.record_file import write_record
from dscale.speculation.auto import Auto
from dscale.speculation.captured_choice import CapturedChoice
from dscale.speculation.policies import StepOutcome
from dscale.speculation.workspace import StepShape

ALONE_EVERY = 16  # steps, one of which is of the other size
PLACES = ((0, 0), (1, 1), (2, 2), (3, 4), (5, 8), (9, 16), (17, 10**9))  # of a row, first and last


@dataclass(frozen=True)
class Step:
    """A step of the script: its slots, in which part it stands, and how many of its like came before it in a row."""

    slots: int
    part: str
    place: int


def script(small: int, large: int, row: int, rounds: int) -> list[Step]:
    """All steps, in order."""
    rows = [Step(size, "row", place) for size in (small, large) for place in range(row)]
    steps = rows * rounds
    for one, others in ((small, large), (large, small)) * rounds:
        for number in range(row):
            alone = number % ALONE_EVERY == ALONE_EVERY - 1
            steps.append(Step(one, "alone", 0) if alone else Step(others, "among", number % ALONE_EVERY))
    return steps


class Scripted(CapturedChoice):
    """Stands where `auto` chooses, and writes down what steps took. seen: the step, and its ms, with all lanes live."""

    def __init__(self, choice: CapturedChoice, lanes: int) -> None:
        self.__dict__.update(choice.__dict__)
        self.lanes = lanes
        self.seen: list[tuple[Step, float]] = []
        self._coming: list[Step] = []
        self._running: list[Step] = []

    def play(self, steps: Sequence[Step]) -> None:
        """What comes next, in order; then whole blocks for ever, unseen."""
        self._coming = list(steps)[::-1]

    @property
    def over(self) -> bool:
        """Whether the script was played."""
        return not self._coming

    def shape(self, live: int) -> StepShape:
        """The next of the script."""
        step = self._coming.pop() if self._coming else Step(self.slots[-1], "", 0)
        self._running.append(step)
        return self._shape(live, self.slots.index(step.slots))

    def observe(self, outcome: StepOutcome) -> None:
        """Steps come in the order in which they were asked for."""
        step = self._running.pop(0)
        if step.part and outcome.live == self.lanes:
            self.seen.append((step, 1e3 * outcome.seconds))


def scripted(llm: LLM, lanes: int) -> Scripted:
    """The engine's `auto` with a script in place of its choice; on a CPU as on a GPU, without captured steps."""
    if not isinstance(llm.engine.worker.policy, Auto) or llm.engine.worker.policy.captured is None:
        llm._captured = True
        llm.switch("auto")
    policy = llm.engine.worker.policy
    assert isinstance(policy, Auto)
    assert policy.captured is not None
    policy.captured = Scripted(policy.captured, lanes)
    return policy.captured


def play(llm: LLM, lanes: int, pair: tuple[int, int], args: argparse.Namespace) -> dict[str, Any]:
    """One pair of sizes at one concurrency."""
    choice = scripted(llm, lanes)
    loop = Loop(llm, lanes, args)
    loop.warm()
    choice.play(script(*pair, args.row, args.rounds))
    while not choice.over:
        loop.step()
    loop.step()
    loop.close()
    return {"concurrency": lanes, "sizes": list(pair), **summary(choice.seen, pair, args.row)}


def summary(seen: Sequence[tuple[Step, float]], pair: tuple[int, int], row: int) -> dict[str, Any]:
    """Medians by size: ms in its row and alone, and the time after so many of its like over that in its row."""
    made: dict[str, Any] = {}
    for size in pair:
        mine = [(step, ms) for step, ms in seen if step.slots == size]
        settled = median([ms for step, ms in mine if step.part == "row" and step.place >= row // 2])
        alone = median([ms for step, ms in mine if step.part == "alone"])
        after = [median([ms for step, ms in mine if step.part == "row" and a <= step.place <= b]) for a, b in PLACES]
        made[str(size)] = {
            "row_ms": settled,
            "alone_ms": alone,
            "alone_over_row": alone / settled if alone and settled else None,
            "after": [one / settled if one and settled else None for one in after],
            "steps": len(mine),
        }
    return made


def median(values: Sequence[float]) -> float | None:
    """None of none."""
    return statistics.median(values) if values else None


def main(given: Sequence[str] | None = None) -> dict[str, Any]:
    """Run, write the record, print the table; returns the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    gpu_throughput.add_loop_arguments(parser)
    parser.add_argument("--sizes", default="8,12", help="two of the captured budgets, the smaller first")
    parser.add_argument("--row", type=int, default=64, help="steps of one size in a row")
    parser.add_argument("--rounds", type=int, default=4)
    parser.set_defaults(concurrency="16,28")
    args = parser.parse_args(given)
    pair = tuple(map(int, args.sizes.split(",")))
    require(len(pair) == 2 and pair[0] < pair[1], f"--sizes {args.sizes}: two numbers, the smaller first")
    models = gpu_throughput.load_models(args)
    embedding = models.loaded.model.embedding
    dtype = str(embedding.dtype).removeprefix("torch.")
    record = gpu_throughput.head("dscale.gpu_clocks/1", args, dtype, embedding.is_cuda)
    for lanes in map(int, args.concurrency.split(",")):
        llm = gpu_throughput.build(Arm.parse("auto"), models, args, lanes)
        record["cells"].append(play(llm, lanes, (pair[0], pair[1]), args))
        del llm
        gpu_throughput.release()
        if args.out is not None:
            write_record(args.out, record)
    print(*clocks(record["cells"]), sep="\n\n")
    return record


if __name__ == "__main__":
    main()
