"""The end of a step: drafts are accepted, cut at end tokens and caps, and the requests move on (dscale.md §3)."""

from __future__ import annotations

from torch import Tensor

from dscale.kernels import triton
from dscale.speculation.acceptance import Accepted, accept_clipped
from dscale.speculation.state import DeviceState


def commit(
    state: DeviceState, lanes: Tensor, context: Tensor, drafts: Tensor, k: Tensor, y: Tensor, starts: Tensor
) -> tuple[Accepted, Tensor, Tensor]:
    """What was accepted, emitted after the cut [N] int64, finished [N] bool; the state moves on in place.
    Nothing remains to a lane that finished: it takes no part in a step that was started before the host knew.

    lanes [N] int64 maps a lane to its row of the state, context [N] int64 is its committed length; the rest as of
    `accept`.
    """
    if triton.usable(y):
        from dscale.kernels.triton import accept as kernel

        moved = (lanes, context, state.length, state.anchor, state.initial)
        parts, emitted, finished = kernel.commit(drafts, k, y, starts, state.end_ids, state.remaining, moved)
        return Accepted(*parts), emitted, finished
    outcome, emitted, finished = accept_clipped(drafts, k, y, starts, state.end_ids[lanes], state.remaining[lanes])
    state.length[lanes] = context + emitted
    state.anchor[lanes] = outcome.next_anchor
    state.remaining[lanes] = (state.remaining[lanes] - emitted).masked_fill_(finished, 0)
    state.initial[lanes] = False
    return outcome, emitted, finished
