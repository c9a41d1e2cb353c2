"""Teacher forcing on an engine: what it would have emitted at every position of a given continuation.

Both ways go through the engine's own paged cache and the rows of a decode step, not through its prefill, because those
are what emitted the text:

    rows    one row a request and step, as decoding without speculation has them. The token an engine without
            speculation would have emitted after this prefix.
    blocks  the anchor and as many following tokens as the captured step verified, all requests side by side. Whether
            verification gives the same tokens again. Where it does, and one row a request does not, verification itself
            is at odds with decoding; where it does not, tokens were accepted that verification had refused.

Every prefix is the given one, whatever the engine would have gone on with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dscale.config import require
from dscale.engine.llm import LLM
from dscale.engine.pages import pages_for
from dscale.engine.request import Request
from dscale.engine.scheduler import Chunk
from dscale.engine.worker import Worker
from dscale.evaluate.continuations import Continuation
from dscale.speculation.decode_step import choose, verify
from dscale.speculation.packing import pack_rows
from dscale.speculation.policies import Draft
from dscale.speculation.workspace import Workspace


@dataclass(frozen=True)
class Scores:
    """Of the n positions of a continuation. choice [n]: the token drawn there, an id or, from a server, its text;
    wrong bool [n]: it is not the emitted one; margin float64 [n]: nats by which the best logit is above the emitted
    token's, NaN where unknown or where tokens are sampled."""

    choice: NDArray
    wrong: NDArray[np.bool_]
    margin: NDArray[np.float64]


def teacher_force(
    llm: LLM, continuations: Sequence[Continuation], blocks: bool = False, together: int | None = None
) -> list[Scores]:
    """Scores of each continuation; the engine must be idle. blocks: see above. together: requests side by side."""
    require(not llm.engine.busy, "teacher forcing: the engine is busy; let its requests finish first")
    llm.engine.settle()
    count = min(together or llm.config.max_requests, llm.config.max_requests)
    out: list[Scores] = []
    for start in range(0, len(continuations), count):
        out += _Forced(llm, continuations[start : start + count], blocks).run()
    return out


@dataclass
class _Lane:
    """One continuation on its way through. lengths: rows to verify and rows that count, of every step."""

    given: Continuation
    request: Request
    lengths: list[tuple[int, int]]
    choice: list[int]
    margin: list[float]

    @property
    def done(self) -> int:
        return len(self.choice)


def _lengths(given: Continuation, blocks: bool) -> list[tuple[int, int]]:
    total, done, out = len(given.tokens), 0, []
    if not blocks:
        return [(1, 1)] * total
    require(given.steps is not None, "teacher forcing in blocks: the continuation comes without its steps")
    for step in given.steps or ():
        out.append((min(max(step.slots, step.emitted), total - done), step.emitted))
        done += step.emitted
    return out


class _Forced:
    """One group of continuations, side by side in rows 0, 1, … of the device state."""

    def __init__(self, llm: LLM, given: Sequence[Continuation], blocks: bool) -> None:
        self.worker: Worker = llm.engine.worker
        self.pool, self.chunk = llm.engine.scheduler.pool, llm.config.max_prefill_tokens
        self.lanes = [
            _Lane(one, self._request(one, row), _lengths(one, blocks), [], []) for row, one in enumerate(given)
        ]

    def _request(self, given: Continuation, row: int) -> Request:
        seed = given.params.seed or 0
        request = Request(f"forced-{row}", list(given.prompt), given.params, seed, (), len(given.tokens) + 1)
        request.row = row
        return request

    def run(self) -> list[Scores]:
        """Prompts, then steps, until every continuation is through; pages are given back."""
        try:
            for lane in self.lanes:
                self._take_pages(lane)
                self._prefill(lane.request)
            self.worker.bind([lane.request for lane in self.lanes])
            while live := [lane for lane in self.lanes if lane.done < len(lane.given.tokens)]:
                self._step(live)
        finally:
            for lane in self.lanes:
                self.pool.release(lane.request.pages)
        return [self._scores(lane) for lane in self.lanes]

    def _take_pages(self, lane: _Lane) -> None:
        pages = self.pool.take(pages_for(len(lane.given.prompt) + len(lane.given.tokens) + 1))
        require(pages is not None, "teacher forcing: the cache holds too few pages for so many requests side by side")
        lane.request.pages = pages or []

    def _prefill(self, request: Request) -> None:
        while request.prefill_left > 0:
            length = min(request.prefill_left, self.chunk)
            self.worker.prefill([Chunk(request, request.committed, length)])
            request.committed += length

    @torch.inference_mode()
    def _step(self, live: Sequence[_Lane]) -> None:
        worker, state, models = self.worker, self.worker.state, self.worker.models
        sizes = [lane.lengths.pop(0) for lane in live]
        width = max(rows for rows, _ in sizes)
        work = self._workspace(live, width)
        tokens, k = _inputs(live, sizes, width, worker.device)
        context = torch.tensor([len(lane.given.prompt) - 1 + lane.done for lane in live], device=worker.device)
        rows = sum(rows for rows, _ in sizes)
        packed, flat = pack_rows(k, rows, tokens[:, 0], tokens[:, 1:], context, state.page_table, work.lanes)
        hidden, _, batch = verify(state, work, models, packed, flat, context, width)
        logits = models.target.logits(hidden)
        drawn = choose(logits, state, work, packed, batch, Draft(tokens[:, 1:])).tolist()
        margins = _margins(logits, live, sizes)
        start = 0
        for lane, (verified, counted) in zip(live, sizes, strict=True):
            lane.choice += drawn[start : start + counted]
            lane.margin += margins[start : start + counted]
            start += verified

    def _workspace(self, live: Sequence[_Lane], width: int) -> Workspace:
        longest = max(len(lane.given.prompt) + lane.done for lane in live)
        work = Workspace.of([lane.request.row for lane in live], longest + width, self.worker.device)
        work.all_greedy = all(lane.given.params.greedy for lane in live)
        return work

    def _scores(self, lane: _Lane) -> Scores:
        choice, given = np.array(lane.choice, np.int64), np.array(lane.given.tokens, np.int64)
        margin = np.array(lane.margin)
        return Scores(choice, choice != given, margin if lane.given.params.greedy else np.full(len(given), np.nan))


def _inputs(
    live: Sequence[_Lane], sizes: Sequence[tuple[int, int]], width: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Token ids [N, width] of every lane's rows, the anchor first, and rows k [N]."""
    rows = []
    for lane, (count, _) in zip(live, sizes, strict=True):
        text = (lane.given.prompt[-1], *lane.given.tokens)[lane.done : lane.done + count]
        rows.append([*text, *[0] * (width - count)])
    return torch.tensor(rows, device=device), torch.tensor([count for count, _ in sizes], device=device)


def _margins(logits: Tensor, live: Sequence[_Lane], sizes: Sequence[tuple[int, int]]) -> list[float]:
    """Nats from the emitted token's logit to the best, of every row."""
    wanted: list[int] = []
    for lane, (count, _) in zip(live, sizes, strict=True):
        wanted += lane.given.tokens[lane.done : lane.done + count]
    own = logits.gather(1, torch.tensor(wanted, device=logits.device)[:, None]).squeeze(1)
    return (logits.amax(1).float() - own.float()).tolist()
