"""`dscale demo`: the same answers without speculation, with whole blocks, and with a shared budget, side by side.

dscale demo
dscale demo --json
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dscale.cli import options as o
from dscale.config import SamplingParams, require
from dscale.versions import versions

if TYPE_CHECKING:
    from dscale.engine.llm import LLM
    from dscale.engine.outputs import RequestOutput

ARMS = ("off", "full", "dvl")
PROMPTS = (
    "A bakery sells 24 rolls in the morning and twice as many in the afternoon. Each roll costs $0.50. "
    "How much money does it take in that day? Reason step by step.",
    "Write a Python function that returns the largest even number in a list, with a short example.",
    "Explain in a few sentences why the sea is salty.",
    "List five tips for learning a new language.",
)


@dataclass
class Arm:
    """Sums of one policy over the prompts."""

    policy: str
    seconds: float = 0.0
    tokens: int = 0
    steps: int = 0
    slots: int = 0

    def add(self, output: RequestOutput, seconds: float) -> None:
        """Take in one answer."""
        self.seconds += seconds
        self.tokens += len(output.outputs[0].token_ids)
        self.steps += output.metrics.steps
        self.slots += output.metrics.slots


def demo(
    model: o.Model = "smollm2-135m",
    drafter: o.Drafter = "auto",
    predictor: o.Predictor = "auto",
    dtype: o.Dtype = "auto",
    max_tokens: o.MaxTokens = 128,
    slots: o.Slots = 8.0,
    as_json: o.AsJson = False,
) -> None:
    """Answer a few prompts with off, full and dvl, and compare speed and text.

    Example: dscale demo
    """
    llms = build_arms(model, drafter, predictor, dtype, slots)
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    arms, answers = run(llms, params)
    record = to_record(model, llms["off"], arms, answers)
    if as_json:
        print(json.dumps(record))
        return
    console = Console()
    console.print(to_table(record))
    console.print(f"same text: {'yes' if record['same_text'] else 'no'}", style="bold")
    console.print(coloured(llms["dvl"], answers["dvl"][0]))
    console.print("green: drafts that the target accepted; plain: the target's own tokens", style="dim")


def build_arms(model: str, drafter: str, predictor: str, dtype: str, slots: float) -> dict[str, LLM]:
    """One LLM a policy over the same target."""
    from dscale.config import resolve_dtype
    from dscale.engine.llm import LLM
    from dscale.engine.placement import default_dtype
    from dscale.models.loader import load_target

    with o.spinner(f"loading {model}"):
        loaded = load_target(model, default_dtype("cpu") if dtype == "auto" else resolve_dtype(dtype))
        shared: dict[str, Any] = {"max_requests": 1, "max_model_len": min(1024, loaded.config.decoder.max_position)}
        common = {"drafter": drafter, "predictor": predictor, "dtype": dtype, "slots": slots, "device": "cpu", **shared}
        return {policy: LLM(loaded, policy=policy, **common) for policy in ARMS}


def run(llms: dict[str, LLM], params: SamplingParams) -> tuple[dict[str, Arm], dict[str, list[RequestOutput]]]:
    """Every prompt with every policy in turn, the order reversed from prompt to prompt, after one warm-up each."""
    arms = {policy: Arm(policy) for policy in llms}
    answers: dict[str, list[RequestOutput]] = {policy: [] for policy in llms}
    warm = SamplingParams(temperature=0.0, max_tokens=8)
    with o.progress_bar() as bar:
        task = bar.add_task("answering", total=len(PROMPTS) * len(llms))
        for llm in llms.values():
            llm.chat([{"role": "user", "content": "Hello"}], warm)
        for number, prompt in enumerate(PROMPTS):
            for policy in list(llms) if number % 2 == 0 else list(llms)[::-1]:
                began = time.perf_counter()
                (output,) = llms[policy].chat([{"role": "user", "content": prompt}], params)
                arms[policy].add(output, time.perf_counter() - began)
                answers[policy].append(output)
                bar.advance(task)
    return arms, answers


def to_record(model: str, llm: LLM, arms: dict[str, Arm], answers: dict[str, list[RequestOutput]]) -> dict[str, Any]:
    """The demo's record, as --json prints it."""
    base = arms["off"].tokens / arms["off"].seconds
    tokens = {policy: [output.outputs[0].token_ids for output in outputs] for policy, outputs in answers.items()}
    require(all(arm.steps > 0 for arm in arms.values()), "demo: no token was generated")
    return {
        "model": model,
        "dtype": str(llm.dtype).removeprefix("torch."),
        "prompts": len(PROMPTS),
        "same_text": all(rows == tokens["off"] for rows in tokens.values()),
        "arms": [
            {
                "policy": arm.policy,
                "tokens_per_s": arm.tokens / arm.seconds,
                "speedup": arm.tokens / arm.seconds / base,
                "mean_progress": arm.tokens / arm.steps,
                "slots_per_request": arm.slots / arm.steps,
                "raw": asdict(arm),
            }
            for arm in arms.values()
        ],
        "versions": versions(),
    }


def to_table(record: dict[str, Any]) -> Table:
    """The comparison as a table."""
    table = Table(title=f"{record['model']} · {record['dtype']} · {record['prompts']} prompts, one at a time")
    table.add_column("policy")
    for name in ("tokens/s", "speed-up", "mean progress", "verified slots"):
        table.add_column(name, justify="right")
    for arm in record["arms"]:
        table.add_row(
            arm["policy"],
            f"{arm['tokens_per_s']:.1f}",
            f"{arm['speedup']:.2f}×",
            f"{arm['mean_progress']:.2f}",
            f"{arm['slots_per_request']:.1f}",
        )
    return table


def coloured(llm: LLM, output: RequestOutput) -> Text:
    """The answer with accepted drafts in green."""
    from dscale.models.tokenizer import IncrementalDecoder

    decoder = IncrementalDecoder(llm.loaded.tokenizer)
    one, text = output.outputs[0], Text()
    assert one.metrics is not None
    ids = iter(one.token_ids)
    for record in one.metrics.records:
        for index in range(record.emitted):
            text.append(decoder.push([next(ids)]), style="green" if index < record.accepted else "default")
    text.append(decoder.finish())
    return text
