"""The worker owns models, caches and device state, and turns a plan of the scheduler into tensors and calls."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dscale.config import PAGE_SIZE
from dscale.engine.graphs import CudaCapture, GraphRunner
from dscale.engine.prefill_graphs import PrefillRunner
from dscale.engine.request import Request
from dscale.engine.results import OutputRing, Outputs, RingSlot
from dscale.engine.scheduler import Chunk
from dscale.kernels.attention import RaggedBatch
from dscale.kernels.top_logits import argmax
from dscale.speculation.costs import StepCosts
from dscale.speculation.decode_step import StepResult, decode_step, draft_block, prefill, verify
from dscale.speculation.edits import LogitEdits
from dscale.speculation.packing import pack_rows
from dscale.speculation.policies import Draft, Off, Policy
from dscale.speculation.state import DeviceState, Models
from dscale.speculation.transfer import place
from dscale.speculation.workspace import StepShape, Workspace


@dataclass
class Launched:
    """A decode step that was started. Its results lie in `result` (an eager step) or arrive in `slot` of the ring.

    shape: its rows are those of these requests, without the spare rows of a bucket.
    """

    requests: list[Request]
    shape: StepShape
    result: StepResult | None
    slot: RingSlot | None
    seconds: float


@dataclass
class Decoded:
    """A finished decode step, on the host: per lane the emitted tokens, accepted drafts, slots, and the seconds.

    draft: what the policy made of the draft, for those who learn from it. result: of an eager step.
    """

    tokens: list[list[int]]
    accepted: list[int]
    slots: list[int]
    shape: StepShape
    draft: Draft
    seconds: float
    result: StepResult | None = None

    def only(self, lanes: Sequence[int]) -> Decoded:
        """The same step as if only these lanes had taken part."""
        known = self.draft.select(torch.tensor(list(lanes), dtype=torch.int64, device=self.draft.tokens.device))
        tokens, accepted, slots = (
            [column[lane] for lane in lanes] for column in (self.tokens, self.accepted, self.slots)
        )
        shape = replace(self.shape, rows=round(self.shape.rows * len(lanes) / len(self.tokens)))
        return Decoded(tokens, accepted, slots, shape, known, self.seconds, self.result)  # type: ignore[arg-type]


class Worker:
    """Runs prefill chunks and decode steps. width: the widest block a policy may ask for.

    graphs and prefills, where set, replay captured steps and prefills; ring, where set, brings results to the host
    (always on a GPU).
    """

    def __init__(self, models: Models, state: DeviceState, policy: Policy | None = None) -> None:
        self.models, self.state = models, state
        self.policy: Policy = policy or Off()
        self.costs = StepCosts(self.measure_verify, self.measure_draft)
        self.device = models.target.embedding.device
        self.graphs: GraphRunner | None = None
        self.prefills: PrefillRunner | None = None
        self.ring: OutputRing | None = None
        self._synced: dict[int, int] = {}  # state row → pages already written to its page table

    def serve(self, most: int, graphs: bool, prefill_rows: int) -> None:
        """Get ready for steps of up to `most` requests and prefills of so many rows, once the policy is set; graphs:
        capture them on a GPU."""
        if self.device.type != "cuda":
            return
        torch.cuda.set_device(self.device)  # kernels and events go to the current device
        self.ring = OutputRing(most, max(self.policy.width, 1), self.device)
        if graphs:
            backend = CudaCapture(self.device)
            self.graphs = GraphRunner(self.state, self.models, self.policy, most, backend)
            self.prefills = self.prefills or PrefillRunner(self.state, self.models, prefill_rows, backend)

    def replay_seconds(self, live: int, shape: StepShape) -> float:
        """Seconds of the captured step that serves `live` requests with this shape."""
        assert self.graphs is not None
        return self.graphs.seconds(live, shape)

    def bind(self, requests: Sequence[Request]) -> None:
        """Make a row of the device state each request's own, and bring the page table up to date."""
        rows: list[int] = []
        columns: list[int] = []
        pages: list[int] = []
        for request in requests:
            if not request.bound:
                self._admit(request)
            known, held = self._synced[request.row], len(request.pages)
            if known < held:
                rows += [request.row] * (held - known)
                columns += range(known, held)
                pages += request.pages[known:]
                self._synced[request.row] = held
        if rows:
            self.state.set_page_entries(rows, columns, pages)

    def _admit(self, request: Request) -> None:
        self.state.admit(request.row, request.params, request.seed, request.end_ids)
        self.state.edits.pop(request.row, None)
        if request.params.edits_logits:
            grammar = request.grammar.begin(request.end_ids) if request.grammar is not None else None
            edits = LogitEdits.begin(
                request.params, request.prompt, self.vocab_size, request.end_ids, self.device, grammar
            )
            edits.commit(request.output)
            self.state.edits[request.row] = edits
        self._synced[request.row] = 0
        anchor = request.tokens[-1]
        self.state.set_anchor(request.row, request.length - 1, anchor, request.remaining, not request.output)
        request.bound = True

    @property
    def vocab_size(self) -> int:
        """Tokens of the target's head."""
        return self.models.target.config.decoder.vocab_size

    def prefill(self, chunks: Sequence[Chunk]) -> list[Tensor]:
        """Put chunks through the target; hidden rows [length, H] of each."""
        self.bind([chunk.request for chunk in chunks])
        if self.prefills is not None:
            return self.prefills.run(chunks)
        ids = [token for chunk in chunks for token in chunk.tokens]
        hidden = prefill(self.state, self.models, self._integers(ids), self._prefill_batch(chunks))
        return list(hidden.split([chunk.length for chunk in chunks]))

    def _prefill_batch(self, chunks: Sequence[Chunk]) -> RaggedBatch:
        lengths = [chunk.length for chunk in chunks]
        starts = [0]
        for length in lengths:
            starts.append(starts[-1] + length)
        lanes = self._integers([chunk.request.row for chunk in chunks])
        positions = torch.cat([torch.arange(c.start, c.start + c.length, device=self.device) for c in chunks])
        row_lanes = torch.repeat_interleave(lanes, self._integers(lengths), output_size=starts[-1])
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

    def launch(self, requests: Sequence[Request]) -> Launched:
        """Start one decode step for these requests; on a GPU nothing of it is waited for."""
        began = time.perf_counter()
        self.bind(requests)
        shape = self.policy.shape(len(requests))
        slot = None if self.ring is None else self.ring.take()
        if slot is not None:
            slot.begin()
        if self.graphs is not None and not any(request.params.needs_host for request in requests):
            assert slot is not None
            all_greedy = all(request.params.greedy for request in requests)
            slot.end(self.graphs.run([request.row for request in requests], shape, all_greedy))
            return Launched(list(requests), shape, None, slot, time.perf_counter() - began)
        result = decode_step(self.state, self._workspace(requests, shape), shape, self.models, self.policy)
        if slot is not None:
            slot.end(Outputs.pack(result))
        return Launched(list(requests), result.shape, result, slot, time.perf_counter() - began)

    def collect(self, launched: Launched) -> Decoded:
        """The results of a step, waited for."""
        result, slot = launched.result, launched.slot
        if slot is not None:
            host, seconds = slot.read(len(launched.requests))
            timed = launched.seconds if seconds is None else seconds
            return Decoded(host.tokens, host.accepted, host.slots, launched.shape, host.draft, timed, result)
        assert result is not None
        emitted = result.emitted.tolist()
        tokens = [row[:count] for row, count in zip(result.tokens.tolist(), emitted, strict=True)]
        accepted, slots = result.accepted.tolist(), result.slots.tolist()
        return Decoded(tokens, accepted, slots, launched.shape, result.draft, launched.seconds, result)

    def _workspace(self, requests: Sequence[Request], shape: StepShape) -> Workspace:
        """Of an eager step, of just these requests."""
        width = self.policy.width
        longest = max(request.longest(width) for request in requests)
        work = Workspace.of([request.row for request in requests], longest + shape.width, self.device)
        work.all_greedy = all(request.params.greedy for request in requests)
        wanted = [r.params.logprobs for r in requests if r.params.logprobs is not None]
        work.logprobs = max(wanted) if wanted else None
        work.edited = tuple(lane for lane, request in enumerate(requests) if request.params.edits_logits)
        work.late = any(request.in_flight for request in requests)
        return work

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
        live = work.live
        return lambda: draft_block(self.state, work, shape, self.models, self.policy, context, anchor, live)

    def _scratch(self, lanes: int) -> Workspace:
        return Workspace.of([self.state.scratch_row] * lanes, self.policy.width + 1, self.device)

    def _integers(self, values: Sequence[int]) -> Tensor:
        return place(values, torch.int64, self.device)


def _nothing() -> None:
    return


@torch.inference_mode()
def _typical(run: Callable[[], object], before: Callable[[], object], repeats: int = 5) -> float:
    """Median seconds of `run`, each time right after `before`."""
    seconds, settle = [], torch.cuda.synchronize if torch.cuda.is_available() else _nothing
    for _ in range(repeats):
        before()
        settle()
        began = time.perf_counter()
        run()
        settle()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)
