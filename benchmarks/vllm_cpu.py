"""Throughput of vLLM on CPU, with or without a DFlash drafter: the yardstick of cpu_speed.py.

    VLLM_PYTHON benchmarks/vllm_cpu.py --model FOLDER --prompts gsm8k.jsonl --concurrency 8 [--drafter FOLDER] --json

Runs with the interpreter of an environment with vLLM (docs/oracles.md), one process for each concurrency. Closed loop:
at most c requests run at once and the next starts when one ends, greedily, up to --max-tokens or the end token; one
batch of warm-up before. vLLM is given what its manual asks for: Intel's OpenMP preloaded where the environment has it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "oracle"))  # what both know of vLLM lives there
from vllm_dflash import correct_context_keys, counters, difference

LENGTH = 1024  # tokens of prompt and answer


def preload_openmp() -> None:
    """Start over with the environment's libiomp5 in LD_PRELOAD, which can only be set before a process begins."""
    library = Path(sys.prefix) / "lib" / "libiomp5.so"
    given = os.environ.get("LD_PRELOAD", "")
    if library.is_file() and "libiomp5" not in given:
        os.environ["LD_PRELOAD"] = f"{library}:{given}".rstrip(":")
        os.execv(sys.executable, [sys.executable, *sys.argv])


def read_prompts(path: Path, count: int) -> list[str]:
    """The first turn of the first `count` rows."""
    rows = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    if len(rows) < count:
        sys.exit(f"{path}: has {len(rows)} prompts, --num-prompts asks for {count}")
    return [row["turns"][0] if "turns" in row else row["prompt"] for row in rows[:count]]


def build(args: argparse.Namespace) -> Any:
    """The engine that answers at most --concurrency requests at a time."""
    from vllm import LLM

    speculation = None
    if args.drafter:
        drafts = args.num_speculative_tokens
        speculation = {"method": "dflash", "model": args.drafter, "num_speculative_tokens": drafts}
    return LLM(
        model=args.model,
        dtype=args.dtype,
        max_model_len=LENGTH,
        max_num_seqs=args.concurrency,
        enforce_eager=not args.compile,
        enable_prefix_caching=False,
        disable_log_stats=False,
        speculative_config=speculation,
    )


def answer(llm: Any, prompts: list[str], max_tokens: int) -> dict[str, Any]:
    """Answer all prompts: tokens, seconds, and what speculation did."""
    from vllm import SamplingParams

    conversations = [[{"role": "user", "content": prompt}] for prompt in prompts]
    before, began = counters(llm), time.perf_counter()
    outputs = llm.chat(conversations, SamplingParams(temperature=0.0, max_tokens=max_tokens), use_tqdm=False)
    seconds = time.perf_counter() - began
    spent = difference(counters(llm), before)
    ids = [list(output.outputs[0].token_ids) for output in outputs]
    tokens = sum(map(len, ids))
    record = {"tokens": tokens, "seconds": seconds, "tokens_per_s": tokens / seconds, "ids": ids}
    if spent["steps"]:
        record |= spent | {"mean_progress": 1 + spent["accepted"] / spent["steps"]}
    return record


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder with config.json, safetensors and a tokenizer")
    parser.add_argument("--drafter", help="folder of a DFlash drafter; without it no speculation")
    parser.add_argument("--num-speculative-tokens", type=int, default=15, help="drafts of a block (W - 1)")
    parser.add_argument("--prompts", type=Path, required=True, help="JSONL rows with `turns` or `prompt`")
    parser.add_argument("--num-prompts", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--concurrency", type=int, default=1)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--compile", action="store_true", help="let vLLM compile the model instead of running eagerly")
    parser.add_argument("--as-shipped", action="store_true", help="keep vLLM's norm of the draft's context keys")
    parser.add_argument("--json", action="store_true", help="print the record as one line")
    args = parser.parse_args()
    preload_openmp()
    prompts = read_prompts(args.prompts, args.num_prompts)
    if not args.as_shipped:
        correct_context_keys()
    import torch
    import vllm

    llm = build(args)
    answer(llm, prompts[: args.concurrency], 24)
    record = answer(llm, prompts, args.max_tokens) | {
        "concurrency": args.concurrency,
        "num_speculative_tokens": args.num_speculative_tokens if args.drafter else 0,
        "dtype": args.dtype,
        "compiled": args.compile,
        "threads": torch.get_num_threads(),
        "versions": {"vllm": vllm.__version__, "torch": torch.__version__},
    }
    if args.json:
        print(json.dumps(record), flush=True)
    else:
        progress = f", mean progress {record['mean_progress']:.2f}" if "mean_progress" in record else ""
        print(f"c={args.concurrency}: {record['tokens_per_s']:.1f} tokens/s{progress}", flush=True)


if __name__ == "__main__":
    main()
