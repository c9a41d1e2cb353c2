"""What a pass of a model costs here, measured on scratch rows of the device state. `auto` asks for it where it has no
captured steps to time (speculation/costs.py)."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from dscale.kernels.top_logits import argmax
from dscale.speculation.decode_step import draft_block, verify
from dscale.speculation.packing import pack_rows
from dscale.speculation.policies import Policy
from dscale.speculation.state import DeviceState, Models
from dscale.speculation.workspace import StepShape, Workspace

Pass = Callable[[], object]


def nothing() -> None:
    """The pass that costs nothing."""


def verify_pass(models: Models, state: DeviceState, policy: Policy, rows: int) -> Pass:
    """A pass of the target over `rows` rows, each of another lane, with its head."""
    work = _scratch(state, policy, rows)
    lanes, device = work.lanes, work.lanes.device
    context, no_drafts = state.length[lanes], torch.empty(rows, 0, dtype=torch.int64, device=device)
    one_each = torch.ones_like(lanes)
    packed, flat = pack_rows(one_each, rows, state.anchor[lanes], no_drafts, context, state.page_table, lanes)

    def run() -> None:
        hidden, _, _ = verify(state, work, models, packed, flat, context, width=1)
        argmax(models.target.logits(hidden))

    return run


def draft_pass(models: Models, state: DeviceState, policy: Policy, lanes: int, width: int) -> Pass:
    """Drafting of one block of `width` rows for each of `lanes` lanes, as the policy reads it."""
    shape = StepShape(width=width, head=width - 1, rows=lanes * width)
    work = _scratch(state, policy, lanes)
    context, anchor = state.length[work.lanes], state.anchor[work.lanes]
    live = work.live
    return lambda: draft_block(state, work, shape, models, policy, context, anchor, live)


@torch.inference_mode()
def typical_seconds(run: Pass, before: Pass, repeats: int = 5) -> float:
    """Median seconds of `run`, each time right after `before`."""
    seconds, settle = [], torch.cuda.synchronize if torch.cuda.is_available() else nothing
    for _ in range(repeats):
        before()
        settle()
        began = time.perf_counter()
        run()
        settle()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def _scratch(state: DeviceState, policy: Policy, lanes: int) -> Workspace:
    return Workspace.of([state.scratch_row] * lanes, policy.width + 1, state.length.device)
