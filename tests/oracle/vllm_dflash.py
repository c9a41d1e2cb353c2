"""Greedy text and draft counts of vLLM on CPU, as JSON; runs with vLLM's own interpreter (docs/oracles.md).

    VLLM_PYTHON tests/oracle/vllm_dflash.py TARGET [--drafter FOLDER] [--width 8] [--max-tokens 48]
                                            [--as-shipped] < prompts.json

prompts.json is a list of lists of token ids. Printed as the last line:
    {"version", "token_ids": [[…]], "requests": [{"steps", "drafted", "accepted"}], "batch": {…, "by_depth": […]}}
"requests" were run one at a time, "batch" all together; without a drafter only the token ids are there. A step that
overruns max_tokens is counted in full, and the step that makes the first token drafts nothing.

vLLM 0.32's CPU kernel norms the context keys of every draft layer with the weights of the first (docs/oracles.md), so
`norm_each_layer` is put in its place; --as-shipped leaves vLLM alone.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB


def norm_each_layer(model: Any, keys: Any) -> Any:
    """Context keys [layers, R, kv, d], each layer normed with its own weight, in float32 inside."""
    import torch

    wide = keys.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + model._rms_norm_eps)
    return wide.to(keys.dtype) * model._k_norm_weights[:, None, None, :]


def correct_context_keys() -> None:
    """Let vLLM's draft model norm its context keys with `norm_each_layer`."""
    from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model

    DFlashQwen3Model._normalize_context_k = norm_each_layer


def build(target: str, drafter: str | None, width: int) -> Any:
    """A vLLM engine in float32, eager, without prefix reuse between the runs."""
    from vllm import LLM

    speculation = {"method": "dflash", "model": drafter, "num_speculative_tokens": width - 1} if drafter else None
    return LLM(
        model=target,
        dtype="float32",
        enforce_eager=True,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        max_model_len=512,
        max_num_seqs=16,
        disable_log_stats=False,
        speculative_config=speculation,
    )


def counters(llm: Any) -> dict[str, Any]:
    """Totals since the engine was built: steps, drafted, accepted, and accepted by depth."""
    values: dict[str, Any] = {}
    for metric in llm.get_metrics():
        name = metric.name.removeprefix("vllm:spec_decode_num_")
        if name != metric.name:
            values[name] = getattr(metric, "values", None) or getattr(metric, "value", 0)
    return {
        "steps": values.get("drafts", 0),
        "drafted": values.get("draft_tokens", 0),
        "accepted": values.get("accepted_tokens", 0),
        "by_depth": values.get("accepted_tokens_per_pos") or [],
    }


def difference(after: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    """What was counted between two snapshots."""
    result: dict[str, Any] = {name: after[name] - before[name] for name in ("steps", "drafted", "accepted")}
    earlier = before["by_depth"] or [0] * len(after["by_depth"])
    result["by_depth"] = [now - then for now, then in zip(after["by_depth"], earlier, strict=True)]
    return result


def decode(llm: Any, prompts: list[list[int]], max_tokens: int, speculative: bool) -> dict[str, Any]:
    """The record of the module's text."""
    import vllm

    greedy = vllm.SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    record: dict[str, Any] = {"version": vllm.__version__}
    if speculative:
        record["requests"] = []
        for item in inputs:
            before = counters(llm)
            llm.generate([item], greedy, use_tqdm=False)
            record["requests"].append(difference(counters(llm), before))
    before = counters(llm)
    outputs = llm.generate(inputs, greedy, use_tqdm=False)
    record["token_ids"] = [list(output.outputs[0].token_ids) for output in outputs]
    if speculative:
        record["batch"] = difference(counters(llm), before)
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("--drafter")
    parser.add_argument("--width", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--as-shipped", action="store_true", help="keep vLLM's norm of the context keys")
    given = parser.parse_args()
    prompts = json.load(sys.stdin)
    if not given.as_shipped:
        correct_context_keys()
    llm = build(given.target, given.drafter, given.width)
    print(json.dumps(decode(llm, prompts, given.max_tokens, given.drafter is not None)), flush=True)


if __name__ == "__main__":
    main()
