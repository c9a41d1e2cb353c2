"""Budgets, lengths and tokens are decided once, by the first rank (issue: ranks that chose different budgets read each
other's rows). Each rank makes the same decisions; what the first one made of them is what counts.

Two small broadcasts a step, both in stream order, so that they are captured with it: drafts and lengths before the
target runs, the target's tokens after. What follows from these – accepted counts, ends, positions – is arithmetic of
integers. Where the step's size follows the draft (on a CPU), the size is broadcast too.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from dscale.layers.ranks import Ranks
from dscale.speculation.policies import Draft, Policy
from dscale.speculation.workspace import StepShape


def size_and_lengths(
    ranks: Ranks, policy: Policy, draft: Draft, shape: StepShape, live: Tensor
) -> tuple[StepShape, Tensor]:
    """The step's size and k int64 [N], rows to verify of each lane; the draft's tokens become the first rank's."""
    if ranks.size == 1:
        shape = policy.resize(draft, shape, live)
        return shape, policy.lengths(draft, shape, live)
    if policy.resizes:
        rows = policy.resize(draft, shape, live).rows if ranks.leads else 0
        shape = replace(shape, rows=int(ranks.share(torch.tensor([rows], device=live.device))))
    lanes = live.shape[0]
    decided = ranks.agree(torch.cat([policy.lengths(draft, shape, live), draft.tokens.flatten()]))
    draft.tokens = decided[lanes:].view(draft.tokens.shape)
    return shape, decided[:lanes]
