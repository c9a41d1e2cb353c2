"""The worker owns models, caches and device state, and turns a plan of the scheduler into tensors and calls."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, NamedTuple, ParamSpec, TypeVar, cast

import torch
from torch import Tensor

from dscale.config import SamplingParams
from dscale.engine.crew import Crew
from dscale.engine.graphs import CudaCapture, GraphRunner
from dscale.engine.pass_times import Pass, draft_pass, nothing, typical_seconds, verify_pass
from dscale.engine.prefill_graphs import Piece, PrefillRunner
from dscale.engine.request import Request
from dscale.engine.results import OutputRing, Outputs, RingSlot
from dscale.engine.scheduler import Chunk
from dscale.kernels.attention import RaggedBatch
from dscale.speculation.costs import StepCosts
from dscale.speculation.decode_step import StepResult, decode_step, prefill
from dscale.speculation.edits import LogitEdits
from dscale.speculation.policies import Draft, Off, Policy, StepOutcome
from dscale.speculation.sampling import RowLogprobs, logprobs
from dscale.speculation.state import DeviceState, Models
from dscale.speculation.transfer import place
from dscale.speculation.workspace import StepShape, Workspace

P = ParamSpec("P")
T = TypeVar("T")


class Admission(NamedTuple):
    """A request that starts on a row of the state: anchor as of DeviceState.set_anchor."""

    row: int
    params: SamplingParams
    seed: int
    end_ids: tuple[int, ...]
    anchor: tuple[int, int, int, bool]


class StepPlan(NamedTuple):
    """A decode step in plain values, the same for every rank. rows: of the state; reach: Workspace.max_context of an
    eager step."""

    rows: list[int]
    shape: StepShape
    captured: bool
    all_greedy: bool
    reach: int
    late: bool
    compared: bool

    def workspace(self, device: torch.device) -> Workspace:
        """Of an eager step of just these rows."""
        work = Workspace.of(self.rows, self.reach, device)
        work.all_greedy, work.late, work.compared = self.all_greedy, self.late, self.compared
        return work


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


def guarded(method: Callable[P, T]) -> Callable[P, T]:
    """A method of a worker that involves all ranks; see Crew.guard. Alone it is the method."""

    @wraps(method)
    def run(*arguments: P.args, **named: P.kwargs) -> T:
        crew = cast(Worker, arguments[0]).crew
        if crew is None:
            return method(*arguments, **named)
        with crew.guard():
            return method(*arguments, **named)

    return run


class Worker:
    """Runs prefill chunks and decode steps. width: the widest block a policy may ask for.

    graphs and prefills, where set, replay captured steps and prefills; ring, where set, brings results to the host
    (always on a GPU).
    """

    def __init__(self, models: Models, state: DeviceState, policy: Policy | None = None) -> None:
        self.models, self.state = models, state
        self.policy: Policy = policy or Off()
        # What a step costs is for the first rank to say: the others take part when it measures.
        leads = models.ranks.leads
        self.costs = StepCosts(self.measure_verify, self.measure_draft) if leads else StepCosts(_one, _one)
        self.crew: Crew | None = None  # the other ranks, on the first of several
        self.number = 0  # of the engine among those of the crew
        self.device = models.target.embedding.device
        self.graphs: GraphRunner | None = None
        self.prefills: PrefillRunner | None = None
        self.ring: OutputRing | None = None
        self._hidden: list[Tensor] = []  # rows of the chunks that were prefilled last
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
            ran: set[bool] = set() if self.graphs is None else self.graphs.ran
            self.graphs = GraphRunner(self.state, self.models, self.policy, most, backend, ran)
            self.prefills = self.prefills or PrefillRunner(self.state, self.models, prefill_rows, backend)

    def replay_seconds(self, live: int, shape: StepShape) -> float:
        """Seconds of the captured step that serves `live` requests with this shape."""
        assert self.graphs is not None
        if not self.models.ranks.leads:
            return _one(live)
        if not self.graphs.timed(live, shape):
            self._tell("time_replay", live, shape)
        return self.graphs.seconds(live, shape)

    def time_replay(self, live: int, shape: StepShape) -> None:
        """Take part in what the first rank times."""
        assert self.graphs is not None
        self.graphs.seconds(live, shape)

    def bind(self, requests: Sequence[Request]) -> None:
        """Make a row of the device state each request's own, and bring the page table up to date."""
        admissions: list[Admission] = []
        rows: list[int] = []
        columns: list[int] = []
        pages: list[int] = []
        for request in requests:
            if not request.bound:
                admissions.append(self._admit(request))
            known, held = self._synced[request.row], len(request.pages)
            if known < held:
                rows += [request.row] * (held - known)
                columns += range(known, held)
                pages += request.pages[known:]
                self._synced[request.row] = held
        if rows or admissions:
            self._everywhere("place", admissions, rows, columns, pages)

    def _admit(self, request: Request) -> Admission:
        self.state.edits.pop(request.row, None)
        if request.params.edits_logits:
            grammar = request.grammar.begin(request.end_ids) if request.grammar is not None else None
            edits = LogitEdits.begin(
                request.params, request.prompt, self.vocab_size, request.end_ids, self.device, grammar
            )
            edits.commit(request.output)
            self.state.edits[request.row] = edits
        self._synced[request.row] = 0
        request.bound = True
        anchor = request.length - 1, request.tokens[-1], request.remaining, not request.output
        return Admission(request.row, request.params, request.seed, request.end_ids, anchor)

    def place(
        self, admissions: Sequence[Admission], rows: Sequence[int], columns: Sequence[int], pages: Sequence[int]
    ) -> None:
        """Requests that start on their rows, then page_table[rows, columns] = pages. On every rank."""
        for one in admissions:
            self.state.admit(one.row, one.params, one.seed, one.end_ids)
            self.state.set_anchor(one.row, *one.anchor)
        if rows:
            self.state.set_page_entries(rows, columns, pages)

    def _everywhere(self, name: str, *arguments: Any) -> Any:
        """A method of this worker, here and on the other ranks."""
        self._tell(name, *arguments)
        return getattr(self, name)(*arguments)

    def _tell(self, name: str, *arguments: Any) -> None:
        if self.crew is not None:
            self.crew.tell(self.number, name, *arguments)

    @property
    def vocab_size(self) -> int:
        """Tokens of the target's head."""
        return self.models.target.config.decoder.vocab_size

    @guarded
    def prefill(self, chunks: Sequence[Chunk], decoding: Sequence[Request] = ()) -> None:
        """Put chunks through the target. decoding: requests of the decode step that follows; what it needs in the
        page table goes there in the same copy."""
        self.bind([*[chunk.request for chunk in chunks], *decoding])
        ids = [token for chunk in chunks for token in chunk.tokens]
        scored = any(chunk.request.params.prompt_logprobs is not None for chunk in chunks)
        pieces = [(chunk.request.row, chunk.start, chunk.length) for chunk in chunks]
        self._everywhere("run_prefill", ids, pieces, scored)

    def run_prefill(self, ids: Sequence[int], pieces: Sequence[Piece], scored: bool) -> None:
        """Token ids of all pieces through the target; scored: `score` will ask for their rows. On every rank."""
        if self.prefills is not None:
            self._hidden = self.prefills.run(ids, pieces, scored)
            return
        hidden = prefill(self.state, self.models, self._integers(ids), self._prefill_batch(pieces), scored)
        self._hidden = list(hidden.split([length for _, _, length in pieces])) if scored else []

    @guarded
    def score(self, chunk: int, first: int, ids: Sequence[int], count: int) -> RowLogprobs:
        """Log-probabilities of tokens `ids` after rows first, first + 1, … of a chunk of the last prefill, and `count`
        alternatives of each."""
        return self._everywhere("run_score", chunk, first, ids, count)

    @torch.inference_mode()
    def run_score(self, chunk: int, first: int, ids: Sequence[int], count: int) -> RowLogprobs:
        """`score`, on every rank."""
        logits = self.models.target.logits(self._hidden[chunk][first : first + len(ids)])
        return logprobs(logits, torch.tensor(ids, device=logits.device), count)

    def _prefill_batch(self, pieces: Sequence[Piece]) -> RaggedBatch:
        lengths = [length for _, _, length in pieces]
        starts = [0]
        for length in lengths:
            starts.append(starts[-1] + length)
        lanes = self._integers([row for row, _, _ in pieces])
        positions = torch.cat([torch.arange(start, start + length, device=self.device) for _, start, length in pieces])
        row_lanes = torch.repeat_interleave(lanes, self._integers(lengths), output_size=starts[-1])
        return RaggedBatch(
            positions=positions,
            slots=self.state.slots(row_lanes, positions),
            page_table=self.state.page_table,
            lanes=lanes,
            starts=self._integers(starts),
            contexts=self._integers([start for _, start, _ in pieces]),
            max_rows=max(lengths),
            max_context=max(start + length for _, start, length in pieces),
            options=self.models.attention,
        )

    @guarded
    def launch(self, requests: Sequence[Request]) -> Launched:
        """Start one decode step for these requests; on a GPU nothing of it is waited for."""
        began = time.perf_counter()
        self.bind(requests)
        plan = self._plan(requests)
        self._tell("follow", plan)
        slot = None if self.ring is None else self.ring.take()
        if slot is not None:
            slot.begin()
        if plan.captured:
            assert slot is not None
            slot.end(self._replay(plan))
            return Launched(list(requests), plan.shape, None, slot, time.perf_counter() - began)
        work = plan.workspace(self.device)
        wanted = [r.params.logprobs for r in requests if r.params.logprobs is not None]
        work.logprobs = max(wanted) if wanted else None
        work.edited = tuple(lane for lane, request in enumerate(requests) if request.params.edits_logits)
        result = decode_step(self.state, work, plan.shape, self.models, self.policy)
        if slot is not None:
            slot.end(Outputs.pack(result))
        return Launched(list(requests), result.shape, result, slot, time.perf_counter() - began)

    def follow(self, plan: StepPlan) -> None:
        """The step that the first rank launches, on the others: its results are read there."""
        if plan.captured:
            self._replay(plan)
        else:
            decode_step(self.state, plan.workspace(self.device), plan.shape, self.models, self.policy)

    def _replay(self, plan: StepPlan) -> Outputs:
        assert self.graphs is not None
        return self.graphs.run(plan.rows, plan.shape, plan.all_greedy)

    def _plan(self, requests: Sequence[Request]) -> StepPlan:
        shape, width = self.policy.shape(len(requests)), self.policy.width
        params = [request.params for request in requests]
        captured = self.graphs is not None and not any(one.needs_host for one in params)
        return StepPlan(
            rows=[request.row for request in requests],
            shape=shape,
            captured=captured,
            all_greedy=all(one.greedy for one in params),
            reach=0 if captured else max(request.longest(width) for request in requests) + shape.width,
            late=any(request.in_flight for request in requests),
            compared=captured or not any(one.edits_logits for one in params),
        )

    @guarded
    def collect(self, launched: Launched) -> Decoded:
        """The results of a step, waited for."""
        result, slot = launched.result, launched.slot
        if self.crew is not None:
            self.crew.check_agreement()
        if slot is not None:
            host, seconds = slot.read(len(launched.requests))
            timed = launched.seconds if seconds is None else seconds
            return Decoded(host.tokens, host.accepted, host.slots, launched.shape, host.draft, timed, result)
        assert result is not None
        emitted = result.emitted.tolist()
        tokens = [row[:count] for row, count in zip(result.tokens.tolist(), emitted, strict=True)]
        accepted, slots = result.accepted.tolist(), result.slots.tolist()
        return Decoded(tokens, accepted, slots, launched.shape, result.draft, launched.seconds, result)

    def learn(self, outcome: StepOutcome) -> None:
        """Give the policy the outcome of a step. What it learns counts on the first rank; the others learn it too where
        what they would decide is compared."""
        if self.models.ranks.differing is not None:
            self._tell("learn", outcome)
        self.policy.observe(outcome)

    def commit_edits(self, request: Request, tokens: Sequence[int]) -> None:
        """Tell the logit edits of a request that has some what was emitted."""
        self.state.edits[request.row].commit(tokens)

    def measure_verify(self, rows: int) -> float:
        """Seconds of one target pass over `rows` rows with its head, on scratch, right after a draft pass as in a step
        (weights of the one have left the processor's caches when the other runs)."""
        width = self.policy.width
        draft: Pass = draft_pass(self.models, self.state, self.policy, 1, width) if width > 1 else nothing
        self._tell("measure_verify", rows)
        return typical_seconds(verify_pass(self.models, self.state, self.policy, rows), draft)

    def measure_draft(self, rows: int) -> float:
        """Seconds of drafting `rows` rows in blocks of the policy's width (fewer rows: one block), on scratch, right
        after a target pass."""
        self._tell("measure_draft", rows)
        width = min(max(rows, 2), self.policy.width)
        draft = draft_pass(self.models, self.state, self.policy, max(rows // width, 1), width)
        return typical_seconds(draft, verify_pass(self.models, self.state, self.policy, 1))

    def _integers(self, values: Sequence[int]) -> Tensor:
        return place(values, torch.int64, self.device)


def _one(rows: int) -> float:
    """Seconds of anything, where nobody asks in earnest."""
    return 1.0
