"""Tensor parallel of the SGLang plug-in: is the text of two ranks that of one, and do the ranks agree in every step?

    SCRIPT=sglang_tp.py bash benchmarks/sglang_h200.sh --pairs .gpu/pairs --limit 150                      two GPUs
    SGLANG_PYTHON benchmarks/sglang_tp.py --pairs FOLDER --out record.json --device cpu        two gloo ranks, minutes

FOLDER has qwen3 and llama of tests/oracle/make_pair.py. Arms: no speculation and dvl (4 slots, an untrained predictor)
on one rank, full and dvl on several. Arms of several ranks run with DSCALE_CHECK_RANKS=1: a difference in a step ends
them, and `steps_compared` counts those of all their rounds. Greedy texts are compared with those of `off` on one rank,
seeded ones with those of dvl on one rank where the first token, which SGLang draws with its own generator, is the same.

Each arm is a process of SGLang for all rounds, --together of them at a time, in any order over the GPUs; one that fails
or outlasts the limit is part of the record with the end of its log. Everything is float32, so that texts can be equal:
norms, rotary embeddings and activations then run as PyTorch's operations (--operations native). Where an arm of one
rank fails in float32 all are run again in bfloat16, and texts may then part where two logits are nearly equal. Sums
over ranks are taken in another order, so that in float32 too a text may part, only far less often.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from sglang_h200 import alike, engine_options, environment, parse_arm, run_logged, write_metadata

TEXTS = Path(__file__).resolve().parents[1] / "tests" / "integrations" / "sglang_texts.py"
SAMPLING = {"greedy": {"temperature": 0}, "seeded": {"temperature": 0.9, "top_p": 0.9, "top_k": 40}}
REFERENCES = {"greedy": ("off", 1), "seeded": ("dscale+dvl+4", 1)}
SHORTEST = 10.0  # seconds under which no process is started
WORDS = 96  # the tokens that the pairs have learned


def prompts(count: int) -> list[list[int]]:
    """Counting by a step, then the first tokens over and over: what the pairs know how to continue, for a while."""
    generator = torch.Generator().manual_seed(5)
    made = []
    for _ in range(count):
        first, step, motif, again = torch.randint(1, 24, (4,), generator=generator).tolist()
        counted = [(first + (1 + step % 3) * i) % WORDS for i in range(6 + motif)]
        made.append(counted + counted[: 2 + motif % 3] * (1 + again % 5))
    return made


def plan(args: argparse.Namespace) -> list[tuple[str, str, int]]:
    """(family, arm, ranks), those of one rank first."""
    arms = [("off", 1), ("dscale+dvl+4", 1), ("dscale+dvl+4", args.tp), ("dscale+full", args.tp)]
    return sorted(((family, *arm) for family in args.families.split(",") for arm in arms), key=lambda one: one[2])


class Child:
    """A process of SGLang for one arm: its job, its environment, and what came of it."""

    def __init__(self, which: tuple[str, str, int], gpu: int, dtype: str, args: argparse.Namespace, work: Path) -> None:
        self.family, self.name, self.tp = which
        self.gpu, self.dtype, self.args, self.work = gpu, dtype, args, work
        self.label = f"{self.family}-{self.name}-tp{self.tp}-{dtype}".replace("+", "-").replace(":", "-")
        work.mkdir(parents=True)
        write_metadata(work / "site")
        self.arm = parse_arm(self.name + "+dscale" * (self.name == "off")) | {"backend": "dscale"}

    def job(self) -> dict[str, Any]:
        """As sglang_texts.py reads it."""
        args, folder = self.args, self.args.pairs / self.family
        given = argparse.Namespace(
            target=str(folder / "target"), drafter=str(folder / "drafter"), load="auto", dtype=self.dtype,
            device=args.device, memory=0.3, tp=self.tp,
        )  # fmt: skip
        options = engine_options(self.arm, given, args.prompts)
        options |= {"sampling_backend": "pytorch", "max_total_tokens": 8192, "nccl_port": _free_port()}
        kinds = ["greedy"] if self.arm["kind"] == "off" else list(SAMPLING)
        rounds = [
            {"prompts": prompts(args.prompts), "tokens": args.tokens, "sampling": SAMPLING[kind]} for kind in kinds
        ]
        job = {"target": given.target, "drafter": given.drafter, "algorithm": None, "device": args.device}
        return job | {"dtype": self.dtype, "tp": self.tp, "options": options, "rounds": rounds, "kinds": kinds}

    def variables(self) -> dict[str, str]:
        """Environment of the process: real acceptance, one GPU for one rank, and ranks that are compared."""
        made = environment(self.arm, argparse.Namespace(trace="", progress=""), self.work / "steps.jsonl")
        made |= {"SGLANG_BENCH": "", "DSCALE_SIMULATE": "", "DSCALE_CHECK_RANKS": str(int(self.tp > 1))}
        made["SGLANG_BENCH_NATIVE"] = "1" if self.args.operations == "native" else ""
        made["SGLANG_BENCH_TORCH_NCCL"] = "1" if self.args.torch_nccl else ""
        if self.args.device == "cpu":
            made["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(map(str, range(self.tp)))
        elif self.tp == 1:
            visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(self.args.tp)))
            made["CUDA_VISIBLE_DEVICES"] = visible.split(",")[self.gpu % self.args.tp]
        return made

    def run(self, end: float) -> dict[str, Any]:
        """Until it ended or the limit is reached: its rounds, or its problem."""
        row = {"family": self.family, "arm": self.name, "tp": self.tp, "dtype": self.dtype}
        left, began = min(end - time.time(), self.args.each), time.time()
        if left < SHORTEST:
            return row | {"problem": "time is up"}
        job, out = self.work / "job.json", self.work / "out.json"
        described = self.job()
        job.write_text(json.dumps(described))
        log = (Path(self.args.logs) if self.args.logs else self.work) / f"{self.label}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        ended = run_logged([sys.executable, str(TEXTS), str(job), str(out)], self.variables(), log, left)
        row["seconds"] = round(time.time() - began, 1)
        told = [line[:300] for line in log.read_text(errors="replace").splitlines() if line.strip()]
        if not out.is_file():
            return row | {"problem": ended, "log": told[-self.args.tail :]}
        log.unlink()
        row["log"] = [line for line in told if "DSCALE" in line][:10]
        made = json.loads(out.read_text())
        rounds = dict(zip(described["kinds"], made["rounds"], strict=True))
        return row | {"plugin": made["plugin"], "rounds": rounds}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def report(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each arm and way of sampling: how its texts lie beside those of the reference."""
    known = {(row["family"], row["arm"], row["tp"]): row for row in rows}
    made = []
    for row in rows:
        head = {key: row[key] for key in ("family", "arm", "tp", "dtype")}
        if "problem" in row:
            made.append(head | {"problem": row["problem"]})
            continue
        for kind, answers in row["rounds"].items():
            reference = known.get((row["family"], *REFERENCES[kind]), {})
            expected = None if reference is row else reference.get("rounds", {}).get(kind)  # itself would say nothing
            steps = [one["steps"] for one in answers]
            one = head | {"sampling": kind, "texts": len(answers), "tokens": sum(len(one["ids"]) for one in answers)}
            one |= {"steps": sum(steps) if all(steps) else None, "reference": "{} tp {}".format(*REFERENCES[kind])}
            one["steps_compared"] = (row["plugin"] or {}).get("steps_compared")
            made.append(one | (compare(expected, answers, kind == "seeded") if expected else {"equal": None}))
    return made


def compare(expected: Sequence[Any], answers: Sequence[Any], drawn: bool) -> dict[str, Any]:
    """How many texts are equal, and after how many tokens others part; drawn: of those whose first token is equal."""
    pairs = [(a["ids"], b["ids"]) for a, b in zip(expected, answers, strict=True)]
    comparable = [(a, b) for a, b in pairs if not drawn or a[0] == b[0]]
    first = [alike(a, b) for a, b in comparable if a != b]
    return {"comparable": len(comparable), "equal": len(comparable) - len(first), "tokens_before_difference": first}


def run_all(dtype: str, args: argparse.Namespace, folder: Path, end: float, told: Callable[[Any], None]) -> list[Any]:
    """All arms in one dtype; `told` hears what is known after each."""
    rows: list[dict[str, Any]] = []
    children = [Child(one, i, dtype, args, folder / dtype / str(i)) for i, one in enumerate(plan(args))]
    with ThreadPoolExecutor(args.together) as pool:
        for row in pool.map(lambda child: child.run(end), children):
            rows.append(row)
            print(f"{row['family']} {row['arm']} tp {row['tp']}: {_brief(row)}", flush=True)
            told(rows)
    return rows


def _brief(row: dict[str, Any]) -> str:
    if "problem" in row:
        return "\n".join([row["problem"], *row.get("log", [])])
    return f"{row['seconds']} s, {row['plugin']}"


def main() -> None:
    """All arms, in float32 and where that fails in bfloat16; the record grows as they end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=Path, required=True, help="folder with qwen3 and llama of make_pair.py")
    parser.add_argument("--families", default="qwen3,llama")
    parser.add_argument("--tp", type=int, default=2, help="ranks of the arms of several, and GPUs there are")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=48, help="of the first prompt; 3 more for each further one")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--operations", default="native", choices=["native", "sglang"], help="of norms and the like")
    parser.add_argument("--torch-nccl", action="store_true", help="ranks speak through torch.distributed alone")
    parser.add_argument("--together", type=int, default=0, help="processes at a time; 0: 4, on a CPU 1")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--limit", type=float, default=240.0, help="seconds for all")
    parser.add_argument("--each", type=float, default=120.0, help="seconds for one process")
    parser.add_argument("--tail", type=int, default=40, help="lines kept of a failed arm's log")
    parser.add_argument("--logs", default="", help="folder that keeps the logs of arms that failed")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    args.together = args.together or (1 if args.device == "cpu" else 4)
    end, runs = time.time() + args.limit, []

    def told(rows: list[dict[str, Any]]) -> None:
        record = {"schema": "dscale.sglang_tp/1", "arguments": {key: str(value) for key, value in vars(args).items()}}
        record |= {"report": report(rows), "runs": [*runs, rows]}
        if args.out:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps(record, indent=1) + "\n")

    with tempfile.TemporaryDirectory() as folder:
        rows = run_all(args.dtype, args, Path(folder), end, told)
        if args.dtype == "float32" and any("problem" in row and row["tp"] == 1 for row in rows):
            runs.append(rows)
            rows = run_all("bfloat16", args, Path(folder), end, told)
    for row in report(rows):
        print(json.dumps(row), flush=True)
    sys.exit(1 if any("problem" in row for row in rows) else 0)


if __name__ == "__main__":
    main()
