"""Tokens a step that the engine really serves with a drafter, greedily, on prompt files.

    python benchmarks/served_progress.py gsm8k.jsonl=60 humaneval.jsonl=30 --out benchmarks/records/served_progress.json

Each file is JSONL with `turns` (the first is asked) or `prompt`; =N takes N prompts spread over it. Policy `full`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from dscale import LLM, SamplingParams
from dscale.evaluate.record_file import write_record


def conversations(path: Path, count: int, llm: LLM, longest: int) -> list[list[dict[str, str]]]:
    """`count` prompts spread over a file, less those over `longest` tokens."""
    rows = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    rows = rows[:: max(1, len(rows) // count)][:count]
    asked = [[{"role": "user", "content": row["turns"][0] if "turns" in row else row["prompt"]}] for row in rows]
    return [one for one in asked if len(llm.loaded.tokenizer.chat(one)) <= longest]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", help="FILE=N")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--drafter", default="auto")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    llm = LLM(args.model, drafter=args.drafter, policy="full", dtype=args.dtype, max_requests=2, max_model_len=1024)
    sets = {}
    for file in args.files:
        path, _, count = file.partition("=")
        asked = conversations(Path(path), int(count or 30), llm, 1024 - args.max_tokens)
        outputs = llm.chat(asked, SamplingParams(temperature=0.0, max_tokens=args.max_tokens))
        tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        steps = sum(output.metrics.steps for output in outputs)
        sets[Path(path).stem] = {"prompts": len(asked), "tokens": tokens, "steps": steps, "progress": tokens / steps}
        print(f"{Path(path).stem:12} {len(asked):4} prompts  {tokens / steps:.2f} tokens a step")
    total = {key: sum(one[key] for one in sets.values()) for key in ("prompts", "tokens", "steps")}
    record = {"schema": "dscale.served_progress/1", "model": args.model, "dtype": args.dtype, "width": 16, "sets": sets}
    record["all"] = total | {"progress": total["tokens"] / total["steps"]}
    write_record(args.out, record)


if __name__ == "__main__":
    main()
