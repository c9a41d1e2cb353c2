"""One decode step, from anchors to committed tokens (architecture.md). There is no other decode path:
`off` is this step with an empty draft, `full` is this step with k = W.

    anchors ─► drafter ─► features ─► predictor ─► allocate ─► pack ─► target ─► accept ─► commit
    (N,)       (N, W)     (N, F)      q (N, W)     k (N,)      (M,)    (M, V)    (N,)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dscale.kernels.attention import RaggedBatch
from dscale.kernels.top_logits import argmax
from dscale.layers.attention import PagedAttention
from dscale.speculation.agreement import size_and_lengths
from dscale.speculation.commit import commit
from dscale.speculation.edits import apply_edits
from dscale.speculation.packing import Packed, PackedRows, pack_rows
from dscale.speculation.policies import Draft, Policy
from dscale.speculation.sampling import RowLogprobs, draw, logprobs
from dscale.speculation.state import DeviceState, Models
from dscale.speculation.workspace import StepShape, Workspace


@dataclass
class StepResult:
    """What a step did, on the device. N lanes, W block width.

    tokens [N, W] emitted tokens, the first emitted[i] of lane i count; accepted [N] drafts among them; slots [N] is k;
    finished [N] bool: an end token or the cap was met; logprobs per verified row, with starts [N+1] to find them.
    """

    tokens: Tensor
    emitted: Tensor
    accepted: Tensor
    slots: Tensor
    finished: Tensor
    starts: Tensor
    draft: Draft
    shape: StepShape
    logprobs: RowLogprobs | None = None


@torch.inference_mode()
def decode_step(state: DeviceState, work: Workspace, shape: StepShape, models: Models, policy: Policy) -> StepResult:
    """Draft, decide, verify, accept and commit for every lane; the state moves on in place."""
    lanes, live = work.lanes, work.running(state.remaining)
    context, anchor = state.length[lanes], state.anchor[lanes]

    draft = draft_block(state, work, shape, models, policy, context, anchor, live)  # drafts (N, W-1), q of §2
    if state.simulation is not None:
        draft = state.simulation.believe(draft, state.seed[lanes], context)
    # q by the predictor, then the shared budget (§2).
    shape, k = size_and_lengths(models.ranks, policy, draft, shape, live)
    # Flat rows, sentinels at the end (§2 Packing).
    packed, rows = pack_rows(k, shape.rows, anchor, draft.tokens, context, state.page_table, lanes)

    hidden, taps, batch = verify(state, work, models, packed, rows, context, draft.tokens.shape[1] + 1)
    logits = models.target.logits(hidden)
    y = choose(logits, state, work, packed, batch, draft)  # y ~ P at every row (§3)
    if state.simulation is not None:
        y = state.simulation.rewrite(y, draft, packed, logits.shape[1])
    if models.ranks.size > 1:
        y = models.ranks.agree(y, work.compared)

    write_draft_context(models, taps, batch)
    outcome, emitted, finished = commit(state, lanes, context, draft.tokens, k, y, packed.starts)
    scores = logprobs(logits, y, work.logprobs) if work.logprobs is not None else None
    return StepResult(
        outcome.tokens, emitted, torch.minimum(outcome.count, emitted), k, finished, packed.starts, draft, shape, scores
    )


def draft_block(
    state: DeviceState,
    work: Workspace,
    shape: StepShape,
    models: Models,
    policy: Policy,
    context: Tensor,
    anchor: Tensor,
    live: Tensor,
) -> Draft:
    """One parallel pass of the drafter over [anchor, mask, …]; the block's keys use the slots after the context."""
    count, width = work.count, shape.width
    if width == 1 or models.drafter is None:
        return Draft.empty(count, anchor.device)
    assert models.draft_cache is not None
    assert models.draft_table is not None
    config = models.drafter.config
    queries = config.queries(width)
    ids = torch.full((count, queries), config.mask_token_id, device=anchor.device)
    ids[:, 0] = anchor
    positions = context[:, None] + torch.arange(queries, device=anchor.device)
    batch = RaggedBatch(
        positions=positions.flatten(),
        slots=state.slots(work.lanes[:, None], positions).flatten(),
        page_table=state.page_table,
        lanes=work.lanes,
        starts=torch.arange(count + 1, device=anchor.device) * queries,
        contexts=context,
        max_rows=queries,
        max_context=work.max_context,
        causal=config.causal,
        arrivals=work.arrivals,
        options=models.attention,
    )
    attend = PagedAttention(config.decoder, models.draft_cache, models.draft_table, batch)
    hidden = models.drafter(models.target.embed(ids.flatten()), attend).view(count, queries, -1)
    hidden = hidden[:, queries - width + 1 : queries - width + 1 + shape.head]  # 1+N drops slot 0
    read = policy.read_draft if shape.scored else policy.read_tokens
    return read(hidden, models.reader or models.target, live, state.initial[work.lanes])


def verify(
    state: DeviceState,
    work: Workspace,
    models: Models,
    packed: Packed,
    rows: PackedRows,
    context: Tensor,
    width: int,
) -> tuple[Tensor, Tensor | None, RaggedBatch]:
    """The target over the packed rows: (hidden [M, H], taps [M, T·H] or None, the batch). Sentinels use slot 0.

    context [N] int64: committed tokens; width: the most rows a lane may have.
    """
    batch = RaggedBatch(
        positions=rows.positions,
        slots=rows.slots,
        page_table=state.page_table,
        lanes=work.lanes,
        starts=packed.starts,
        contexts=context,
        max_rows=width,
        max_context=work.max_context,
        arrivals=work.arrivals,
        options=models.attention,
    )
    attend = PagedAttention(models.target.config.decoder, models.target_cache, models.target_table, batch)
    hidden, taps = models.target(rows.ids, attend, models.taps)
    return hidden, taps, batch


def choose(
    logits: Tensor, state: DeviceState, work: Workspace, packed: Packed, batch: RaggedBatch, draft: Draft
) -> Tensor:
    """Draw y at every row, each as if the drafts before it had been emitted (§3)."""
    if work.edited:
        logits = logits.to(torch.float32, copy=True)  # log-probabilities are of the logits before the edits
        bounds = packed.starts.tolist()
        for lane in work.edited:
            first, end = bounds[lane], bounds[lane + 1]
            edits = state.edits[int(work.lanes[lane])]
            logits[first:end] = apply_edits(logits[first:end], edits, draft.tokens[lane, : end - first - 1])
    if work.all_greedy:
        return argmax(logits)
    return draw(logits, state.row_params(work.lanes, packed.lane_of_row, batch.positions), all_greedy=False)


def write_draft_context(models: Models, taps: Tensor | None, batch: RaggedBatch) -> None:
    """Projected draft keys and values for all rows the target has seen; committed length decides what is visible."""
    if models.drafter is None or taps is None:
        return
    assert models.draft_cache is not None
    assert models.draft_table is not None
    models.drafter.write_context(taps, models.draft_cache, models.draft_table[batch.positions], batch.slots)


@torch.inference_mode()
def prefill(state: DeviceState, models: Models, ids: Tensor, batch: RaggedBatch, hidden: bool = False) -> Tensor:
    """Prompt rows through the target, both caches written. No token is drawn here: the last prompt token is the first
    anchor, so the first output token comes from a decode step like every other. So what the last layer makes of its
    keys is computed only where `hidden` asks for it: hidden rows [R, H], else [0, H]."""
    attend = PagedAttention(models.target.config.decoder, models.target_cache, models.target_table, batch)
    if hidden:
        rows, taps = models.target(ids, attend, models.taps)
    else:
        rows, taps = models.target.embedding[:0], models.target.fill(ids, attend, models.taps)
    write_draft_context(models, taps, batch)
    return rows
