"""`dscale reproduce`: the same prompts twice on one boot, and how often the text differs.

dscale reproduce smollm2-135m --policy off --policy dvl --prompts gsm8k.jsonl --limit 16 --out reproducibility.json
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dscale.cli import checked
from dscale.cli import options as o
from dscale.config import require

if TYPE_CHECKING:
    from dscale.evaluate.reproducibility import ReproducibilityRecord


def reproduce(
    model: o.CheckedModel,
    policy: Annotated[list[str] | None, typer.Option(help="Arm, default off and auto; repeatable.")] = None,
    prompts: o.PromptSets = None,
    limit: o.Limit = 16,
    max_tokens: o.MaxTokens = 96,
    longest: o.Longest = 1024,
    temperature: o.Temperature = 0.0,
    seed: o.SeedOfPrompts = 0,
    drafter: o.Drafter = "auto",
    predictor: o.Predictor = "auto",
    dtype: o.Dtype = "auto",
    device: o.Device = "auto",
    draft_weights: o.DraftWeights = "auto",
    max_requests: o.Requests = 16,
    base_url: Annotated[str | None, typer.Option(help="Ask this OpenAI-compatible server instead.")] = None,
    served_model: o.ServedModel = None,
    out: o.RecordFile = None,
    as_json: o.AsJson = False,
) -> None:
    """Flip hazard a token and share of sequences that diverge, by arm; no gate may be tighter than this.

    Example: dscale reproduce smollm2-135m --policy off --policy dvl --prompts gsm8k.jsonl --limit 16 --out repeat.json
    """
    from dscale.evaluate.continuations import sampling_of
    from dscale.evaluate.record_file import write_record
    from dscale.evaluate.remote import Endpoint
    from dscale.evaluate.repeats import repeat_engine, repeat_server
    from dscale.evaluate.reproducibility import ReproducibilityRecord
    from dscale.models.loader import open_target

    require(max_requests > 0 and limit >= 0, "--max-requests and --limit: must be positive (--limit 0 takes all)")
    params = sampling_of(temperature, max_tokens, seed)
    tokenizer = open_target(model).tokenizer()
    asked = checked.ask(prompts or [], limit, max_tokens, longest, tokenizer)
    used: str | None = None
    if base_url is not None:
        server = Endpoint.open(base_url, served_model, max_requests)
        with o.spinner("asking twice"):
            arms = [
                repeat_server(
                    server, (policy or ["server"])[0], asked.ids, params, partial(tokenizer.encode, add_special=False)
                )
            ]
    else:
        policies = tuple(policy or ("off", "auto"))
        options = {"drafter": drafter, "predictor": predictor, "dtype": dtype, "device": device}
        options |= {"draft_weights": draft_weights}
        llm = checked.engine(model, policies, asked, max_tokens, max_requests, **options)
        used, arms = str(llm.dtype).removeprefix("torch."), []
        with o.reporting() as report:
            for index, one in enumerate(policies):
                report("repeating", index, len(policies))
                arms.append(repeat_engine(llm, one, asked.ids, params))
    record = ReproducibilityRecord(
        **checked.head(),
        model=Path(model).name,
        dtype=used,
        prompts=asked.about,
        arms=tuple(arms),
        server=base_url or "",
    )
    if out is not None:
        write_record(out, record.as_json())
    show(record, as_json)


def show(record: ReproducibilityRecord, as_json: bool) -> None:
    """One line an arm, or the record."""
    if as_json:
        print(json.dumps(record.as_json()))
        return
    for arm in record.arms:
        print(arm)
