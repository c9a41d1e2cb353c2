"""Where the SGLang versions that are served differ in what the plug-in touches: names, and who holds a value.

0.5.16 calls the anchors bonus tokens, hands its workers the hidden mode of a pass as an argument, resolves server
arguments from declarations, and never lets its host wait for a step of DFLASH. All else the plug-in finds alike.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import metadata
from typing import Any

from torch import Tensor

from dscale.config import require

SUPPORTED = ("0.5.14", "0.5.16")


def check_version() -> None:
    """InputError unless this SGLang is one that the plug-in was written for."""
    found = metadata.version("sglang")
    known = " and ".join(SUPPORTED)
    reason = "its workers and spec infos differ between versions"
    require(found in SUPPORTED, f"DSCALE: SGLang {found} is not supported ({reason}); supported are {known}")


@cache
def newer() -> bool:
    """Whether this is 0.5.16, not 0.5.14."""
    return metadata.version("sglang") != SUPPORTED[0]


def assign(arguments: Any, **fields: Any) -> None:
    """Set server arguments. 0.5.16 applies what was declared after what was only assigned, so there it is declared."""
    if newer():
        arguments.override("dscale", **fields)
        return
    for name, value in fields.items():
        setattr(arguments, name, value)


def prompts_backend(arguments: Any) -> str | None:
    """The attention backend that was chosen for prompts, while the arguments are being resolved."""
    if newer():
        from sglang.srt.arg_groups.overrides import resolved_view

        arguments = resolved_view(arguments)
    chosen: str | None = arguments.prefill_attention_backend or arguments.attention_backend
    return chosen


def pass_over_prompts(target: Any, batch: Any) -> Any:
    """The target worker's result for a batch of prompts, taps of all rows in it."""
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode

    if newer():
        return target.forward_batch_generation(batch, capture_hidden_mode=CaptureHiddenMode.FULL)
    batch.capture_hidden_mode = CaptureHiddenMode.FULL
    return target.forward_batch_generation(batch)


def anchors(carried: Any) -> Tensor:
    """Of what passes from a step to the next: each request's last token, int [N]."""
    tokens: Tensor = carried.bonus_tokens if newer() else carried.verified_id
    return tokens


def carry(worker: Any, anchor: Tensor, length: Tensor, done: Callable[[], Any]) -> Any:
    """What passes to the next step. done makes an event that this one has ended, for a scheduler that waits for it."""
    if newer():
        return worker._make_next_draft_input_decode(bonus_tokens=anchor, new_seq_lens=length)
    # What is allocated SGLang also keeps by request; carried along, it would be read back when a request ends.
    following = worker._make_next_draft_input_decode(verified_id=anchor, new_seq_lens=length)
    following.verify_done = done()
    return following


def planned(batch: Any, width: int) -> tuple[Tensor, int]:
    """Upper bounds of the committed lengths that the host knows, int [N], and their sum (SGLang plans with them)."""
    carried, known = batch.spec_info, batch.seq_lens_cpu
    if not newer():
        if carried.planning_seq_lens_cpu is not None:
            return carried.planning_seq_lens_cpu, int(carried.planning_seq_lens_sum)
        known = known if known is not None else batch.seq_lens.cpu()
    elif known is not None:
        known = known + width
    elif carried.reserved_seq_lens_cpu is not None:
        return carried.reserved_seq_lens_cpu, int(carried.reserved_seq_lens_sum)
    else:
        known = batch.seq_lens.cpu()
    return known, int(known.sum())


def three_dimensional(runner: Any) -> bool:
    """Whether a model's positions have three dimensions."""
    return any(bool(getattr(owner, "model_is_mrope", False)) for owner in (runner, runner.model_config))
