"""A decode step beside the passes of its models: which slots a block has, what is verified, what was accepted.

Nothing here knows SGLang, and nothing is read on the host, so that every stage can be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dscale.integrations.sglang.drafts import Drafts
from dscale.speculation.acceptance import accept
from dscale.speculation.packing import Packed, PackedRows, pack_rows
from dscale.speculation.policies import Draft
from dscale.speculation.simulated import Simulation

Agree = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # drafts [N, W-1] and k [N] that every rank takes


def decided_together(drafts: Tensor, k: Tensor, send: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Drafts [N, W-1] and k [N] of the first rank, in one message: send gives every rank that of the first."""
    decided = send(torch.cat([drafts, k[:, None]], dim=1))
    return decided[:, :-1], decided[:, -1]


@dataclass(frozen=True)
class Lanes:
    """Inputs of a step, one entry a lane. anchor, context (tokens committed), rows (of SGLang's request table) and
    seeds are int64 [N]; initial (first step after the prompt) and live are bool [N]. spare: not all may be live."""

    anchor: Tensor
    context: Tensor
    rows: Tensor
    seeds: Tensor
    initial: Tensor
    live: Tensor
    spare: bool = False

    @property
    def count(self) -> int:
        """N."""
        return self.rows.shape[0]


@dataclass(frozen=True)
class Block:
    """Rows of the drafter, flat int64 [N · W] each: [anchor, mask, …], their positions and cache slots."""

    ids: Tensor
    positions: Tensor
    slots: Tensor


@dataclass(frozen=True)
class Decision:
    """What is verified: drafts with what is believed of them, k int64 [N], and the packed rows."""

    draft: Draft
    k: Tensor
    packed: Packed
    flat: PackedRows


@dataclass(frozen=True)
class Settled:
    """What a step made: tokens int64 [N, W], emitted of them int32 [N], the next anchor int32 [N], the committed
    length after the step int64 [N]."""

    tokens: Tensor
    emitted: Tensor
    anchor: Tensor
    length: Tensor


class Stages:
    """table [rows, positions] int32 is SGLang's req_to_token: pages of one token."""

    def __init__(self, drafts: Drafts, table: Tensor, mask: int, simulation: Simulation | None) -> None:
        self.drafts, self.table, self.simulation = drafts, table, simulation
        self.mask, self.width, self.vocab = mask, drafts.width, drafts.head.vocab
        self._offsets = torch.arange(self.width, device=table.device)

    def block(self, lanes: Lanes) -> Block:
        """What the drafter reads."""
        ids = torch.full((lanes.count, self.width), self.mask, device=self.table.device)
        ids[:, 0] = lanes.anchor
        positions = lanes.context[:, None] + self._offsets
        slots = self.table[lanes.rows[:, None], positions].long()
        return Block(ids.flatten(), positions.flatten(), slots.flatten())

    def decide(self, hidden: Tensor, lanes: Lanes, agree: Agree | None = None) -> Decision:
        """From the drafter's rows hidden [N, W, H]; slot 0 of them predicts nothing (layout 1+N)."""
        draft = self.drafts.read(hidden[:, 1:], lanes.live, lanes.initial)
        if self.simulation is not None:
            draft = self.simulation.believe(draft, lanes.seeds, lanes.context)
        k = self.drafts.lengths(draft, lanes.live, lanes.spare)
        if agree is not None:
            draft.tokens, k = agree(draft.tokens, k)
        rows = self.drafts.rows * lanes.count
        fields = (lanes.anchor, draft.tokens, lanes.context, self.table, lanes.rows)
        return Decision(draft, k, *pack_rows(k, rows, *fields, page_size=1))

    def settle(self, y: Tensor, decision: Decision, context: Tensor) -> Settled:
        """From the target's own tokens y [M] of the packed rows; context [N] int64."""
        if self.simulation is not None:
            y = self.simulation.rewrite(y, decision.draft, decision.packed, self.vocab)
        outcome = accept(decision.draft.tokens, decision.k, y, decision.packed.starts)
        length = context + outcome.emitted
        return Settled(outcome.tokens, outcome.emitted.int(), outcome.next_anchor.int(), length)
