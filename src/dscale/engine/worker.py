"""The worker owns models, caches and device state, and turns a plan of the scheduler into tensors and calls."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dscale.config import PAGE_SIZE
from dscale.engine.request import Request
from dscale.engine.scheduler import Chunk
from dscale.kernels.attention import RaggedBatch
from dscale.kernels.top_logits import argmax
from dscale.speculation.costs import StepCosts
from dscale.speculation.decode_step import StepResult, decode_step, draft_block, prefill, verify
from dscale.speculation.edits import LogitEdits
from dscale.speculation.packing import pack_rows
from dscale.speculation.policies import Off, Policy
from dscale.speculation.state import DeviceState, Models
from dscale.speculation.workspace import StepShape, Workspace


@dataclass
class Decoded:
    """A finished decode step, on the host: per lane the emitted tokens, accepted drafts, slots, and the seconds."""

    tokens: list[list[int]]
    accepted: list[int]
    slots: list[int]
    shape: StepShape
    result: StepResult
    seconds: float


class Worker:
    """Runs prefill chunks and decode steps. width: the widest block a policy may ask for."""

    def __init__(self, models: Models, state: DeviceState, policy: Policy | None = None) -> None:
        self.models, self.state = models, state
        self.policy: Policy = policy or Off()
        self.costs = StepCosts(self.measure_verify, self.measure_draft)
        self.device = models.target.embedding.device
        self._synced: dict[int, int] = {}  # state row → pages already written to its page table

    def bind(self, request: Request) -> None:
        """Make the request's row of the device state its own, and bring its page table up to date."""
        if not request.bound:
            self.state.admit(request.row, request.params, request.seed, request.end_ids)
            self.state.edits.pop(request.row, None)
            if request.params.edits_logits:
                edits = LogitEdits.begin(request.params, request.prompt, self.vocab_size, request.end_ids, self.device)
                edits.commit(request.output)
                self.state.edits[request.row] = edits
            self._synced[request.row] = 0
            anchor = request.tokens[-1]
            self.state.set_anchor(request.row, request.length - 1, anchor, request.remaining, not request.output)
            request.bound = True
        known = self._synced[request.row]
        if known < len(request.pages):
            self.state.set_pages(request.row, request.pages, known)
            self._synced[request.row] = len(request.pages)

    @property
    def vocab_size(self) -> int:
        """Tokens of the target's head."""
        return self.models.target.config.decoder.vocab_size

    def prefill(self, chunks: Sequence[Chunk]) -> list[Tensor]:
        """Put chunks through the target; hidden rows [length, H] of each."""
        for chunk in chunks:
            self.bind(chunk.request)
        ids: list[int] = []
        for chunk in chunks:
            ids += chunk.request.tokens[chunk.start : chunk.start + chunk.length]
        hidden = prefill(self.state, self.models, self._integers(ids), self._prefill_batch(chunks))
        return list(hidden.split([chunk.length for chunk in chunks]))

    def _prefill_batch(self, chunks: Sequence[Chunk]) -> RaggedBatch:
        lengths = [chunk.length for chunk in chunks]
        starts = [0]
        for length in lengths:
            starts.append(starts[-1] + length)
        lanes = self._integers([chunk.request.row for chunk in chunks])
        positions = torch.cat([torch.arange(c.start, c.start + c.length, device=self.device) for c in chunks])
        row_lanes = torch.repeat_interleave(lanes, self._integers(lengths))
        pages = self.state.page_table[row_lanes, positions // PAGE_SIZE].long()
        return RaggedBatch(
            positions=positions,
            slots=pages * PAGE_SIZE + positions % PAGE_SIZE,
            page_table=self.state.page_table,
            lanes=lanes,
            starts=self._integers(starts),
            contexts=self._integers([chunk.start for chunk in chunks]),
            max_rows=max(lengths),
            max_context=max(chunk.start + chunk.length for chunk in chunks),
            options=self.models.attention,
        )

    def decode(self, requests: Sequence[Request]) -> Decoded:
        """One decode step for these requests."""
        began = time.perf_counter()
        for request in requests:
            self.bind(request)
        shape = self.policy.shape(len(requests))
        work = Workspace.of([r.row for r in requests], max(r.length for r in requests) + shape.width, self.device)
        work.all_greedy = all(request.params.greedy for request in requests)
        wanted = [r.params.logprobs for r in requests if r.params.logprobs is not None]
        work.logprobs = max(wanted) if wanted else None
        work.edited = tuple(lane for lane, request in enumerate(requests) if request.params.edits_logits)
        result = decode_step(self.state, work, shape, self.models, self.policy)
        shape = result.shape
        emitted = result.emitted.tolist()
        tokens = [row[:count] for row, count in zip(result.tokens.tolist(), emitted, strict=True)]
        accepted, slots = result.accepted.tolist(), result.slots.tolist()
        return Decoded(tokens, accepted, slots, shape, result, time.perf_counter() - began)

    def commit_edits(self, request: Request, tokens: Sequence[int]) -> None:
        """Tell a request's logit edits what was emitted."""
        edits = self.state.edits.get(request.row)
        if edits is not None and request.params.edits_logits:
            edits.commit(tokens)

    def measure_verify(self, rows: int) -> float:
        """Seconds of one target pass over `rows` rows with its head, on scratch, right after a draft pass as in a step
        (weights of the one have left the processor's caches when the other runs)."""
        width = self.policy.width
        draft: Callable[[], object] = self._draft_pass(1, width) if width > 1 else _nothing
        return _typical(self._verify_pass(rows), draft)

    def measure_draft(self, rows: int) -> float:
        """Seconds of drafting `rows` rows in blocks of the policy's width (fewer rows: one block), on scratch, right
        after a target pass."""
        width = min(max(rows, 2), self.policy.width)
        return _typical(self._draft_pass(max(rows // width, 1), width), self._verify_pass(1))

    def _verify_pass(self, rows: int) -> Callable[[], None]:
        work = self._scratch(rows)
        state, lanes = self.state, work.lanes
        context, nothing = state.length[lanes], torch.empty(rows, 0, dtype=torch.int64, device=self.device)
        one_each = torch.ones_like(lanes)
        packed, flat = pack_rows(one_each, rows, state.anchor[lanes], nothing, context, state.page_table, lanes)

        def run() -> None:
            hidden, _, _ = verify(state, work, self.models, packed, flat, context, width=1)
            argmax(self.models.target.logits(hidden))

        return run

    def _draft_pass(self, lanes: int, width: int) -> Callable[[], object]:
        shape = StepShape(width=width, head=width - 1, rows=lanes * width)
        work = self._scratch(lanes)
        context, anchor = self.state.length[work.lanes], self.state.anchor[work.lanes]
        return lambda: draft_block(self.state, work, shape, self.models, self.policy, context, anchor)

    def _scratch(self, lanes: int) -> Workspace:
        return Workspace.of([self.state.scratch_row] * lanes, self.policy.width + 1, self.device)

    def _integers(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(list(values), dtype=torch.int64, device=self.device)


def _nothing() -> None:
    return


@torch.inference_mode()
def _typical(run: Callable[[], object], before: Callable[[], object], repeats: int = 5) -> float:
    """Median seconds of `run`, each time right after `before`."""
    seconds = []
    for _ in range(repeats):
        before()
        began = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)
