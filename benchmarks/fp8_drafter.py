"""What a drafter in eight bits costs in accepted drafts: tokens a step with --draft-weights auto and fp8, same prompts.

    python benchmarks/fp8_drafter.py gsm8k.jsonl=24 mt-bench.jsonl=24 --out benchmarks/records/fp8_drafter.json
    python benchmarks/fp8_drafter.py gsm8k.jsonl=24 --option draft_kv_cache_dtype --out …       of its cache instead

Files as of served_progress.py. Policy `full`, greedy and at temperature 1, where prompt n has seed n. On a CPU the
values are rounded as on a GPU and multiplied in the wider type. The ratio of progress is of the sums over all prompts;
its 95% interval resamples prompts.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from served_progress import conversations

from dscale import LLM, SamplingParams
from dscale.engine.outputs import RequestOutput
from dscale.evaluate.record_file import write_record

LONGEST = 1024
RESAMPLED = 2000
OPTIONS = ("draft_weights", "draft_kv_cache_dtype", "kv_cache_dtype")
TEMPERATURES = (0.0, 1.0)
Answers = dict[float, dict[str, list[RequestOutput]]]  # by temperature and file


def answers(kind: str, args: argparse.Namespace) -> Answers:
    """Of every prompt, by an engine with the option so; prompt n of a file has seed n."""
    llm = LLM(
        args.model, drafter=args.drafter, policy="full", dtype=args.dtype, device=args.device, max_requests=8,
        max_model_len=LONGEST, **{args.option: kind},
    )  # fmt: skip
    made: Answers = {heat: {} for heat in TEMPERATURES}
    for file in args.files:
        path, _, count = file.partition("=")
        asked = conversations(Path(path), int(count or 24), llm, LONGEST - args.max_tokens)
        for heat, sets in made.items():
            each = [SamplingParams(temperature=heat, max_tokens=args.max_tokens, seed=n) for n in range(len(asked))]
            sets[Path(path).stem] = llm.chat(asked, each)
    return made


def counts(outputs: Sequence[RequestOutput]) -> list[tuple[int, int]]:
    """(tokens, steps) of each."""
    return [(len(output.outputs[0].token_ids), output.metrics.steps) for output in outputs]


def progress(pairs: Sequence[tuple[int, int]]) -> float:
    """Tokens a step."""
    return sum(tokens for tokens, _ in pairs) / sum(steps for _, steps in pairs)


def interval(plain: Sequence[tuple[int, int]], rounded: Sequence[tuple[int, int]]) -> list[float]:
    """95% interval of the ratio of progress."""
    drawn = random.Random(0)
    ratios = []
    for _ in range(RESAMPLED):
        rows = drawn.choices(range(len(plain)), k=len(plain))
        ratios.append(progress([rounded[row] for row in rows]) / progress([plain[row] for row in rows]))
    ratios.sort()
    return [ratios[int(RESAMPLED * share)] for share in (0.025, 0.975)]


def compare(plain: Sequence[RequestOutput], rounded: Sequence[RequestOutput]) -> dict[str, Any]:
    """Progress of both, their ratio, and how many texts are equal."""
    pairs = [counts(plain), counts(rounded)]
    equal = sum(a.outputs[0].token_ids == b.outputs[0].token_ids for a, b in zip(plain, rounded, strict=True))
    made = {"prompts": len(plain), "equal_texts": equal, "tokens": sum(tokens for tokens, _ in pairs[0])}
    made |= {"steps": {name: sum(steps for _, steps in one) for name, one in zip(("auto", "fp8"), pairs, strict=True)}}
    made |= {"progress": {name: progress(one) for name, one in zip(("auto", "fp8"), pairs, strict=True)}}
    return made | {"ratio": progress(pairs[1]) / progress(pairs[0]), "interval": interval(*pairs)}


def main(given: Sequence[str] | None = None) -> dict[str, Any]:
    """Command line; returns the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", help="FILE=N")
    parser.add_argument("--option", choices=OPTIONS, default=OPTIONS[0], help="what is auto, then fp8")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--drafter", default="auto")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(given)
    plain, rounded = (answers(kind, args) for kind in ("auto", "fp8"))
    record: dict[str, Any] = {"schema": "dscale.fp8_drafter/1", "model": args.model, "dtype": args.dtype}
    record["option"] = args.option
    record |= {"device": args.device, "policy": "full", "max_tokens": args.max_tokens, "temperatures": {}}
    for heat in TEMPERATURES:
        cells = {name: compare(one, rounded[heat][name]) for name, one in plain[heat].items()}
        cells["all"] = compare(*([*chain(*one[heat].values())] for one in (plain, rounded)))
        record["temperatures"][str(heat)] = cells
        for name, one in cells.items():
            low, high = one["interval"]
            print(
                f"temperature {heat} {name:10} {one['progress']['auto']:.3f} → {one['progress']['fp8']:.3f} tokens a "
                f"step, ratio {one['ratio']:.4f} ({low:.4f} … {high:.4f}), {one['equal_texts']} of {one['prompts']} "
                "texts equal"
            )
    write_record(args.out, record)
    return record


if __name__ == "__main__":
    main()
